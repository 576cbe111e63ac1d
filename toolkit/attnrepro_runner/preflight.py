"""`python -m attnrepro_runner preflight`: whether this place can run anything, as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from attnrepro_runner import __version__, limits


def main() -> int:
    """Print what is here; 0 where compiled code can be written and run and torch imports."""
    facts: dict[str, object] = {
        "runner": __version__,
        "python": sys.version.split()[0],
        "memory_limit_bytes": limits.memory_limit(None),
        "executes": executes(Path(tempfile.gettempdir())),
    }
    try:
        import torch
    except ImportError as error:
        facts["torch"], facts["reason"] = None, str(error)
    else:
        facts["torch"] = str(torch.__version__)
        facts["cuda_device"] = torch.cuda.is_available()
    sys.stdout.write(json.dumps(facts, sort_keys=True) + "\n")
    return 0 if facts["executes"] is True and facts["torch"] else 70


def executes(folder: Path) -> bool:
    """Say whether a file written into a folder can be executed: compilers' caches live there."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            script = Path(name) / "run"
            script.write_text("#!/bin/sh\nexit 7\n")
            script.chmod(0o700)
            return subprocess.run([script], check=False).returncode == 7
    except OSError:
        return False
