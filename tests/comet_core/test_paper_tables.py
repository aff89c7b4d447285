"""The paper's tables as recipes: complete, read rightly, resumable; a figure that moves is noticed."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comet_core import reproduce
from comet_core.paper_table import PaperTable, Row, agreement, check, load_table, ordering, read_published, table_names
from comet_core.progress import SilentProgress
from comet_core.recipe import load_recipe
from comet_core.reproduce import cells, is_here, measure
from comet_core.reproduce_report import mean_published_rank, report, write_report
from comet_core.results import read
from comet_cuda.errors import CometError

PAPER = Path(__file__).resolve().parents[2] / "results" / "paper"


def test_tables_hold_every_row_and_column_of_the_paper() -> None:
    one, two = load_table("table1"), load_table("table2")
    for table, file in ((one, "table1_perplexity.csv"), (two, "table2_zeroshot.csv")):
        published = read_published(PAPER / file)
        assert dict(table.published) == published
        assert {model for model, _, _ in published} == set(table.models)
        rows = {(row.scheme, row.method) for row in table.rows}
        assert {(scheme, method) for _, scheme, method in published} <= rows
    assert one.published_value("llama-3-8b", one.rows[1]) == 6.28
    assert one.published_base("llama-2-7b") == 5.47 and one.published_base("llama-3-8b") == 6.14
    assert two.published["llama-3-70b", "W4AxKV4", "FMPQ"]["average"] == 74.1


@pytest.mark.parametrize("name", table_names())
def test_every_row_has_a_recipe(name: str) -> None:
    table = load_table(name)
    for row in table.rows:
        for model in (*table.models, *table.stand_ins):
            assert load_recipe(row.recipe_for(model))


def test_a_wrong_table_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CometError, match="no table table3") as error:
        load_table("table3")
    assert "table1" in error.value.hint
    for content, word in (
        ("title: x\nmetric: speed\nrows: []", "speed"),
        ("colour: red", "colour"),
        ("title: x", "metric"),
    ):
        (tmp_path / "t.yaml").write_text(content)
        with pytest.raises(CometError, match=word):
            load_table(str(tmp_path / "t.yaml"))


def test_orders_and_their_agreement() -> None:
    values = {"a": 3.0, "b": 1.0, "c": 2.0}
    assert ordering(values, lower_is_better=True) == ["b", "c", "a"]
    assert ordering(values, lower_is_better=False) == ["a", "c", "b"]
    assert agreement(values, {"a": 30, "b": 10, "c": 20}) == 1.0
    assert agreement(values, {"a": 1, "b": 3, "c": 2}) == -1.0
    assert agreement(values, {"a": 3, "b": 2, "c": 1}) == pytest.approx(1 / 3)
    assert agreement(values, {"a": 1}) is None and agreement(values, dict.fromkeys("abc", 1.0)) is None


def test_published_places_put_16_bit_first_and_w4a4_last() -> None:
    places = mean_published_rank(load_table("table1"), load_table("table1").rows)
    order = sorted(places, key=places.__getitem__)
    assert order[0] == "FP16" and order[-1] == "W4A4 OmniQuant" and places["FP16"] == 0


def small(expect: dict[str, float], tolerance: float = 0.02) -> PaperTable:
    rows = tuple(Row(name, "x", "fp16", expect={"m": value}) for name, value in expect.items())
    return replace(load_table("ci"), rows=rows, tolerance=tolerance)


def test_a_figure_or_a_place_that_moves_is_noticed() -> None:
    table = small({"A": 20.0, "B": 30.0, "C": 30.3})
    same = {("m", "A x"): 20.1, ("m", "B x"): 30.2, ("m", "C x"): 30.1}
    assert check(table, same) == [], "B and C are too close to have places"
    assert "A x: 21.000, expected 20.000" in check(table, same | {("m", "A x"): 21.0})[0]
    swapped = check(small({"A": 20.0, "B": 22.0}, 0.06), {("m", "A x"): 20.9, ("m", "B x"): 20.8})
    assert swapped == ["m: A x and B x changed places (20.900, 20.800)"]
    assert "was not measured" in check(table, {})[0]
    loose = replace(table, rows=tuple(replace(row, tolerance=0.1) for row in table.rows))
    assert check(loose, same | {("m", "A x"): 21.0}) == []


@pytest.fixture(scope="module")
def tiny_table(tiny: Any) -> PaperTable:
    """Four recipes on a model of two random layers."""
    folder = tiny.source.folder
    rows = tuple(
        Row(scheme, "none", name)
        for scheme, name in (
            ("FP16", "fp16"),
            ("W8A8", "w8a8-smoothquant"),
            ("W4A16", "w4a16-rtn"),
            ("W4A4", "w4a4-naive"),
        )
    )
    text = str(folder / "text.txt")
    return replace(
        load_table("ci"), name="tiny", rows=rows, models=(), stand_ins=(str(folder),), data=text, seq_len=64, windows=4,
        calibration={"samples": 2, "seq_len": 32, "data": text}, published={},
    )  # fmt: skip


def run(table: PaperTable, out: Path) -> list[reproduce.Cell]:
    known = read(out / "records.jsonl") if (out / "records.jsonl").exists() else []
    return cells(table, known)


def test_a_table_is_measured_cell_by_cell_and_goes_on(
    tiny_table: PaperTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    todo = run(tiny_table, out)
    assert [cell.here and not cell.records for cell in todo] == [True] * 4
    for cell in todo[:2]:
        measure(cell, tiny_table, out, device="cpu", dtype="auto", keep=False, progress=SilentProgress())
    assert not any((out / "models").glob("*")), "packed models are removed"
    done = run(tiny_table, out)
    assert [bool(cell.records) for cell in done] == [True, True, False, False]
    for cell in done[2:]:
        measure(cell, tiny_table, out, device="cpu", dtype="auto", keep=False, progress=SilentProgress())
    found = run(tiny_table, out)
    values = {cell.row.scheme: cell.value("perplexity") for cell in found}
    assert None not in values.values() and not any(cell.stale for cell in found)
    base = values["FP16"]
    losses = {name: abs(value / base - 1) for name, value in values.items()}  # type: ignore[operator]
    assert losses["W8A8"] < losses["W4A16"] and losses["W8A8"] < losses["W4A4"] and losses["W8A8"] < 0.01
    other = replace(tiny_table, windows=3)
    assert not any(cell.records for cell in run(other, out)), "other windows are other figures"
    recalibrated = replace(tiny_table, calibration={**tiny_table.calibration, "samples": 1})
    assert [bool(cell.records) for cell in run(recalibrated, out)] == [True, False, False, False]


def test_the_report_says_what_is_published_measured_and_a_stand_in(tmp_path: Path) -> None:
    table = load_table("table1")
    record = {
        "kind": "eval", "model": "smollm2-135m", "recipe": "fmpq-paper", "task": "wikitext2", "metric": "perplexity",
        "value": 43.21, "windows": "all", "seq_len": 2048, "kv_quantized": True, "int4_mac_fraction": 0.84,
        "protocol": {"data": "wikitext2 test", "dtype": "float32"}, "provenance": {"recipe_digest": "old"},
    }  # fmt: skip
    exact = record | {"recipe": "fp16", "value": 21.77, "kv_quantized": False, "provenance": {"recipe_digest": None}}
    llama = record | {"model": "llama-3-8b", "value": 6.95}
    others = record | {"kv_quantized": False, "value": 41.0}, record | {"protocol": {"engine": "vLLM"}, "value": 42.0}
    found = cells(table, [record, exact, llama, *others], models=["llama-3-8b", "smollm2-135m"])
    text = report(table, found)
    assert "6.91 / 6.95†" in text, "published beside measured"
    assert "| 43.21† |" in text and "| 21.77 |" in text and "stand-ins" in text
    assert "smollm2-135m: FP16 < W4AxKV4 FMPQ" in text and "fmpq-paper on" in text
    paths = write_report(table, found, tmp_path)
    assert all(path.stat().st_size > 500 for path in paths) and paths[2].suffix == ".png"
    with paths[1].open() as file:
        lines = list(csv.DictReader(file))
    row = next(line for line in lines if (line["model"], line["recipe"]) == ("llama-3-8b", "fmpq-paper"))
    assert (row["published"], row["measured"], row["stand_in"]) == ("6.91", "6.95", "no")


def test_zero_shot_cells_need_every_task(tmp_path: Path) -> None:
    table = load_table("table2")
    base = {
        "kind": "eval", "model": "smollm2-135m", "recipe": "fp16", "metric": "acc", "value": 0.5, "stderr": 0.01,
        "windows": 10, "seq_len": 0, "kv_quantized": False, "kv_open_page": "16bit", "int4_mac_fraction": 0.0,
        "limit": None, "protocol": {"data": "x"}, "provenance": {"recipe_digest": None},
    }  # fmt: skip
    records = [base | {"task": task} for task in (*table.tasks, "average")]
    whole = cells(table, records, models=["smollm2-135m"], recipes=["fp16"])[0]
    assert whole.value("average") == 50.0 and whole.value("piqa") == 50.0
    assert not cells(table, records[1:], models=["smollm2-135m"], recipes=["fp16"])[0].records
    limited = replace(table, limit=500)
    assert not cells(limited, records, models=["smollm2-135m"], recipes=["fp16"])[0].records
    json.dumps(records)


def test_only_named_rows_and_models_are_taken_and_a_missing_model_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    table = load_table("table1")
    monkeypatch.setattr(reproduce, "is_here", lambda model: False)
    found = cells(table, [], models=["gemma3-270m"], recipes=["quarot"])
    assert [(cell.recipe.name, cell.here, cell.stand_in) for cell in found] == [("quarot-local", False, True)]
    with pytest.raises(CometError, match="no row"):
        cells(table, [], recipes=["nothing"])
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not is_here("llama-2-70b")


@pytest.mark.slow
def test_the_small_table_on_real_weights(tmp_path: Path) -> None:
    """`comet reproduce ci`: figures within their tolerance, methods in their places."""
    if not is_here("smollm2-135m"):
        pytest.skip("the weights of smollm2-135m are not on this machine: comet demo fetches them")
    table = load_table("ci")
    assert all(row.expect for row in table.rows), "the table states what it expects"
    for cell in run(table, tmp_path):
        measure(cell, table, tmp_path, device="cpu", dtype="float32", keep=False, progress=SilentProgress())
    values = {(cell.model, cell.row.label): cell.value("perplexity") for cell in run(table, tmp_path)}
    assert check(table, {place: value for place, value in values.items() if value is not None}) == []
