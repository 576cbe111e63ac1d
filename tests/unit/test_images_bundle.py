"""Bundles: cut, sent in pieces, put together again."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from attnrepro.errors import BuildFailed, Unavailable, UsageError
from attnrepro.images import bundle, bundle_engine, bundle_finish, bundle_install, hostroot
from attnrepro.images.hostrecord import STACK, Kernels, is_host_stack
from attnrepro.images.store import Store
from attnrepro.images.wheelfiles import read_wheel, unpack

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from typing import TYPE_CHECKING

from small_host import PYTHON, make_host, make_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

FA2 = "host-torch-fa2"
KERNEL = "fa3_fwd-0.0.3-py3-none-any.whl"
PART = 700_000


def fake_engine(root: Path) -> Path:
    for name in (*bundle_engine.PROGRAMS, "usr/sbin/runc"):
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("#!/bin/sh\nexit 0\n")
        place.chmod(0o755)
    return root


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundle")


@pytest.fixture(scope="module")
def made(work: Path) -> bundle.Bundle:
    """A bundle without the network: what pip would fetch is one wheel."""

    def download(command: list[str], **_: object) -> str:
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        make_wheel(folder, "needed", "1", {"needed/__init__.py": b"n = 1\n"})
        assert "docker>=7.1" in command
        return ""

    kernel = make_wheel(
        work,
        "fa3-fwd",
        "0.0.3",
        {"fa3/a.so": random.Random(1).randbytes(1 << 20), "fa3/bin/tool": b"#!/bin/sh"},
    )
    # Both hold one file, as flash-attn-4 and flash-attn 2 do: each is of a stack of its own.
    other = make_wheel(work, "flash-attn", "2.8.3", {"fa3/a.so": b"\x7fELF other"})
    shared = make_wheel(work, "einops", "0.8.2", {"einops/__init__.py": b""})
    public = make_wheel(work, "torch", "2.11.0", {"torch/a.so": b"t"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "run", download)
        return bundle.make(
            [STACK, FA2],
            out=work / "out",
            part_size=PART,
            wheels={STACK: [kernel, shared], FA2: [other, shared]},
            public=[public],
            python="3.12",
            store=Store(work / "store"),
            engine_root=fake_engine(work / "engine"),
            progress=lambda line: None,
        )


def installer(made: bundle.Bundle, into: Path, visit: Path) -> subprocess.CompletedProcess[str]:
    """Run the bundle's own installer as the host would, isolated from this package."""
    return subprocess.run(
        [
            *(sys.executable, "-I", "-S", str(visit / "install")),
            *("--into", str(into), "--bundle", str(visit)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def visit_with(made: bundle.Bundle, folder: Path, names: list[str]) -> Path:
    folder.mkdir()
    for name in ("install", "bundle.json", *names):
        (folder / name).write_bytes((made.folder / name).read_bytes())
    return folder


def test_parts_arrive_in_several_visits(made: bundle.Bundle, work: Path, tmp_path: Path) -> None:
    names = [name for name, _ in made.parts]
    assert len(names) >= 3
    assert all(size <= PART for _, size in made.parts)
    first = visit_with(made, tmp_path / "v1", names[:1])
    done = installer(made, tmp_path / "into", first)
    assert done.returncode == bundle_install.WAITING
    assert f"waiting for {len(names) - 1} of {len(names)} parts" in done.stderr
    damaged = visit_with(made, tmp_path / "v2", names[1:])
    data = bytearray((damaged / names[1]).read_bytes())
    data[100] ^= 1
    (damaged / names[1]).write_bytes(data)
    done = installer(made, tmp_path / "into", damaged)
    assert done.returncode == bundle_install.WAITING
    assert f"{names[1]} is damaged" in done.stderr
    last = visit_with(made, tmp_path / "v3", [names[1]])
    document = json.loads((last / "bundle.json").read_text())
    spool = tmp_path / "into" / "parts"
    assert bundle_install.collect(last, spool, document) == []
    bundle_install.unpack(spool, document, tmp_path / "into")
    payload = tmp_path / "into" / "payload"
    assert (payload / "engine/bin/dockerd").stat().st_mode & 0o111
    assert (payload / "site/needed/__init__.py").is_file()
    assert (payload / "site/attnrepro/images/bundle_finish.py").is_file()
    assert (payload / "site/attnrepro_runner/__init__.py").is_file()
    assert (payload / "site/attnrepro/_data/schema/image.schema.json").is_file()
    contents = json.loads((payload / "contents.json").read_text())
    hosts = {host["stack"]: [w["file"] for w in host["wheels"]] for host in contents["hosts"]}
    assert hosts == {
        STACK: ["fa3_fwd-0.0.3-py3-none-any.whl", "einops-0.8.2-py3-none-any.whl"],
        FA2: ["flash_attn-2.8.3-py3-none-any.whl", "einops-0.8.2-py3-none-any.whl"],
    }
    assert len(list((payload / "kernels").iterdir())) == 3
    wheel = contents["hosts"][0]["wheels"][0]
    tool = [
        i for i in zipfile.ZipFile(payload / "kernels" / KERNEL).infolist() if "/bin/" in i.filename
    ]
    assert [i.external_attr >> 16 for i in tool] == [0o744]
    unpack([payload / "kernels" / KERNEL], tmp_path / "site")
    assert (tmp_path / "site/fa3/bin/tool").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "site/fa3/a.so").stat().st_mode & 0o777 == 0o644
    carried = read_wheel(payload / "kernels" / wheel["file"])
    original = read_wheel(work / wheel["file"])
    assert wheel["sha256"] == original.sha256 != carried.sha256
    assert carried.files == original.files
    [public] = (payload / "public").iterdir()
    assert bundle_finish.public_wheel(public) == read_wheel(work / "torch-2.11.0-py3-none-any.whl")


def test_installer_needs_the_standard_library_only(made: bundle.Bundle) -> None:
    text = (made.folder / "install").read_text()
    lines = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    modules = {line.split()[1].split(".")[0] for line in lines}
    assert modules <= set(sys.stdlib_module_names)
    assert (made.folder / "install").stat().st_mode & 0o111


def test_cut_stream_is_told(made: bundle.Bundle, tmp_path: Path) -> None:
    document = json.loads((made.folder / "bundle.json").read_text())
    document["parts"].pop()
    with pytest.raises(bundle_install.Failure, match="cannot be unpacked"):
        bundle_install.unpack(made.folder, document, tmp_path / "into")
    assert not (tmp_path / "into" / "payload").exists()


def test_launcher_finds_package_and_client(tmp_path: Path) -> None:
    site = tmp_path / "payload" / "site" / "attnrepro"
    site.mkdir(parents=True)
    (site / "__init__.py").touch()  # else an installed package of that name is found first
    (site / "__main__.py").write_text(
        "import os, sys; print('package', sys.argv[1:], os.environ['DOCKER_HOST'])"
    )
    path = bundle_install.launcher(tmp_path, sys.executable, tmp_path / "d.sock")
    done = subprocess.run([path, "doctor", "a b"], capture_output=True, text=True, check=True)
    assert done.stdout == f"package ['doctor', 'a b'] unix://{tmp_path}/d.sock\n"


def test_engine_that_does_not_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_install, "mount_cgroups", lambda: None)
    monkeypatch.setattr(bundle_install.os, "getuid", lambda: 0)
    engine = tmp_path / "payload" / "engine" / "bin"
    engine.mkdir(parents=True)
    for name in ("dockerd", "runc"):
        (engine / name).write_text("#!/bin/sh\necho cannot do it >&2\nexit 1\n")
        (engine / name).chmod(0o755)
    with pytest.raises(bundle_install.Failure, match="cannot do it"):
        bundle_install.start_engine(tmp_path, tmp_path / "d.sock")


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    def make(stacks: list[str], **changes: object) -> None:
        arguments: dict[str, object] = {
            "out": tmp_path / "out",
            "part_size": 65536,
            "wheels": {},
            "public": (),
            "python": "3.12",
            "store": Store(tmp_path / "store"),
            "engine_root": fake_engine(tmp_path / "engine"),
            "progress": lambda line: None,
            **changes,
        }
        bundle.make(stacks, **arguments)  # type: ignore[arg-type]

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(UsageError, match="not empty"):
        make([STACK], out=tmp_path / "full")
    with pytest.raises(UsageError, match="--wheel"):
        make(["cpu-torch2.13"], wheels={STACK: [Path("x.whl")]})
    with pytest.raises(UsageError, match=r"host-torch-fa2 is none"):
        make([STACK], wheels={FA2: [Path("x.whl")]})
    with pytest.raises(BuildFailed, match="dockerd"):
        make([STACK], engine_root=tmp_path / "full")
    # flash-attn 2 and flash-attn-4 both hold flash_attn/cute: told here, not on the host.
    same = [make_wheel(tmp_path, name, "1", {"flash_attn/cute/x.py": b"x"}) for name in ("a", "b")]
    with pytest.raises(BuildFailed, match=r"cute/x\.py is in both a-1.* and b-1"):
        make([STACK], wheels={STACK: same})
    with pytest.raises(UsageError, match="named twice"):
        make([STACK, "cpu-torch2.13", "cpu-torch2.13@r1"])
    # One name, two wheels: the host would take one of them for both.
    twins = []
    for name in ("p", "q"):
        (tmp_path / name).mkdir()
        twins.append(make_wheel(tmp_path / name, "a", "2", {"a.py": name.encode()}))
    with pytest.raises(BuildFailed, match="two different files are named a-2"):
        make([STACK, FA2], wheels={STACK: twins[:1], FA2: twins[1:]})


def test_a_wheel_names_its_stack_before_the_equals_sign() -> None:
    given = ["a.whl", "host-torch-fa2=b.whl", "host-torch=c.whl", "odd=name.whl"]
    assert bundle.by_stack(given) == {
        STACK: [Path("a.whl"), Path("c.whl"), Path("odd=name.whl")],
        FA2: [Path("b.whl")],
    }


def test_a_misspelt_stack_before_the_equals_sign_is_told(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "a", "1", {"a.py": b""})
    with pytest.raises(UsageError, match="host-torch-FA4 is no name"):
        bundle.by_stack([f"host-torch-FA4={wheel}"])


def test_programs_of_a_wheel_come_along_and_pythons_scripts_do_not(tmp_path: Path) -> None:
    files = {"ninja-1.data/scripts/ninja": b"\x7fELF", "ninja-1.data/scripts/n.py": b"#!python\n"}
    unpack([make_wheel(tmp_path, "ninja", "1", files)], tmp_path / "site")
    assert sorted(p.name for p in (tmp_path / "site/bin").iterdir()) == ["ninja"]


@pytest.mark.parametrize(
    "name",
    [
        *("host-torch-", "host-torch-A", "host-torchfa2", "xhost-torch"),
        *("host-torch-a.", "host-torch-a..b"),  # Docker takes no such name
    ],
)
def test_other_names_are_no_hosts(name: str) -> None:
    assert not is_host_stack(name)


def test_interrupted_bundle_leaves_nothing_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls = tmp_path / "out", []

    def pieces(payload: Path) -> Iterator[bytes]:
        yield bytes(70_000)
        calls.append(sorted(path.name for path in out.iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(bundle.bundle_engine, "put", lambda *a, **k: None)
    monkeypatch.setattr(bundle, "_package", lambda *a: None)
    monkeypatch.setattr(bundle, "_compressed", pieces)
    with pytest.raises(KeyboardInterrupt):
        bundle.make(
            [],
            out=out,
            part_size=65536,
            wheels={},
            public=(),
            python="3.12",
            store=Store(tmp_path / "store"),
            engine_root=None,
            progress=lambda line: None,
        )
    assert calls == [["part-0000"]]
    assert not out.exists()


def test_stack_that_is_not_built(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        bundle._image(tmp_path, "cpu-torch2.13", Store(tmp_path / "store"))
    assert caught.value.hint == "attnrepro build cpu-torch2.13"


def test_damaged_blob_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "images" / "x"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / ("ab" * 32)).write_bytes(b"other")
    (folder / "record.json").write_text("{}")
    with pytest.raises(BuildFailed, match="damaged"):
        bundle_finish._adopt(folder, Store(tmp_path / "store"))


@pytest.mark.parametrize(
    ("text", "size"), [("31MiB", 31 << 20), ("64KiB", 65536), ("2 GiB", 2 << 30), ("70000", 70000)]
)
def test_sizes(text: str, size: int) -> None:
    assert bundle.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "1KiB", "31MB", "-1MiB", "1e6", "1.5MiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        bundle.parse_size(text)


def test_archive_is_anonymous(made: bundle.Bundle) -> None:
    document = json.loads((made.folder / "bundle.json").read_text())
    stream = bundle_install.Parts([made.folder / p["name"] for p in document["parts"]])
    with io.BufferedReader(stream) as whole, tarfile.open(fileobj=whole, mode="r|xz") as archive:
        owners = {(m.uid, m.uname, m.mtime) for m in archive}
    stream.close()
    assert owners == {(0, "", 0)}


def test_sets_of_kernels_share_a_base_unless_one_would_lack_a_package_of_the_hosts(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    make_host(root)

    def kernels(name: str, requires: tuple[str, ...] = ()) -> Kernels:
        wheel = make_wheel(tmp_path, name, "1", {f"{name}/x.py": b""}, requires)
        return Kernels(folder=tmp_path, infos=(read_wheel(wheel),))

    one, other = kernels("one", ("sympy",)), kernels("other")
    [(shared, stacks)] = hostroot._bases({"a": one, "b": other}, PYTHON, ["torch"], root)
    assert stacks == ["a", "b"]
    assert "sympy" in shared.kept
    # One brings its own numpy, so that the host's is not in its base; the other has none.
    own = {"a": kernels("numpy"), "b": kernels("third", ("numpy",))}
    apart = list(hostroot._bases(own, PYTHON, ["torch"], root))
    assert [stacks for _, stacks in apart] == [["a"], ["b"]]
    assert ["numpy" in selection.kept for selection, _ in apart] == [False, True]
