"""Installing an engine from the distribution, as root; else saying the exact command."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnrepro.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PACKAGES: Final = {
    "podman": "podman",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "crun": "crun",
    "runc": "runc",
    "newuidmap": "uidmap",
}
"""Program to the package that brings it, on Debian ≥ 12 and Ubuntu ≥ 24.04."""

_CGROUPS: Final = Path("/sys/fs/cgroup")


def command(packages: Sequence[str]) -> str:
    """Say the exact command for this user."""
    install = f"apt-get install -y --no-install-recommends {' '.join(packages)}"
    return install if os.getuid() == 0 else f"sudo {install}"


def wanted(*, cgroup_v2: bool) -> list[str]:
    """List the packages that lack: podman with a runtime that fits the cgroups, and builders.

    crun refuses v1 and hybrid cgroups, so runc stands beside it there.
    """
    programs = ["podman", "buildah", "mmdebstrap", "crun" if cgroup_v2 else "runc"]
    if os.getuid() != 0:
        programs.append("newuidmap")
    path = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"
    return [PACKAGES[program] for program in programs if shutil.which(program, path=path) is None]


def install_engine(progress: Callable[[str], None]) -> list[str]:
    """Install podman and what it needs from the distribution; give an unmounted cgroup tree.

    Returns the packages installed; empty where all was there.

    Raises Unavailable where this user is not root (with the exact command), where there is no
    apt-get, or where it fails (with its last lines).
    """
    mount_cgroups(progress)
    packages = wanted(cgroup_v2=is_cgroup_v2())
    if not packages:
        return []
    if os.getuid() != 0:
        message = f"installing {', '.join(packages)} needs root"
        raise Unavailable(message, hint=command(packages))
    if shutil.which("apt-get") is None:
        message = "this system has no apt-get"
        raise Unavailable(message, hint=f"install {', '.join(packages)} by its own means")
    _apt(["update"], progress)
    _apt(["install", "-y", "--no-install-recommends", *packages], progress)
    return packages


def is_cgroup_v2(root: Path = _CGROUPS) -> bool:
    """Tell whether the machine has the unified hierarchy alone."""
    return (root / "cgroup.controllers").exists()


def mount_cgroups(progress: Callable[[str], None]) -> None:
    """Mount cgroup2 where nothing manages cgroups, as on a machine without systemd.

    Where anything is mounted already, v1 or v2, nothing is changed.
    """
    if os.getuid() != 0 or not _CGROUPS.is_dir() or any(_CGROUPS.iterdir()):
        return
    progress("mounting cgroup2 on /sys/fs/cgroup, which is empty")
    done = subprocess.run(
        ["mount", "-t", "cgroup2", "none", str(_CGROUPS)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        message = f"/sys/fs/cgroup is empty and cgroup2 cannot be mounted: {done.stderr.strip()}"
        raise Unavailable(message, hint="containers need cgroups; run on a host that allows them")


def _apt(arguments: list[str], progress: Callable[[str], None]) -> None:
    progress(f"+ apt-get {' '.join(arguments)}")
    last: deque[str] = deque(maxlen=8)
    with subprocess.Popen(
        ["apt-get", "-q", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line.rstrip())
    if process.returncode:
        message = f"apt-get {arguments[0]} failed: {' | '.join(last)}"
        raise Unavailable(message, hint="mend the package sources, then run it again")
