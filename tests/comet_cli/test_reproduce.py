"""`comet reproduce`: lists, measures what is here, notices what moved."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from comet_cli import main

TABLE = """
title: A small table
metric: perplexity
windows: 4
tolerance: 0.02
stand_ins: [smollm2-135m, gemma3-270m]
rows:
  - {scheme: FP16, method: none, recipe: fp16, expect: {smollm2-135m: 20.0}}
  - {scheme: W4A4, method: rounding, recipe: w4a4-naive, expect: {smollm2-135m: 40.0}}
"""


def record(cell: Any, value: float) -> dict[str, Any]:
    from comet_core.recipe import digest

    return {
        "kind": "eval", "model": cell.model, "recipe": cell.recipe.name, "task": "wikitext2", "metric": "perplexity",
        "value": value, "windows": 4, "seq_len": 2048, "int4_mac_fraction": 1.0,
        "kv_quantized": cell.recipe.kv_cache.bits < 16,
        "protocol": {"data": "wikitext2 test"}, "provenance": {"recipe_digest": digest(cell.recipe)},
    }  # fmt: skip


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table on a machine that has one of its two models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("comet_core.reproduce.is_here", lambda model: model == "smollm2-135m")
    path = tmp_path / "small.yaml"
    path.write_text(TABLE)
    return path


def figures(monkeypatch: pytest.MonkeyPatch, values: dict[str, float]) -> list[str]:
    """Measuring a cell gives the value of its recipe; returns what was measured."""
    from comet_core.results import append

    measured: list[str] = []

    def measure(cell: Any, table: Any, out: Path, **_: Any) -> None:
        measured.append(cell.recipe.name)
        append(out / "records.jsonl", record(cell, values[cell.recipe.name]))

    monkeypatch.setattr("comet_core.reproduce.measure", measure)
    monkeypatch.setattr("comet_core.reproduce.require_data", lambda table: None)
    monkeypatch.setattr("comet_core.reproduce.require_cells", lambda *_: None)
    return measured


def test_a_dry_run_lists_and_measures_nothing(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = figures(monkeypatch, {})
    result = CliRunner().invoke(main.app, ["reproduce", str(table), "--dry-run"])
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert result.exit_code == 0 and not measured and not Path("runs").exists()
    assert [line[1:2] + line[4:] for line in lines] == [
        ["smollm2-135m", "would be measured"], ["smollm2-135m", "would be measured"],
        ["gemma3-270m", "no weights here"], ["gemma3-270m", "no weights here"],
    ]  # fmt: skip


def test_what_is_measured_is_written_and_not_measured_again(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = figures(monkeypatch, {"fp16": 20.1, "w4a4-naive": 40.4})
    for _ in range(2):
        result = CliRunner().invoke(main.app, ["reproduce", str(table)])
        assert result.exit_code == 0, result.stderr
    assert measured == ["fp16", "w4a4-naive"]
    text = Path("runs/reproduce/small.md").read_text()
    assert "20.10" in text and "40.40" in text and "stand-ins" in text
    assert {path.name for path in Path("runs/reproduce").iterdir()} >= {"small.csv", "small.png", "bits.md", "bits.png"}
    assert json.loads(Path("runs/reproduce/records.jsonl").read_text().splitlines()[0])["value"] == 20.1


def test_a_figure_that_moved_fails(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures(monkeypatch, {"fp16": 20.1, "w4a4-naive": 45.0})
    result = CliRunner().invoke(main.app, ["reproduce", str(table)])
    assert result.exit_code == 2 and "45.000, expected 40.000" in result.stderr
    assert Path("runs/reproduce/small.md").exists(), "what was measured is written all the same"


def test_a_full_disk_ends_the_run_and_a_model_that_does_not_fit_a_row_does_not(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comet_core.whole_files import cannot_write
    from comet_cuda.errors import CometError

    figures(monkeypatch, {})
    asked = []

    def failing(cell: Any, *_: Any, **__: Any) -> None:
        asked.append(cell.recipe.name)
        raise error

    monkeypatch.setattr("comet_core.reproduce.measure", failing)
    error: CometError = cannot_write(Path("x"), OSError(errno.ENOSPC, "No space left on device"))
    result = CliRunner().invoke(main.app, ["reproduce", str(table)])
    assert isinstance(result.exception, CometError) or result.exit_code == 2
    assert len(asked) == 1, "the next cell would fail too"
    error = CometError("this family cannot carry a rotation")
    result = CliRunner().invoke(main.app, ["reproduce", str(table)])
    assert len(asked) == 3 and result.stderr.count("left out. this family") == 2


def test_another_size_is_another_figure(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures(monkeypatch, {"fp16": 20.1, "w4a4-naive": 40.4})
    CliRunner().invoke(main.app, ["reproduce", str(table)])
    for flags in (["--windows", "8"], ["--samples", "3"]):
        result = CliRunner().invoke(main.app, ["reproduce", str(table), "--dry-run", "--recipes", "w4a4-naive", *flags])
        assert "would be measured" in result.stdout, flags


def test_without_the_table_s_text_nothing_is_packed(
    table: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(*_: Any, **__: Any) -> None:
        raise AssertionError("would have packed")

    monkeypatch.setattr("comet_core.reproduce.measure", measure)
    monkeypatch.setattr("comet_core.corpus._why_no_hub", lambda: "no network")
    monkeypatch.setenv("COMET_DATA", str(tmp_path))
    result = CliRunner().invoke(main.app, ["reproduce", str(table), "--dry-run"])
    assert result.exit_code == 2 and "pydoc would stand in" in result.stderr and "would be measured" in result.stdout
    result = CliRunner().invoke(main.app, ["reproduce", str(table)])
    assert "pydoc would stand in" in result.stderr and "hint: Set COMET_DATA" in result.stderr
    assert result.exit_code == 2 and "was not measured" in result.stderr, "figures were expected"
