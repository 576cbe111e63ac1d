"""What a stack's kernel releases claim, and whether that covers a call.

Claims are data (schema/claims.schema.json) with a source and a date. They are judged before
anything is launched; whether they are true is what probes and oracle test.

    capability = Capability.load(folder_of_the_stack)
    decide(cell, subject, capability, Device(vendor="cpu"))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from attnrepro import jsonio, resources, schema
from attnrepro.errors import InvalidDocument
from attnrepro.manifest import callfacts
from attnrepro.schema_words import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from attnrepro.jsonio import JsonObject
    from attnrepro.manifest.callfacts import Fact
    from attnrepro.manifest.model import Cell, Subject

KIND = "claims"
FILE = "claims.json"
_WRONG_DEVICE = 100
"""Weight of a wrong device among misses: such a claim's other misses say nothing."""


_OTHER_CASE = 10
"""Weight of a dtype or width for which the backend has another claim."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a cell is to run."""

    vendor: str
    architectures: tuple[str, ...] = ()
    """Those it may be; empty where it is not known, and no claim is refused for it then."""


@dataclass(frozen=True, kw_only=True)
class Supported:
    """The release claims the call."""

    release: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """The release does not claim the call, or silently does less."""

    reason: str
    source: str


Decision: TypeAlias = Supported | Unsupported


@dataclass(frozen=True, kw_only=True)
class Capability:
    """The claims of one stack."""

    stack: str
    claims: tuple[JsonObject, ...]
    """With every default explicit."""
    adapter_decides: bool = False
    """A stack of the user's own with an adapter and no claims: its `check` answers at run time."""

    @classmethod
    def load(cls, folder: Path) -> Capability:
        """Read the claims.json of a shipped stack's folder and what it includes.

        Raises:
            InvalidDocument: a file is missing or not valid; all problems of it.

        """
        path = folder / FILE
        return cls(
            stack=f"{folder.parent.name}/{folder.name}",
            claims=_with_included(_read(path), path.name),
        )

    @classmethod
    def of_author(
        cls, stack: str, data: bytes | None, *, base: Capability, has_adapter: bool
    ) -> Capability:
        """The claims of a stack that extends `base`: its author's own, then those of the base."""
        own: tuple[JsonObject, ...] = ()
        if data is not None:
            own = _with_included(_parse(data, f"{FILE} of {stack}"), stack)
        return cls(
            stack=stack,
            claims=own + base.claims,
            adapter_decides=data is None and has_adapter,
        )

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends that some claim is about, sorted."""
        return tuple(sorted({claim["backend"] for claim in self.claims}))


def decide(cell: Cell, subject: Subject, capability: Capability, device: Device) -> Decision:
    """Whether some claim covers a cell of a subject; if none, the reason of the nearest one."""
    return _decide(
        subject.backend, callfacts.of_call(cell.parsed, subject.options), capability, device
    )


def uncompared(
    cell: Cell, subjects: Sequence[Subject], capability: Capability, device: Device
) -> tuple[str, ...]:
    """Backends of the stack that claim the cell and are no subject of it.

    A baseline beside which they were left out is a weak one.
    """
    named = {subject.backend for subject in subjects}
    facts = callfacts.of_call(cell.parsed, {})
    return tuple(
        backend
        for backend in capability.backends
        if backend not in named
        and isinstance(_decide(backend, facts, capability, device), Supported)
    )


def _decide(
    backend: str, facts: dict[str, Fact], capability: Capability, device: Device
) -> Decision:
    nearest: tuple[int, Unsupported] | None = None
    for claim in capability.claims:
        if claim["backend"] != backend:
            continue
        misses = [*_device_misses(claim, device)]
        weight = _WRONG_DEVICE * len(misses)
        if not misses:
            facts["vendor"] = device.vendor
            facts["architecture"] = device.architectures
            misses = [*_misses(claim, facts)]
            weight = len(misses) + _OTHER_CASE * (not callfacts.is_case(claim, facts))
        if not misses:
            return Supported(release=claim["release"], source=claim["source"])
        if nearest is None or weight < nearest[0]:
            nearest = weight, misses[0]
    if nearest is not None:
        return nearest[1]
    if capability.adapter_decides:
        return Supported(release=capability.stack, source="no claims; its adapter decides")
    meant = did_you_mean(backend, capability.backends)
    known = f'did you mean "{meant}"?' if meant else f"it has {', '.join(capability.backends)}"
    return Unsupported(
        reason=f'the stack {capability.stack} claims no backend "{backend}"; {known}',
        source=f"{FILE} of {capability.stack}",
    )


def _device_misses(claim: JsonObject, device: Device) -> Iterator[Unsupported]:
    if device.vendor not in claim["vendors"]:
        yield _miss(claim, f"runs on {_list(claim['vendors'])}, not on {device.vendor}")
    known, asked = claim["architectures"], device.architectures
    if known and asked and not set(known) & set(asked):
        yield _miss(claim, f"has kernels for {_list(known)}, not for {_list(asked)}")


def _misses(claim: JsonObject, facts: dict[str, Fact]) -> Iterator[Unsupported]:
    for rule in claim["ignores"]:
        if callfacts.holds(rule["when"], facts):
            yield _miss(
                claim, f"takes {rule['what']} and silently ignores it: {rule['reason']}", rule
            )
    for what, allowed in callfacts.unmet(claim, facts):
        yield _miss(claim, f"does not claim {what}" + (f" (claimed: {allowed})" if allowed else ""))
    for rule in claim["refuses"]:
        if callfacts.holds(rule["when"], facts):
            yield _miss(claim, rule["reason"], rule)


def _miss(claim: JsonObject, reason: str, rule: JsonObject | None = None) -> Unsupported:
    source = (rule or {}).get("source") or claim["source"]
    return Unsupported(
        reason=f"{claim['backend']} of {claim['release']}: {reason}",
        source=f"{source} ({claim['date']})",
    )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


def read_release(path: Path) -> tuple[JsonObject, ...]:
    """The claims of one file of images/claims. Raises InvalidDocument."""
    return tuple(_read(path)["claims"])


def _with_included(document: JsonObject, what: str) -> tuple[JsonObject, ...]:
    claims = list(document["claims"])
    for name in document["include"]:
        path = resources.images_dir() / "claims" / f"{name}.json"
        included = _read(path)
        if included["include"]:
            message = f"{path.name}, included by {what}, includes others itself"
            raise InvalidDocument(message, hint="let the stack include each release by its name")
        claims += included["claims"]
    return tuple(claims)


def _read(path: Path) -> JsonObject:
    try:
        return _parse(path.read_bytes(), str(path))
    except OSError as error:
        message = f"cannot read the capability data {path}: {error.strerror or error}"
        hint = "add the file, or take its name out of `include`"
        raise InvalidDocument(message, hint=hint) from None


@lru_cache(maxsize=64)
def _parse(data: bytes, what: str) -> JsonObject:
    document = jsonio.loads(data, what=what)
    if problems := schema.validate(KIND, document):
        message = f"{what} is not valid capability data: {len(problems)} problems"
        raise InvalidDocument(message, problems=problems)
    return schema.with_defaults(KIND, document)
