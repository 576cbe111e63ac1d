"""What stands at the path, what stands in the trust file, and what is printed."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from test_hostile_keys import SMALL_ORDER

from attnrepro.artifact import trust
from attnrepro.artifact.budget import Budget, read_once
from attnrepro.artifact.trust import TrustedKey, TrustStore
from attnrepro.artifact.verify import check_threshold, support, verify
from attnrepro.cli.main import run
from attnrepro.errors import InvalidDocument, Rejected, UsageError
from support import example

NOW = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def honest() -> bytes:
    return example.artifact()


def entry(seed: int = 1, owner: str = "alice", **more: Any) -> TrustedKey:
    return TrustedKey(owner=owner, key=example.signer(seed).public, added=NOW, **more)


def rule_of_path(path: Path) -> str | None:
    with pytest.raises(Rejected) as caught:
        verify(path, trust=TrustStore())
    return caught.value.rule


# The path.


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
@pytest.mark.timeout(10)
def test_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.attnrepro")
    assert rule_of_path(tmp_path / "x.attnrepro") == "input.not_regular"


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no /dev/zero")
@pytest.mark.timeout(10)
def test_endless_device() -> None:
    assert rule_of_path(Path("/dev/zero")) == "input.not_regular"


def test_folder(tmp_path: Path) -> None:
    assert rule_of_path(tmp_path) == "input.not_regular"


def test_too_large_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.attnrepro"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse: nothing is allocated, unless somebody reads it
    assert rule_of_path(path) == "input.too_large"


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        verify(tmp_path / "x.attnrepro", trust=TrustStore())


def test_budget_holds_for_bytes(honest: bytes) -> None:
    with pytest.raises(Rejected) as caught:
        verify(honest, trust=TrustStore(), budget=Budget(content=100))
    assert caught.value.rule == "outer.size"


def test_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.attnrepro"
    path.write_bytes(bytes(100))
    budget = Budget(content=0)
    stop = threading.Event()

    def grow() -> None:
        with path.open("ab", buffering=0) as file:
            while not stop.is_set() and file.tell() < 64 * 2**20:
                file.write(bytes(2**20))

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                assert len(read_once(path, budget)) <= budget.file
            except Rejected as error:
                rule = error.rule
                break
        else:
            rule = "it never became too large"
    finally:
        stop.set()
        writer.join()
    assert rule == "input.too_large"


def test_file_replaced_between_check_and_use(
    tmp_path: Path, honest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that is shown comes from the one read: a swap during verify changes nothing."""
    from attnrepro.artifact import bundle

    path = tmp_path / "x.attnrepro"
    path.write_bytes(honest)
    other = example.artifact(example.signer(9))
    parse, swapped = bundle.parse, []

    def swapping(data: bytes) -> bundle.Bundle:
        replacement = tmp_path / "y"
        replacement.write_bytes(other)
        replacement.replace(path)
        swapped.append(True)
        return parse(data)

    monkeypatch.setattr(bundle, "parse", swapping)
    verified = verify(path, trust=TrustStore(keys=(entry(),)), now=NOW)
    assert swapped
    assert path.read_bytes() == other
    assert verified.owner == "alice"
    assert verified.signer == example.signer().public


# The trust file.


def _file(*keys: dict[str, Any], threshold: Any = 1, **more: Any) -> bytes:
    document = {"schema": trust.SCHEMA, "threshold": threshold, "keys": list(keys), **more}
    return json.dumps(document).encode()


def _key(seed: int = 1, **changes: Any) -> dict[str, Any]:
    return {**entry(seed).document(), **changes}


@pytest.mark.parametrize("point", SMALL_ORDER, ids=lambda point: point.hex()[:8])
def test_small_order_key_in_the_trust_file(point: bytes) -> None:
    der = example.signer().public.der[:-32] + point
    with pytest.raises(InvalidDocument) as caught:
        trust.parse(_file(_key(public_key=base64.b64encode(der).decode())))
    assert caught.value.rule == "key.small_order"


def test_one_key_under_two_owners() -> None:
    with pytest.raises(InvalidDocument) as caught:
        trust.parse(_file(_key(owner="alice"), _key(owner="bob")))
    assert caught.value.rule == "trust.two_owners"


def test_one_key_twice() -> None:
    with pytest.raises(InvalidDocument) as caught:
        trust.parse(_file(_key(), _key(owner="ALICE")))
    assert caught.value.rule == "trust.two_owners"


def test_revoked_key_entered_again_as_valid() -> None:
    revoked = _key(revoked={"at": "2026-01-01T00:00:00Z", "reason": "lost"})
    with pytest.raises(InvalidDocument):
        trust.parse(_file(revoked, _key()))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        _file(threshold=0),
        _file(threshold=1.5),
        _file(threshold=True),
        _file(extra=1),
        _file(_key(owner="")),
        _file(_key(owner=" alice")),
        _file(_key(owner="alice\n")),
        _file(_key(owner="alice\u202e")),
        _file(_key(owner="\u0430lice")),  # Cyrillic a
        _file(_key(public_key="")),
        _file(_key(public_key="AAAA")),
        _file(_key(public_key="A")),
        _file(_key(added="yesterday")),
        _file(_key(added="2026-02-30T00:00:00Z")),
        _file(_key(not_after="2026-13-01T00:00:00Z")),
        _file(_key(revoked={})),
        _file(_key(trusted=True)),
        _file(_key()).replace(b'"threshold": 1', b'"threshold": 2, "threshold": 1'),
        b"\xef\xbb\xbf" + _file(_key()),
    ],
)
def test_invalid_trust_file_is_refused_whole(data: bytes) -> None:
    with pytest.raises(InvalidDocument):
        trust.parse(data)


def test_standing(honest: bytes) -> None:
    def owner(**more: Any) -> str | None:
        return verify(honest, trust=TrustStore(keys=(entry(**more),)), now=NOW).owner

    day = timedelta(days=1)
    assert owner(not_before=NOW - day, not_after=NOW + day) == "alice"
    for rule, more in (
        ("trust.expired", {"not_after": NOW - day}),
        ("trust.not_yet_valid", {"not_before": NOW + day}),
        ("trust.revoked", {"revoked_at": NOW + day, "revoked_reason": "stolen"}),
    ):
        with pytest.raises(Rejected) as caught:
            owner(**more)
        assert caught.value.rule == rule


def test_bad_content_of_an_unknown_key_is_rejected_not_unknown(honest: bytes) -> None:
    changed = example.content_zip(honest)[:-1] + b"\x01"
    with pytest.raises(Rejected) as caught:
        verify(example.with_content(honest, changed), trust=TrustStore())
    assert caught.value.rule == "subject.content"


# Several owners.


def test_threshold_counts_distinct_owners(honest: bytes) -> None:
    from attnrepro.artifact.sign import Original

    store = TrustStore(
        keys=(entry(1, "alice"), entry(2, "bob"), entry(3, "ALICE"), entry(4, "carol")),
        threshold=2,
    )
    original = verify(honest, trust=store, now=NOW)
    of = Original.of(original)

    def backing(*reruns: bytes) -> tuple[tuple[str, ...], tuple[str, ...], int]:
        checked = [verify(data, trust=store, now=NOW) for data in reruns]
        found = support(original, checked, trust=store, now=NOW)
        return found.owners, found.independent, len(found.ignored)

    mine, bobs = example.rerun(of, example.signer(3)), example.rerun(of, example.signer(2))
    strangers = example.rerun(of, example.signer(9))
    no = {"result": "no", "required": True, "reason": "differ", "first_difference": "c000 out"}
    differs = example.rerun(of, example.signer(4), outputs_identical=no)
    files = {**example.files(), "logs/flash-0.txt": b"other\n"}
    elsewhere = example.rerun(
        Original.of(verify(example.artifact(files=files), trust=store, now=NOW)),
        example.signer(4),
    )
    assert backing() == (("alice",), (), 0)
    assert backing(mine) == (("alice",), (), 1)
    not_a_rerun = support(original, [original], trust=store, now=NOW)
    assert not_a_rerun.ignored == ("rerun 1 is the statement of a run, not of a rerun",)
    assert backing(strangers, differs, elsewhere) == (("alice",), (), 3)
    assert backing(bobs, bobs) == (("alice", "bob"), ("bob",), 0)
    with pytest.raises(Rejected) as caught:
        check_threshold(support(original, [], trust=store, now=NOW), store)
    assert caught.value.rule == "trust.threshold"
    rerun = verify(bobs, trust=store, now=NOW)
    check_threshold(support(original, [rerun], trust=store, now=NOW), store)


def test_rerun_must_carry_its_signed_verdicts(honest: bytes) -> None:
    from attnrepro import jsonio
    from attnrepro.artifact.sign import Original

    data = example.rerun(Original.of(verify(honest, trust=TrustStore())))
    statement = example.payload(data)
    statement["predicate"]["verdicts"]["outputs_identical"]["reason"] = "other"
    with pytest.raises(Rejected) as caught:
        verify(
            example.resigned(data, jsonio.canonical(statement), example.signer(2)),
            trust=TrustStore(),
        )
    assert caught.value.rule == "crosscheck.verdicts"


# What is printed.

EVIL = "\x1b[2J\x1b[31mTRUSTED\x1b]0;x\x07\r\u202e\u009b1m"


@pytest.fixture
def evil_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Intact and signed, with escape sequences in every field that may hold text."""
    from attnrepro.artifact import sign

    monkeypatch.setenv("ATTNREPRO_HOME", str(tmp_path / "home"))
    seen = example.observations()
    cell = seen["cells"][0]
    cell["uncompared"] = [EVIL]
    cell["subjects"][0]["place"] = seen["run"]["id"] = EVIL
    cell["subjects"][0]["execution"]["expected"] = cell["subjects"][0]["reason"] = EVIL
    seen["device"]["model"] = seen["containment"]["version"] = EVIL
    files = {**example.files(), "logs/flash-0.txt": EVIL.encode()}
    packed = example.content(observations=seen, files=files)
    path = tmp_path / "evil.attnrepro"
    path.write_bytes(
        sign.make_artifact(packed, predicate=example.predicate(), signer=example.signer())
    )
    return path


@pytest.mark.parametrize(
    ("verb", "options", "code"),
    [
        ("verify", [], 3),
        ("verify", ["--json"], 3),
        ("show", [], 0),
        ("show", ["--json"], 0),
        ("show", ["--csv"], 0),
        ("attach", ["--pr"], 0),
        ("attach", ["--paper"], 0),
    ],
)
def test_no_escape_sequence_reaches_the_terminal(
    evil_file: Path,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    options: list[str],
    code: int,
) -> None:
    assert run([verb, str(evil_file), *options]) == code
    printed = "".join(capsys.readouterr())
    assert verb == "verify" or "TRUSTED" in printed
    assert not set(printed) & set("\x1b\x07\r\u202e\u009b")


@pytest.mark.parametrize(
    "change",
    [
        {"device_class": {"model": EVIL}},
        {"invocation": ["attnrepro", EVIL]},
        {"redactions": [EVIL]},
        {"runner": {"version": EVIL, "sha256": "0" * 64}},
        {"containment": {"engine": EVIL, "contained": True, "options": []}},
    ],
)
def test_no_escape_sequence_is_signed(honest: bytes, change: dict[str, Any]) -> None:
    from attnrepro import jsonio

    statement = example.payload(honest)
    statement["predicate"] |= change
    with pytest.raises(Rejected) as caught:
        verify(example.resigned(honest, jsonio.canonical(statement)), trust=TrustStore())
    assert caught.value.rule == "statement.schema"


def test_unknown_key_with_familiar_names_exits_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stranger's predicate claims a trusted owner; the exit code is exactly 3."""
    from attnrepro.artifact import sign

    monkeypatch.setenv("ATTNREPRO_HOME", str(tmp_path / "home"))
    trust.save(TrustStore(keys=(entry(1, "self"),)))
    predicate = example.predicate()
    predicate["device_class"] |= {"owner": "self", "signer": example.signer().public.fingerprint}
    data = sign.make_artifact(example.content(), predicate=predicate, signer=example.signer(9))
    path = tmp_path / "self.attnrepro"
    path.write_bytes(data)
    assert run(["verify", str(path)]) == 3
    assert "signed by yourself" not in "".join(capsys.readouterr())
