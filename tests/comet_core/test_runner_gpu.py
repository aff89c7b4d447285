"""The runner on a GPU: every way to attend agrees, chunks and graphs change no token, memory that runs out is met."""

import dataclasses
from typing import Any

import pytest
import torch

from comet_core.bench_serving import ServingBench
from comet_core.paged_cache import FILLS_A_GPU
from comet_core.runner import BatchState, Runner
from comet_core.runner_weights import random_runner
from comet_core.serving_scheme import GIB, SCHEMES
from comet_cuda.errors import CometError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BF16_NOISE = 0.03  # relative, of logits after two layers; a wrong key or position costs more than 0.3


def on_gpu(value: Any) -> Any:
    """A model of 16-bit linears, moved tensor by tensor."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, tuple):
        return tuple(map(on_gpu, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {field.name: on_gpu(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.float().cpu(), wanted.float().cpu()
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def prefilled(model: Any, ids: torch.Tensor, prompt: int, **changes: Any) -> Runner:
    sizes = {"kv_bits": 4, "batch": len(ids), "context": 200, "page": 64, "sinks": 4}
    runner = Runner(model, **(sizes | changes))
    for slot in range(len(ids)):
        assert runner.cache.reserve(slot, 200)
    runner.prefill([(slot, row[:prompt].tolist()) for slot, row in enumerate(ids)])
    return runner


def next_logits(runner: Runner, ids: torch.Tensor, at: int, uniform: int = 0) -> torch.Tensor:
    state = BatchState.empty(len(ids), runner.model.device)
    state.write(ids[:, at].tolist(), range(len(ids)), [at] * len(ids))
    return runner.decode_logits(state, uniform)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """The same 16-bit weights on the CPU and on the GPU: two layers of SmolLM2."""
    cpu = random_runner("smollm2-135m", SCHEMES["16-bit"], "cpu", torch.bfloat16, layers=2)
    return cpu, on_gpu(cpu)


@pytest.mark.parametrize("kv_bits", [4, 16])
def test_prefill_in_any_chunks_and_decode_agree_with_the_cpu(pair: tuple[Any, Any], kv_bits: int) -> None:
    ids = torch.randint(0, 1000, (2, 150), generator=torch.Generator().manual_seed(0))
    wanted = next_logits(prefilled(pair[0], ids, 140, kv_bits=kv_bits), ids, 140)
    found = [
        next_logits(prefilled(pair[1], ids, 140, kv_bits=kv_bits, chunk=chunk), ids, 140) for chunk in (8192, 100, 37)
    ]
    assert distance(found[0], wanted) < BF16_NOISE
    for other in found[1:]:
        assert distance(other, found[0]) < BF16_NOISE


def test_every_16_bit_decode_attention_agrees(pair: tuple[Any, Any]) -> None:
    """Split along the keys (few sequences), grouped queries (many), one length (static batches)."""
    many = FILLS_A_GPU // pair[1].shape.kv_heads + 1
    ids = torch.randint(0, 1000, (many, 60), generator=torch.Generator().manual_seed(0))
    grouped = next_logits(prefilled(pair[1], ids, 50, kv_bits=16), ids, 50)
    uniform = next_logits(prefilled(pair[1], ids, 50, kv_bits=16), ids, 50, uniform=51)
    few = next_logits(prefilled(pair[1], ids[:3], 50, kv_bits=16), ids[:3], 50)
    assert distance(uniform, grouped) < BF16_NOISE
    assert distance(few, grouped[:3]) < BF16_NOISE


@pytest.mark.parametrize("scheme", ["16-bit", "KV4", "W4A4KV4"])
def test_graphs_refill_and_padding_change_no_token(scheme: str) -> None:
    chosen = SCHEMES[scheme]
    model = random_runner("smollm2-135m", chosen, "cuda", torch.bfloat16, layers=2)
    runner = Runner(model, kv_bits=chosen.kv_bits, batch=3, context=200, page=64, sinks=4, chunk=64)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in (5, 70, 1, 9, 120, 3)]
    together = runner.generate(prompts, max_new_tokens=12)
    assert together == [runner.generate([prompt], max_new_tokens=12)[0] for prompt in prompts]
    state = BatchState.empty(2, model.device)
    graph, captured = runner.captured(2)
    for slot in (0, 1):
        assert runner.cache.reserve(slot, 100)
    runner.prefill([(0, prompts[1]), (1, prompts[3])])
    for each in (state, captured):
        each.write([4, 5], (0, 1), [len(prompts[1]), len(prompts[3])])
    wanted = runner.decode_logits(state).argmax(-1)
    graph.replay()
    assert torch.equal(captured.tokens, wanted)


def test_memory_that_runs_out_is_met() -> None:
    """The allocator is held to less than the plan counts on: "max" steps down and still measures."""
    bench = ServingBench("smollm2-135m", "16-bit", layers=2)
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(CometError, match=r"needs .* GiB .* are free"):
        bench.measure(10**7, 128, 16)
    try:
        torch.cuda.set_per_process_memory_fraction(min(1.0, 6 * GIB / total))
        bench.available = lambda: 9 * GIB  # type: ignore[method-assign]
        record = bench.measure("max", 2000, 4)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert record["batch_is_largest"] and record["memory_gib"] < 6
