"""Records of the end-to-end benchmark: their sums, their keys, what is refused; and the arithmetic of a trace."""

from pathlib import Path
from typing import Any

import pytest
import torch

from comet_core.bench_serving import ServingBench, _between, bench_serving
from comet_core.results import check
from comet_core.runner import Runner
from comet_core.serving_report import draw_memory, draw_step_parts, draw_throughput, serving_table, step_table
from comet_core.serving_scheme import SCHEMES, kv_bytes, weight_bytes
from comet_core.step_breakdown import ATTENTION, GEMM, LM_HEAD, QUANTIZE, KernelRun, summarize, table
from comet_cuda.errors import CometError


@pytest.fixture(scope="module")
def bench() -> ServingBench:
    return ServingBench("smollm2-135m", "W4A4KV4", device="cpu", layers=1)


def test_a_record_adds_up(bench: ServingBench) -> None:
    record = bench.measure(2, 12, 6)
    check(record)
    prefill, decode = 2 * 12 / record["prefill_tokens_per_s"], 5 * record["tpot_ms"] / 1000
    assert record["tokens_per_s"] == pytest.approx(2 * 6 / (prefill + decode), rel=0.02)
    assert record["memory_gib"] == pytest.approx(sum(record["memory"].values()), abs=0.003)
    assert 0.84 <= record["int4_share"] < 1 and record["layers"] == 1
    assert "random weights" in record["weights"]


def test_planned_memory_is_what_is_allocated(bench: ServingBench) -> None:
    shape = bench.model.shape
    sixteen_bit_parts = shape.kv_heads * (2 * 128 + 4 * 4) * shape.head_dim  # open page and sinks
    planned = 3 * (kv_bytes(shape, 4, 300) + sixteen_bit_parts)  # these are float32 here
    assert bench.runner(3, 300).memory()["kv"] == planned
    sixteen = ServingBench("smollm2-135m", "16-bit", device="cpu", layers=1)
    planned = weight_bytes(sixteen.model.shape, SCHEMES["16-bit"])
    assert sixteen.runner(1, 16).memory()["weights"] == 2 * planned  # float32 here, 16 bit on a GPU


def test_time_is_linear_between_the_points() -> None:
    points = [(10, 1.0), (20, 2.0), (40, 3.0)]
    assert [_between(points, at) for at in (10, 15, 30, 50)] == [1.0, 1.5, 2.5, 3.5]


def test_what_does_not_fit_is_skipped_with_a_word() -> None:
    said: list[str] = []
    found = list(
        bench_serving("smollm2-135m", ["16-bit"], [10**6], [(8, 4)], device="cpu", layers=1, on_skip=said.append)
    )
    assert not found and "needs" in said[0]
    with pytest.raises(CometError, match="scheme"):
        list(bench_serving("smollm2-135m", ["W3A3"], [1], device="cpu"))


def test_the_parts_of_a_step_and_its_gaps_add_up() -> None:
    runs = [
        KernelRun("quantize_act", 0, 10),
        KernelRun("w4ax_gemm_sm90", 5, 40),  # started early
        KernelRun("kv4_decode", 42, 60),
        KernelRun("void at::native::copy<int>(int)", 67, 68),
        KernelRun("nvjet_tst_128x64", 68, 90),
    ]
    found = summarize(runs)
    assert found["span_us"] == 90
    assert found["kinds"] == {GEMM: 30, LM_HEAD: 22, ATTENTION: 18, QUANTIZE: 10, "other": 1}
    assert sum(found["kinds"].values()) + found["gaps"]["sum_us"] == found["span_us"]
    assert found["gaps"] == {"count": 2, "sum_us": 9, "largest_us": 7, "over_5_us": 1}
    assert found["besides_gemm_and_attention_us"] == 11
    assert "| other | copy | 1 | 1.0 | 1.1% |" in table(found)


def test_random_cache_contents_stay_finite(bench: ServingBench) -> None:
    runner = bench.runner(2, 140)
    runner.state(2).write([1, 2], [0, 1], [135, 135])
    assert torch.isfinite(runner.decode_logits(runner.state(2))).all()


PARTS = {
    "kinds": {"GEMM": 5000.0, "attention": 3.0},
    "gaps": {"sum_us": 1.0, "largest_us": 0.5},
    "span_us": 5004.0,
    "context": 1281,
}


def record(scheme: str, tokens_per_s: float, tpot_ms: float) -> dict:
    return {
        "kind": "e2e", "model": "llama-3-8b", "scheme": scheme, "engine": "comet", "batch": 64, "prompt_tokens": 1024,
        "output_tokens": 512, "tokens_per_s": tokens_per_s, "ttft_ms": 10.0, "tpot_ms": tpot_ms, "memory_gib": 20.0,
        "provenance": {"gpu": "a GPU"},
    }  # fmt: skip


def test_the_table_compares_with_16_bit_and_takes_the_latest() -> None:
    found = [record("16-bit", 1000.0, 10.0), record("W4A4KV4", 1500.0, 6.0), record("W4A4KV4", 2000.0, 4.0)]
    lines = serving_table(found).splitlines()
    assert len(lines) == 4
    assert "| 2,000 | 2.00 | 2.50 |" in lines[3]
    assert "| 1,000 |  |  |" in lines[2]
    on_vllm = {"engine": "vLLM 0.26.0"}
    lines = serving_table([*found, record("bf16", 500.0, 20.0) | on_vllm, record("comet", 600.0, 10.0) | on_vllm])
    assert any("comet, vLLM 0.26.0" in line and "| 600 | 1.20 | 2.00 |" in line for line in lines.splitlines())


def test_pictures_are_drawn(tmp_path: Path) -> None:
    found = [record("16-bit", 1000.0, 10.0), record("W4A4KV4", 2000.0, 4.0) | {"step_parts": PARTS}]
    drawn = [
        draw_throughput(found, "llama-3-8b", (1024, 512), tmp_path / "a.png"),
        draw_memory("llama-2-7b", tmp_path / "b.png"),
        draw_step_parts(found, tmp_path / "c.png"),
    ]
    assert all(png.read_bytes().startswith(b"\x89PNG") for png in drawn)


def test_traced_steps_come_from_both_kinds_of_record() -> None:
    step = {key: record("W4A4KV4", 0, 0)[key] for key in ("model", "scheme", "engine", "batch", "provenance")}
    step |= {"kind": "step", "context": 1281, "layers": 4, "step_parts": PARTS}
    check(step)
    lines = step_table([step, record("16-bit", 1000.0, 10.0) | {"step_parts": PARTS}]).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| llama-3-8b, 4 layers | W4A4KV4, batch 64, context 1,281 | 5,004 | 5,000 | 3 |")


def test_a_batch_that_runs_out_of_memory_steps_down(bench: ServingBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the cache does not fit, then a step: the record still is of the largest batch that ran."""
    made, decode = Runner.__init__, ServingBench._decode

    def scarce(self: Runner, *args: Any, batch: int, **named: Any) -> None:
        if batch > 6:
            raise torch.OutOfMemoryError("no memory")
        made(self, *args, batch=batch, **named)

    def scarcer(self: ServingBench, runner: Runner, *args: Any) -> Any:
        if runner.batch > 4:
            raise torch.OutOfMemoryError("no memory")
        return decode(self, runner, *args)

    monkeypatch.setattr(Runner, "__init__", scarce)
    monkeypatch.setattr(ServingBench, "_decode", scarcer)
    monkeypatch.setattr("comet_core.bench_serving.largest_batch", lambda *_: 8)
    found = bench.measure("max", 4, 3)
    assert found["batch"] == 4 and found["batch_is_largest"]
    with pytest.raises(CometError, match="ran out of memory"):
        bench.measure(5, 4, 3)
    with pytest.raises(CometError, match="did not fit"):
        bench.measure(7, 4, 3)


def test_a_packed_folder_serves_its_scheme_and_its_shapes_the_others(tiny: Any) -> None:
    packed = ServingBench(str(tiny.packed), "W4A4KV4", device="cpu").measure(2, 8, 3)
    assert "random" not in packed["weights"] and packed["provenance"]["recipe_digest"]
    assert packed["int4_share"] < 1
    sixteen = ServingBench(str(tiny.packed), "16-bit", device="cpu").measure(2, 8, 3)
    assert "random weights" in sixteen["weights"] and sixteen["int4_share"] == 0
    assert packed["model"] == sixteen["model"]
