"""A small stack cut out of the shipped CPU one: Debian with Python, pip and setuptools."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from attnrepro.resources import images_dir

if TYPE_CHECKING:
    from pathlib import Path

SHIPPED = images_dir() / "cpu-torch2.13" / "r1"
_COMPILER = re.compile(
    r"(binutils.*|cpp.*|g\+\+.*|gcc|gcc-12|lib(asan8|atomic1|binutils|cc1-0|ctf.*|gprofng0|isl23|"
    r"itm1|jansson4|lsan0|mpc3|mpfr6|quadmath0|tsan2|ubsan1)|libc-dev-bin|lib.*-dev|"
    r"libpython3\.11|linux-libc-dev|rpcsvc-proto|zlib1g-dev) "
)
_WHEELS = re.compile(r"(pip|setuptools)==")


def document(**changes: Any) -> dict[str, Any]:
    """image.json of the small stack."""
    whole = json.loads((SHIPPED / "image.json").read_text())
    whole |= {
        "stack": "mini",
        "title": "Python alone",
        "framework": {"name": "python", "version": "3.11"},
        "kernels": [{"name": "none", "version": "0"}],
        "compiler": None,
        "wheels": {"python": "3.11", "requirements": ["pip==26.3", "setuptools==84.2.1"]},
        "cost": {"seconds": 30, "image_bytes": 130_000_000},
    }
    whole["base"]["packages"] = ["python3.11", "usr-is-merged"]
    return {**whole, **changes}


def files(**changes: Any) -> dict[str, bytes]:
    """Recipe of the small stack; keyword arguments change image.json."""
    debs = (SHIPPED / "debs.lock").read_text().splitlines()
    wheels = (SHIPPED / "requirements.lock").read_text().splitlines()
    kept = [line for line in debs if not _COMPILER.match(line)]
    return {
        "image.json": json.dumps(document(**changes)).encode(),
        "Dockerfile": (SHIPPED / "Dockerfile").read_bytes(),
        "compile.py": (SHIPPED / "compile.py").read_bytes(),
        "claims.json": b"{}",
        "debs.lock": "\n".join([*kept, ""]).encode(),
        "requirements.lock": "\n".join(
            [*(line for line in wheels if _WHEELS.match(line)), ""]
        ).encode(),
    }


def write(folder: Path, **changes: Any) -> Path:
    """The small stack as a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files(**changes).items():
        (folder / name).write_bytes(data)
    return folder
