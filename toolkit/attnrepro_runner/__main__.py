"""`python -m attnrepro_runner JOB.json OUT`: run a job.

Also `preflight`, `mutants`, `smoke`, `fidelity`, each a table or a document for people.

Exit status: 0 all tasks written, 3 bad job, 9 the device vanished, 10 interrupted (both times
finished tasks stay), 70 internal.
"""

from __future__ import annotations

import sys
from pathlib import Path

USAGE = """usage: python -m attnrepro_runner JOB.json OUT
       python -m attnrepro_runner preflight
       python -m attnrepro_runner mutants [ARGUMENTS]
       python -m attnrepro_runner fidelity [ARGUMENTS]
       python -m attnrepro_runner smoke [BACKEND]
"""


def main(arguments: list[str]) -> int:
    """Run one command; return the exit status."""
    match arguments:
        case ["worker", requests, answers]:
            from attnrepro_runner import worker

            return worker.main(int(requests), int(answers))
        case ["count", job, cell, subject]:
            from attnrepro_runner import counters

            return counters.main(Path(job), cell, subject)
        case ["fidelity", *rest]:
            from attnrepro_runner import fidelity

            return fidelity.main(rest)
        case ["preflight"]:
            from attnrepro_runner import preflight

            return preflight.main()
        case ["mutants", *rest]:
            from attnrepro_runner import mutants

            return mutants.main(rest)
        case ["smoke", *rest]:
            from attnrepro_runner import smoke

            return smoke.main(rest)
        case [job, out]:
            from attnrepro_runner import coordinator

            return coordinator.main(Path(job), Path(out))
    sys.stderr.write(USAGE)
    return 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
