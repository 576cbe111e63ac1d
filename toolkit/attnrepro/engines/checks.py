"""What `doctor` looks at: each check says what is there, and the exact fix for what is not."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnrepro.engines import gpuchecks, install
from attnrepro.engines.docker import DockerEngine
from attnrepro.engines.podman import PodmanEngine
from attnrepro.errors import Unavailable
from attnrepro.images.sources import pip_is_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from attnrepro.engines.base import EngineFacts
    from attnrepro.engines.gpu import EngineDoors
    from attnrepro.jsonio import JsonObject

DISK_NEED_BYTES: Final = 8 << 30
"""CPU stack: fetched wheels, the image, and the engine's copy of it."""
GPU_DISK_NEED_BYTES: Final = 30 << 30
MEMORY_NEED_BYTES: Final = 4 << 30
_SUPPORTED: Final = {"debian": 12.0, "ubuntu": 24.04}


class Level(StrEnum):
    """How a check ended."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing is wrong."""
    WARN = "warn"
    """Runs, but numbers or trust suffer."""
    MISSING = "missing"
    """Something will not run."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of doctor's answer."""

    id: str
    level: Level
    found: str
    fix: str | None = None
    """The exact command or change; None where nothing is to be done."""

    def document(self) -> JsonObject:
        """Give the check as JSON."""
        return {"id": self.id, "level": self.level.value, "found": self.found, "fix": self.fix}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All checks, and whether this machine can build and run in a container."""

    checks: tuple[Check, ...]

    @property
    def usable(self) -> bool:
        """True where some engine answers and nothing that every run needs is missing."""
        engines = [c for c in self.checks if c.id in ("engine.docker", "engine.podman")]
        others = [c for c in self.checks if c not in engines]
        return any(c.level is Level.OK for c in engines) and not any(
            c.level is Level.MISSING for c in others
        )

    def document(self) -> JsonObject:
        """Give all checks as one JSON document."""
        return {"usable": self.usable, "checks": [check.document() for check in self.checks]}

    def text(self) -> str:
        """Lay the checks out for a terminal."""
        width = max(len(check.id) for check in self.checks)
        lines = []
        for check in self.checks:
            lines.append(f"{check.level.value:<8}{check.id:<{width}}  {check.found}")
            if check.fix:
                lines.append(f"{'':<8}{'':<{width}}  fix: {check.fix}")
        verdict = "can" if self.usable else "cannot yet"
        lines.append(f"This machine {verdict} build images and run benchmarks in a container.")
        return "\n".join(lines)


def diagnose(store: Path, *, root: Path = Path("/")) -> Diagnosis:
    """Look at everything. Changes nothing; takes a second or two where engines answer.

    Args:
        store: where images will lie (its disk is measured).
        root: of the file system to read; tests give recorded machines.
    """
    engines = engine_checks({"docker": DockerEngine, "podman": PodmanEngine})
    checks: list[Check] = [
        platform_check(_os_release(root), platform.machine()),
        python_check(),
        *(check for check, _ in engines),
        *builders(),
        *_gpu(root, [doors for _, doors in engines if doors is not None]),
        disk_check(store, gpu=any((root / "dev").glob("nvidia[0-9]*"))),
        memory_check(_meminfo(root)),
        *cpu_checks(root),
    ]
    return Diagnosis(checks=tuple(checks))


def engine_checks(
    makers: Mapping[str, Callable[[], DockerEngine | PodmanEngine]],
) -> list[tuple[Check, EngineDoors | None]]:
    """Ask each engine; where one answers, another that does not is only a note."""
    answers: list[tuple[Check, EngineDoors | None]] = []
    for name, maker in makers.items():
        try:
            engine = maker()
            facts, doors = engine.facts(), engine.doors()
        except Unavailable as error:
            found, fix = error.message, error.hint
            check = Check(id=f"engine.{name}", level=Level.MISSING, found=found, fix=fix)
            answers.append((check, None))
        else:
            check = Check(id=f"engine.{name}", level=Level.OK, found=_facts_line(facts))
            answers.append((check, doors))
    if all(doors is None for _, doors in answers):
        return answers
    return [
        (replace(check, level=Level.NOTE) if doors is None else check, doors)
        for check, doors in answers
    ]


def _facts_line(facts: EngineFacts) -> str:
    rootless = ", rootless" if facts.rootless else ""
    return (
        f"{facts.name} {facts.version}, store {facts.store}, runtime {facts.runtime}, "
        f"cgroups {facts.cgroup_version}{rootless}"
    )


def _gpu(root: Path, doors: Iterable[EngineDoors]) -> Iterator[Check]:
    for finding in gpuchecks.findings(root, tuple(doors)):
        yield Check(id=finding.id, level=Level(finding.level), found=finding.found, fix=finding.fix)


def platform_check(release: Mapping[str, str], machine: str) -> Check:
    """Debian ≥ 12 or Ubuntu ≥ 24.04 on x86-64 builds and runs; all others verify and show."""
    name = release.get("PRETTY_NAME", "an unknown system")
    least = _SUPPORTED.get(release.get("ID", ""))
    try:
        version = float(release.get("VERSION_ID", "0"))
    except ValueError:
        version = 0.0
    found = f"{name} on {machine}"
    if machine != "x86_64" or least is None:
        fix = "build and run on Debian ≥ 12 or Ubuntu ≥ 24.04, x86-64; verify and show work here"
        return Check(id="platform", level=Level.MISSING, found=found, fix=fix)
    if "VERSION_ID" in release and version < least:
        fix = f"upgrade to {release['ID'].capitalize()} ≥ {least:g}"
        return Check(id="platform", level=Level.MISSING, found=found, fix=fix)
    # Debian testing and unstable have no VERSION_ID.
    return Check(id="platform", level=Level.OK, found=found)


def python_check() -> Check:
    """Python, and what of the standard library distributions split off."""
    version = platform.python_version()
    lacking = [m for m in ("venv", "ensurepip") if importlib.util.find_spec(m) is None]
    if lacking and sys.prefix == sys.base_prefix:
        series = ".".join(version.split(".")[:2])
        fix = f"apt-get install python{series}-venv"
        found = f"Python {version} without {' and '.join(lacking)}"
        return Check(id="python", level=Level.WARN, found=found, fix=fix)
    if not pip_is_here():
        found = f"Python {version} without pip, which fetches an image's wheels"
        return Check(
            id="python",
            level=Level.MISSING,
            found=found,
            fix="python3 -m ensurepip, or apt-get install python3-pip",
        )
    return Check(id="python", level=Level.OK, found=f"Python {version} with pip")


def builders() -> Iterator[Check]:
    """What can build an image's root file system, and its Debian base."""
    for name, programs in (
        ("builder.podman", ("podman", "buildah")),
        ("base.debian", ("mmdebstrap",)),
    ):
        absent = [p for p in programs if shutil.which(p) is None]
        if not absent:
            yield Check(id=name, level=Level.OK, found=" and ".join(programs))
            continue
        # A registry base needs no mmdebstrap, Docker needs no podman: neither is fatal alone.
        yield Check(
            id=name,
            level=Level.WARN,
            found=f"no {' and no '.join(absent)}",
            fix=install.command(absent),
        )
    yield _buildx()


def _buildx() -> Check:
    if shutil.which("docker") is None:
        return Check(
            id="builder.buildx", level=Level.NOTE, found="no docker command (podman builds)"
        )
    from attnrepro.images.process import output

    said = output(["docker", "buildx", "version"])
    if said is None:
        fix = (
            "install Docker's buildx plugin: the package docker-buildx (Debian 13, Ubuntu 24.04), "
            "or docker-buildx-plugin of Docker's own archive; or build with podman"
        )
        found = "docker without its buildx plugin"
        return Check(id="builder.buildx", level=Level.WARN, found=found, fix=fix)
    return Check(id="builder.buildx", level=Level.OK, found=" ".join(said.split()[:2]))


def disk_check(store: Path, *, gpu: bool) -> Check:
    """Free space where the store lies, against what a stack needs."""
    place = store
    while not place.exists():
        place = place.parent
    free, need = shutil.disk_usage(place).free, GPU_DISK_NEED_BYTES if gpu else DISK_NEED_BYTES
    found = f"{free / 2**30:.0f} GiB free for {store}; a stack needs about {need / 2**30:.0f}"
    if free < need:
        fix = "attnrepro store gc, or set ATTNREPRO_STORE to a larger disk"
        return Check(id="disk", level=Level.WARN, found=found, fix=fix)
    return Check(id="disk", level=Level.OK, found=found)


def memory_check(available: int | None) -> Check:
    """Memory that is free now, in bytes."""
    if available is None:
        return Check(id="memory", level=Level.NOTE, found="/proc/meminfo does not tell")
    found = f"{available / 2**30:.1f} GiB available"
    if available < MEMORY_NEED_BYTES:
        fix = "end other programs: the float64 reference needs room"
        return Check(id="memory", level=Level.WARN, found=found, fix=fix)
    return Check(id="memory", level=Level.OK, found=found)


def cpu_checks(root: Path) -> Iterator[Check]:
    """Frequency governor and load; both only make times scatter."""
    governors = set()
    for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"):
        governors.add(path.read_text(encoding="ascii").strip())
    if not governors:
        found = "no frequency scaling is exposed (usual in a virtual machine); recorded as null"
        yield Check(id="cpu.governor", level=Level.NOTE, found=found)
    elif governors == {"performance"}:
        yield Check(id="cpu.governor", level=Level.OK, found="performance")
    else:
        fix = "cpupower frequency-set -g performance, as root, if the machine is yours"
        yield Check(
            id="cpu.governor", level=Level.WARN, found=", ".join(sorted(governors)), fix=fix
        )
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    found = f"load {load:.1f} on {cores} cores"
    if load > max(0.5, cores / 4):
        fix = "wait until other work ends: it widens every interval"
        yield Check(id="cpu.load", level=Level.WARN, found=found, fix=fix)
    else:
        yield Check(id="cpu.load", level=Level.OK, found=found)


def _os_release(root: Path) -> dict[str, str]:
    try:
        return platform.freedesktop_os_release() if root == Path("/") else _release_file(root)
    except OSError:
        return {}


def _release_file(root: Path) -> dict[str, str]:
    text = (root / "etc/os-release").read_text(encoding="utf-8")
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key: value.strip('"') for key, value in pairs}


def _meminfo(root: Path) -> int | None:
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
