"""From a finished run folder to the content that is signed, and the predicate beside it."""

from __future__ import annotations

import getpass
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnrepro import treelist
from attnrepro.artifact import container
from attnrepro.artifact.content import SBOM, Content
from attnrepro.errors import AttnreproError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from attnrepro.jsonio import JsonObject
    from attnrepro.results import Merged
    from attnrepro.runfolder import RunFolder
    from attnrepro.runnerwheel import RunnerWheel

RUNNER_FOLDER: Final = "recipe/runner/"
IMAGES_FOLDER: Final = "recipe/images/"

_OTHER_MEMBERS: Final = 150
"""Kept free for documents, recipes, logs and telemetry when samples are counted before a run."""
_LOG_BYTES: Final = 1 << 20
_WORD: Final = re.compile(r"[A-Za-z0-9_]")
_QUOTED: Final = frozenset({"reason", "place", "evidence", "flags", "facts", "errors"})
"""Fields of the observations whose texts are not this program's own."""
_HEX: Final = "[0-9a-fA-F]"
_DEVICE: Final = re.compile(
    rf"(?<![A-Za-z0-9])(?:(?:GPU-|MIG-)?{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"
    rf"|(?:GPU|MIG)-{_HEX}{{16}})(?![A-Za-z0-9])"
)
"""A device's UUID. The statement has its keyed digest, which nobody else can compute."""


@dataclass(frozen=True, kw_only=True)
class UsedImage:
    """An image that a run used: what of it enters the artifact."""

    key: str
    """How the recipe's folder is named: STACK-REVISION."""
    document: JsonObject
    """The image record (`image` schema)."""
    recipe: Mapping[str, bytes]
    sbom: bytes
    listing: bytes
    """Of its tree (`images.tree.listing`)."""
    rebuild_status: str
    """Whether a stranger can rebuild it, and whether that was tried."""

    def statement(self) -> JsonObject:
        """As the predicate's `images` has it."""
        record = self.document
        return {
            "key": self.key,
            "stack": record["stack"],
            "revision": record["revision"],
            "manifest_digest": record["manifest_digest"],
            "config_digest": record["config_digest"],
            "tree_sha256": record["tree_sha256"].removeprefix("sha256:"),
            "base_kind": record["base"]["kind"],
            "builder": f"{record['builder']['name']} {record['builder']['version']}",
            "rebuild_status": self.rebuild_status,
        }


def check_members(jobs: Sequence[Mapping[str, Any]], clocks: Sequence[str]) -> None:
    """Refuse, before anything runs, what would not fit into one artifact. Raises UsageError.

    Args:
        jobs: what the runner will be given.
        clocks: of the manifest; a backward and an append of its own are timed by each, too.
    """
    launches = {
        (task["id"], subject)
        for job in jobs
        for task in job["tasks"]
        if task["stage"] == "launch"
        for subject in task["subjects"]
    }
    cells: dict[str, int] = {}
    for job in jobs:
        for cell in job["cells"]:
            for subject in cell["subjects"]:
                cells[subject] = cells.get(subject, 0) + _series(cell, clocks)
    count = sum(cells.get(subject, 0) for _, subject in launches)
    limit = container.MAX_MEMBERS - _OTHER_MEMBERS
    if count > limit:
        message = f"this run would give {count} series of samples; an artifact holds {limit}"
        raise UsageError(message, hint="fewer cells, subjects or launches, or several manifests")


def _series(cell: Mapping[str, Any], clocks: Sequence[str]) -> int:
    """Series of samples of one launch of a subject in a cell."""
    cache = cell["workload"].get("cache")
    parts = 1 + (cell["workload"]["phase"] == "forward_backward")
    parts += cache is not None and cache["append"] > 0 and not cache["append_in_call"]
    calls = [clock for clock in clocks if clock != "request"]
    return int(parts) * len(calls) + int("request" in clocks and cell["request"] is not None)


def content(
    manifest: bytes,
    merged: Merged,
    *,
    folder: RunFolder,
    segments: Iterable[str],
    images: Sequence[UsedImage],
    runner: RunnerWheel,
) -> tuple[Content, list[str]]:
    """Everything that goes into content.zip, and which kinds of text were redacted."""
    files: dict[str, bytes] = {**merged.samples, RUNNER_FOLDER + runner.name: runner.data}
    for image in images:
        for path, data in image.recipe.items():
            files[f"{IMAGES_FOLDER}{image.key}/{path}"] = data
        files[SBOM if len(images) == 1 else f"sbom/{image.key}.spdx.json"] = image.sbom
    for key, packed in treelist.pack({image.key: image.listing for image in images}).items():
        files[f"{IMAGES_FOLDER}{key}{treelist.SUFFIX}"] = packed
    redactor = Redactor()
    wanted = {name for task in merged.observations["tasks"] for name in task["telemetry"]}
    for segment in segments:
        for log in sorted((folder.path / segment / "logs").glob("*.log")):
            files[f"logs/{segment}/{log.name}"] = redactor.log(_tail(log.read_bytes()))
        if workers := folder.worker_logs(segment):
            files[f"logs/{segment}/workers.log"] = redactor.log(_tail(workers))
        for name in sorted(wanted):
            try:
                files[name] = folder.read(segment, name)
            except OSError:
                continue  # it is another segment's
            wanted.discard(name)
    if wanted:
        message = f"the runner named {sorted(wanted)[0]} and did not write it"
        raise AttnreproError(message)
    found = Content(
        manifest=manifest,
        repeatable=merged.repeatable,
        observations=redactor.reasons(merged.observations),
        files=files,
    )
    return found, redactor.kinds()


def predicate(
    merged: Merged,
    *,
    images: Sequence[UsedImage],
    runner: RunnerWheel,
    invocation: Sequence[str],
    device_class: Mapping[str, Any],
    redactions: Sequence[str],
) -> JsonObject:
    """The parts of the signed predicate that do not follow from the content."""
    redactor = Redactor()
    words = [_plain(redactor.word(part)) for part in invocation]
    seen = merged.observations["containment"]
    return {
        "images": [image.statement() for image in images],
        "runner": {"version": runner.version, "sha256": runner.sha256},
        "invocation": words,
        "device_class": {
            name: _plain(value) if isinstance(value, str) else value
            for name, value in device_class.items()
        },
        "containment": {
            "engine": seen["engine"],
            "contained": seen["contained"],
            "options": [
                _plain(redactor.text(f"{name}={value}"))
                for name, value in sorted(seen["facts"].items())
            ][:256],
        },
        "redactions": sorted({*redactions, *redactor.kinds()}),
    }


class Redactor:
    """Takes the names of people, machines and folders out of text that will be published."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._names = [
            ("working folder", str(Path.cwd()), "."),
            ("home folder", str(Path.home()), "~"),
            ("host name", platform.node(), "HOST"),
            ("user name", _user(), "USER"),
        ]

    def kinds(self) -> list[str]:
        """Kinds of what was taken out so far."""
        return sorted(self._seen)

    def log(self, data: bytes) -> bytes:
        """A log without those names, as UTF-8."""
        return self.text(data.decode("utf-8", "replace")).encode()

    def text(self, text: str) -> str:
        """A text without those names."""
        for kind, name, instead in self._names:
            if len(name) < 4 or name in ("root", "localhost", "/root"):
                continue
            replaced = _whole(name).sub(instead, text)
            if replaced != text:
                self._seen.add(kind)
                text = replaced
        text, devices = _DEVICE.subn("UUID", text)
        if devices:
            self._seen.add("device UUID")
        return text

    def reasons(self, document: Any, *, quoted: bool = False) -> Any:
        """The document with every text redacted that quotes what a library or an engine said."""
        if isinstance(document, dict):
            return {
                key: self.reasons(value, quoted=quoted or key in _QUOTED)
                for key, value in document.items()
            }
        if isinstance(document, list):
            return [self.reasons(item, quoted=quoted) for item in document]
        if quoted and isinstance(document, str):
            return self.text(document)
        return document

    def word(self, part: str) -> str:
        """One word of a command line; of an absolute path the last component alone."""
        if part.startswith("/"):
            self._seen.add("folder")
            return Path(part).name or "/"
        option, equals, value = part.partition("=")
        if equals and value.startswith("/"):
            self._seen.add("folder")
            return f"{option}={Path(value).name}"
        return self.text(part)


def _whole(name: str) -> re.Pattern[str]:
    """The name, not as a part of a longer word."""
    head = r"(?<![A-Za-z0-9_])" if _WORD.match(name) else ""
    return re.compile(f"{head}{re.escape(name)}(?![A-Za-z0-9_])")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""  # a uid without a name has nothing to hide


def _plain(text: str) -> str:
    """One line of printable characters: what a statement may hold."""
    return "".join(c if c.isprintable() else "?" for c in text)[:4000]


def _tail(data: bytes) -> bytes:
    if len(data) <= _LOG_BYTES:
        return data
    return b"[the beginning was left out]\n" + data[-_LOG_BYTES:]
