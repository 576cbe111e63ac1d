"""What the shipped GPU stacks pin, and what they are made of besides wheels."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest

from attnrepro.errors import BuildFailed, UsageError
from attnrepro.images import (
    base,
    build,
    fetch,
    gitsource,
    graft,
    lock,
    registry,
    simpleindex,
    spec,
    tryout,
)
from attnrepro.images.locks import Wheel
from attnrepro.images.sources import BaseImage
from attnrepro.images.store import Store
from attnrepro.manifest import matrix
from attnrepro.resources import images_dir

if TYPE_CHECKING:
    from pathlib import Path

FA4, FA2 = "cuda13.0-torch2.13-fa4", "cuda13.0-torch2.13-fa2.8.3"
FA3, TWIN = "cuda12.8-torch2.8-fa3", "cuda13.0-torch2.11-fa4"
CK, TRITON = "rocm7.2-torch2.10-fa2.8.3-ck", "rocm7.2-torch2.10-fa2.8.3-triton"
SDIST = "1e71dd64a9e0280e0447b8a0c2541bad4bf6ac65bdeaa2f90e51a9e57de0370d"


def versions(name: str) -> dict[str, str]:
    return {wheel.name: wheel.version for wheel in spec.resolve(name).wheels}


def dockerfile(name: str) -> str:
    return spec.resolve(name).files["Dockerfile"].decode()


def quiet(line: str) -> None:
    del line


def test_stacks_of_wheels_share_the_debian_base() -> None:
    digests = {spec.resolve(name).base_digest for name in ("cpu-torch2.13", FA4, FA2)}
    assert len(digests) == 1


def test_the_wheels_stack_is_of_one_toolkit() -> None:
    found = versions(FA4)
    assert found["torch"] == "2.13.0"
    assert found["flash-attn-4"] == "4.0.0b36"
    assert found["nvidia-cudnn-cu13"] == "9.20.0.48"
    for name in ("nvidia-cuda-nvcc", "nvidia-nvjitlink", "cuda-bindings", "nvidia-cuda-runtime"):
        assert found[name].startswith("13.0."), name


def test_the_twin_has_the_hosts_torch_and_the_kernels_of_the_wheels_stack() -> None:
    host, wheels = versions(TWIN), versions(FA4)
    assert (host["torch"], host["nvidia-cudnn-cu13"], host["triton"]) == (
        *("2.11.0", "9.19.0.56", "3.6.0"),
    )
    for name in (
        *("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi", "fa3-fwd"),
        *("nvidia-cudnn-frontend", "flashinfer-python", "torch-c-dlpack-ext"),
    ):
        assert host[name] == wheels[name]


@pytest.mark.parametrize("name", [FA2, CK, TRITON])
def test_flash_attention_2_is_one_source_everywhere(name: str) -> None:
    subject = spec.resolve(name)
    sdist = next(wheel for wheel in subject.wheels if wheel.name == "flash-attn")
    assert sdist.sha256 == SDIST
    assert sdist.file in dockerfile(name)


@pytest.mark.parametrize("name", [FA2, FA3, CK, TRITON])
def test_builds_that_would_download_are_told_not_to(name: str) -> None:
    text = dockerfile(name)
    assert "FLASH_ATTENTION_FORCE_BUILD=TRUE" in text
    assert ("FLASH_ATTENTION_OFFLINE_BUILD=1" in text) == (name == FA3)


def test_architectures_are_named_where_a_kernel_is_compiled() -> None:
    archs = "';'".join(["80", "90", "100", "120"]).replace("'", "")
    assert f"FLASH_ATTN_CUDA_ARCHS='{archs}'" in dockerfile(FA2)
    assert spec.resolve(FA2).document["arch"] == [f"sm_{arch}" for arch in archs.split(";")]
    assert f"GPU_ARCHS='{';'.join(spec.resolve(CK).document['arch'])}'" in dockerfile(CK)
    environment = spec.resolve(TRITON).document["env"]
    assert environment["FLASH_ATTENTION_TRITON_AMD_ENABLE"] == "TRUE"
    assert "FLASH_ATTENTION_TRITON_AMD_ENABLE" not in spec.resolve(CK).document["env"]


@pytest.mark.parametrize("name", ["compile.py", "kernel.py"])
def test_helpers_are_the_same_in_every_stack(name: str) -> None:
    assert len({path.read_bytes() for path in images_dir().glob(f"*/r1/{name}")}) == 1


@pytest.mark.parametrize("name", [FA3, TWIN, CK, TRITON])
def test_a_base_that_cannot_be_pulled_fails_first_and_names_its_source(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> int:
        pytest.fail("gigabytes were fetched for a base that is not to be had")

    monkeypatch.setattr(base, "source_url", lambda kind, key: "http://127.0.0.1:9")
    monkeypatch.setattr(fetch, "wheels", never)
    monkeypatch.setattr(fetch, "debs", never)
    monkeypatch.setattr(Store, "free_bytes", lambda self: 10**15)
    with pytest.raises(BuildFailed, match=r"source docker\.io .*tried for \d+\.\d s") as error:
        build.build(name, progress=quiet, store=Store(tmp_path))
    assert spec.resolve(name).document["base"]["kind"] != "registry" or "rocm" in str(error.value)


def test_the_matrix_shows_what_is_in_the_store_and_nothing_else(tmp_path: Path) -> None:
    found = matrix.document([], everything=False, store=Store(tmp_path))
    assert {stack["stack"].partition("/")[0] for stack in found["stacks"]} == set(spec.stacks())
    assert not any(stack["built"] or stack["image"] for stack in found["stacks"])
    text = matrix.text(found, details=False)
    assert text.count("(nvidia, not built here") == 4
    assert text.count("needs the registry image rocm-pytorch-7.2.4") == 2
    assert "built here:" not in text


# Folders of a registry image ------------------------------------------------------------------


def tar(path: Path, *members: tuple[str, bytes | str]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, what in members:
            info = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                info.size = len(what)
                archive.addfile(info, io.BytesIO(what))
            else:
                info.type = tarfile.SYMTYPE if what else tarfile.DIRTYPE
                info.linkname = what
                archive.addfile(info)


def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *paths: str) -> dict[str, bytes | str]:
    def pull(image: BaseImage, *, root: Path, **_: object) -> None:
        tar(
            root,
            ("./usr/local/cuda-12.8/bin/nvcc", b"nvcc"),
            ("usr/local/cuda-12.8/lib64", "lib"),
            ("usr/local/cuda", "cuda-12.8"),
            ("usr/local/cuda-12.80/other", b"x"),
            ("usr/bin/tool", b"vendor's"),
        )

    monkeypatch.setattr(registry, "pull", pull)
    image = BaseImage(registry="docker.io", repository="a/b", tag="1", digest="sha256:" + "0" * 64)
    tar(tmp_path / "root.tar", ("usr", ""), ("usr/bin/tool", b"debian's"))
    merged = graft.add(
        graft.Graft(image=image, paths=paths),
        tmp_path / "root.tar",
        store=Store(tmp_path / "store"),
        folder=tmp_path,
        offline=False,
        progress=quiet,
    )
    with tarfile.open(merged) as archive:
        return {
            member.name.removeprefix("./"): file.read() if file else member.linkname
            for member in archive
            for file in [archive.extractfile(member) if member.isreg() else None]
        }


def test_a_graft_is_its_folders_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert add(tmp_path, monkeypatch, "usr/local/cuda-12.8/bin", "usr/local/cuda-12.8/lib64") == {
        "usr": "",
        "usr/bin/tool": b"debian's",
        "usr/local/cuda-12.8/bin/nvcc": b"nvcc",
        "usr/local/cuda-12.8/lib64": "lib",
    }


def test_a_graft_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildFailed, match=r"has no usr/local/cuda-12\.9"):
        add(tmp_path, monkeypatch, "usr/local/cuda-12.9")


def test_a_grafts_digest_and_paths_decide_the_base() -> None:
    subject = spec.resolve(FA3)
    other = dict(subject.document)
    other["base"] = {**other["base"], "graft": {**other["base"]["graft"], "paths": ["usr/local"]}}
    assert subject.graft is not None
    pins = subject.files["digests.json"].replace(
        subject.graft.image.digest.encode(), b"sha256:" + b"01" * 32
    )
    digests = {
        subject.base_digest,
        spec.Stack(files=subject.files, document=other).base_digest,
        spec.Stack(
            files={**subject.files, "digests.json": pins}, document=subject.document
        ).base_digest,
    }
    assert len(digests) == 3


# Source trees ---------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A repository with two commits; a clone may ask for the older one."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "kernel.cu").write_text("1\n")
    git(folder, "add", "kernel.cu")
    git(folder, "commit", "--quiet", "-m", "one")
    commit = git(folder, "rev-parse", "HEAD")
    (folder / "kernel.cu").write_text("2\n")
    git(folder, "commit", "--quiet", "-am", "two")
    git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    monkeypatch.setattr(gitsource, "source_url", lambda kind, key: f"file://{folder}")
    return folder, commit


def test_a_tree_is_fetched_by_its_commit_once(upstream: tuple[Path, str], tmp_path: Path) -> None:
    folder, commit = upstream
    store = Store(tmp_path / "store")
    wanted = [gitsource.GitSource(source="kernels", commit=commit)]
    found = gitsource.fetch(store, wanted, offline=False, progress=quiet)
    (file,) = found
    assert file == f"kernels-{commit[:12]}.tar"
    with tarfile.open(store.blob(found[file])) as archive:
        member = archive.extractfile("kernels/kernel.cu")
        assert member is not None
        assert member.read() == b"1\n"
    folder.rename(folder.with_name("gone"))
    assert gitsource.fetch(store, wanted, offline=True, progress=quiet) == found


def test_a_tree_that_is_nowhere_is_an_error(upstream: tuple[Path, str], tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    wanted = [gitsource.GitSource(source="kernels", commit="1" * 39 + "2")]
    with pytest.raises(BuildFailed, match="offline"):
        gitsource.fetch(store, wanted, offline=True, progress=quiet)
    with pytest.raises(BuildFailed, match="git fetch"):
        gitsource.fetch(store, wanted, offline=False, progress=quiet)
    assert not [path for path in store.root.rglob("*") if path.is_file()]


def test_an_unreachable_upstream_is_named_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gitsource, "source_url", lambda kind, key: "http://127.0.0.1:9/x")
    wanted = [gitsource.GitSource(source="kernels", commit="1" * 39 + "2")]
    with pytest.raises(BuildFailed, match="source kernels is not reachable"):
        gitsource.fetch(Store(tmp_path), wanted, offline=False, progress=quiet)


# Source distributions -------------------------------------------------------------------------


def sdist(data: bytes) -> Wheel:
    digest = hashlib.sha256(data).hexdigest()
    return Wheel(name="toy", version="1.0", sha256=digest, file="toy-1.0.tar.gz", size=len(data))


def host(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """A host whose pip is configured by these alone, and public sources that nobody serves."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for module in (fetch, simpleindex):
        monkeypatch.setattr(module, "source_url", lambda kind, key: "http://127.0.0.1:9")


def get(store: Store, item: Wheel) -> int:
    return fetch.wheels(store, [item], python="3.11", sources={}, offline=False, progress=quiet)


@pytest.mark.parametrize("page", ["index", "links"])
def test_an_sdist_is_fetched_without_being_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"no archive at all: pip would have failed to read it"
    project = tmp_path / "simple" / "toy"
    project.mkdir(parents=True)
    (project / "toy-1.0.tar.gz").write_bytes(data)
    (project / "index.html").write_text('<a href="toy-1.0.tar.gz#sha256=0">toy</a>')
    if page == "index":
        host(monkeypatch, PIP_INDEX_URL=f"file://{tmp_path}/simple")
    else:
        host(monkeypatch, PIP_FIND_LINKS=str(project), PIP_NO_INDEX="1")
    store = Store(tmp_path / "store")
    assert get(store, sdist(data)) == len(data)
    assert store.read("sha256:" + sdist(data).sha256) == data
    assert (project / "toy-1.0.tar.gz").read_bytes() == data


def test_an_sdist_with_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy-1.0.tar.gz").write_bytes(b"other")
    host(monkeypatch, PIP_FIND_LINKS=str(tmp_path), PIP_NO_INDEX="1")
    store = Store(tmp_path / "store")
    with pytest.raises(BuildFailed, match="hashes otherwise"):
        get(store, sdist(b"locked"))
    assert not store.has(sdist(b"locked").sha256)


def test_a_json_index_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "simple" / "toy"
    folder.mkdir(parents=True)
    (folder / "index.html").write_text('{"files": [{"url": "../../files/toy-1.0.tar.gz"}]}')
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "toy-1.0.tar.gz").write_bytes(b"data")
    host(monkeypatch, PIP_INDEX_URL=f"file://{tmp_path}/simple")
    found = simpleindex.digest("toy", "toy-1.0.tar.gz", tmp_path, source="pypi")
    assert found == (hashlib.sha256(b"data").hexdigest(), 4)


def test_a_file_that_no_index_has_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(monkeypatch, PIP_NO_INDEX="1")
    with pytest.raises(BuildFailed, match="no index has"):
        simpleindex.digest("toy", "toy-2.0.tar.gz", tmp_path, source="pypi")


# Trying a recipe on some objects --------------------------------------------------------------


class Compiler:
    """A builder whose Dockerfile ran: it left what kernel.py leaves."""

    name = "buildx"
    version = "0"
    dockerfile = ""

    def build(
        self,
        context: Path,
        *,
        wheels: Path,
        epoch: int,
        cached: bool,
        target: Path,
        progress: object,
    ) -> None:
        self.dockerfile = (context / "Dockerfile").read_text()
        self.wheels = sorted(path.name for path in wheels.iterdir())
        tar(target, ("opt/stack/objects.json", b'{"objects": [], "of": 73}'))


def test_a_recipe_is_tried_on_the_objects_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    root = store.add_bytes(b"root")
    monkeypatch.setattr(fetch, "debs", lambda *_, **__: 0)
    monkeypatch.setattr(fetch, "wheels", lambda *_, **__: 0)
    monkeypatch.setattr(base, "prepare", lambda *_, **__: root)
    monkeypatch.setattr(base, "link_or_copy", lambda source, target: target.touch())
    compiler = Compiler()
    found = tryout.tryout(
        spec.resolve(FA2), ["flash_api", "one"], builder=compiler, store=store, progress=quiet
    )
    assert found == {"objects": [], "of": 73}
    assert 'ARG KERNEL_OBJECTS="flash_api one"' in compiler.dockerfile
    assert "flash_attn-2.8.3.tar.gz" in compiler.wheels
    assert store.records() == []


@pytest.mark.parametrize(
    ("name", "objects"), [(FA4, ["x"]), (FA2, []), (FA2, ["a b"]), (FA2, ['x"; rm'])]
)
def test_what_cannot_be_tried_is_refused(name: str, objects: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        tryout.tryout(
            spec.resolve(name), objects, builder=Compiler(), store=Store(tmp_path), progress=quiet
        )


def test_a_lock_holds_the_sdists_and_leaves_the_wheels_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r1"
    shutil.copytree(images_dir() / CK / "r1", folder)
    (folder / "requirements.lock").unlink()
    item = Wheel(
        name="toy",
        version="1.0",
        sha256=hashlib.sha256(b"wheel").hexdigest(),
        file="toy-1.0-py3-none-any.whl",
        size=5,
    )

    def resolve(work: Path, requirements: list[str], **_: object) -> list[Wheel]:
        assert "einops==0.8.2" in requirements
        (work / item.file).write_bytes(b"wheel")
        return [item]

    monkeypatch.setenv("ATTNREPRO_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(lock, "resolve_wheels", resolve)
    monkeypatch.setattr(lock, "digest", lambda name, file, folder, source: (SDIST, 8447812))
    lock.write(folder, mirrors=(), progress=quiet)
    assert (folder / "requirements.lock").read_text().splitlines() == [
        "# Python 3.12",
        f"flash-attn==2.8.3 --hash=sha256:{SDIST}  # flash_attn-2.8.3.tar.gz 8447812",
        item.line(),
    ]
    assert Store(tmp_path / "store").read("sha256:" + item.sha256) == b"wheel"
