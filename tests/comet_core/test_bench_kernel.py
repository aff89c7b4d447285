"""The kernel benchmark's shapes, summary and pictures; the timing itself needs a GPU."""

from pathlib import Path

import pytest
import torch

from comet_core import bench_kernel as module
from comet_core.bench_kernel import (
    ABLATIONS,
    SMALLEST,
    Shape,
    _path,
    bench_kernel,
    int8_blocks,
    paper_shapes,
    random_weights,
    summarize,
)
from comet_core.bench_plots import draw_roofline, draw_speed_up
from comet_core.model_source import alias_shapes
from comet_core.progress import SilentProgress
from comet_core.results import Record, check
from comet_cuda.errors import CometError
from comet_cuda.prepared_linear import ActivationFormat, prepare_linear
from comet_cuda.quantize_act import TOKEN
from comet_cuda.w4ax_gemm_integer import w4ax_gemm_integer_ref


def record(m: int, n: int, speedup: float, **changes: object) -> Record:
    return {
        "kind": "bench", "op": "w4ax_gemm", "arch": "sm_90a", "path": "w4ax_gemm_sm90", "m": m, "n": n, "k": 4096,
        "int4_fraction": 0.84, "weight_symmetry": "asymmetric", "ablation": None, "includes_quantize": False,
        "median_us": 10.0, "baseline": "cublas_bf16", "baseline_us": 10 * speedup, "speedup": speedup,
        "bound_fraction": 0.5, "provenance": {"gpu": "a GPU"}, **changes,
    }  # fmt: skip


def test_shapes_are_those_of_the_models() -> None:
    for model in ("llama-7b", "llama-3-70b", "qwen2-72b"):
        s = alias_shapes(model)
        heads = s["num_attention_heads"] + 2 * s["num_key_value_heads"]
        hidden, middle = s["hidden_size"], s["intermediate_size"]
        found = {(shape.n, shape.k) for shape in paper_shapes(model)}
        assert {(heads * s["head_dim"], hidden), (2 * middle, hidden), (hidden, middle)} <= found
    everything = paper_shapes()
    assert len(everything) == len({(s.n, s.k) for s in everything}) == 30
    assert min(s.n * s.k for s in everything) >= SMALLEST
    assert any("llama-2-7b o" in s.names and "llama-7b o" in s.names for s in everything)
    with pytest.raises(CometError, match="llama-8b"):
        paper_shapes("llama-8b")


@pytest.mark.parametrize("blocks", [1, 5, 25, 32, 86, 100, 384])
def test_at_least_the_share_asked_for_is_int4(blocks: int) -> None:
    count = int8_blocks(blocks, 0.84)
    assert (blocks - count) / blocks >= 0.84 > (blocks - count - 1) / blocks


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("share", "path"), [(1, "w4ax_gemm_sm90"), (TOKEN, "w4ax_gemm_integer")])
def test_random_weights_suit_the_kernel_that_is_timed(symmetric: bool, share: int, path: str) -> None:
    bits = torch.tensor([8, 4, 4], dtype=torch.uint8)
    inputs = ActivationFormat(None, bits, torch.ones(3), True, share)
    linear = prepare_linear(*random_weights(300, 3, symmetric, share, "cpu"), inputs, "sm_90")
    assert _path(linear) == path


def test_the_summary_takes_geometric_means_by_kernel_and_batch() -> None:
    records = [record(1, 4096, 2.0), record(1, 8192, 8.0), record(16, 4096, 3.0, ablation="pipeline")]
    for one in records:
        check(one)
    rows = summarize(records)
    assert [(row["M"], row["shapes"], row["speed-up"]) for row in rows] == [(1, 2, "4.00"), (16, 1, "3.00")]
    assert "pipeline off" in rows[1]["kernel"]


def test_pictures_are_drawn(tmp_path: Path) -> None:
    records = [record(m, n, 2.0 + m / 100) for m in (1, 16) for n in (4096, 8192)]
    records += [record(m, 4096, 1.5, path="cublas_fp8", bound_fraction=None) for m in (1, 16)]
    for png in (draw_speed_up(records, tmp_path / "a.png"), draw_roofline(records, tmp_path / "b.png")):
        assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000


def test_unknown_names_are_refused_before_anything_runs() -> None:
    for options in ({"peers": ["marlun"]}, {"ablations": ["none"]}, {"recipe": "w4a16"}):
        with pytest.raises(CometError):
            next(bench_kernel([Shape(4096, 4096)], [1], progress=SilentProgress(), **options))  # type: ignore[arg-type]


def measure_on_the_cpu(monkeypatch: pytest.MonkeyPatch, wrong: bool = False) -> tuple[list[Record], list[object]]:
    """All variants of a small linear, with references for kernels and one time for all; the tiles of ablations."""
    asked: list[object] = []

    def launch(*arguments: object) -> torch.Tensor:
        asked.append(arguments[10])
        y = w4ax_gemm_integer_ref(*arguments[:10])  # type: ignore[arg-type]
        y[0, 0] *= 1.01 if wrong else 1
        return y

    prepare = prepare_linear
    monkeypatch.setattr(module, "prepare_linear", lambda *arguments: prepare(*arguments, "sm_90"))
    monkeypatch.setattr(module, "launch_integer", launch)
    monkeypatch.setattr(module, "sm_count", lambda device: 132)
    monkeypatch.setattr(module, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(module, "median_microseconds", lambda runs: 10.0)
    monkeypatch.setattr(module, "_time_peer", lambda *arguments: 20.0)
    monkeypatch.setattr(module, "copies_for_cold_l2", lambda size: 2)
    monkeypatch.setattr(module.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module.Case, "bound_us", lambda self, m: None)
    found = bench_kernel([Shape(256, 640)], [9], ablations=list(ABLATIONS), device="cpu", progress=SilentProgress())
    return list(found), asked


def test_ablations_of_the_default_format_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    records, asked = measure_on_the_cpu(monkeypatch)
    for one in records:
        check(one)
    assert [r["ablation"] for r in records] == [None, None, *ABLATIONS]
    assert {r["path"] for r in records} == {"w4ax_gemm_integer"}
    assert [r["includes_quantize"] for r in records] == [False, True, False, False, False]
    pipeline, schedule, conversion = (asked[2 * i] for i in range(3))
    assert (pipeline.stages, pipeline.batch, schedule.stream, conversion.one_by_one) == (1, 1, 0, 1)  # type: ignore[attr-defined]
    assert len({pipeline.tokens, schedule.tokens, conversion.tokens}) == 1  # type: ignore[attr-defined]


def test_an_ablation_with_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CometError, match="not the same bits with pipeline off"):
        measure_on_the_cpu(monkeypatch, wrong=True)


@pytest.mark.parametrize("share", [1, TOKEN])
def test_a_kernel_without_a_switch_says_so(share: int) -> None:
    inputs = ActivationFormat(None, torch.tensor([8, 4, 4], dtype=torch.uint8), torch.ones(3), True, share)
    linear = prepare_linear(*random_weights(64, 3, False, share, "cpu"), inputs, "sm_90" if share == 1 else "sm_80")
    with pytest.raises(CometError, match="no such switch"):
        module._ablated(linear, 16, "conversion")
