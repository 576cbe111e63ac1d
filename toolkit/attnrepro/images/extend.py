"""A stack that adds a kernel of the user's own to a pinned one.

The kernel is built in the container, without network, into the parent's environment. The image
keeps the parent's layers and adds one with the difference, so that base and head of a pull request
share all but their own files.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from attnrepro.errors import BuildFailed, InvalidDocument, Problem
from attnrepro.images import kernel, oci, tree
from attnrepro.images.locks import Wheel, parse_wheels
from attnrepro.images.spec import Stack
from attnrepro.images.tree import Entry, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from attnrepro.images.kernel import Source
    from attnrepro.images.store import ImageRecord, Store
    from attnrepro.jsonio import JsonObject

ADAPTER_PATH: Final = "/opt/attnrepro/adapter.py"
"""Where an extending stack's adapter lies in its image."""

_END: Final = 1024
"""Bytes that end a tar."""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """An extending stack, ready to build."""

    stack: Stack
    """With everything that it takes over from its parent."""
    parent: ImageRecord
    wheels: tuple[Wheel, ...]
    """What the build needs beyond the parent: the kernel, and its own locked requirements."""
    extends: JsonObject
    source: JsonObject
    adapter: JsonObject | None
    modified: tuple[str, ...]


def prepare(
    store: Store,
    stack: Stack,
    parent: ImageRecord,
    *,
    allow_dirty: bool,
    pack_limit: int,
    offline: bool,
    progress: Callable[[str], None],
) -> Extension:
    """Fetch the kernel and write the recipe of the extending image.

    Raises:
        BuildFailed: see `kernel.obtain`.
        InvalidDocument: the parent extends another stack itself.
    """
    if parent.document["extends"] is not None:
        message = f"{stack.label} extends {parent.stack}, which extends another stack itself"
        raise InvalidDocument(
            message,
            problems=[
                Problem(
                    pointer="/extends",
                    found=parent.stack,
                    allowed="a whole stack",
                    fix=f"extend {parent.document['extends']['stack']}",
                )
            ],
        )
    below = json.loads(parent.recipe["image.json"])
    python = below["wheels"]["python"]
    source = kernel.obtain(
        store, stack, python=python, allow_dirty=allow_dirty, offline=offline, progress=progress
    )
    own = (
        parse_wheels(stack.files["requirements.lock"]) if "requirements.lock" in stack.files else []
    )
    document = _document(stack.document, below, source)
    files = {**stack.files, kernel.FACTS: kernel.facts(source)}
    files |= {f"parent/{path}": data for path, data in parent.recipe.items()}
    files["compile.py"] = parent.recipe["compile.py"]
    packed = f"source/{source.file}"
    if source.size <= pack_limit:
        files[packed] = store.blob(source.sha256).read_bytes()
    if "Dockerfile" not in files:
        files["Dockerfile"] = _dockerfile(document, source, python, has_lock=bool(own)).encode()
    adapter = None
    if (name := stack.document.get("adapter")) is not None:
        digest = hashlib.sha256(files[name]).hexdigest()
        adapter = {"file": name, "path": ADAPTER_PATH, "sha256": digest}
    dirty = source.document["dirty"]
    return Extension(
        stack=Stack(files=files, document=document, folder=stack.folder),
        parent=parent,
        wheels=(*own, source.as_wheel()),
        extends={
            "stack": parent.stack,
            "revision": parent.revision,
            "manifest_digest": parent.manifest_digest,
        },
        source=source.document,
        adapter=adapter,
        modified=(
            *parent.document["modified"],
            *(("--allow-dirty: the kernel has uncommitted changes",) if dirty else ()),
        ),
    )


def _document(own: JsonObject, below: JsonObject, source: Source) -> JsonObject:
    """image.json of the whole: the parent's, under the extending stack's own words."""
    result = {**below, **{key: own[key] for key in ("stack", "revision", "title", "extends")}}
    result.pop("claims", None)
    for key in ("claims", "adapter", "arch", "source", "build_env"):
        if key in own:
            result[key] = own[key]
    result["env"] = {**below["env"], **own.get("env", {})}
    facts = source.document
    origin = (
        f"git {facts['commit']}"
        if facts["kind"] == "git"
        else f"{facts['kind']} sha256:{facts['sha256']}"
    )
    if facts["dirty"]:
        origin += " with uncommitted changes"
    declared = own.get("kernels") or [{"name": own["stack"], "version": own["revision"]}]
    result["kernels"] = [{**item, "source": item.get("source", origin)} for item in declared]
    result["layers"] = [*below["layers"], {"name": "kernel", "paths": ["opt/attnrepro"]}]
    cost = own.get("cost", {"seconds": 60, "image_bytes": below["cost"]["image_bytes"]})
    result["cost"] = cost
    return result


def _dockerfile(document: JsonObject, source: Source, python: str, *, has_lock: bool) -> str:
    env = {
        "PATH": document["env"]["PATH"],
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        **document.get("build_env", {}),
    }
    settings = " ".join(f"{name}={_quoted(value)}" for name, value in env.items())
    pip = (
        "python -m pip --isolated --no-cache-dir {verb} --disable-pip-version-check --no-input "
        "--no-index --find-links /run/wheels --no-deps"
    )
    install = pip.format(verb="install") + " --root-user-action ignore --no-compile"
    mounts = ["--mount=type=bind,from=wheels,target=/run/wheels"]
    mounts.append("--mount=type=bind,source=compile.py,target=/run/recipe/compile.py")
    steps = ["set -eu", "export PYTHONDONTWRITEBYTECODE=1 HOME=/tmp"]
    if has_lock:
        mounts.append(
            "--mount=type=bind,source=requirements.lock,target=/run/recipe/requirements.lock"
        )
        steps.append(f"{install} --require-hashes --requirement /run/recipe/requirements.lock")
    file = shlex.quote(f"/run/wheels/{source.file}")
    if source.document["kind"] == "wheel":
        steps.append(f"{install} --force-reinstall {file}")
    else:
        where = "/tmp/kernel"
        subdirectory = source.document.get("subdirectory")
        inside = f"{where}/{subdirectory}" if subdirectory else where
        build = pip.format(verb="wheel") + " --no-build-isolation --wheel-dir /tmp/wheel"
        steps += [
            f"mkdir {where}",
            f"tar -xf {file} -C {where} --strip-components=1",
            f"{build} {shlex.quote(inside)}",
            f"{install} --force-reinstall /tmp/wheel/*.whl",
            f"rm -rf {where} /tmp/wheel",
        ]
    if "adapter" in document:
        mounts.append(
            f"--mount=type=bind,source={document['adapter']},target=/run/recipe/adapter.py"
        )
        folder = ADAPTER_PATH.rpartition("/")[0]
        steps += [
            f"mkdir -p {folder}",
            f"cp /run/recipe/adapter.py {ADAPTER_PATH}",
            f"chmod 755 {folder}",
            f"chmod 644 {ADAPTER_PATH}",
        ]
    steps.append(f"python /run/recipe/compile.py /opt/stack/lib/python{python}")
    run = " \\\n    ".join([*mounts, *(f"{step};" for step in steps[:-1]), steps[-1]])
    return (
        "# Written by attnrepro: base.tar is the parent image's root file system.\n"
        f"FROM scratch\nADD base.tar /\nARG SOURCE_DATE_EPOCH\nENV {settings}\nRUN {run}\n"
    )


def _quoted(value: str) -> str:
    """A value for ENV: in double quotes, nothing expanded."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def write_parent_root(store: Store, parent: ImageRecord, target: Path) -> None:
    """The parent's root file system as one tar: its layers, which share no path.

    Raises BuildFailed if a layer in the store is damaged.
    """
    with target.open("wb") as output:
        for layer in parent.layers:
            oci.copy_checked(store.blob(layer.digest), output, layer)
            output.truncate(output.tell() - _END)
            output.seek(0, 2)
        output.write(b"\0" * _END)


def write_layers(
    store: Store, extension: Extension, entries: Sequence[Entry], root: Path, folder: Path
) -> tuple[list[oci.Layer], list[Entry]]:
    """The parent's layers and one of the difference; and the whole tree's entries."""
    before = tree.parse_listing(extension.parent.listing)
    hashed = _hash_all(entries, root)
    after = {entry.path: entry for entry in hashed}
    changed = {path for path, entry in after.items() if _differs(before.get(path), entry)}
    gone = _whiteouts(before, after)
    if not changed and not gone:
        message = f"{extension.stack.label} changes nothing in {extension.parent.stack}"
        raise BuildFailed(message, hint="does the kernel install any file?")
    for path in [*changed, *gone]:
        # A layer without its folders gets folders of the engine's own making.
        while path := path.rpartition("/")[0]:
            changed.add(path)
    written = folder / "kernel.tar"
    with root.open("rb") as source, written.open("wb") as file:
        layer, _ = oci.write_layer(
            "kernel",
            [entry for entry in hashed if entry.path in changed],
            source,
            file,
            epoch=extension.stack.epoch,
            whiteouts=gone,
        )
    store.adopt(written, layer.digest)
    return [*extension.parent.layers, layer], hashed


def _hash_all(entries: Sequence[Entry], root: Path) -> list[Entry]:
    result = []
    with root.open("rb") as source:
        for entry in entries:
            if entry.kind is Kind.FILE:
                sha256 = hashlib.sha256()
                for piece in tree.chunks(source, entry):
                    sha256.update(piece)
                result.append(replace(entry, sha256=sha256.hexdigest()))
            else:
                result.append(entry)
    return result


def _differs(old: Entry | None, new: Entry) -> bool:
    return old is None or old.line() != new.line()


def _whiteouts(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> list[str]:
    """Paths that are gone, each below a folder that is still there."""
    result = []
    for path in before.keys() - after.keys():
        folder = path.rpartition("/")[0]
        if not folder or (folder in after and after[folder].kind is Kind.FOLDER):
            result.append(path)
    return sorted(result)
