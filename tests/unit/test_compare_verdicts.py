"""Verdicts on code that is compiled when it runs."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from test_compare_explain import side

from attnrepro.compare.verdicts import Result, Side, kernels_identical

CODE = ["0" * 64, "1" * 64]


def compiling(backend: str, cubins: list[str]) -> Side:
    found = side()
    observations: dict[str, Any] = copy.deepcopy(dict(found.observations))
    for cell in observations["cells"]:
        for subject in cell["subjects"]:
            subject["backend"] = backend
            subject["execution"]["cubins"] = cubins
    return replace(found, observations=observations)


@pytest.mark.parametrize("backend", ["flex", "flash_attn_4", "flashinfer"])
def test_compiled_code_that_was_not_recorded_is_not_called_identical(backend: str) -> None:
    before = compiling(backend, [])
    verdict = kernels_identical(before, before)
    assert verdict.result is Result.NOT_COMPARABLE
    assert "run time" in verdict.reason
    recorded = compiling(backend, CODE)
    assert kernels_identical(recorded, recorded).result is Result.YES
    other = kernels_identical(recorded, compiling(backend, CODE[:1]))
    assert other.result is Result.NO
    assert "1 of them equal" in str(other.first_difference)


def test_the_order_in_which_cells_were_checked_is_no_part_of_the_code() -> None:
    # A cell's list holds what the cells before it compiled: one that was tried again comes last.
    first, again = compiling("flash_attn_4", CODE[:1]), compiling("flash_attn_4", CODE)
    for found, cubins in ((first, CODE), (again, CODE)):
        seen: Any = found.observations
        cell = copy.deepcopy(seen["cells"][0])
        cell["id"] = "c001"
        for subject in cell["subjects"]:
            subject["execution"]["cubins"] = cubins
        seen["cells"].append(cell)
    assert kernels_identical(first, again).result is Result.YES


def test_libraries_need_no_compiled_code() -> None:
    before = compiling("sdpa.flash", [])
    assert kernels_identical(before, before).result is Result.YES
