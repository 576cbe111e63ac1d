"""The engines' builders: a context folder in, a root-file-system tar out, nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from attnrepro.errors import Unavailable
from attnrepro.images.process import output, run

if TYPE_CHECKING:
    from collections.abc import Callable

    Progress = Callable[[str], None]

ENGINES: Final = ("docker", "podman")


class Builder(Protocol):
    """What runs a Dockerfile without network and exports its root file system."""

    name: str
    """As it stands in an image record."""
    version: str

    def build(
        self,
        context: Path,
        *,
        wheels: Path,
        epoch: int,
        cached: bool,
        target: Path,
        progress: Progress,
    ) -> None:
        """Build `context`/Dockerfile.

        Args:
            context: The main context, with base.tar.
            wheels: The named context `wheels`.
            epoch: SOURCE_DATE_EPOCH.
            cached: Whether steps may come from the builder's cache.
            target: The tar to write.
            progress: Told the command and its output.

        Raises:
            BuildFailed: a step failed; the message ends with its last lines.
        """


class Buildx:
    """Docker's BuildKit, through the docker command's buildx plugin."""

    name = "buildx"

    def __init__(self) -> None:
        """Ask the engine. Raises Unavailable, saying what is missing."""
        if shutil.which("docker") is None:
            message = "docker is not installed"
            raise Unavailable(message)
        plugin = output(["docker", "buildx", "version"])
        if plugin is None:
            message = "docker has no buildx plugin"
            raise Unavailable(message, hint="attnrepro doctor names the package; podman builds too")
        server = output(["docker", "version", "--format", "{{.Server.Version}}"])
        if server is None:
            message = "the Docker daemon does not answer"
            raise Unavailable(message, hint="start it, or set DOCKER_HOST; see `attnrepro doctor`")
        if int(re.match(r"\d*", server.strip())[0] or 0) < 23:  # type: ignore[index]
            message = f"Docker {server.strip()} has no named build contexts"
            raise Unavailable(message, hint="use Docker ≥ 23 or podman ≥ 4.3")
        words = plugin.split()
        self.version = f"{words[1] if len(words) > 1 else '?'} on Docker {server.strip()}"

    def build(
        self,
        context: Path,
        *,
        wheels: Path,
        epoch: int,
        cached: bool,
        target: Path,
        progress: Progress,
    ) -> None:
        """See `Builder.build`. BuildKit drops the build when its client goes."""
        command = ["docker", "buildx", "build", "--progress", "plain", "--network", "none"]
        command += [] if cached else ["--no-cache"]
        command += ["--build-context", f"wheels={wheels}"]
        command += ["--build-arg", f"SOURCE_DATE_EPOCH={epoch}"]
        command += ["--output", f"type=tar,dest={target}", str(context)]
        run(
            command,
            progress=progress,
            doing="the build",
            hint="the last lines above are the failing step's",
            env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
            every_line=True,
        )


class Podman:
    """podman's buildah, without a daemon."""

    name = "podman"

    def __init__(self) -> None:
        """Ask podman. Raises Unavailable, saying what is missing."""
        said = output(["podman", "--version"])
        if said is None:
            message = "podman is not installed"
            raise Unavailable(message, hint="apt-get install podman")
        self.version = said.split()[-1]
        parts = [int(part) for part in re.findall(r"\d+", self.version)[:2]]
        if parts < [4, 3]:
            message = f"podman {self.version} has no named build contexts"
            raise Unavailable(message, hint="use podman ≥ 4.3 or Docker ≥ 23")

    def build(
        self,
        context: Path,
        *,
        wheels: Path,
        epoch: int,
        cached: bool,
        target: Path,
        progress: Progress,
    ) -> None:
        """See `Builder.build`. The image that podman keeps beside the tar is removed."""
        podman = ["podman", *podman_options()]
        image = target.with_suffix(".iid")
        command = [*podman, "build", "--network", "none", "--iidfile", str(image)]
        # One layer a step is only worth its time when a later build may use it.
        command += ["--layers=true"] if cached else ["--layers=false", "--no-cache"]
        command += ["--force-rm", "--build-context", f"wheels={wheels}"]
        command += ["--build-arg", f"SOURCE_DATE_EPOCH={epoch}"]
        command += ["--output", f"type=tar,dest={target}", str(context)]
        try:
            run(
                command,
                progress=progress,
                doing="the build",
                hint="the last lines above are the failing step's",
                every_line=True,
            )
        finally:
            if image.is_file():
                digest = image.read_text().strip()
                subprocess.run(
                    [*podman, "rmi", "--force", digest],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    check=False,
                )


def podman_options() -> list[str]:
    """Global options that podman needs on this host.

    crun refuses hybrid control groups, and without systemd there is nobody to make them.
    """
    options = []
    if not Path("/run/systemd/system").is_dir():
        options += ["--cgroup-manager", "cgroupfs"]
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists() and shutil.which(
        "runc", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    ):
        options += ["--runtime", "runc"]
    return options


def choose(engine: str | None) -> Builder:
    """The builder of a named engine, or of the first that is there.

    Raises Unavailable with the reason of each that is not.
    """
    makers: dict[str, Callable[[], Builder]] = {"docker": Buildx, "podman": Podman}
    if engine is not None:
        if engine not in makers:
            message = f"{engine!r} builds no images"
            raise Unavailable(message, hint=f"one of {', '.join(ENGINES)}")
        return makers[engine]()
    reasons = []
    for maker in makers.values():
        try:
            return maker()
        except Unavailable as error:
            reasons.append(f"{error.message} ({error.hint})" if error.hint else error.message)
    message = "no container engine can build here: " + "; ".join(reasons)
    raise Unavailable(
        message, hint="apt-get install podman, or `attnrepro quickstart --install-engine` as root"
    )
