"""A manifest of 1,000 cells: what `check` does for each, and that it does it once."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from manifest_fakes import document, loaded

from attnrepro import resources
from attnrepro.manifest import explain, plan
from attnrepro.manifest.capability import Capability
from attnrepro_runner.semantics import Workload

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "folder", sorted(resources.images_dir().glob("*/r*")), ids=lambda folder: folder.parent.name
)
def test_a_thousand_cells_are_read_and_judged_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every backend of the stack is a subject, so that nothing is left uncompared."""
    stack = Capability.load(folder)
    vendor = stack.claims[0]["vendors"][0]
    counts = {"parse": 0, "decide": 0, "judge": 0}

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    counted(Workload, "parse")
    for module, name in ((plan, "decide"), (plan, "judge"), (explain, "judge")):
        counted(module, name)
    manifest = loaded(
        document(
            image={"stack": folder.parent.name},
            device={"vendor": vendor},
            workload={"phase": "forward"},
            sweep={
                "/workload/seqlen_k": list(range(16, 141)),
                "/workload/softcap": [None, 30],
                "/workload/dtype": ["bfloat16", "float16"],
                "/workload/head_dim_v": [None, 32],
            },
            subjects=[{"id": f"s{i}", "backend": b} for i, b in enumerate(stack.backends)],
        )
    )
    found = explain.document(manifest)
    assert len(found["cells"]) == 1000
    assert counts == {"parse": 1000, "decide": 1000 * len(stack.backends), "judge": 1}
    refused = dict.fromkeys(stack.backends, 0)
    for one in found["cells"]:
        assert one["uncompared"] == []
        for subject_, backend in zip(found["subjects"], stack.backends, strict=True):
            support = one["subjects"][subject_["id"]]
            refused[backend] += support["status"] == "UNSUPPORTED"
            assert ("reason" in support) == (support["status"] == "UNSUPPORTED")
    assert refused == {name: 1000 - covered(stack, name) for name in stack.backends}


def covered(stack: Capability, backend: str) -> int:
    """How many of those cells some claim covers, told from the claims' own fields."""
    claims = [claim for claim in stack.claims if claim["backend"] == backend]
    calls = itertools.product((False, True), ("bfloat16", "float16"), (64, 32))
    return 125 * sum(any(covers(claim, *call) for claim in claims) for call in calls)


def covers(claim: dict[str, Any], softcap: bool, dtype: str, width: int) -> bool:
    widths = claim["head_dim_v"]
    return (
        "forward" in claim["phases"]
        and dtype in claim["dtypes"]
        and claim["head_dim"]["min"] <= 64 <= claim["head_dim"]["max"]
        and (width == 64 if widths == "equal" else widths["min"] <= width <= widths["max"])
        and claim["gqa"]
        and (claim["softcap"] or not softcap)
    )
