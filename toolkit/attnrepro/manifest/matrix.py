"""What each pinned release claims, as one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnrepro import resources
from attnrepro.errors import UsageError
from attnrepro.manifest import capability, stacks
from attnrepro.manifest.callfacts import words
from attnrepro.manifest.defaults import shipped_revision
from attnrepro.manifest.explain import columns
from attnrepro.manifest.model import ImageRef
from attnrepro.schema_words import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnrepro.images.store import Store
    from attnrepro.jsonio import JsonObject

_EXTRAS: Final = ("window", "gqa", "softcap", "alibi", "dropout", "append_in_call")
_BITS: Final = {
    "option": "with the option deterministic",
    "none": "not claimed",
}
_LENGTHS: Final = {
    "equal": "equal",
    "ragged": "may differ between sequences",
    "empty": "may differ between sequences, which may be empty",
}
_LEGEND: Final = """\
v: width of V, = that of K. masks: aligned top_left, bottom_right where lengths differ. cache: dense
is contiguous. bits: the same from call to call, forward/backward; option: with deterministic."""


def document(names: Sequence[str], *, everything: bool, store: Store | None = None) -> JsonObject:
    """Claims of stacks (all that are shipped where none is named).

    Args:
        names: Stacks, each NAME or NAME@REVISION.
        everything: Also the releases that no shipped stack holds.
        store: Where built images are; None is the user's own.

    Raises:
        UsageError: a name is no stack.

    """
    known = stacks.shipped_names()
    found: list[JsonObject] = []
    for target in names or known:
        name, _, revision = target.partition("@")
        ref = ImageRef(stack=name, revision=revision or shipped_revision(name), digest=None)
        facts = stacks.find(ref, store)
        found.append(
            {
                "stack": str(ref),
                "device": facts.vendor,
                "built": facts.is_built,
                "image": facts.manifest_digest,
                "bytes": facts.image_bytes,
                "pulls": facts.pulls,
                "claims": list(facts.capability.claims),
            }
        )
    others: list[JsonObject] = []
    if everything:
        held = {claim["release"] for stack in found for claim in stack["claims"]}
        for path in sorted((resources.images_dir() / "claims").glob("*.json")):
            claims = capability.read_release(path)
            if not {claim["release"] for claim in claims} & held:
                others.append({"release": path.stem, "claims": list(claims)})
    return {"stacks": found, "releases_without_a_stack": others}


def one(document: Mapping[str, Any], backend: str) -> JsonObject:
    """The part of a matrix that is about one backend. Raises UsageError where nothing is."""
    names: set[str] = set()

    def kept(groups: list[Any]) -> list[Any]:
        result = []
        for group in groups:
            names.update(claim["backend"] for claim in group["claims"])
            claims = [claim for claim in group["claims"] if claim["backend"] == backend]
            if claims:
                result.append({**group, "claims": claims})
        return result

    found = {key: kept(groups) for key, groups in document.items()}
    if not any(found.values()):
        meant = did_you_mean(backend, names)
        message = f"no release here claims a backend {backend!r}"
        raise UsageError(message, hint=f"did you mean {meant!r}?" if meant else "see --all")
    return found


def text(document: Mapping[str, Any], *, details: bool) -> str:
    """The matrix for a terminal; with `details`, every field, what is refused, and notes."""
    lines: list[str] = []
    for stack in document["stacks"]:
        lines += [f"{stack['stack']} ({stack['device']}, {_built(stack)})"]
        lines += _table(stack["claims"])
        lines += [*_details(stack["claims"], details=details), ""]
    if document["releases_without_a_stack"]:
        lines += ["Releases that no shipped stack holds yet: claims only, not built here", ""]
    for release in document["releases_without_a_stack"]:
        lines += [release["release"], *_table(release["claims"])]
        lines += [*_details(release["claims"], details=details), ""]
    return "\n".join([*lines, _LEGEND])


def _built(stack: JsonObject) -> str:
    """Whether there is an image, from the store alone: nothing unbuilt is shown as if it were."""
    size = f"{stack['bytes'] / 1e9:.1f} GB"
    if stack["built"]:
        return f"built here: {stack['image'][:19]}, {size}"
    pulls = f", needs the registry image {stack['pulls']}" if stack["pulls"] else ""
    return f"not built here, about {size}{pulls}"


def _table(claims: Sequence[JsonObject]) -> list[str]:
    head = ["dtypes", "head_dim", "v", "phases", "layouts", "masks", "cache", "and", "lse", "bits"]
    rows = [["  backend", *head]]
    for claim in claims:
        extras = [name.replace("_in_call", "") for name in _EXTRAS if claim[name]]
        rows.append(
            [
                f"  {_name(claim)}",
                " ".join(_short(name) for name in claim["dtypes"]),
                _range(claim["head_dim"]),
                "=" if claim["head_dim_v"] == "equal" else _range(claim["head_dim_v"]),
                " ".join(_short(name) for name in claim["phases"]),
                " ".join(claim["layouts"]),
                " ".join(_short(name) for name in claim["alignments"]) or "none",
                " ".join(_short(name) for name in claim["cache"]) or "-",
                " ".join(extras) or "-",
                _short(claim["lse"]),
                "/".join(claim["determinism"][name] for name in ("forward", "backward")),
            ]
        )
    return columns(rows)


def _name(claim: JsonObject) -> str:
    return f"{claim['backend']} ({claim['case']})" if claim["case"] else str(claim["backend"])


def _range(constraint: JsonObject) -> str:
    """A range of widths in few characters."""
    return words(constraint).replace(" to ", "-").replace(", multiples of ", "/")


def _short(name: str) -> str:
    return {
        "float32": "f32",
        "bfloat16": "bf16",
        "float16": "f16",
        "float8_e4m3fn": "f8",
        "forward": "fwd",
        "forward_backward": "+bwd",
        "top_left": "top",
        "bottom_right": "bottom",
        "contiguous": "dense",
        "second_entry": "second",
    }.get(name, name)


def _details(claims: Sequence[JsonObject], *, details: bool) -> list[str]:
    lines = []
    for claim in claims:
        # What is silently ignored is told in any case: it is the reason why this table exists.
        lines += [
            f"  ! {claim['backend']} silently ignores {rule['what']}: {rule['reason']}"
            for rule in claim["ignores"]
        ]
    for claim in claims if details else ():
        lines.append(f"  {_name(claim)}")
        lines += [f"    {name}: {value}" for name, value in _fields(claim)]
        lines += [f"    refuses: {rule['reason']}" for rule in claim["refuses"]]
        lines += [f"    note: {note}" for note in claim["notes"]]
    sources = dict.fromkeys(
        f"  {claim['release']}: {claim['source']} ({claim['date']})" for claim in claims
    )
    return [*lines, *sources]


def _fields(claim: JsonObject) -> Iterator[tuple[str, str]]:
    """What the table has no room for."""
    vendors = ", ".join(claim["vendors"])
    yield "architectures", ", ".join(claim["architectures"]) or f"any of {vendors}"
    yield "layouts", ", ".join(claim["layouts"])
    yield "strides", claim["strides"]
    yield "lengths", _LENGTHS[claim["lengths"]]
    bits = (f"{name} {_BITS.get(value, value)}" for name, value in claim["determinism"].items())
    yield "determinism", "; ".join(bits)
    options = (f"{name} ({words(values)})" for name, values in claim["options"].items())
    yield "options", ", ".join(options) or "none"
    if "paged" in claim["cache"]:
        yield "page_size", f"multiples of {claim['page_multiple']}"
    if claim["dropout"]:
        yield "dropout.offset", f"multiples of {claim['dropout_offset_multiple']}"
    if claim["fp8"]:
        yield "FP8 descales", ", ".join(claim["fp8"])
    yield "dtype_out", words(claim["dtype_out"])
    yield "accumulate", words(claim["accumulate"])
    yield "rows that attend nothing", words(claim["masked_rows"])
