"""What a loaded manifest is."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from attnrepro.manifest import callfacts
from attnrepro.manifest.semantics import CellFacts, facts
from attnrepro_runner.semantics import Workload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro.jsonio import JsonObject
    from attnrepro.manifest.callfacts import Fact


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something in a valid manifest that its author should know."""

    pointer: str
    text: str


@dataclass(frozen=True, kw_only=True, order=True)
class ImageRef:
    """A pinned stack."""

    stack: str
    revision: str | None
    """Revision folder; None for a stack that this release does not ship."""
    digest: str | None
    """Manifest digest ("sha256:…") that the image must have; None accepts what the recipe gives."""

    @classmethod
    def of(cls, document: JsonObject) -> ImageRef:
        """From a canonical `image` object."""
        return cls(
            stack=document["stack"],
            revision=document["revision"],
            digest=document["digest"],
        )

    def __str__(self) -> str:
        return f"{self.stack}/{self.revision}" if self.revision else self.stack


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One backend under test, with its pinned options."""

    id: str
    backend: str
    role: str
    options: Mapping[str, object]
    image: ImageRef
    """Its own image, or the manifest's."""
    required: bool

    @property
    def is_timed(self) -> bool:
        """Whether it is timed against the others."""
        return self.role != "accuracy_reference"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the sweep: the unit of retry, cache and placement."""

    id: str
    """c000 … c4095, in the order of the canonical manifest."""
    label: str
    variant: str | None
    workload: JsonObject
    """Canonical: every default explicit."""
    inputs: JsonObject
    request: JsonObject | None
    subjects: tuple[str, ...]
    sources: Mapping[str, str] = field(default_factory=dict)
    """Pointer of a field that a variant or an axis sets -> pointer of the value in the manifest."""

    @cached_property
    def parsed(self) -> Workload:
        """The workload's meaning. Raises WorkloadError in a cell that `load` did not check."""
        return Workload.parse(self.workload)

    def take(self, other: Cell) -> None:
        """Spare reading the workload again where another cell's is the same."""
        if self.workload == other.workload:
            vars(self)["parsed"] = other.parsed

    @cached_property
    def facts(self) -> CellFacts:
        """Figures of one call, known before anything runs. Raises as `parsed` does."""
        return facts(self.parsed)

    @cached_property
    def call(self) -> Mapping[str, Fact]:
        """Facts that claims are judged by. Raises as `parsed` does."""
        return callfacts.of_call(self.parsed)

    def source(self, pointer: str) -> str:
        """Where in the manifest the value of this cell's field `pointer` stands."""
        for target in sorted(self.sources, key=len, reverse=True):
            if pointer == target or pointer.startswith(target + "/"):
                return self.sources[target] + pointer[len(target) :]
        return pointer


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A valid manifest in its canonical form, and the cells that it asks for."""

    document: JsonObject
    """Canonical document; not to be changed."""
    canonical: bytes
    """RFC 8785 bytes of `document`."""
    sha256: str
    """Hex digest of `canonical`: the manifest's identity."""
    cells: tuple[Cell, ...]
    subjects: tuple[Subject, ...]
    notes: tuple[Note, ...]

    @property
    def name(self) -> str:
        """Short name, used for files."""
        return str(self.document["name"])

    @property
    def image(self) -> ImageRef:
        """The default image of subjects."""
        return ImageRef.of(self.document["image"])

    def subject(self, name: str) -> Subject:
        """The subject with this id. Raises KeyError."""
        for subject in self.subjects:
            if subject.id == name:
                return subject
        raise KeyError(name)
