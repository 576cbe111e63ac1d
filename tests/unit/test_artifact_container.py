from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrepro.artifact import container
from attnrepro.artifact.budget import Budget
from attnrepro.errors import Rejected

BUDGET = Budget()
PART = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,8}", fullmatch=True)
NAME = st.lists(PART, min_size=1, max_size=4).map("/".join)


def _possible(members: dict[str, bytes]) -> bool:
    try:
        container.check_names(sorted(members))
    except Rejected:
        return False
    return True


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(NAME, st.binary(max_size=50), max_size=8).filter(_possible))
def test_read_inverts_write(members: dict[str, bytes]) -> None:
    data = container.write(members)
    assert container.read(data, budget=BUDGET) == members
    assert container.write(dict(reversed(members.items()))) == data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == members


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300))
def test_reading_anything_rejects_or_round_trips(data: bytes) -> None:
    again, rule = data, ""
    try:
        again = container.write(container.read(data, budget=BUDGET))
    except Rejected as error:
        rule = error.rule
    assert again == data
    assert rule == "" or (rule is not None and rule.startswith("container."))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_change_rejects(data: st.DataObject) -> None:
    honest = container.write({"a/b.json": b"{}", "c": b"123"})
    at = data.draw(st.integers(0, len(honest) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda v: v != honest[at]))
    changed = honest[:at] + bytes([value]) + honest[at + 1 :]
    try:
        members = container.read(changed, budget=BUDGET)
    except Rejected:
        return
    assert container.write(members) == changed  # a renamed member, say: another valid container


def test_known_bytes() -> None:
    """The format itself: a change here breaks every signature ever made."""
    data = container.write({"a": b"x"})
    assert data.hex() == (
        "504b03040a00000000000000210083"
        "16dc8c01000000010000000100000061"
        "78"
        "504b01021e030a00000000000000210083"
        "16dc8c0100000001000000010000000000000000000000"
        "a4810000000061"
        "504b050600000000010001002f000000200000000000"
    )


def test_budget_of_members() -> None:
    data = container.write({"a": b"", "b": b""})
    with pytest.raises(Rejected) as caught:
        container.read(data, budget=Budget(members=1))
    assert caught.value.rule == "container.members"


def test_at_most_1000_members() -> None:
    container.write({f"m{index}": b"" for index in range(1000)})
    with pytest.raises(Rejected) as caught:
        container.write({f"m{index}": b"" for index in range(1001)})
    assert caught.value.rule == "container.members"
