"""The paper's performance figures: every one has its published row, and records make ours."""

from pathlib import Path
from typing import Any

import pytest

from comet_core.reproduce_speed import kernel_shapes, load_figures, speed_table, value_of, write_speed
from comet_core.results import Record
from comet_cuda.errors import CometError

PAPER = Path(__file__).resolve().parents[2] / "results" / "paper" / "speed.csv"


GPU = {"gpu": "a GPU"}


def kernel(n: int, k: int, m: int, us: float, ablation: str | None = None) -> Record:
    return {
        "kind": "bench", "op": "w4ax_gemm", "path": "w4ax_gemm_sm90", "n": n, "k": k, "m": m, "ablation": ablation,
        "includes_quantize": False, "int4_fraction": 0.75, "median_us": us, "speedup": 60.0 / us, "provenance": GPU,
    }  # fmt: skip


def serving(scheme: str, rate: float, batch: int = 4) -> Record:
    return {
        "kind": "e2e", "model": "llama-3-8b", "scheme": scheme, "engine": "comet", "batch": batch,
        "prompt_tokens": 1024, "output_tokens": 512, "tokens_per_s": rate, "provenance": GPU,
    }  # fmt: skip


def test_figures_are_made_of_records(tmp_path: Path) -> None:
    figures, section = load_figures(PAPER)
    by_name = {figure.name: figure for figure in figures}
    assert by_name["kernel over 16-bit cuBLAS, batch 64"].published == 2.97
    assert by_name["end to end over W4A16, batch 4"].published == 1.18
    shapes = kernel_shapes(section["models"])
    records: list[dict[str, Any]] = []
    for shape in shapes:
        records += [kernel(shape.n, shape.k, 64, 20.0), kernel(shape.n, shape.k, 16, 20.0)]
        records += [kernel(shape.n, shape.k, m, 30.0, "pipeline") for m in (16, 64, 256)]
    assert value_of(by_name["kernel over 16-bit cuBLAS, batch 64"], records, section) == pytest.approx(3.0)
    assert value_of(by_name["slower without the software pipeline"], records, section) is None, "batch 256 is missing"
    records += [kernel(shape.n, shape.k, 256, 20.0) for shape in shapes]
    assert value_of(by_name["slower without the software pipeline"], records, section) == pytest.approx(1.5)
    records += [serving("W4A4KV4", 300.0), serving("W4A16KV16", 200.0), serving("W4A4KV4", 1.0, batch=8)]
    records.append(serving("W4A4KV4", 9999.0) | {"layers": 4})  # a model cut short is no measurement of the whole
    head, rows = speed_table(records, PAPER)
    found = {row[0]: row for row in rows}
    assert head[2] == "here (a GPU)"
    assert found["end to end over W4A16, batch 4"][1:4] == ["1.18", "1.50", "1.27"]
    assert found["KV4 alone"][2] == "not measured"
    page, sheet = write_speed(records, PAPER, tmp_path)
    assert "| 1.50 |" in page.read_text() and sheet.read_text().startswith("figure,")


def test_a_figure_without_its_published_row_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "speed.csv"
    short.write_text("part,what,against,condition,value,unit\n")
    with pytest.raises(CometError, match="0 rows"):
        load_figures(short)
