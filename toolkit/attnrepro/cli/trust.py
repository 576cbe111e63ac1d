"""`attnrepro trust add | list | revoke`: the keys that you trust."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from attnrepro.artifact import trust
from attnrepro.artifact.find_key import find_key
from attnrepro.cli.output import emit
from attnrepro.errors import InvalidDocument, Rejected, UsageError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Add, list or revoke the keys that you trust.",
)

_FINGERPRINT: Final = re.compile(r"[0-9a-f]{1,64}")

_File = Annotated[
    Path | None,
    typer.Option("--trust", help="Another trust file than your own."),
]
_Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]


@app.command("add")
def add(
    key: Annotated[
        str,
        typer.Argument(
            help="A public key (PEM or OpenSSH), an artifact signed by it, or the name of a "
            "known key."
        ),
    ],
    owner: Annotated[str, typer.Option(help="Who holds the key.")],
    until: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], help="Last day on which it is valid (UTC)."),
    ] = None,
    trust_file: _File = None,
    as_json: _Json = False,
) -> None:
    """Trust a key from now on. Compare the printed fingerprint with what its owner tells you."""
    if not owner.strip():
        message = "--owner is empty"
        raise UsageError(message, hint="name who holds the key")
    now = datetime.now(UTC).replace(microsecond=0)
    if until is not None and until.date() < now.date():
        message = f"--until {until.date()} has passed: the key would be expired at once"
        raise UsageError(message, hint="give a day to come, or leave it out")
    entry = trust.TrustedKey(
        owner=owner,
        key=find_key(key),
        added=now,
        not_after=until.replace(hour=23, minute=59, second=59, tzinfo=UTC) if until else None,
    )
    store = trust.load(trust_file, missing_ok=True).with_key(entry)
    _save(store, trust_file, f"--owner {owner!r:.60}")
    found = _entry(entry, now)
    emit(found, as_json=as_json, text=lambda: f"trusted from now on: {_line(found)}")


@app.command("list")
def list_(trust_file: _File = None, as_json: _Json = False) -> None:
    """List trusted and revoked keys, and the keys that ship with attnrepro (known, not trusted)."""
    now, store = datetime.now(UTC), trust.load(trust_file)
    entries = [_entry(entry, now) for entry in store.keys]
    known = trust.known_keys()
    found = {"threshold": store.threshold, "keys": entries, "known": known}
    lines = [_line(entry) for entry in entries] or ["no key is trusted yet"]
    held = {entry.key.fingerprint for entry in store.keys}
    lines += [
        f"{'known, not trusted':<20}{name}  sha256:{key}"
        for key, name in known.items()
        if key not in held
    ]
    emit(found, as_json=as_json, text=lambda: "\n".join(lines))


@app.command("revoke")
def revoke(
    key: Annotated[
        str,
        typer.Argument(
            help="Its owner as your trust file has it, at least 8 digits of its fingerprint, or "
            "what `trust add` takes."
        ),
    ],
    reason: Annotated[str, typer.Option(help="Why; shown when an artifact of it is verified.")],
    trust_file: _File = None,
    as_json: _Json = False,
) -> None:
    """Reject every artifact of a key from now on, whenever it was made."""
    now = datetime.now(UTC).replace(microsecond=0)
    before = trust.load(trust_file)
    prefix = key.removeprefix("sha256:").lower()
    owners = {entry.owner.casefold() for entry in before.keys}
    if key.casefold() in owners or not _FINGERPRINT.fullmatch(prefix):
        prefix = _named(key, before)
    store = before.with_revoked(prefix, reason=reason, now=now)
    _save(store, trust_file, f"--reason {reason!r:.60}")
    revoked = next(e for e in store.keys if e.key.fingerprint.startswith(prefix))
    found = _entry(revoked, now)
    emit(found, as_json=as_json, text=lambda: _line(found))


def _named(key: str, store: trust.TrustStore) -> str:
    """Fingerprint of what `revoke` was given: an owner of the trust file, or what `add` takes."""
    named = {e.key.fingerprint for e in store.keys if e.owner.casefold() == key.casefold()}
    try:
        named.add(find_key(key).fingerprint)
    except (UsageError, Rejected) as error:
        if not named:
            message = f"{error.message}, and no owner in the trust file"
            raise UsageError(message, hint=error.hint) from None
    if len(named) > 1:
        message = f"{key} names {len(named)} keys: {', '.join(sorted(one[:16] for one in named))}"
        raise UsageError(message, hint="give digits of the one to revoke: attnrepro trust list")
    (fingerprint,) = named
    if store.find(fingerprint) is None:
        message = f"{key} is not in your trust file, and so is not trusted"
        raise UsageError(message, hint="attnrepro trust list")
    return fingerprint


def _save(store: trust.TrustStore, path: Path | None, given: str) -> None:
    """Write a store that a reader would accept; what it would refuse came from an option."""
    data = store.to_bytes()
    try:
        kept = trust.parse(data)
    except InvalidDocument as error:
        allowed = "; ".join(p.allowed for p in error.problems) or error.message
        message = f"{given} cannot stand in a trust file"
        raise UsageError(message, hint=f"allowed: {allowed}") from None
    trust.save(kept, path)


def _entry(entry: trust.TrustedKey, now: datetime) -> dict[str, Any]:
    return {
        "owner": entry.owner,
        "fingerprint": entry.key.fingerprint,
        "algorithm": entry.key.algorithm.value,
        "standing": entry.standing(now).value,
        "reason": entry.revoked_reason,
    }


def _line(found: dict[str, Any]) -> str:
    reason = f" ({found['reason']})" if found["reason"] else ""
    return f"{found['standing'] + reason:<20}{found['owner']}  sha256:{found['fingerprint']}"
