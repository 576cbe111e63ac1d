"""Programs of other Debian suites, unpacked beside the machine's own; nothing is installed.

Fetched through the host's own apt configuration (mirror, proxy, CA) into a private apt state.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from shutil import which

import pytest

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
REQUIRE = "ATTNREPRO_REQUIRE_DEBS"
"""Set where a program that cannot be fetched is a failure (CI) instead of a skipped test."""


def program(suite: str, package: str) -> Path:
    """Path of `/usr/bin/PACKAGE` from a Debian suite; skips the test where it cannot be fetched."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "attnrepro-tests" / f"{suite}-{package}"
    binary = folder / "root" / "usr" / "bin" / package
    if binary.exists():
        return binary
    try:
        _fetch(suite, package, folder)
    except (OSError, subprocess.SubprocessError, LookupError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        reason = (
            f"NOT CHECKED: {package} of Debian {suite} cannot be fetched: {detail.strip()[-300:]}"
        )
        if os.environ.get(REQUIRE):
            pytest.fail(reason)
        pytest.skip(reason)
    return binary


def _fetch(suite: str, package: str, folder: Path) -> None:
    if which("apt-get") is None or which("dpkg") is None or not KEYRING.exists():
        raise LookupError("no apt with Debian's keyring here")
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    line = f"deb [signed-by={KEYRING}] {_mirror()} {suite} main\n"
    (folder / "sources.list").write_text(line)
    settings = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::Archives": "archives",
        "APT::Sandbox::User": "root",
        "APT::Update::Post-Invoke-Success::": "",
        "Acquire::Languages": "none",
    }
    apt = ["apt-get", "-q"]
    for name, value in settings.items():
        apt += ["-o", f"{name}={value}"]
    _run([*apt, "update"], folder)
    _run([*apt, "download", package], folder)
    (deb,) = folder.glob(f"{package}_*.deb")
    unpacked = folder / "root.new"
    _run(["dpkg", "-x", str(deb), str(unpacked)], folder)
    unpacked.rename(folder / "root")
    deb.unlink()


def _mirror() -> str:
    """The host's own Debian mirror."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    mirrors = [uri.rstrip("/") for uri in found.stdout.split()]
    return next(uri for uri in mirrors if uri.endswith("/debian"))


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=300)
