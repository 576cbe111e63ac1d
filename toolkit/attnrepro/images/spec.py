"""A stack: the recipe files of one image, loaded, validated, and what they say.

A recipe is a mapping of file names to bytes, whether it comes from a shipped folder, a folder of
the user's, or the inside of a foreign artifact; the same checks apply to all three.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from attnrepro.errors import InvalidDocument, Problem, UsageError
from attnrepro.images.dockerfile import lint
from attnrepro.images.gitsource import GitSource
from attnrepro.images.graft import Graft
from attnrepro.images.locks import Deb, Wheel, parse_debs, parse_wheels
from attnrepro.images.oci import WRITER
from attnrepro.images.sources import PIN_FIELDS, BaseImage, base_image
from attnrepro.jsonio import JsonObject, canonical, loads
from attnrepro.resources import images_dir

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_RECIPE_NAME: Final = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9._-]{0,100}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,100}){0,5}"
)
_CONTEXTS: Final = frozenset({"wheels"})
_NOT_RECIPE: Final = frozenset({"README.md"})
MAX_RECIPE_FILES: Final = 64
MAX_RECIPE_BYTES: Final = 4 << 20
"""Of one recipe file, a packed kernel source apart."""


class BaseKind(StrEnum):
    """Where an image's root file system comes from."""

    DEBIAN = "debian"
    REGISTRY = "registry"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One pinned stack: its files and what image.json says."""

    files: Mapping[str, bytes] = field(repr=False)
    """The recipe: image.json and the files beside it."""
    document: JsonObject = field(repr=False)
    """image.json, parsed."""
    folder: Path | None = None
    """Where it was loaded from; None for a recipe out of an artifact."""

    @property
    def name(self) -> str:
        """Name of the stack."""
        return cast("str", self.document["stack"])

    @property
    def revision(self) -> str:
        """Revision, as r1."""
        return cast("str", self.document["revision"])

    @property
    def label(self) -> str:
        """Name and revision, as people write them."""
        return f"{self.name}@{self.revision}"

    @property
    def extends(self) -> str | None:
        """The stack below this one, NAME or NAME@REVISION; None for a whole stack."""
        return cast("str | None", self.document.get("extends"))

    @property
    def epoch(self) -> int:
        """Time that every file carries, s since 1970."""
        return cast("int", self.document["source_date_epoch"])

    @property
    def base_kind(self) -> BaseKind:
        """Debian root file system, or registry image."""
        return BaseKind(self.document["base"]["kind"])

    @property
    def drop(self) -> Sequence[str]:
        """Patterns of paths that are left out of the base."""
        return cast("Sequence[str]", self.document["base"].get("drop", []))

    @cached_property
    def debs(self) -> list[Deb]:
        """The locked Debian packages; none on a registry base."""
        data = self.files.get("debs.lock", self.files.get("parent/debs.lock"))
        return parse_debs(data) if data is not None else []

    @cached_property
    def wheels(self) -> list[Wheel]:
        """The locked wheels; an extending stack's take the place of its parent's."""
        found: dict[str, Wheel] = {}
        for path in ("parent/requirements.lock", "requirements.lock"):
            if path in self.files:
                found |= {wheel.name: wheel for wheel in parse_wheels(self.files[path])}
        return list(found.values())

    @cached_property
    def base_image(self) -> BaseImage:
        """The registry base, by digest. Raises InvalidDocument."""
        return self._pin(self.document["base"]["image"])

    @cached_property
    def graft(self) -> Graft | None:
        """Folders that a Debian base takes over from a registry image. Raises InvalidDocument."""
        graft = self.document["base"].get("graft")
        if graft is None:
            return None
        return Graft(image=self._pin(graft["image"]), paths=tuple(graft["paths"]))

    @property
    def trees(self) -> list[GitSource]:
        """Public source trees that the Dockerfile compiles."""
        return [GitSource(**tree) for tree in self.document.get("trees", [])]

    def _pin(self, key: str) -> BaseImage:
        pins = self.files.get("digests.json", self.files.get("parent/digests.json", b"{}"))
        return base_image(pins, key, what="digests.json")

    @cached_property
    def recipe_digest(self) -> str:
        """`sha256:` and hex over the writer's version and every recipe file but the claims.

        What a release claims is data about an image; correcting it gives no other image. A packed
        kernel source is named by its digest in source.json, packed or not.
        """
        parts = {
            path: hashlib.sha256(data).hexdigest()
            for path, data in self.files.items()
            if path not in (self.document.get("claims"), "parent/claims.json")
            and not path.startswith("source/")
        }
        data = canonical({"writer": WRITER, "files": parts})
        return "sha256:" + hashlib.sha256(data).hexdigest()

    @cached_property
    def base_digest(self) -> str:
        """`sha256:` and hex over what decides the base's root tar, and nothing else."""
        base = dict(self.document["base"])
        base.pop("packages", None)
        if self.base_kind is BaseKind.REGISTRY:
            base["digest"] = self.base_image.digest
        elif self.graft is not None:
            base["digest"] = self.graft.image.digest
        debs = sorted(deb.line() for deb in self.debs)
        data = canonical({"writer": WRITER, "base": base, "debs": debs, "epoch": self.epoch})
        return "sha256:" + hashlib.sha256(data).hexdigest()

    def layer_of(self, path: str) -> int:
        """Index of the layer that holds a path of the tree."""
        for index, layer in enumerate(self.document["layers"]):
            for prefix in layer.get("paths", ()):
                if path == prefix or path.startswith(f"{prefix}/"):
                    return index
        return 0


def from_files(files: Mapping[str, bytes], *, folder: Path | None = None) -> Stack:
    """A stack from its recipe files, everything checked.

    Raises:
        InvalidDocument: image.json, a lock or the Dockerfile is not valid; all problems at once.
    """
    from attnrepro.schema import validate

    what = "image.json" if folder is None else str(folder / "image.json")
    problems = _check_names(files)
    if "image.json" not in files or problems:
        message = "no stack: there is no image.json" if not problems else "the recipe is not valid"
        raise InvalidDocument(message, problems=problems)
    document = loads(files["image.json"], what=what)
    problems = validate("stack", document)
    if not problems:
        problems = _check_files(files, document)
    if problems:
        message = f"{what} is not a valid stack"
        raise InvalidDocument(message, problems=problems)
    stack = Stack(files=files, document=document, folder=folder)
    if stack.extends is None:
        _parse_rest(stack)
    return stack


def _check_names(files: Mapping[str, bytes]) -> list[Problem]:
    problems = []
    if len(files) > MAX_RECIPE_FILES:
        found = f"{len(files)} files"
        problems.append(
            Problem(
                pointer="",
                found=found,
                allowed=f"≤ {MAX_RECIPE_FILES}",
                fix="leave other files out",
            )
        )
    for path, data in files.items():
        limit = 16 * MAX_RECIPE_BYTES if path.startswith("source/") else MAX_RECIPE_BYTES
        if not _RECIPE_NAME.fullmatch(path) or len(data) > limit:
            problems.append(
                Problem(
                    pointer=f"/{path}"[:100],
                    found=f"{len(data)} bytes",
                    allowed=f"plain names, ≤ {limit} bytes a file",
                    fix="rename or shorten the file",
                )
            )
    return problems


def _check_files(files: Mapping[str, bytes], document: JsonObject) -> list[Problem]:
    """Files that image.json needs but that are not there, and the Dockerfile's lint."""
    needed = {document[key] for key in ("claims", "adapter") if key in document}
    if "extends" not in document:
        needed |= {"Dockerfile", "requirements.lock"}
        base = document["base"]
        needed |= {"debs.lock"} if base["kind"] == "debian" else {"digests.json"}
        needed |= {"digests.json"} if "graft" in base else set()
    problems = [
        Problem(
            pointer=f"/{name}",
            found="no such file",
            allowed="a file of the recipe",
            fix="put it beside image.json",
        )
        for name in sorted(needed - files.keys())
    ]
    if "Dockerfile" in files:
        text = files["Dockerfile"].decode("utf-8", "replace")
        problems += lint(text, contexts=_CONTEXTS, files=files.keys())
    if "extends" not in document and any("paths" not in layer for layer in document["layers"][1:]):
        problems.append(
            Problem(
                pointer="/layers",
                found="an upper layer without paths",
                allowed="paths on every layer but the first",
                fix="name the folders that the layer holds",
            )
        )
    return problems


def _parse_rest(stack: Stack) -> None:
    """Parse locks and pins now, so that a bad one is found before anything is fetched."""
    _ = stack.wheels
    _ = stack.base_image if stack.base_kind is BaseKind.REGISTRY else (stack.debs, stack.graft)


def read_folder(folder: Path) -> dict[str, bytes]:
    """The recipe files of a stack's folder: the plain files directly in it."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _NOT_RECIPE or not path.is_file():
            continue
        if _RECIPE_NAME.fullmatch(path.name) and path.suffix not in (".whl", ".gz", ".pyc"):
            files[path.name] = path.read_bytes()
    return files


def load(folder: Path) -> Stack:
    """The stack in a folder.

    Raises:
        UsageError: there is no such folder, or no image.json in it.
        InvalidDocument: what it holds is not valid.
    """
    if not (folder / "image.json").is_file():
        message = f"{folder} is not a stack: it has no image.json"
        raise UsageError(message, hint="see docs/add-a-stack.md and docs/own-kernel.md")
    files = read_folder(folder)
    document = loads(files["image.json"], what=str(folder / "image.json"))
    base = document.get("base") if isinstance(document, dict) else None
    key = _pinned_image(base)
    if key is not None and "digests.json" not in files:
        # The one pin that this stack uses travels with it, so that its recipe is whole; why it is
        # believed may be told better later, and is no part of the recipe.
        shared = loads((images_dir() / "digests.json").read_bytes(), what="images/digests.json")
        pin = {name: shared[key][name] for name in PIN_FIELDS} if key in shared else None
        files["digests.json"] = canonical({key: pin} if pin is not None else {})
    return from_files(files, folder=folder)


def _pinned_image(base: object) -> str | None:
    """Key in digests.json of the registry image that a base is, or takes folders from."""
    if not isinstance(base, dict):
        return None
    image = base.get("image") if base.get("kind") == "registry" else base.get("graft")
    key = image.get("image") if isinstance(image, dict) else image
    return key if isinstance(key, str) else None


def revisions(stack: str) -> list[str]:
    """Revisions of a shipped stack, oldest first; none if there is no such stack."""
    folder = images_dir() / stack
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", stack) or not folder.is_dir():
        return []
    found = [path.name for path in folder.iterdir() if re.fullmatch(r"r[1-9][0-9]*", path.name)]
    return sorted(found, key=lambda name: int(name[1:]))


def stacks() -> list[str]:
    """Names of the shipped stacks."""
    return sorted(path.name for path in images_dir().iterdir() if revisions(path.name))


def default_stack() -> str:
    """The shipped stack for this host's device: a CPU stack, the newest by name."""
    return [name for name in stacks() if name.startswith("cpu-")][-1]


def shipped(stack: str, revision: str | None = None) -> Stack | None:
    """A shipped stack, its newest revision if none is named; None if it is not shipped."""
    known = revisions(stack)
    if not known or revision not in (None, *known):
        return None
    return load(images_dir() / stack / (revision or known[-1]))


def resolve(target: str) -> Stack:
    """A stack by what a user writes: NAME, NAME@REVISION, or the path of a folder.

    Raises:
        UsageError: neither; the hint lists the shipped stacks.
    """
    name, _, revision = target.partition("@")
    if (stack := shipped(name, revision or None)) is not None:
        return stack
    if Path(target).is_dir():
        return load(Path(target).resolve())
    message = f"there is no stack {target!r} and no such folder"
    raise UsageError(message, hint=f"shipped stacks: {', '.join(stacks())}")
