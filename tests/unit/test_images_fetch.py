"""Fetching: by hash, from what the host is configured for, nothing else and nothing half."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from attnrepro.errors import BuildFailed
from attnrepro.images import base, fetch
from attnrepro.images.locks import Deb, Wheel
from attnrepro.images.process import run, stream
from attnrepro.images.store import Store

HAS_APT = Path("/usr/lib/apt/apt-helper").exists()
needs_apt = pytest.mark.skipif(not HAS_APT, reason="this host has no apt")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def make_wheel(folder: Path, name: str = "toy") -> Wheel:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr(f"{name}.py", "x = 1\n")
        info = f"{name}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    data = sink.getvalue()
    file = f"{name}-1.0-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    (folder / file).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    return Wheel(name=name, version="1.0", sha256=digest, file=file, size=len(data))


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose pip knows one folder, and public sources that nobody serves."""
    folder = tmp_path / "links"
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": str(folder),
        "PIP_NO_INDEX": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fetch, "source_url", lambda kind, key: f"http://127.0.0.1:9/{kind}/{key}")
    return folder


def wheels(store: Store, *items: Wheel, offline: bool = False) -> list[str]:
    lines: list[str] = []
    fetch.wheels(store, items, python="3.11", sources={}, offline=offline, progress=lines.append)
    return lines


def test_a_wheel_comes_from_where_the_hosts_pip_looks(store: Store, links: Path) -> None:
    wheel = make_wheel(links)
    assert wheels(store, wheel)
    assert store.intact(wheel.sha256)
    (links / wheel.file).unlink()
    assert wheels(store, wheel, offline=True) == []


def test_a_wheel_of_another_hash_never_enters(store: Store, links: Path) -> None:
    wheel = make_wheel(links)
    (links / wheel.file).write_bytes((links / wheel.file).read_bytes() + b"\0")
    with pytest.raises(BuildFailed, match=wheel.file) as error:
        wheels(store, wheel)
    assert "hash" in error.value.message.lower()
    assert not store.has(wheel.sha256)
    assert list((store.root / "tmp").iterdir()) == []


def test_a_missing_wheel_is_named_and_the_others_stay(store: Store, links: Path) -> None:
    here, gone = make_wheel(links, "here"), make_wheel(links, "gone")
    (links / gone.file).unlink()
    with pytest.raises(BuildFailed, match=gone.file):
        wheels(store, here, gone)
    assert store.intact(here.sha256)


def test_a_truncated_wheel_in_the_store_is_fetched_again(store: Store, links: Path) -> None:
    wheel = make_wheel(links)
    wheels(store, wheel)
    store.blob(wheel.sha256).write_bytes(b"short")
    assert fetch.missing(store, [wheel]) == [wheel]
    wheels(store, wheel)
    assert store.intact(wheel.sha256)


def test_offline_says_what_the_store_lacks(store: Store, links: Path) -> None:
    with pytest.raises(BuildFailed, match="--offline"):
        wheels(store, make_wheel(links), offline=True)


def make_deb(pool: Path, content: bytes = b"not really a package") -> Deb:
    path = "pool/main/t/toy/toy_1.0_all.deb"
    (pool / path).parent.mkdir(parents=True, exist_ok=True)
    (pool / path).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return Deb(name="toy", version="1.0", arch="all", sha256=digest, size=len(content), path=path)


def debs(store: Store, mirror: Path, *items: Deb, offline: bool = False) -> None:
    fetch.debs(
        store,
        items,
        source="nowhere",
        mirrors=[f"file:{mirror}"],
        offline=offline,
        progress=lambda _: None,
    )


@pytest.fixture
def no_other_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "apt_mirrors", lambda source, extra=(): list(extra))


@needs_apt
@pytest.mark.usefixtures("no_other_mirror")
def test_a_package_comes_by_pool_path_and_hash(store: Store, tmp_path: Path) -> None:
    deb = make_deb(tmp_path / "mirror")
    debs(store, tmp_path / "mirror", deb)
    assert store.intact(deb.sha256)
    debs(store, tmp_path / "empty", deb, offline=True)


@needs_apt
@pytest.mark.usefixtures("no_other_mirror")
@pytest.mark.parametrize("what", ["gone", "other bytes"])
def test_a_package_that_is_gone_is_named_with_the_ways_out(
    store: Store, tmp_path: Path, what: str
) -> None:
    deb = make_deb(tmp_path / "mirror")
    path = tmp_path / "mirror" / deb.path
    path.unlink() if what == "gone" else path.write_bytes(b"x" * deb.size)
    with pytest.raises(fetch.MissingDebs, match=r"toy 1\.0") as error:
        debs(store, tmp_path / "mirror", deb)
    assert "--mirror" in (error.value.hint or "")
    assert "--allow-newer" in (error.value.hint or "")
    assert error.value.debs == (deb,)
    assert not store.has(deb.sha256)
    assert list((store.root / "tmp").iterdir()) == []


def test_mirrors_are_those_given_then_the_hosts_then_the_public_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = "http://host/debian/\nhttp://host/debian-security/\nhttp://host/debian/\n"
    monkeypatch.setattr(fetch, "output", lambda command: listed)
    monkeypatch.setattr(fetch, "source_url", lambda kind, key: "https://public/debian")
    found = fetch.apt_mirrors("debian", ["https://snapshot/debian/"])
    assert found == ["https://snapshot/debian", "http://host/debian", "https://public/debian"]
    monkeypatch.setattr(fetch, "output", lambda command: None)
    assert fetch.apt_mirrors("debian") == ["https://public/debian"]


def test_a_package_that_is_not_what_the_lock_says_makes_no_repository(
    store: Store, tmp_path: Path
) -> None:
    deb = make_deb(tmp_path / "mirror")
    store.add_bytes((tmp_path / "mirror" / deb.path).read_bytes())
    folder = tmp_path / "repository"
    folder.mkdir()
    with pytest.raises(BuildFailed, match="no Debian package of toy"):
        base.write_repository([deb], store, folder)


# Programs -------------------------------------------------------------------------------------


def test_a_failing_program_ends_the_message_with_its_last_lines() -> None:
    with pytest.raises(BuildFailed, match=r"(?s)making failed .*the reason"):
        run(["sh", "-c", "echo the reason >&2; exit 3"], progress=lambda _: None, doing="making")


def test_an_interrupt_ends_the_whole_group(tmp_path: Path) -> None:
    """A builder's children must not go on after a Ctrl-C."""
    marker = tmp_path / "pid"
    script = f"sh -c 'echo $$ > {marker}; sleep 60' & echo started; wait"

    def interrupt(line: str) -> None:
        if line.strip() == "started":
            deadline = time.monotonic() + 5
            while not (marker.exists() and marker.read_text().strip()):
                assert time.monotonic() < deadline
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream(["sh", "-c", script], progress=interrupt, every_line=True)
    pid = int(marker.read_text())
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_a_second_signal_waits_until_the_group_has_ended(tmp_path: Path) -> None:
    script = tmp_path / "child.sh"
    # It needs its time to end, as mmdebstrap does to unmount.
    script.write_text(
        f"trap 'sleep 1; touch {tmp_path}/ended; exit 1' INT\n"
        f"echo begun; touch {tmp_path}/begun; while :; do sleep 0.05; done\n"
    )
    code = (
        "import sys\nfrom attnrepro.images import process\n"
        "from attnrepro.signals import unwound_by_signals\n"
        "with unwound_by_signals():\n"
        f"    process.stream(['bash', {str(script)!r}], progress=print)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as parent:
        deadline = time.monotonic() + 30
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for _ in range(3):
            parent.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        parent.wait(30)
    assert (tmp_path / "ended").exists(), "the child was left, or ended in the middle of its work"
