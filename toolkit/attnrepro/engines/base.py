"""What the rest of the toolkit knows of a container engine.

An engine loads an image from our own archive, checks that what it holds is that image, runs one
closed container of it and removes it. It neither builds nor pulls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from attnrepro.engines.gpu import GpuAccess  # noqa: TC001 - a field of a dataclass
from attnrepro.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from attnrepro.jsonio import JsonObject

OWNER_LABEL: Final = "org.attnrepro.owner"
"""Label on every container: which process on which machine answers for it."""

ENVIRONMENT_NAMES: Final = frozenset(
    {
        "ATEN_CPU_CAPABILITY",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_ORDER",
        "CUDA_DISABLE_PTX_JIT",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "CUDA_VISIBLE_DEVICES",
        "DNNL_MAX_CPU_ISA",
        "DNNL_VERBOSE",
        "FLASH_ATTENTION_TRITON_AMD_ENABLE",
        "GOMP_CPU_AFFINITY",
        "HIP_VISIBLE_DEVICES",
        "KMP_AFFINITY",
        "KMP_BLOCKTIME",
        "LANG",
        "LC_ALL",
        "MKL_CBWR",
        "MKL_DYNAMIC",
        "MKL_NUM_THREADS",
        "MKL_VERBOSE",
        "NVIDIA_TF32_OVERRIDE",
        "OMP_DYNAMIC",
        "OMP_NUM_THREADS",
        "OMP_PLACES",
        "OMP_PROC_BIND",
        "OMP_WAIT_POLICY",
        "ONEDNN_MAX_CPU_ISA",
        "ONEDNN_VERBOSE",
        "OPENBLAS_NUM_THREADS",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONFAULTHANDLER",
        "PYTHONHASHSEED",
        "PYTHONNOUSERSITE",
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "ROCR_VISIBLE_DEVICES",
        "SOURCE_DATE_EPOCH",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCH_BLAS_PREFER_CUBLASLT",
        "TORCH_LOGS",
        "TRITON_DISABLE_LINE_INFO",
        "TZ",
    }
)
"""Variables a run may set, besides `ATTNREPRO_*`.

A list of names, not of prefixes: `CUDA_INJECTION64_PATH`, `HSA_TOOLS_LIB` or `TRITON_PTXAS_PATH`
load code just as `LD_PRELOAD` does.
"""

_OWN_NAME = re.compile(r"ATTNREPRO_[A-Z0-9_]{1,60}")
_CONTAINER_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,120}")
_IMAGE_NAME = re.compile(r"[a-z0-9][a-z0-9._/-]{0,200}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CPUSET = re.compile(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")


@dataclass(frozen=True, kw_only=True)
class ImageIdentity:
    """One image: where its file lies, and both digests by which an engine may show it."""

    archive: Path
    """OCI layout and docker-archive in one tar, as `images.oci` writes it."""
    name: str
    """Repository and tag under which the archive loads."""
    manifest_digest: str
    """`sha256:` and 64 hex digits; what Docker's containerd store shows."""
    config_digest: str
    """`sha256:` and 64 hex digits; what Docker's classic store and podman show."""

    def __post_init__(self) -> None:
        """Refuse what is no name or digest. Raises UsageError."""
        if not _IMAGE_NAME.fullmatch(self.name):
            message = f"{self.name!r} is not an image name"
            raise UsageError(message)
        for digest in (self.manifest_digest, self.config_digest):
            if not _DIGEST.fullmatch(digest):
                message = f"{digest!r} is not an image digest (sha256: and 64 hex digits)"
                raise UsageError(message)


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of the host inside the container."""

    source: Path
    """Absolute path on the host."""
    target: str
    """Absolute path in the container."""
    read_only: bool


@dataclass(frozen=True, kw_only=True)
class ContainerSpec:
    """One run of one container. Everything that is not named here stays closed."""

    image: ImageIdentity
    command: tuple[str, ...]
    mounts: tuple[Mount, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Names from `ENVIRONMENT_NAMES` or `ATTNREPRO_*`; HOME and caches are set by the engine."""
    uid: int
    gid: int
    tmpfs_bytes: int = 2 << 30
    """Size of /tmp, the only writable place besides writable mounts."""
    memory_bytes: int | None = None
    """Limit of the container's memory, swap included; None is no limit."""
    cpuset: str | None = None
    """Cores in the kernel's list form, as "0-3,8"; None is all."""
    pids_limit: int = 4096
    nofile: int = 65536
    timeout_seconds: float | None = None
    """Wall-clock limit, after which the container is killed."""
    gpu: GpuAccess | None = None
    """How a device enters the container (`engines.gpu.resolve`); None is none."""
    name: str
    """Name of the container; `container_name()` makes a fresh one."""

    def __post_init__(self) -> None:
        """Refuse values that could be taken for something else. Raises UsageError."""
        if not self.command or self.command[0].startswith("-"):
            message = f"the command {list(self.command)!r} must begin with a program"
            raise UsageError(message)
        if any("\0" in part for part in self.command):
            message = "a command's argument holds a NUL"
            raise UsageError(message)
        if not _CONTAINER_NAME.fullmatch(self.name):
            message = f"{self.name!r} is not a container name"
            raise UsageError(message)
        if self.cpuset is not None and not _CPUSET.fullmatch(self.cpuset):
            message = f"{self.cpuset!r} is not a list of cores such as 0-3,8"
            raise UsageError(message)
        for value, what in (
            (self.tmpfs_bytes, "tmpfs_bytes"),
            (self.pids_limit, "pids_limit"),
            (self.nofile, "nofile"),
            (1 if self.memory_bytes is None else self.memory_bytes, "memory_bytes"),
            (1 if self.timeout_seconds is None else self.timeout_seconds, "timeout_seconds"),
        ):
            if not value > 0:
                message = f"{what} is {value!r}; it must be positive"
                raise UsageError(message)
        if self.uid < 0 or self.gid < 0:
            message = f"user {self.uid}:{self.gid} is not a user"
            raise UsageError(message)
        for mount in self.mounts:
            check_mount(mount)
        check_environment(self.environment, self.mounts)


@dataclass(frozen=True, kw_only=True)
class ExitStatus:
    """How a container ended."""

    code: int | None
    """Exit code, 128 + n after signal n; None where we killed it."""
    timed_out: bool
    oom_killed: bool
    """The kernel killed a process of it for memory."""
    stopped: bool
    """The `stop` callback asked for the end."""
    duration_ns: int
    """From start to end, by the host's monotonic clock."""
    engine_facts: Mapping[str, str]
    """What the engine did otherwise than asked (limits it cannot set), and how it ran."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine is; recorded in every artifact."""

    name: str
    version: str
    store: str
    """`classic`, `containerd`, `containers-storage`, or `none`."""
    runtime: str
    """OCI runtime, as `runc`, `crun`; `none` on the bare host."""
    cgroup_version: str
    """`v1`, `v2` or `none`."""
    rootless: bool
    contained: bool
    """False on the bare host, whose results are never called contained."""
    detail: Mapping[str, str] = field(default_factory=dict)

    def containment(self, facts: Mapping[str, str]) -> JsonObject:
        """Make the `containment` member of observations.json, with a run's own facts added."""
        return {
            "engine": self.name,
            "version": self.version,
            "contained": self.contained,
            "facts": {
                "store": self.store,
                "runtime": self.runtime,
                "cgroup_version": self.cgroup_version,
                "rootless": "yes" if self.rootless else "no",
                **self.detail,
                **facts,
            },
        }


@runtime_checkable
class Engine(Protocol):
    """The four things we ask of an engine. Every method raises Unavailable if it vanishes."""

    name: str

    def facts(self) -> EngineFacts:
        """Version, store, runtime, cgroups. Asked once and kept."""
        ...

    def ensure_image(self, identity: ImageIdentity) -> str:
        """Load the image if the engine lacks it; return the engine's own id of it.

        Raises ImageDiffers where the engine's id is not the digest that its store must show.
        """
        ...

    def run(
        self, spec: ContainerSpec, *, log: Path, stop: Callable[[], bool] | None = None
    ) -> ExitStatus:
        """Run a container to its end; its output goes to `log`; it is removed on every path.

        The image is checked first (ImageDiffers). `stop` is asked a few times a second.
        SIGTERM and SIGHUP end the container too, then raise Interrupted; Ctrl-C raises
        KeyboardInterrupt.
        """
        ...

    def remove_image(self, identity: ImageIdentity) -> None:
        """Remove the image from the engine's store; nothing happens if it is not there."""
        ...


def check_mount(mount: Mount) -> None:
    """Refuse relative paths and characters that an engine's option syntax would split at.

    Raises UsageError.
    """
    for path, side in ((str(mount.source), "source"), (mount.target, "target")):
        if not path.startswith("/") or ".." in PurePosixPath(path).parts:
            message = f"a mount's {side} must be an absolute path without '..': {path!r}"
            raise UsageError(message)
        if any(c in path for c in ',:"\\') or not path.isprintable():
            message = f"a mount's {side} may not hold a comma, colon, quote or control: {path!r}"
            raise UsageError(message, hint="use a folder with a plain name (--out, TMPDIR)")
    if mount.target in ("/", "/tmp", "/proc", "/sys", "/dev"):
        message = f"nothing may be mounted over {mount.target}"
        raise UsageError(message)


def check_environment(environment: Mapping[str, str], mounts: tuple[Mount, ...]) -> None:
    """Refuse names outside the allow-list, and a PYTHONPATH outside the read-only mounts.

    Raises UsageError.
    """
    closed = [PurePosixPath(m.target) for m in mounts if m.read_only]
    for name, value in environment.items():
        if name not in ENVIRONMENT_NAMES and not _OWN_NAME.fullmatch(name):
            message = f"the environment variable {name!r} may not be set for a run"
            raise UsageError(message, hint="allowed are ATTNREPRO_* and the names in the docs")
        if "\0" in value or "\n" in value:
            message = f"the value of {name} holds a NUL or a newline"
            raise UsageError(message)
        if name == "PYTHONPATH":
            for entry in map(PurePosixPath, value.split(":")):
                if ".." in entry.parts or not any(
                    entry == root or root in entry.parents for root in closed
                ):
                    message = f"PYTHONPATH entry {str(entry)!r} is not inside a read-only mount"
                    raise UsageError(message)
