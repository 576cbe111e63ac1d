from __future__ import annotations

import pytest
from manifest_fakes import document, loaded, refused


def test_cells_are_the_product_in_canonical_order() -> None:
    manifest = loaded(
        document(
            sweep={"/workload/seqlen_k": [16, 32], "/workload/batch": [1, 2]},
            workload={"phase": "forward"},
            variants=[
                {"id": "bf16", "set": {"/workload/dtype": "bfloat16"}},
                {"id": "f32", "set": {"/workload/dtype": "float32"}, "subjects": ["eager"]},
            ],
        )
    )
    assert [c.id for c in manifest.cells] == [f"c{i:03d}" for i in range(8)]
    assert [c.label for c in manifest.cells][:3] == [
        "bf16 batch=1 seqlen_k=16",
        "bf16 batch=1 seqlen_k=32",
        "bf16 batch=2 seqlen_k=16",
    ]
    assert manifest.cells[0].subjects == ("flash", "eager")
    assert manifest.cells[4].subjects == ("eager",)
    assert manifest.cells[4].workload["dtype"] == "float32"
    assert "expected" not in manifest.cells[0].inputs


def test_one_cell_without_axes_is_called_by_its_phase() -> None:
    assert [c.label for c in loaded(document()).cells] == ["prefill"]


def test_long_values_and_equal_names_stay_apart() -> None:
    manifest = loaded(
        document(
            workload={"phase": "forward", "layout": "thd", "batch": 2},
            sweep={
                "/workload/seqlen_q": [[100000 + i, 7000000 + i] for i in range(2)],
                "/inputs/seed": [1, 2],
                "/workload/mask/window": [None, {"left": 3, "right": 0}],
            },
        )
    )
    labels = [c.label for c in manifest.cells]
    assert len(set(labels)) == 8
    assert 'window={"alignment":null,"left":3,"right":0}' in labels[3] or "#1" in labels[3]


def test_what_is_wrong_with_axes_and_variants() -> None:
    value = document(
        sweep={
            "/workload/seqlen_kk": [1],
            "/workload/batch": [1, 0],
            "/request/layers": [1],
            "/inputs/expected": [{}],
        },
    )
    found = refused(value)
    assert found["/sweep/~1workload~1seqlen_kk/0"].fix == 'did you mean "/workload/seqlen_k"?'
    assert "/sweep/~1workload~1batch/1" in found
    assert "/sweep/~1inputs~1expected/0" in found
    del value["sweep"]["/workload/seqlen_kk"], value["sweep"]["/inputs/expected"]
    value["sweep"]["/workload/batch"] = [1]
    assert "while /request is null" in refused(value)["/sweep/~1request~1layers/0"].found


def test_one_field_is_set_once() -> None:
    value = document(
        sweep={"/workload/mask": [{"causal": "top_left"}]},
        variants=[{"id": "a", "set": {"/workload/mask/causal": "none"}}],
    )
    assert "/variants/0/set" in refused(value)


def test_two_equal_cells_are_refused() -> None:
    assert (
        "equal to cell"
        in refused(document(sweep={"/workload/batch": [1, 1.0]}))[
            "/sweep/~1workload~1batch/1"
        ].found
    )


@pytest.mark.timeout(60)
def test_too_many_cells_are_refused_before_they_are_made() -> None:
    axes = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v")
    value = document(sweep={f"/workload/{axis}": list(range(1, 257)) for axis in axes})
    assert refused(value)["/sweep"].found == f"{256**7} cells"
