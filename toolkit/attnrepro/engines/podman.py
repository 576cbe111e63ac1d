"""podman by subprocess: no daemon, rootless where the user is no root."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnrepro.engines import closed, kernellog
from attnrepro.engines.base import OWNER_LABEL, EngineFacts
from attnrepro.engines.gpu import EngineDoors
from attnrepro.errors import Unavailable
from attnrepro.signals import signals_held

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnrepro.engines.base import ContainerSpec, ExitStatus, ImageIdentity

_CALL_SECONDS: Final = 120
_INSTALL_HINT: Final = "apt-get install podman as root, or attnrepro doctor --fix"
_RUNTIMES: Final = ("crun", "runc")
# podman 4.3 lowers its own limit to this before it starts the runtime, and then asks for more: a
# runtime without CAP_SYS_RESOURCE, as in a sandbox, fails unless no more is asked for.
_PROCESSES: Final = 32768
# runc lies in sbin, which a user's PATH lacks on Debian.
_SBIN: Final = ":/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True, kw_only=True)
class PodmanSetup:
    """How podman must be called on this machine; found once, recorded in every artifact."""

    facts: EngineFacts
    options: tuple[str, ...]
    """Global options, before the verb."""
    controllers: frozenset[str]
    """Cgroup controllers by which limits can be set."""


class PodmanEngine:
    """podman, called once an operation."""

    name = "podman"

    def __init__(self, program: str = "podman") -> None:
        """Use `program`, found on PATH."""
        self._program = program
        self._setup: PodmanSetup | None = None

    def facts(self) -> EngineFacts:
        """See `Engine.facts`. Raises Unavailable where podman is not there or cannot work."""
        return self.setup().facts

    def setup(self) -> PodmanSetup:
        """Find out how podman must be called here. Raises Unavailable."""
        if self._setup is None:
            path = os.environ.get("PATH", os.defpath) + _SBIN
            self._setup = setup_of(
                json.loads(self._call("info", "--format=json")),
                {name: shutil.which(name, path=path) for name in _RUNTIMES},
                systemd=_systemd(),
            )
        return self._setup

    def doors(self) -> EngineDoors:
        """By which doors a GPU may enter: CDI came with podman 4.1."""
        version = self.facts().version
        old = tuple(int(p) for p in version.split(".")[:2] if p.isdecimal()) < (4, 1)
        return EngineDoors(
            cdi=not old,
            cdi_reason=f"podman {version} has no CDI (4.1 has)" if old else "",
            nvidia_runtime=False,
        )

    def ensure_image(self, identity: ImageIdentity) -> str:
        """See `Engine.ensure_image`."""
        want = identity.config_digest
        found = self._image_id(want.removeprefix("sha256:"))
        if found is None:
            if not identity.archive.is_file():
                message = f"podman has no image {identity.name}, nor is {identity.archive} there"
                raise Unavailable(message, hint="attnrepro build makes it")
            self._call("load", "--quiet", f"--input={identity.archive}", limit=None)
            found = self._image_id(want.removeprefix("sha256:"))
        if found != want:
            other = found or self._image_id(identity.name) or "nothing"
            raise closed.differs(identity, want, other, "podman")
        return found

    def run(
        self, spec: ContainerSpec, *, log: Path, stop: Callable[[], bool] | None = None
    ) -> ExitStatus:
        """See `Engine.run`."""
        closed.check_sources(spec)
        image = self.ensure_image(spec.image)
        arguments, facts = run_arguments(spec, image, self.setup())
        command = [self._program, *self.setup().options, *arguments]
        if spec.cpuset is not None and "cpuset" not in self.setup().controllers:
            # No controller to pin by: the container inherits the affinity of podman itself.
            command = closed.pinned(command, spec.cpuset)
        with closed.ended_by_signals():
            self._remove_orphans()
            try:
                return self._run(spec, command, facts, log, stop)
            finally:
                with signals_held():
                    self._remove(spec.name)

    def remove_image(self, identity: ImageIdentity) -> None:
        """See `Engine.remove_image`."""
        image = identity.config_digest.removeprefix("sha256:")
        if self._image_id(image) is not None:
            self._call("rmi", "--force", image)

    def _run(
        self,
        spec: ContainerSpec,
        command: list[str],
        facts: dict[str, str],
        log: Path,
        stop: Callable[[], bool] | None,
    ) -> ExitStatus:
        # A session of its own: the terminal's Ctrl-C reaches us alone, and we remove the container.
        # A folder of its own: under cgroups v1 conmon leaves a file `oom` where podman was started.
        with (
            tempfile.TemporaryDirectory(prefix="attnrepro-") as folder,
            subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                env=_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            try:
                assert process.stdout is not None
                copy = closed.LogCopy(closed.chunks(process.stdout), log)
                copy.start()
                done = threading.Event()
                threading.Thread(target=closed.wait_for, args=(process, done), daemon=True).start()
                began = time.monotonic_ns()
                limit = spec.timeout_seconds
                ending = closed.watch(
                    done,
                    deadline_ns=None if limit is None else began + int(limit * 1e9),
                    stop=stop,
                )
                if ending != "done":
                    with suppress(Unavailable):  # it may have ended by itself meanwhile
                        self._call("kill", "--signal=KILL", spec.name)
                    done.wait(30)
                duration = time.monotonic_ns() - began
                copy.finish()
            finally:
                process.kill()
        ended = self._inspect(spec.name)
        state = ended.get("State", {})
        if process.returncode < 0 and ending == "done":
            message = f"podman was killed by signal {-process.returncode} while the container ran"
            raise Unavailable(message, hint="start the run again")
        if str(state.get("StartedAt", "0001-")).startswith("0001-"):
            told = log.read_text(encoding="utf-8", errors="replace").strip()[-600:]
            message = f"podman could not start the container: {told}"
            raise Unavailable(message, hint="attnrepro doctor checks the engine")
        return closed.status_of(
            ending,
            int(state["ExitCode"]),
            oom_killed=bool(state["OOMKilled"]) or kernellog.oom_killed(str(ended["Id"])),
            duration_ns=duration,
            facts=facts | closed.gpu_facts(spec),
        )

    def _inspect(self, container: str) -> Mapping[str, Any]:
        try:
            text = self._call("container", "inspect", "--format=json", container)
        except Unavailable:
            return {}
        found: dict[str, Any] = json.loads(text)[0]
        return found

    def _image_id(self, reference: str) -> str | None:
        try:
            return f"sha256:{self._call('image', 'inspect', '--format={{.Id}}', reference).strip()}"
        except Unavailable:
            return None

    def _remove(self, container: str) -> None:
        with suppress(Unavailable):
            self._call("rm", "--force", "--ignore", "--time=0", "--volumes", container)

    def _remove_orphans(self) -> None:
        listed = self._call("ps", "--all", f"--filter=label={OWNER_LABEL}", "--format=json")
        for entry in json.loads(listed or "[]") or ():
            if closed.orphaned(entry["Labels"][OWNER_LABEL]):
                self._remove(entry["Id"])

    def _call(self, *arguments: str, limit: float | None = _CALL_SECONDS) -> str:
        options = self._setup.options if self._setup else ()
        try:
            done = subprocess.run(
                [self._program, *options, *arguments],
                stdin=subprocess.DEVNULL,
                env=_environment(),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit,
                check=False,
            )
        except FileNotFoundError:
            message = "podman is not installed"
            raise Unavailable(message, hint=_INSTALL_HINT) from None
        except (OSError, subprocess.TimeoutExpired) as error:
            message = f"podman {arguments[0]} does not answer: {error}"
            raise Unavailable(message, hint="attnrepro doctor checks the engine") from None
        if done.returncode:
            message = f"podman {arguments[0]} failed: {done.stderr.strip()[-600:]}"
            raise Unavailable(message, hint="attnrepro doctor checks the engine")
        return done.stdout


def setup_of(
    info: Mapping[str, Any], runtimes: Mapping[str, str | None], *, systemd: bool
) -> PodmanSetup:
    """Decide runtime, cgroup manager and possible limits from `podman info`.

    crun refuses the v1 and hybrid cgroup layouts that machines without systemd often have; runc
    takes them. Rootless podman cannot use v1 at all.

    Raises Unavailable where the runtime that is needed is missing.
    """
    host = info["host"]
    version = str(host.get("cgroupVersion", "v1"))
    rootless = bool(host["security"]["rootless"])
    order = ("crun", "runc") if version == "v2" else ("runc",)
    runtime = next((name for name in order if runtimes.get(name)), None)
    if runtime is None:
        message = f"podman has no {' or '.join(order)}, which cgroups {version} need"
        hint = f"apt-get install {order[0]} as root, or attnrepro doctor --fix"
        raise Unavailable(message, hint=hint)
    manager = "systemd" if systemd and version == "v2" else "cgroupfs"
    usable = not (rootless and (version != "v2" or not systemd))
    controllers = frozenset(host.get("cgroupControllers") or ()) if usable else frozenset()
    return PodmanSetup(
        facts=EngineFacts(
            name="podman",
            version=str(info["version"]["Version"]),
            store="containers-storage",
            runtime=runtime,
            cgroup_version=version,
            rootless=rootless,
            contained=True,
            detail={
                "storage_driver": str(info["store"]["graphDriverName"]),
                "seccomp": "yes" if host["security"].get("seccompEnabled") else "no",
                "kernel": str(host["kernel"]),
                "cgroup_manager": manager,
                "cgroup_controllers": " ".join(sorted(controllers)) or "none",
            },
        ),
        options=(f"--runtime={runtimes[runtime]}", f"--cgroup-manager={manager}"),
        controllers=controllers,
    )


def run_arguments(
    spec: ContainerSpec, image: str, setup: PodmanSetup
) -> tuple[list[str], dict[str, str]]:
    """Write `podman run`'s arguments: closed but for what the spec names.

    Every value stands in its option's own word, so none can pass for another option. Returns the
    arguments, and facts about limits that cannot be set here.
    """
    nofile = closed.nofile(spec)
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    processes = _PROCESSES if hard == resource.RLIM_INFINITY else min(_PROCESSES, hard)
    arguments = [
        "run",
        f"--name={spec.name}",
        "--pull=never",
        "--network=none",
        "--read-only",
        "--read-only-tmpfs=false",
        f"--tmpfs=/tmp:{closed.tmpfs_options(spec)}",
        f"--shm-size={closed.SHM_BYTES}b",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        f"--user={spec.uid}:{spec.gid}",
        f"--ulimit=nofile={nofile}:{nofile}",
        f"--ulimit=nproc={processes}:{processes}",
        "--ulimit=core=0:0",
        "--ipc=private",
        "--hostname=attnrepro",
        "--no-hosts",
        "--http-proxy=false",
        "--image-volume=ignore",
        "--no-healthcheck",
        "--sdnotify=ignore",
        "--systemd=false",
        "--log-driver=none",
        "--workdir=/tmp",
        f"--label={OWNER_LABEL}={closed.owner()}",
    ]
    if setup.facts.rootless:
        arguments.append("--userns=keep-id")
    if not setup.controllers and setup.facts.runtime == "crun":  # runc has no such mode
        arguments.append("--cgroups=disabled")
    facts: dict[str, str] = {}
    limits = (
        ("pids", "pids_limit", f"--pids-limit={spec.pids_limit}"),
        ("memory", "memory_bytes", f"--memory={spec.memory_bytes}b"),
        ("memory", "memory_bytes", f"--memory-swap={spec.memory_bytes}b"),
        ("cpuset", "cpuset", f"--cpuset-cpus={spec.cpuset}"),
    )
    for controller, field, option in limits:
        if getattr(spec, field) is None:
            continue
        if controller in setup.controllers:
            arguments.append(option)
        else:
            how = "by affinity" if field == "cpuset" else "not enforced"
            facts[f"limit_{field}"] = f"{how}: no cgroup controller {controller}"
    for mount in closed.mounts(spec):
        mode = "true" if mount.read_only else "false"
        arguments.append(
            f"--mount=type=bind,source={mount.source},target={mount.target},ro={mode},"
            "bind-propagation=rprivate"
        )
    if spec.gpu:
        arguments += [f"--device={name}" for name in spec.gpu.cdi_names]
        arguments += [f"--device={node}:{node}:rw" for node in spec.gpu.nodes]
        arguments += [f"--group-add={group}" for group in spec.gpu.groups]
    arguments += [f"--env={name}={value}" for name, value in closed.environment(spec).items()]
    arguments.append(f"--entrypoint={json.dumps([spec.command[0]])}")
    return [*arguments, image.removeprefix("sha256:"), *spec.command[1:]], facts


def _systemd() -> bool:
    """Tell whether a systemd manages this user's cgroups."""
    if os.getuid() == 0:
        return Path("/run/systemd/system").is_dir()
    return Path(os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"), "systemd").is_dir()


def _environment() -> dict[str, str]:
    # Nothing is pulled, so no credentials are read; podman fails where DOCKER_CONFIG names a folder
    # without config.json.
    dropped = ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE")
    return {name: value for name, value in os.environ.items() if name not in dropped}
