"""The LSE of rows that attend nothing, where an option decides what it is."""

from __future__ import annotations

import importlib
import math

import gpu_fakes
import pytest
import torch
from case_fakes import (
    TINY,
    checked,
    own_process,  # noqa: F401 - an autouse fixture
    subject_of,
)
from numerics_fakes import ReferenceBackend, workload_of

from attnrepro_runner import flush, inputs, measured
from attnrepro_runner.backends import registry, varlen
from attnrepro_runner.oracle import Oracle
from attnrepro_runner.probes import run_probes
from attnrepro_runner.report import Report
from attnrepro_runner.subject import Cell, Subject

CPU = torch.device("cpu")
EMPTY = {"seqlen_q": 24, "seqlen_k": 16, "mask": {"causal": "bottom_right"}}
CONVENTIONS = {"fa2": math.inf, "fa3": -math.inf, "fa4": -math.inf}


@pytest.mark.parametrize("given", CONVENTIONS)
@pytest.mark.parametrize("named", CONVENTIONS)
def test_varlen_is_judged_by_the_convention_of_its_implementation(
    monkeypatch: pytest.MonkeyPatch, named: str, given: str
) -> None:
    fake = gpu_fakes.varlen_attn([], CONVENTIONS[given])
    monkeypatch.setattr(importlib.import_module(varlen._MODULE), "varlen_attn", fake)
    monkeypatch.setattr(varlen, "check_implementation", lambda options: None)
    monkeypatch.setattr(varlen, "activate", lambda options: None)
    options = {"implementation": named}
    subject = Subject({"id": "s", "backend": "torch.varlen", "options": options}, CPU, 1)
    honest = CONVENTIONS[named] == CONVENTIONS[given]
    workload = workload_of(**EMPTY)
    tensors = inputs.make_inputs(workload, {}, stream=0, device="cpu")
    outputs = subject.bind(workload, tensors).step()
    report = Oracle(workload, {}, tensors).check(outputs, empty_row_lse=subject.empty_row_lse)
    assert report.ok is honest, report.reason()
    probed = run_probes(subject.backend, options, workload, CPU)
    assert (probed.status() == "PASS") is honest, probed.reason()


def test_varlen_without_the_option_is_torchs_own_flash() -> None:
    document = {"id": "s", "backend": "torch.varlen", "options": {}}
    assert Subject(document, CPU, 1).empty_row_lse == math.inf
    assert registry.load("torch.varlen").empty_row_lse == math.inf


class Chosen(ReferenceBackend):
    """Gives -inf, and says so for the options alone."""

    empty_row_lse = math.inf

    def empty_row_lse_of(self, options: object) -> float:
        return -math.inf


class Unasked(ReferenceBackend):
    """Gives -inf and says otherwise."""

    empty_row_lse = math.inf


def test_a_check_asks_for_the_options() -> None:
    good, bad = (checked(backend, **EMPTY) for backend in (Chosen(), Unasked()))
    assert good.status.value == "PASS", good.reason
    assert bad.status.value == "INCORRECT"


def test_a_launch_asks_for_the_options() -> None:
    for backend, status in ((Chosen(), "PASS"), (Unasked(), "INCORRECT")):
        report = Report(lambda place: None)
        one = Cell(id="c000", label="", workload=workload_of(**TINY | EMPTY), inputs={})
        shared = {"accuracy": {}, "timing": {"clocks": ("host",), "warmup_seconds": [0.0, 0.01]}}
        measured.MeasuredCell(
            subject_of(backend), one, shared, launch=0, device=None, empty=flush.Warm()
        ).open(report)
        assert report.status.value == status, report.reason
