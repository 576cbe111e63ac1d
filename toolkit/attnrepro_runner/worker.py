"""A worker process: loads one subject, answers requests until the pipe closes.

Imports of the library under test happen in `hello`, after the timer is bound.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import TYPE_CHECKING, Any

from attnrepro_runner import clocks, protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnrepro_runner.flush import Flush
    from attnrepro_runner.measured import MeasuredCell
    from attnrepro_runner.report import Report
    from attnrepro_runner.subject import Cell, Subject

    Work = Callable[[Cell, Report], None]

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def main(requests: int, answers: int) -> int:
    """Answer requests from one descriptor on another; return when the first is closed."""
    _end_with_the_parent()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the coordinator decides
    inbox = protocol.Inbox(requests)
    service = Service(answers)
    while True:
        try:
            request = inbox.read()
            protocol.write(answers, service.answer(request))
        except protocol.Closed:
            return 0


class Service:
    """The subject and the cell in hand."""

    def __init__(self, answers: int) -> None:
        """Answer notes on a descriptor; nothing is loaded yet."""
        self._answers = answers
        self._subject: Subject
        self._shared: Mapping[str, Any] = {}
        self._import_ns = 0
        self._open: MeasuredCell | None = None
        self._flush: Flush | None = None
        self._device: clocks.DeviceApi | None = None
        self._repeat: Callable[[float], tuple[int, int]] | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Do what is asked; an exception becomes a failure, never the end of the process."""
        try:
            return {"done": getattr(self, "do_" + str(request["do"]))(request)}
        except Exception as error:
            from attnrepro_runner.report import Report

            report = Report(lambda _: None)
            report.failed(error)
            return {"failed": {"status": report.status.value, "reason": str(report.reason)}}

    def do_hello(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Import torch, the adapter and its library; say what came up."""
        self._note("import")
        begin = clocks.now()
        import torch

        from attnrepro_runner import libraries, subject

        self._import_ns = clocks.now() - begin
        self._shared = request["shared"]
        device = libraries.torch_device()
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        torch.set_num_threads(threads)
        begin = clocks.now()
        self._subject = subject.Subject(request["subject"], device, threads)
        self._subject.import_library()
        self._import_ns += clocks.now() - begin

        from attnrepro_runner import flush, mathflags

        self._flush = flush.choose(
            device, wanted=bool(self._shared["timing"].get("flush_cache", True))
        )
        return {
            "framework": f"torch {torch.__version__}",
            "math": mathflags.read_back(),
            "flush": self._flush.describe(),
            "device": libraries.device_facts(device),
            "facts": {
                "torch_threads": str(torch.get_num_threads()),
                "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
                "torch_config": " ".join(torch.__config__.show().split())[:4000],
            },
        }

    def do_prime(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Load what the first cell would load, of everything but the subject."""
        del request
        from attnrepro_runner import stages

        self._note("priming")
        stages.prime(self._subject.device)
        return {}

    def do_check(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Check a cell."""
        from attnrepro_runner import libraries, stages

        libraries.learn_digests(request["digests"])
        profile = os.environ.get("ATTNREPRO_PROFILE", "native")

        def work(cell: Cell, report: Report) -> None:
            stages.check(self._subject, cell, report, self._shared, profile=profile)

        return {**self._cell(request, work).entry(), "digests": libraries.known_digests()}

    def do_cold(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Time a cell's cold start."""
        from attnrepro_runner import stages

        def work(cell: Cell, report: Report) -> None:
            stages.cold(self._subject, cell, report, import_ns=self._import_ns)

        return self._cell(request, work).entry()

    def do_memory(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Count a cell's memory."""
        from attnrepro_runner import stages

        def work(cell: Cell, report: Report) -> None:
            stages.measure_memory(self._subject, cell, report)

        return self._cell(request, work).entry()

    def do_open(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Make a cell ready for blocks of samples."""
        from attnrepro_runner import measured, stages

        flush = self._flush
        assert flush is not None
        if self._device is None:
            self._device = stages.clocks_device(self._subject)
        readable: dict[str, int] = {}

        def work(cell: Cell, report: Report) -> None:
            opened = measured.MeasuredCell(
                self._subject,
                cell,
                self._shared,
                launch=int(request["launch"]),
                device=self._device,
                empty=flush,
            )
            readable.update(opened.open(report))
            self._open = opened if readable else None

        self._open = None
        entry = self._cell(request, work).entry()
        return {"entry": entry, "clocks": readable, "flushed": flush.complete}

    def do_block(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Take samples; those that do not count come first."""
        assert self._open is not None
        self._note("sampling")
        self._open.warm_again()
        count = int(request["discard"]) + int(request["count"])
        begin = clocks.now()
        block = self._open.block(request["clocks"], count)
        return {
            "samples": block.samples,
            "lost": block.lost,
            "partial": block.partial,
            "repeated": block.repeated,
            "spent_ns": clocks.now() - begin,
        }

    def do_ceilings(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Measure what the device reaches: copying, reading, one product a dtype."""
        from attnrepro_runner import ceilings

        self._note("ceilings")
        found = ceilings.measure(request["dtypes"], self._subject.device)
        return {"ceilings": [ceiling.to_dict() for ceiling in found]}

    def do_ready(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Bind a cell so that its call can be repeated back to back."""
        from attnrepro_runner import stages

        self._repeat = None

        def work(cell: Cell, report: Report) -> None:
            self._repeat = stages.repeater(self._subject, cell, report)

        return self._cell(request, work).entry()

    def do_repeat(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Repeat the bound call for a while; say how often, and how long that took."""
        assert self._repeat is not None
        self._note("repeating")
        calls, spent = self._repeat(float(request["seconds"]))
        return {"calls": calls, "spent_ns": spent}

    def do_close(self, request: Mapping[str, Any]) -> dict[str, object]:
        """Check the cell again and let it go."""
        assert self._open is not None
        opened, self._open = self._open, None

        def work(_: Cell, report: Report) -> None:
            opened.close(report)

        return {"entry": self._cell(request, work).entry()}

    def _cell(self, request: Mapping[str, Any], work: Work) -> Report:
        from attnrepro_runner.report import Report
        from attnrepro_runner.subject import Cell

        report = Report(self._note)
        try:
            work(Cell.read(request["cell"]), report)
        except Exception as error:  # the subject's, whatever it is
            report.failed(error)
        return report

    def _note(self, place: str) -> None:
        protocol.write(self._answers, {"note": place})


def _end_with_the_parent() -> None:
    """Ask the kernel to end this process when the coordinator ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
