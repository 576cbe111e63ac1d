"""The verifier's own trust file: the only place that trust comes from.

A key has one owner; owners are counted without regard to case. Validity is judged by the
verifier's clock, since a time inside an artifact is chosen by whoever signs it. A revoked key stays
in the file: removing it would turn "revoked" into "unknown".
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from attnrepro import files, jsonio, resources, schema
from attnrepro.artifact.public_key import PublicKey, parse_public_key
from attnrepro.errors import InvalidDocument, Rejected, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SCHEMA: Final = "attnrepro.trust/1"
SELF: Final = "self"
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"


class Standing(StrEnum):
    """What a trust file says of a key at some time."""

    TRUSTED = "trusted"
    UNKNOWN = "unknown"
    REVOKED = "revoked"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"


@dataclass(frozen=True, kw_only=True)
class TrustedKey:
    """One entry."""

    owner: str
    key: PublicKey
    added: datetime
    not_before: datetime | None = None
    not_after: datetime | None = None
    revoked_at: datetime | None = None
    revoked_reason: str | None = None

    def standing(self, now: datetime) -> Standing:
        """Trusted, revoked or outside its validity. A revocation holds whenever it was made."""
        if self.revoked_at is not None:
            return Standing.REVOKED
        if self.not_after is not None and now > self.not_after:
            return Standing.EXPIRED
        if self.not_before is not None and now < self.not_before:
            return Standing.NOT_YET_VALID
        return Standing.TRUSTED

    def document(self) -> dict[str, Any]:
        """The JSON object of the trust file."""
        entry: dict[str, Any] = {
            "owner": self.owner,
            "public_key": base64.b64encode(self.key.der).decode("ascii"),
            "added": self.added.strftime(_TIME),
        }
        for name, moment in (("not_before", self.not_before), ("not_after", self.not_after)):
            if moment is not None:
                entry[name] = moment.strftime(_TIME)
        if self.revoked_at is not None:
            entry["revoked"] = {
                "at": self.revoked_at.strftime(_TIME),
                "reason": self.revoked_reason,
            }
        return entry


@dataclass(frozen=True, kw_only=True)
class TrustStore:
    """A valid trust file: every key sound, every key under one owner."""

    keys: tuple[TrustedKey, ...] = ()
    threshold: int = 1
    """Distinct owners who must have signed about a content."""

    def find(self, fingerprint: str) -> TrustedKey | None:
        """The entry of a key, whatever its standing."""
        return next((entry for entry in self.keys if entry.key.fingerprint == fingerprint), None)

    def standing(self, key: PublicKey, now: datetime) -> Standing:
        """What this file says of a key."""
        entry = self.find(key.fingerprint)
        return entry.standing(now) if entry else Standing.UNKNOWN

    def with_key(self, entry: TrustedKey) -> TrustStore:
        """A store with one key more; the same key under the same owner again changes nothing.

        Raises UsageError where the key stands under another owner or was revoked.
        """
        known = self.find(entry.key.fingerprint)
        if known is None:
            return replace(self, keys=(*self.keys, entry))
        if known.owner.casefold() != entry.owner.casefold():
            message = f"this key is already in the trust file, under the owner {known.owner}"
            raise UsageError(message, hint="one key has one owner", rule="trust.two_owners")
        if known.revoked_at is not None:
            message = f"this key was revoked: {known.revoked_reason}"
            raise UsageError(message, hint="ask the owner for a new key", rule="trust.revoked")
        return self

    def with_revoked(self, prefix: str, *, reason: str, now: datetime) -> TrustStore:
        """A store in which one key is revoked.

        Args:
            prefix: at least 8 hex digits of the fingerprint.
            reason: shown to whoever verifies an artifact of that key.
            now: time of the revocation.

        Raises UsageError where the prefix is short or names no key or several, and where the key
        is revoked already: the first date and reason stay.
        """
        hits = [entry for entry in self.keys if entry.key.fingerprint.startswith(prefix.lower())]
        hint = "give at least 8 digits of the fingerprint: attnrepro trust list"
        if len(prefix) < 8:
            message = f"{prefix!r} is too short to name a key"
            raise UsageError(message, hint=hint)
        if not hits:
            message = f"no key of the trust file begins with {prefix!r}"
            hint = "a key that is not in it is not trusted: attnrepro trust list"
            raise UsageError(message, hint=hint)
        if len(hits) > 1:
            message = f"{prefix!r} names {len(hits)} keys of the trust file"
            raise UsageError(message, hint=hint)
        if hits[0].revoked_at is not None:
            message = f"this key is revoked already: {hits[0].revoked_reason}"
            raise UsageError(message, hint="the first date and reason stay")
        revoked = replace(hits[0], revoked_at=now, revoked_reason=reason)
        return replace(self, keys=tuple(revoked if e is hits[0] else e for e in self.keys))

    def to_bytes(self) -> bytes:
        """The trust file, one key a line so that it can be reviewed as a diff."""
        lines = ",\n  ".join(jsonio.canonical(e.document()).decode() for e in self.keys)
        body = f"[\n  {lines}\n]" if lines else "[]"
        text = f'{{"schema": "{SCHEMA}",\n"threshold": {self.threshold},\n"keys": {body}}}\n'
        return text.encode()


def trust_path() -> Path:
    """The user's trust file, which need not exist."""
    return files.state_dir() / "trust.json"


def load(path: Path | None = None, *, missing_ok: bool = False) -> TrustStore:
    """Read a trust file.

    Args:
        path: the file; None is the user's own, which may be missing.
        missing_ok: whether a named file may be missing as well.

    Raises:
        InvalidDocument: any rule broken, a key of small order and a key under two owners included:
            a trust file is taken whole or not at all.
        UsageError: unreadable, or the named file is not there.
    """
    missing_ok = missing_ok or path is None
    path = path or trust_path()
    try:
        data = files.read_regular(path, limit=1 << 22)
    except FileNotFoundError:
        if missing_ok:
            return TrustStore()
        message = f"the trust file {path} is not there"
        raise UsageError(message, hint="attnrepro trust add makes one") from None
    except OSError as error:
        message = f"cannot read the trust file {path}: {error.strerror}"
        raise UsageError(message, hint="check its owner and mode") from None
    return parse(data, what=str(path))


def parse(data: bytes, *, what: str = "the trust file") -> TrustStore:
    """Read the bytes of a trust file. Raises InvalidDocument."""
    document = jsonio.loads(data, what=what)
    if problems := schema.validate("trust", document):
        message = f"{what} is not a valid trust file"
        raise InvalidDocument(message, rule="trust.schema", problems=problems)
    keys = tuple(_entry(item, index, what) for index, item in enumerate(document["keys"]))
    owners: dict[str, str] = {}
    for entry in keys:
        fingerprint = entry.key.fingerprint
        if fingerprint in owners:
            same = owners[fingerprint].casefold() == entry.owner.casefold()
            found = "twice" if same else "under two owners"
            message = f"{what}: the key {fingerprint[:16]}… stands {found}"
            raise InvalidDocument(message, rule="trust.two_owners", hint="keep one of the entries")
        owners[fingerprint] = entry.owner
    return TrustStore(keys=keys, threshold=document["threshold"])


def save(store: TrustStore, path: Path | None = None) -> None:
    """Write a trust file, whole or not at all. Raises UsageError."""
    path = path or trust_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.atomic_write(path, store.to_bytes(), mode=0o600)
    except OSError as error:
        message = f"cannot write the trust file {path}: {error.strerror}"
        raise UsageError(message, hint="check its folder's owner and mode") from None


def known_keys() -> dict[str, str]:
    """Keys that ship with the package: fingerprint → name. Known is not trusted."""
    folder = resources.manifests_dir() / "keys"
    return {
        parse_public_key(path.read_bytes()).fingerprint: path.stem
        for path in sorted(folder.glob("*.pub"))
    }


def independent_owners(store: TrustStore, keys: Iterable[PublicKey], now: datetime) -> list[str]:
    """Distinct owners of the trusted keys among `keys`, sorted."""
    owners: dict[str, str] = {}
    for key in keys:
        entry = store.find(key.fingerprint)
        if entry and entry.standing(now) is Standing.TRUSTED:
            owners.setdefault(entry.owner.casefold(), entry.owner)
    return sorted(owners.values(), key=str.casefold)


def _entry(item: dict[str, Any], index: int, what: str) -> TrustedKey:
    try:
        der = base64.b64decode(item["public_key"], validate=True)
        key = parse_public_key(der)
        revoked = item.get("revoked")
        return TrustedKey(
            owner=item["owner"],
            key=key,
            added=_time(item["added"]),
            not_before=_time(item["not_before"]) if "not_before" in item else None,
            not_after=_time(item["not_after"]) if "not_after" in item else None,
            revoked_at=_time(revoked["at"]) if revoked else None,
            revoked_reason=revoked["reason"] if revoked else None,
        )
    except Rejected as error:
        message = f"{what}: /keys/{index}: {error.message}"
        hint = "remove this entry"
        raise InvalidDocument(message, rule=error.rule, hint=hint) from None
    except (ValueError, binascii.Error) as error:
        message = f"{what}: /keys/{index}: {error}"
        raise InvalidDocument(message, rule="trust.schema", hint="mend or remove it") from None


def _time(text: str) -> datetime:
    return datetime.strptime(text, _TIME).replace(tzinfo=UTC)
