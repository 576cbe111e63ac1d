"""NVML, ceilings and request models on the GPU at hand."""

from __future__ import annotations

import pytest
import torch

from attnrepro_runner import ceilings, marks, models, nvml, plausible, requests, shares
from attnrepro_runner.accelerator import AcceleratorUnavailable
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.semantics import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.filterwarnings("ignore"),
]

DEVICE = torch.device("cuda", 0)
MODEL: dict[str, object] = {
    "batch": 2,
    "heads_q": 4,
    "heads_kv": 2,
    "head_dim": 64,
    "dtype": "bfloat16",
    "mask": {"causal": "bottom_right"},
}
KINDS: dict[str, dict[str, object]] = {
    "training_step": {"phase": "forward_backward", "seqlen_q": 256, "seqlen_k": 256},
    "prefill": {"phase": "prefill", "seqlen_q": 256, "seqlen_k": 256},
    "decode_step": {
        "phase": "decode",
        "seqlen_q": 1,
        "seqlen_k": 500,
        "cache": {"kind": "contiguous", "capacity": 512, "append": 1},
    },
}


def test_nvml_is_the_frameworks_device() -> None:
    properties = torch.cuda.get_device_properties(DEVICE)
    try:
        device = nvml.open_nvml(uuid=str(properties.uuid))
    except AcceleratorUnavailable as error:
        pytest.skip(str(error))
    record = device.record()
    assert record.model == properties.name
    assert record.architecture == f"sm_{properties.major}{properties.minor}"
    assert record.memory_bytes is not None
    assert record.memory_bytes >= properties.total_memory
    sample = device.sample()
    assert sample.power_mw is not None
    assert sample.power_mw > 1000
    assert str(properties.uuid) not in str(record) + str(sample)
    device.close()


def test_a_ceiling_is_below_the_architectures_limit() -> None:
    properties = torch.cuda.get_device_properties(DEVICE)
    architecture = f"sm_{properties.major}{properties.minor}"
    if architecture not in plausible.FLOPS_PER_CLOCK:
        pytest.skip(f"no limit is known for {architecture}")
    device = nvml.open_nvml(uuid=str(properties.uuid))
    clock = device.record().sm_clock_max_mhz
    found = ceilings.measure(("bfloat16", "float16", "float32"), DEVICE)
    assert {c.dtype for c in found} == {"uint8", "int64", "bfloat16", "float16", "float32"}
    for ceiling in (c for c in found if "float" in c.dtype):
        limit = plausible.flops_limit(
            architecture, properties.multi_processor_count, clock, ceiling.dtype
        )
        assert limit is not None
        # Products in full precision could run at 2.7 times the rate at which they do.
        least = limit / (8 if ceiling.dtype == "float32" else 4)
        assert least < ceiling.per_second < limit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "backend",
    [n for n in registry.BACKENDS if "rocm" not in n and n not in ("sdpa.math", "flex")],
)
def test_requests_agree_whatever_the_backend(backend: str, kind: str) -> None:
    workload = Workload.parse(MODEL | KINDS[kind])
    model = models.find(f"small_{kind}", None)
    values = []
    for name in ("sdpa.math", backend):
        adapter = registry.load(name)
        found = adapter.availability()
        if not found.available:
            pytest.skip(f"{name}: {found.reason}")
        try:
            adapter.check(workload, {})
            request = requests.Request(model, adapter, workload, {}, {"seed": 1}, DEVICE)
        except Unsupported as refusal:
            pytest.skip(f"{name} refuses: {refusal}")
        request.step()
        timed = marks.TimedMarks(DEVICE)
        values.append(request.step(timed).float())
        assert 0 < shares.attention_share(timed.totals_ns()) < 1
    torch.testing.assert_close(values[0], values[1], atol=0.05, rtol=0.05)
