"""Docker through its SDK: stock classic and containerd stores, contexts, DOCKER_HOST."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from attnrepro.engines import closed
from attnrepro.engines.base import OWNER_LABEL, EngineFacts
from attnrepro.engines.dockerapi import (
    ANY_API,
    CALL_SECONDS,
    START_HINT,
    Api,
    connection,
    endpoint,
    knock,
)
from attnrepro.engines.gpu import EngineDoors, GpuMode
from attnrepro.errors import Unavailable
from attnrepro.signals import signals_held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from attnrepro.engines.base import ContainerSpec, ExitStatus, ImageIdentity


class DockerEngine:
    """The Docker daemon that the user's own client would talk to."""

    name = "docker"

    def __init__(self, url: str | None = None) -> None:
        """Talk to `url`, else DOCKER_HOST, else the current context, else the default socket."""
        self._url = url or endpoint()
        self._api: str | None = None
        self._facts: EngineFacts | None = None
        self._info: Mapping[str, Any] = {}

    @property
    def url(self) -> str:
        """Address of the daemon."""
        return self._url

    @property
    def api_version(self) -> str:
        """API version that the daemon speaks. Raises Unavailable where none answers."""
        with self._client():
            return self._api or ANY_API

    def facts(self) -> EngineFacts:
        """See `Engine.facts`. Raises Unavailable where no Docker answers."""
        if self._facts is None:
            with self._client() as client:
                self._info = client.info()
            self._facts = facts_of(self._info)
        return self._facts

    def doors(self) -> EngineDoors:
        """By which doors a GPU may enter."""
        self.facts()
        cdi = bool(self._info.get("CDISpecDirs"))
        return EngineDoors(
            cdi=cdi,
            cdi_reason="" if cdi else 'Docker\'s daemon.json lacks {"features": {"cdi": true}}',
            nvidia_runtime="nvidia" in (self._info.get("Runtimes") or {}),
        )

    def ensure_image(self, identity: ImageIdentity) -> str:
        """See `Engine.ensure_image`."""
        containerd = self.facts().store == "containerd"
        want = identity.manifest_digest if containerd else identity.config_digest
        found = self._image_id(want)
        if found is None:
            try:
                self._load(identity)
            except BaseException:
                # The containerd store keeps the name of an image whose layers it never got.
                self.remove_image(identity)
                raise
            found = self._image_id(want)
        if found != want:
            other = found or self._image_id(identity.name) or "nothing"
            raise closed.differs(identity, want, other, "Docker")
        return found

    def run(
        self, spec: ContainerSpec, *, log: Path, stop: Callable[[], bool] | None = None
    ) -> ExitStatus:
        """See `Engine.run`."""
        closed.check_sources(spec)
        image = self.ensure_image(spec.image)
        config = container_config(spec, image, self.facts())
        with closed.ended_by_signals():
            self._remove_orphans()
            with self._client() as client, self._client(timeout=None) as streams:
                try:
                    return self._run(spec, config, log, stop, client, streams)
                finally:
                    with signals_held():
                        self._remove(spec.name)

    def remove_image(self, identity: ImageIdentity) -> None:
        """See `Engine.remove_image`."""
        from docker.errors import ImageNotFound

        containerd = self.facts().store == "containerd"
        want = identity.manifest_digest if containerd else identity.config_digest
        with self._client() as client, suppress(ImageNotFound):
            client.remove_image(want, force=True)

    def _run(
        self,
        spec: ContainerSpec,
        config: dict[str, Any],
        log: Path,
        stop: Callable[[], bool] | None,
        client: Api,
        streams: Api,
    ) -> ExitStatus:
        from docker.errors import NotFound

        try:
            made = client.create_container_from_config(config, spec.name)
        except NotFound as error:
            # A load that was killed half-way leaves an image without its layers.
            self.remove_image(spec.image)
            message = f"Docker's copy of {spec.image.name} is incomplete: {error.explanation}"
            raise Unavailable(message, hint="start it again: the image is loaded anew") from None
        container = str(made["Id"])
        copy = closed.LogCopy(streams.attach(container, stdout=True, stderr=True, stream=True), log)
        copy.start()
        began = time.monotonic_ns()
        with _gone_while_running():
            client.start(container)
        waiter = _Waiter(self._url, self._api or ANY_API, container)
        waiter.start()
        limit = spec.timeout_seconds
        ending = closed.watch(
            waiter.done,
            deadline_ns=None if limit is None else began + int(limit * 1e9),
            stop=stop,
        )
        if ending != "done":
            with suppress(Exception):  # it may have ended by itself meanwhile
                client.kill(container)
            waiter.done.wait(CALL_SECONDS)
        duration = time.monotonic_ns() - began
        if waiter.error is not None:
            raise waiter.error
        copy.finish()
        with _gone_while_running():
            state = client.inspect_container(container)["State"]
        facts = closed.gpu_facts(spec)
        if made.get("Warnings"):
            facts["warnings"] = " ".join(made["Warnings"])
        return closed.status_of(
            ending,
            int(state["ExitCode"]),
            oom_killed=bool(state["OOMKilled"]),
            duration_ns=duration,
            facts=facts,
        )

    def _image_id(self, reference: str) -> str | None:
        from docker.errors import ImageNotFound

        with self._client() as client:
            try:
                return str(client.inspect_image(reference)["Id"])
            except ImageNotFound:
                return None

    def _load(self, identity: ImageIdentity) -> None:
        if not identity.archive.is_file():
            message = f"Docker has no image {identity.name}, and {identity.archive} is not there"
            raise Unavailable(message, hint="attnrepro build makes it")
        with self._client(timeout=None) as client, identity.archive.open("rb") as archive:
            for line in client.load_image(archive, quiet=True):
                if "error" in line:
                    message = f"Docker cannot load {identity.archive}: {line['error']}"
                    raise Unavailable(message, hint="free disk space, or build the image again")

    def _remove(self, container: str) -> None:
        from docker.errors import NotFound

        # A vanished engine is told by what raised before; its container goes at the next start.
        with suppress(Unavailable, NotFound), self._client() as client:
            client.remove_container(container, force=True, v=True)

    def _remove_orphans(self) -> None:
        with self._client() as client:
            for entry in client.containers(all=True, filters={"label": OWNER_LABEL}):
                if closed.orphaned(entry["Labels"][OWNER_LABEL]):
                    self._remove(entry["Id"])

    @contextmanager
    def _client(self, *, timeout: int | None = CALL_SECONDS) -> Iterator[Api]:
        """Open a connection of our own, with every transport error told as Unavailable."""
        import requests
        import urllib3
        from docker.errors import APIError, DockerException, ImageNotFound, NotFound

        try:
            knock(self._url)
            if self._api is None:
                # Not the SDK's own "auto", which leaks its connection where the answer is bad.
                with connection(self._url, ANY_API) as client:
                    self._api = str(client.version(api_version=False)["ApiVersion"])
            with connection(self._url, self._api) as client:
                client.timeout = timeout
                yield client
        except (NotFound, ImageNotFound):
            raise
        except APIError as error:
            message = f"Docker refused: {error.explanation or error}"
            raise Unavailable(message, hint="attnrepro doctor checks the engine") from None
        except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError) as error:
            message = f"Docker does not answer at {self._url}: {error}"
            raise Unavailable(message, hint=START_HINT) from None


def _gone(error: Exception) -> Unavailable:
    return Unavailable(f"Docker went away while the container ran: {error}", hint=START_HINT)


@contextmanager
def _gone_while_running() -> Iterator[None]:
    """Tell a lost connection for what it is: the container may begin before the answer comes."""
    import requests
    import urllib3

    try:
        yield
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        from docker.errors import APIError

        if isinstance(error, APIError):
            raise
        raise _gone(error) from None


class _Waiter(threading.Thread):
    """Blocks in Docker's own wait call, so that the main thread can watch time and signals."""

    def __init__(self, url: str, api: str, container: str) -> None:
        super().__init__(name="attnrepro-wait", daemon=True)
        self._url = url
        self._api = api
        self._container = container
        self.done = threading.Event()
        self.error: Unavailable | None = None

    def run(self) -> None:
        """Wait; an engine that goes away meanwhile is an error, not an exit code."""
        try:
            knock(self._url)
            with connection(self._url, self._api) as client:
                client.timeout = None
                client.wait(self._container)
        except Exception as error:
            # Any failure to wait means that the engine is gone: sockets, HTTP, JSON or API.
            self.error = _gone(error)
        finally:
            self.done.set()


def facts_of(info: Mapping[str, Any]) -> EngineFacts:
    """Read the facts out of Docker's `info` reply."""
    status = dict(info.get("DriverStatus") or ())
    containerd = str(status.get("driver-type", "")).startswith("io.containerd.snapshotter")
    security = [str(option) for option in info.get("SecurityOptions") or ()]
    return EngineFacts(
        name="docker",
        version=str(info.get("ServerVersion", "unknown")),
        store="containerd" if containerd else "classic",
        runtime=str(info.get("DefaultRuntime", "unknown")),
        cgroup_version=f"v{info.get('CgroupVersion') or '1'}",
        rootless=any("rootless" in option for option in security),
        contained=True,
        detail={
            "storage_driver": str(info.get("Driver", "unknown")),
            "seccomp": "yes" if any("seccomp" in option for option in security) else "no",
            "kernel": str(info.get("KernelVersion", "unknown")),
        },
    )


def container_config(spec: ContainerSpec, image: str, facts: EngineFacts) -> dict[str, Any]:
    """Write the body of Docker's create call: closed but for what the spec names.

    https://docs.docker.com/reference/api/engine/version/v1.43/#tag/Container/operation/ContainerCreate
    """
    # In a rootless daemon's user namespace, 0 is the user who runs it: the one who owns the output.
    user = "0:0" if facts.rootless else f"{spec.uid}:{spec.gid}"
    host: dict[str, Any] = {
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "Privileged": False,
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "Init": False,
        "AutoRemove": False,
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "none", "Config": {}},
        "Tmpfs": {"/tmp": closed.tmpfs_options(spec)},
        "ShmSize": closed.SHM_BYTES,
        "PidsLimit": spec.pids_limit,
        "Ulimits": [
            {"Name": "nofile", "Soft": closed.nofile(spec), "Hard": closed.nofile(spec)},
            {"Name": "core", "Soft": 0, "Hard": 0},
        ],
        "Mounts": [
            {
                "Type": "bind",
                "Source": str(mount.source),
                "Target": mount.target,
                "ReadOnly": mount.read_only,
                "BindOptions": {"Propagation": "rprivate"},
            }
            for mount in closed.mounts(spec)
        ],
    }
    if spec.memory_bytes is not None:
        host |= {"Memory": spec.memory_bytes, "MemorySwap": spec.memory_bytes}
    if spec.cpuset is not None:
        host["CpusetCpus"] = spec.cpuset
    if spec.gpu:
        host["Devices"] = [
            {"PathOnHost": node, "PathInContainer": node, "CgroupPermissions": "rw"}
            for node in spec.gpu.nodes
        ]
        host["GroupAdd"] = [str(group) for group in spec.gpu.groups]
        if spec.gpu.mode is GpuMode.CDI:
            host["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": list(spec.gpu.cdi_names)}]
        elif spec.gpu.mode is GpuMode.RUNTIME:
            host["DeviceRequests"] = [
                {
                    "Driver": "nvidia",
                    "DeviceIDs": list(spec.gpu.runtime_ids),
                    "Capabilities": [["gpu", "compute", "utility"]],
                }
            ]
    return {
        "Image": image,
        "Entrypoint": [spec.command[0]],
        "Cmd": list(spec.command[1:]),
        "User": user,
        "WorkingDir": "/tmp",
        "Env": [f"{name}={value}" for name, value in closed.environment(spec).items()],
        "Labels": {OWNER_LABEL: closed.owner()},
        "Healthcheck": {"Test": ["NONE"]},
        "Hostname": "attnrepro",
        "NetworkDisabled": True,
        "Tty": False,
        "OpenStdin": False,
        "HostConfig": host,
    }
