"""What a stack's kernel releases claim, and whether that covers a call.

Claims are data (schema/claims.schema.json) with a source and a date. They are judged before
anything is launched; whether they are true is what probes and oracle test.

    capability = Capability.load(folder_of_the_stack)
    decide(cell, subject, capability, Device(vendor="cpu"))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from attnrepro import jsonio, resources, schema
from attnrepro.errors import InvalidDocument
from attnrepro.manifest import callfacts
from attnrepro.schema_words import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
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

    @cached_property
    def by_backend(self) -> Mapping[str, tuple[JsonObject, ...]]:
        """Claims by the backend that they are about, sorted by its name."""
        found: dict[str, list[JsonObject]] = {}
        for claim in self.claims:
            found.setdefault(claim["backend"], []).append(claim)
        return {name: tuple(found[name]) for name in sorted(found)}

    @cached_property
    def unseen(self) -> Mapping[str, frozenset[str]]:
        """By backend: those facts of a call that none of its claims looks at."""
        return {
            backend: callfacts.RULES_ONLY.difference(
                *(rule["when"] for c in claims for rule in (*c["ignores"], *c["refuses"]))
            )
            for backend, claims in self.by_backend.items()
        }

    @cached_property
    def decisions(self) -> dict[tuple[object, ...], Decision]:
        """What was decided already, by all that it depends on: cells differ in little."""
        return {}

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends that some claim is about, sorted."""
        return tuple(self.by_backend)


def decide(cell: Cell, subject: Subject, capability: Capability, device: Device) -> Decision:
    """Whether some claim covers a cell of a subject; if none, the reason of the nearest one."""
    options = callfacts.of_options(subject.options)
    return _decide(subject.backend, cell.call, options, capability, device)


def uncompared(
    cell: Cell, subjects: Sequence[Subject], capability: Capability, device: Device
) -> tuple[str, ...]:
    """Backends of the stack that claim the cell and are no subject of it.

    A baseline beside which they were left out is a weak one.
    """
    named = {subject.backend for subject in subjects}
    return tuple(
        backend
        for backend in capability.by_backend
        if backend not in named
        and isinstance(_decide(backend, cell.call, {}, capability, device), Supported)
    )


def _decide(
    backend: str,
    call: Mapping[str, Fact],
    options: Mapping[str, Fact],
    capability: Capability,
    device: Device,
) -> Decision:
    unseen = capability.unseen.get(backend, callfacts.RULES_ONLY)
    seen = tuple([value for name, value in call.items() if name not in unseen])
    # The text of options tells true from 1.
    key = (backend, device, repr(options), seen)
    if (decision := capability.decisions.get(key)) is None:
        decision = _decide_anew(backend, call, options, capability, device)
        capability.decisions[key] = decision
    return decision


def _decide_anew(
    backend: str,
    call: Mapping[str, Fact],
    options: Mapping[str, Fact],
    capability: Capability,
    device: Device,
) -> Decision:
    facts: dict[str, Fact] = {
        **call,
        **options,
        "vendor": device.vendor,
        "architecture": device.architectures,
    }
    nearest: tuple[JsonObject, _Miss] | None = None
    for claim in capability.by_backend.get(backend, ()):
        miss = _device_miss(claim, device) or _call_miss(claim, facts, options)
        if miss is None:
            return Supported(release=claim["release"], source=claim["source"])
        if nearest is None or miss.weight < nearest[1].weight:
            nearest = claim, miss
    if nearest is not None:
        return _unsupported(*nearest)
    if capability.adapter_decides:
        return Supported(release=capability.stack, source="no claims; its adapter decides")
    meant = did_you_mean(backend, capability.backends)
    known = f'did you mean "{meant}"?' if meant else f"it has {', '.join(capability.backends)}"
    return Unsupported(
        reason=f'the stack {capability.stack} claims no backend "{backend}"; {known}',
        source=f"{FILE} of {capability.stack}",
    )


class _Miss(NamedTuple):
    """The reason why a claim does not cover a call."""

    weight: int
    """Of all its reasons together: the claim with the least is the nearest."""
    reason: str
    rule: JsonObject | None = None


def _device_miss(claim: JsonObject, device: Device) -> _Miss | None:
    reasons = []
    if device.vendor not in claim["vendors"]:
        reasons.append(f"runs on {_list(claim['vendors'])}, not on {device.vendor}")
    known, asked = claim["architectures"], device.architectures
    if known and asked and not set(known) & set(asked):
        reasons.append(f"has kernels for {_list(known)}, not for {_list(asked)}")
    return _Miss(_WRONG_DEVICE * len(reasons), reasons[0]) if reasons else None


def _call_miss(
    claim: JsonObject, facts: Mapping[str, Fact], options: Mapping[str, Fact]
) -> _Miss | None:
    """What is ignored in silence is told first; then what the release says of what it lacks."""
    ignored = [rule for rule in claim["ignores"] if callfacts.holds(rule["when"], facts)]
    refused = [rule for rule in claim["refuses"] if callfacts.holds(rule["when"], facts)]
    unmet = list(callfacts.unmet(claim, facts, options))
    if not (ignored or refused or unmet):
        return None
    # A rule about nothing but a fact that is not claimed is the reason why it is not.
    lacking = {fact for fact, _, _ in unmet}
    reasons = [r for r in refused if len(r["when"]) == 1 and lacking.issuperset(r["when"])]
    unmet = [miss for miss in unmet if not any(miss[0] in rule["when"] for rule in reasons)]
    is_other_case = any(fact in callfacts.CASE for fact, _, _ in unmet)
    weight = len(ignored) + len(refused) + len(unmet) + _OTHER_CASE * is_other_case
    if ignored:
        rule = ignored[0]
        what = f"takes {rule['what']} and silently ignores it: {rule['reason']}"
        return _Miss(weight, what, rule)
    if reasons or not unmet:
        rule = (reasons or refused)[0]
        return _Miss(weight, rule["reason"], rule)
    _, what, allowed = unmet[0]
    return _Miss(weight, f"does not claim {what}" + (f" (claimed: {allowed})" if allowed else ""))


def _unsupported(claim: JsonObject, miss: _Miss) -> Unsupported:
    source = (miss.rule or {}).get("source") or claim["source"]
    return Unsupported(
        reason=f"{claim['backend']} of {claim['release']}: {miss.reason}",
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
