"""Install a bundle on a host without a network. Standard library only; this file is the installer.

Run it with the Python that imports torch, as root, beside the parts that have arrived:

    /opt/torch/.venv/bin/python3 install [--into /opt/attnrepro]

Parts may come in several visits: each run keeps what it finds and names what is missing (exit 3).
With the last part it unpacks, starts Docker with the bundle's own engine files, makes the image of
this host (or loads the bundled images) and says how to go on.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SOCKET = Path("/var/run/docker.sock")
WAITING = 3
"""Exit code while parts are missing."""
FAILED = 8
_DAEMON = {
    "storage-driver": "overlay2",
    "features": {"containerd-snapshotter": False, "cdi": True},
    "iptables": False,
    "ip6tables": False,
    "bridge": "none",
    "userland-proxy": False,
}


class Failure(Exception):
    """Told to the user in one line."""


class Parts(io.RawIOBase):
    """The parts, one after the other, as one stream."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._file: io.BufferedReader | None = None

    def readable(self) -> bool:
        """Say yes."""
        return True

    def close(self) -> None:
        """Close the part in hand."""
        if self._file is not None:
            self._file.close()
            self._file = None
        super().close()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a buffer from the current part, or the next."""
        while self._paths or self._file is not None:
            if self._file is None:
                self._file = self._paths.pop(0).open("rb")
            if count := self._file.readinto(buffer):
                return count
            self._file.close()
            self._file = None
        return 0


def say(line: str) -> None:
    """One line of progress, with the time since the start."""
    sys.stderr.write(f"[{time.monotonic() - BEGAN:5.1f} s] {line}\n")
    sys.stderr.flush()


BEGAN = time.monotonic()


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def collect(here: Path, spool: Path, document: dict[str, list[dict[str, str]]]) -> list[str]:
    """Take every whole part that lies beside the installer; returns the names of those missing."""
    spool.mkdir(parents=True, exist_ok=True)
    missing = []
    for part in document["parts"]:
        name = part["name"]
        held, arrived = spool / name, here / name
        if held.is_file() and sha256(held) == part["sha256"]:
            continue
        if not arrived.is_file():
            missing.append(name)
            continue
        if sha256(arrived) != part["sha256"]:
            say(f"{name} is damaged; send it again")
            missing.append(name)
            continue
        temporary = held.with_suffix(".tmp")
        shutil.copyfile(arrived, temporary)
        temporary.replace(held)
    return missing


def unpack(spool: Path, document: dict[str, list[dict[str, str]]], into: Path) -> None:
    """Decompress and unpack all parts below `into`/payload."""
    new, payload = into / "payload.new", into / "payload"
    shutil.rmtree(new, ignore_errors=True)
    parts = Parts([spool / part["name"] for part in document["parts"]])
    try:
        with (
            io.BufferedReader(parts, 1 << 20) as stream,
            lzma.open(stream) as plain,
            tarfile.open(fileobj=plain, mode="r|") as archive,
        ):
            archive.extractall(new, filter="data")
    except (lzma.LZMAError, tarfile.TarError, EOFError) as error:
        message = f"the bundle cannot be unpacked: {error}"
        raise Failure(message) from None
    shutil.rmtree(payload, ignore_errors=True)
    new.replace(payload)


def answers(address: Path) -> bool:
    """Whether a Docker daemon answers on a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(5)
        try:
            probe.connect(str(address))
            probe.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in probe.recv(64)
        except OSError:
            return False


def mount_cgroups() -> None:
    """Mount cgroup2 where nothing is mounted, as on a machine without systemd."""
    place = Path("/sys/fs/cgroup")
    if place.is_dir() and not any(place.iterdir()):
        subprocess.run(["mount", "-t", "cgroup2", "none", str(place)], check=False)


def start_engine(into: Path, address: Path) -> None:
    """Start the bundle's dockerd in a session of its own, or use the engine that is there."""
    if answers(address):
        say(f"an engine answers at {address}")
        return
    if os.getuid() != 0:
        message = "starting dockerd needs root"
        raise Failure(message)
    mount_cgroups()
    engine, state = into / "payload" / "engine", into / "engine"
    state.mkdir(parents=True, exist_ok=True)
    config = state / "daemon.json"
    config.write_text(
        json.dumps({**_DAEMON, "data-root": str(state / "data"), "exec-root": str(state / "exec")})
    )
    (state / "docker.pid").unlink(missing_ok=True)
    environment = {**os.environ, "PATH": f"{engine / 'bin'}:{os.environ.get('PATH', os.defpath)}"}
    command = [str(engine / "bin" / "dockerd"), f"--config-file={config}"]
    command += [f"--pidfile={state / 'docker.pid'}", f"--host=unix://{address}"]
    programs = [command[0], str(engine / "bin" / "runc")]
    if any(
        subprocess.run([program, "--version"], capture_output=True, check=False).returncode
        for program in programs
    ):
        # The host lacks one of their libraries (libsystemd, libseccomp): the bundle has them.
        environment["LD_LIBRARY_PATH"] = str(engine / "lib")
    with (state / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    for _ in range(300):
        if answers(address):
            say(f"dockerd runs, pid {daemon.pid}")
            return
        if daemon.poll() is not None:
            break
        time.sleep(0.1)
    tail = (state / "dockerd.log").read_text(errors="replace")[-1500:]
    message = f"dockerd did not start; {state / 'dockerd.log'} ends with:\n{tail}"
    raise Failure(message)


def launcher(into: Path, python: str, address: Path) -> Path:
    """Write the command `attnrepro` that uses the bundled package and the engine's client."""
    path = into / "bin" / "attnrepro"
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = into / "payload"
    path.write_text(
        "#!/bin/sh\n"
        f'export PYTHONPATH="{payload / "site"}" PATH="{payload / "engine" / "bin"}:$PATH"\n'
        f'export DOCKER_HOST="unix://{address}"\n'
        f'exec "{python}" -m attnrepro "$@"\n'
    )
    path.chmod(0o755)
    return path


def prepare(into: Path, python: str, address: Path) -> None:
    """Hand over to the bundled package, which makes and loads the images."""
    payload = into / "payload"
    environment = {**os.environ, "PYTHONPATH": str(payload / "site")}
    environment["DOCKER_HOST"] = f"unix://{address}"
    environment["PATH"] = f"{payload / 'engine' / 'bin'}:{environment.get('PATH', os.defpath)}"
    command = [python, "-m", "attnrepro.images.bundle_finish", str(payload)]
    if code := subprocess.run(command, env=environment, check=False).returncode:
        message = f"making the images failed (exit code {code})"
        raise Failure(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the installer; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--into", type=Path, default=Path("/opt/attnrepro"))
    parser.add_argument("--python", default=sys.executable, help="the Python that imports torch")
    parser.add_argument("--socket", type=Path, default=SOCKET, help="where Docker listens")
    parser.add_argument("--bundle", type=Path, default=Path(__file__).resolve().parent)
    chosen = parser.parse_args(arguments)
    into, spool = chosen.into.resolve(), chosen.into.resolve() / "parts"
    try:
        document = json.loads((chosen.bundle / "bundle.json").read_text())
        missing = collect(chosen.bundle, spool, document)
        if missing:
            say(
                f"waiting for {len(missing)} of {len(document['parts'])} parts: {' '.join(missing)}"
            )
            return WAITING
        say(f"all {len(document['parts'])} parts are whole; unpacking")
        unpack(spool, document, into)
        say("starting the engine")
        start_engine(into, chosen.socket)
        prepare(into, chosen.python, chosen.socket)
        say(f"ready: {launcher(into, chosen.python, chosen.socket)} doctor")
    except (Failure, OSError, ValueError) as error:
        say(f"failed: {error}")
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
