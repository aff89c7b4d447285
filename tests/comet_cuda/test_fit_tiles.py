"""Rows of the integer GEMM's table from times: those of a known table are found again, as far as they decide."""

import json
import sys
from math import log
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "cuda" / "tools"))
import fit_tiles

from comet_cuda.integer_tiles import IntegerTiles, tiles_of

KNOWN: fit_tiles.Rows = {
    IntegerTiles(64, stages=11, stream=0, split=3): (3000.0, 390.0),
    IntegerTiles(64, stages=12, stream=0, split=2): (2500.0, 430.0),
    IntegerTiles(64, row_wgs=3, stages=9, quick=1): (9000.0, 400.0),
}
NEVER = IntegerTiles(64, row_wgs=3, stages=7, stream=0, split=6)
SHAPES = [(4096, 4096), (4096, 14336), (6144, 4096), (8192, 8192), (10240, 8192), (28672, 4096), (57344, 8192)]


def measured() -> fit_tiles.Times:
    found: fit_tiles.Times = {}
    for m in (33, 64):
        for n, k in SHAPES:
            problem = (m, n, k, True)
            times = {}
            for tiles, (start, step) in KNOWN.items():
                starts, steps = fit_tiles.parts(tiles, problem)
                times[tiles] = start * starts + step * steps
            found[problem] = times | {NEVER: 1.5 * max(times.values())}
    return found


def test_rows_of_a_known_table_choose_as_it_does() -> None:
    times = measured()
    fit = fit_tiles.Fit(times)
    loss, rows = fit.search(most=4)
    assert loss < 1e-3 and NEVER not in rows
    picks = {problem: fit.pick(rows, problem) for problem in times}
    assert set(picks.values()) == set(rows) == set(KNOWN), "each of the three is the fastest somewhere"
    for problem, tiles in picks.items():
        assert times[problem][tiles] < 1.02 * min(times[problem].values())


def test_squares_find_the_numbers_and_one_row_alone_loses() -> None:
    times = measured()
    fit = fit_tiles.Fit(times)
    for tiles, numbers in KNOWN.items():
        assert fit.squares[tiles] == pytest.approx(numbers, rel=1e-6)
    loss, rows = fit.search(most=1)
    assert len(rows) == 1 and loss > 0.02
    slowest = max(log(found[next(iter(rows))] / min(found.values())) for found in times.values())
    assert max(fit.behind_best(rows, problem) for problem in times) == pytest.approx(slowest)


def test_what_was_not_measured_costs_more_than_its_estimate() -> None:
    times = measured()
    problem, tiles = (64, 4096, 4096, True), IntegerTiles(64, stages=11, stream=0, split=3)
    assert fit_tiles.Fit(times).pick(KNOWN, problem) == tiles
    del times[problem][tiles]
    rows = {tiles: KNOWN[tiles]}
    assert fit_tiles.Fit(times).behind_best(rows, problem) == pytest.approx(fit_tiles.UNKNOWN)


def test_rows_that_stay_are_neither_moved_nor_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {IntegerTiles(64, row_wgs=3, stages=9, quick=1): (9000.0, 400.0)}
    loss, rows = fit_tiles.Fit(measured(), fixed).search(most=3)
    assert loss < 1e-3 and rows.items() > fixed.items() and set(rows) == set(KNOWN)
    row = {"min_tokens": 33, "max_tokens": 64, "step_ns": 400, "start_ns": 9000, "tokens": 64, "stages": 12}
    monkeypatch.setattr(fit_tiles, "integer_table", lambda: (row, row | {"min_tokens": 65, "stages": 8}))
    assert fit_tiles.rows_of_the_table(33, 48) == {IntegerTiles(64, stages=12): (9000, 400)}


def test_a_file_of_times_becomes_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"m": m, "n": n, "k": k, "behind": behind, "us": us / 1000, "tiles": fit_tiles.names_of(tiles)}
        for (m, n, k, behind), found in measured().items()
        for tiles, us in found.items()
    ]
    file = tmp_path / "times.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["fit_tiles.py", str(file), "--ranges", "1-32,33-64"])
    fit_tiles.main()
    printed = capsys.readouterr().out
    assert "33 to 64 tokens" in printed and "1 to 32" not in printed
    rows = [json.loads(line.strip().rstrip(",")) for line in printed.splitlines() if line.startswith(" {")]
    assert {tiles_of(row) for row in rows} == set(KNOWN) and all(row["min_tokens"] == 33 for row in rows)
