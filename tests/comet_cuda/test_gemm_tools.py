"""Ablations of the integer GEMM, and the tools that count and check it, as far as no GPU is needed."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "cuda" / "tools"))
import integer_variants
import profile_gemm
import sanitize
import tune_gemm

from comet_core import results
from comet_core.bench_kernel import ABLATIONS, INTEGER_OFF, SM90_OFF
from comet_cuda import jit, quantize_token_ref
from comet_cuda.errors import CometError
from comet_cuda.tiles_sm90 import SHARED_LIMIT
from comet_cuda.w4ax_gemm_integer import SOURCE, IntegerTiles, choose_integer_tiles, integer_table

LAUNCHES = list(profile_gemm.launches("llama-3-8b", [16, 64], ["pipeline", "schedule"]))
UNITS = {"time_ns": "ns", "dram_bytes": "byte", "sm_throughput": "%", "tensor_pipe": "%"}


def ncu_lists() -> str:
    names = {name.split(".")[0] for names in profile_gemm.METRICS.values() for name in names}
    names -= {"sm__pipe_tensor_cycles_active", "sm__pipe_tensor_op_gmma_cycles_active"}
    return "Device NVIDIA H200 (GH100)\n\nMetric Name   Metric Type\n" + "\n".join(
        f"{n}  Counter  of {n}" for n in names
    )


def ncu_prints(chosen: dict[str, str], rows: list[dict[str, str]], kernel: str = profile_gemm.KERNEL) -> str:
    def line(values: list[str]) -> str:
        return ",".join(f'"{value}"' for value in values)

    head = ["ID", "Process ID", "Kernel Name", "Grid Size"]
    lines = [line([*head, *chosen.values()]), line(["", "", "", "", *(UNITS.get(what, "cycle") for what in chosen)])]
    lines += [line([str(i), "7", kernel, "(132, 1, 1)", *(row[w] for w in chosen)]) for i, row in enumerate(rows)]
    return "==PROF== Connected to process 7\n" + "\n".join(lines) + "\n"


ROW = {
    "time_ns": "12,345.6", "cycles": "20,000", "active_mean": "15,000.5", "active_max": "18,000",
    "sm_throughput": "61.5", "tensor_pipe": "30.25", "dram_bytes": "8,650,752",
}  # fmt: skip


def test_every_ablation_is_described_and_changes_tiles() -> None:
    assert list(INTEGER_OFF) == list(ABLATIONS) and set(SM90_OFF) <= set(ABLATIONS)
    for off in INTEGER_OFF.values():
        assert replace(IntegerTiles(64, stages=12), **off) != IntegerTiles(64, stages=12)


def compiles(tiles: IntegerTiles) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC (pip install '.[cuda]')")
    assert tiles.shared_bytes <= SHARED_LIMIT
    options = jit._options("sm_90a", tiles.defines(torch.bfloat16), ())
    code, log = jit._run_nvrtc(jit.read_sources(SOURCE), SOURCE, options)
    resources = jit.parse_resources(log)["w4ax_gemm_integer"]
    assert code and "(C75" not in log, "the compiler serializes products"
    assert (resources.spill_bytes, resources.stack_bytes) == (0, 0)


@pytest.mark.parametrize(("m", "ablation"), [(16, "pipeline"), (64, "conversion"), (256, "pipeline")])
def test_some_ablated_kernels_compile_without_spills(m: int, ablation: str) -> None:
    compiles(replace(choose_integer_tiles(m, 4096, 32), **INTEGER_OFF[ablation]))


def test_a_tile_that_a_cluster_shares_compiles_without_spills() -> None:
    compiles(IntegerTiles(128, row_wgs=3, stages=6, stream=0, split=2))


@pytest.mark.slow
@pytest.mark.parametrize("ablation", list(INTEGER_OFF))
@pytest.mark.parametrize("tiles", sanitize.variants(), ids=tune_gemm.short)
def test_every_ablated_kernel_compiles_without_spills(tiles: IntegerTiles, ablation: str) -> None:
    compiles(replace(tiles, **INTEGER_OFF[ablation]))


def test_the_table_ships_no_ablated_kernel() -> None:
    assert all(row.get("stages", 6) > 1 and not row.get("one_by_one") for row in integer_table())


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
)
@pytest.mark.parametrize("ablation", list(INTEGER_OFF))
@pytest.mark.parametrize("m", [1, 16, 64, 256])
def test_ablated_kernels_are_right(m: int, ablation: str) -> None:
    for n, blocks, eights in ((1023, 39, 14), (520, 16, 0), (4096, 9, 9)):
        problem = integer_variants.IntegerProblem(m, n, 128 * blocks, eights, 1)
        tiles = replace(choose_integer_tiles(m, n, blocks), **INTEGER_OFF[ablation])
        assert problem.problem(tiles, 3) == ""


def test_the_first_counter_that_ncu_lists_is_taken() -> None:
    chosen = profile_gemm.choose_metrics(ncu_lists())
    assert chosen["tensor_pipe"] == "sm__pipe_tensor_op_imma_cycles_active" + profile_gemm.PEAK
    with pytest.raises(CometError, match="no counter for time_ns, cycles"):
        profile_gemm.choose_metrics("==ERROR== no device")


def test_counters_become_records_and_a_table() -> None:
    chosen = profile_gemm.choose_metrics(ncu_lists())
    printed = ncu_prints(chosen, [ROW] * len(LAUNCHES))
    counted = profile_gemm.parse_counters(printed, chosen)
    assert len(counted) == len(LAUNCHES) == 4 * 2 * 3
    common = profile_gemm.common_of("a command", "cpu")
    records = [profile_gemm.record_of(*pair, chosen, common) for pair in zip(LAUNCHES, counted, strict=True)]
    for record in records:
        results.check(record)
        assert set(results.COUNTERS) <= set(record)
    first = records[0]
    assert (first["median_us"], first["dram_bytes"], first["tensor_pipe"]) == (12.346, 8650752, 0.3025)
    assert (first["sm_active"], first["imbalance"]) == (0.75, round(18000 / 15000.5 - 1, 4))
    table = results.counters_table(records)
    assert table.count("pipeline off") == 8 and table.count("shipped") == 8 and "20.0%" in table and "8.7" in table


@pytest.mark.parametrize(("change", "words"), [({"tensor_pipe": "n/a"}, "n/a"), ({"cycles": ""}, "sm__cycles_elapsed")])
def test_a_counter_without_a_number_is_an_error(change: dict[str, str], words: str) -> None:
    chosen = profile_gemm.choose_metrics(ncu_lists())
    with pytest.raises(CometError, match=words):
        profile_gemm.parse_counters(ncu_prints(chosen, [ROW | change]), chosen)
    with pytest.raises(CometError, match="vectorized"):
        profile_gemm.parse_counters(ncu_prints(chosen, [ROW], "vectorized_elementwise"), chosen)


FAKE_NCU = """#!/bin/sh
case "$1" in
  --query-metrics) cat "$FAKE/listed" ;;
  --import) cat "$FAKE/printed" ;;
  *) echo "$@" > "$FAKE/asked"; exit $FAKE_STATUS ;;
esac
"""


def test_ncu_is_started_asked_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ncu").write_text(FAKE_NCU)
    (tmp_path / "ncu").chmod(0o755)
    (tmp_path / "listed").write_text(ncu_lists())
    (tmp_path / "printed").write_text(ncu_prints(profile_gemm.choose_metrics(ncu_lists()), [ROW] * 2))
    for name, value in {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAKE": str(tmp_path), "FAKE_STATUS": "0"}.items():
        monkeypatch.setenv(name, value)
    counted, chosen = profile_gemm.count(2, ["--batch=16"])
    assert len(counted) == 2 and counted[0]["cycles"] == 20000
    asked = (tmp_path / "asked").read_text()
    assert "--clock-control none" in asked and ",".join(chosen.values()) in asked and "--child --batch=16" in asked
    with pytest.raises(CometError, match="2 of 3 launches"):
        profile_gemm.count(3, [])
    monkeypatch.setenv("FAKE_STATUS", "3")
    with pytest.raises(CometError, match="status 3"):
        profile_gemm.count(2, [])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CometError, match="not on PATH"):
        profile_gemm.count(2, [])


def run_steps_on_the_cpu(monkeypatch: pytest.MonkeyPatch, wrong: bool = False) -> None:
    """sanitize.run_child with tensors that stay here and references for kernels."""

    def gemm(*arguments: object) -> torch.Tensor:
        y = sanitize.gemm.w4ax_gemm_integer_ref(*arguments[:10])
        return y + 1 if wrong else y

    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sanitize.gemm, "launch", gemm)
    for name in ("quantize_token", "rms_norm_quantize_token", "silu_mul_quantize_token"):
        monkeypatch.setattr(sanitize.token, name, getattr(quantize_token_ref, f"{name}_ref"))
    sanitize.run_child()


def test_the_sanitizer_s_steps_are_right(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_steps_on_the_cpu(monkeypatch)
    outcome = sanitize.parse("memcheck", capsys.readouterr().out)
    assert outcome.steps >= len(sanitize.BATCHES) + len(sanitize.variants()) + 36 and not outcome.wrong
    assert not outcome.clean, "neither the tool's total nor a kernel was seen"
    for others in ("quantize_steps", "kv4_steps"):
        monkeypatch.setattr(sanitize, others, list)
    run_steps_on_the_cpu(monkeypatch, wrong=True)
    wrong = sanitize.parse("memcheck", capsys.readouterr().out).wrong
    assert len(wrong) == len(sanitize.BATCHES) + len(sanitize.variants())


def test_times_that_nobody_could_read_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tune_gemm.py", "tune", "--m", "1", "--out", "times.jsonl"])
    with pytest.raises(SystemExit):
        tune_gemm.main()
    assert "--out wants --share 0" in capsys.readouterr().err


SAID = """========= COMPUTE-SANITIZER
step: gemm, 1 tokens
{reports}step: quantize, 1 x 584, none
launched: quantize_token, w4ax_gemm_integer
========= {total}
"""
READ = """========= Invalid __global__ read of size 4 bytes
=========     at w4ax_gemm_integer+0x1230
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f0012340000 is out of bounds
"""
RACE = (
    "========= Error: Race reported between Write access at quantize_token+0x20 and Read access at quantize_token+0x90"
)


def test_reports_are_counted_by_kernel_and_step() -> None:
    clean = sanitize.parse("racecheck", SAID.format(reports="", total="RACECHECK SUMMARY: 0 hazards displayed"))
    assert clean.clean and clean.steps == 2
    dirty = sanitize.parse("memcheck", SAID.format(reports=READ + READ + RACE + "\n", total="ERROR SUMMARY: 3 errors"))
    assert not dirty.clean and sum(dirty.reports.values()) == 3
    told = sanitize.summary([clean, dirty])
    assert "racecheck: clean; 2 steps, to the end: quantize_token, w4ax_gemm_integer" in told
    assert "w4ax_gemm_integer, 2 x Invalid __global__ read of size 4 bytes; in 1 steps, first: gemm, 1 tokens" in told
    assert "quantize_token, 1 x Error: Race reported" in told and "0x" not in told
    cut = sanitize.parse("initcheck", "step: gemm, 1 tokens\n")
    assert not cut.clean and "NOT to the end" in sanitize.summary([cut])


def test_a_tool_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compute-sanitizer").write_text("#!/bin/sh\necho step: one\nsleep 60\n")
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    outcome = sanitize.check("memcheck", 0, tmp_path, 1.0)
    assert outcome.steps == 1 and not outcome.clean
