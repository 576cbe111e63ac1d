"""`python -m attnrepro`."""

from attnrepro.cli.main import main

main()
