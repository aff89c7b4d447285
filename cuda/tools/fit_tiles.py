"""Rows of the integer GEMM's table from measured times: which variants, and what `start_ns` and `step_ns` of each.

    python cuda/tools/tune_gemm.py tune --share 0 --m 1,8 --out few.jsonl          # and so on, also with --alone
    python cuda/tools/fit_tiles.py few.jsonl alone.jsonl --ranges 1-8,9-16
    python cuda/tools/fit_tiles.py many.jsonl --ranges 65-96 --beside                # what the table has for them stays

In: times of tune_gemm.py. Out: for each range of tokens, rows by which the least estimate picks variants nearly as
fast as the fastest measured; and by how much not. Least squares begin (over times alone, where there are any); then
rows are added while they help, and numbers moved while that helps: estimates need only be right in their order. A pick
that was not measured counts as by least squares, and 3% more.
"""

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import fields
from math import exp, log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from comet_cuda.affine import BLOCK
from comet_cuda.integer_tiles import IntegerTiles, integer_table, starts_and_steps, tiles_of

UNKNOWN = 0.03  # of a variant that was not measured for a problem
LEAST_GAIN = 0.0012  # that another row must bring
FAR = 1.3  # how far numbers may move from least squares, so that small problems, too, get sensible estimates
MOVES_NS = (-2000, -1000, -400, -150, 150, 400, 1000, 2000)
SCALES = (0.92, 0.97, 0.99, 1.0, 1.01, 1.03, 1.08)

Problem = tuple[int, int, int, bool]  # tokens, rows, channels, behind a quantization
Times = dict[Problem, dict[IntegerTiles, float]]  # ns
Rows = dict[IntegerTiles, tuple[float, float]]  # start and step, ns


def read_times(files: list[Path]) -> Times:
    """What `tune_gemm.py tune --out` wrote."""
    times: Times = defaultdict(dict)
    for file in files:
        for line in file.read_text().splitlines():
            found = json.loads(line)
            problem = (found["m"], found["n"], found["k"], found["behind"])
            times[problem].setdefault(tiles_of(found["tiles"]), 1000 * found["us"])
    return times


def parts(tiles: IntegerTiles, problem: Problem) -> tuple[float, float]:
    tokens, rows, channels, _ = problem
    return starts_and_steps(tiles, tokens, rows, -(-channels // BLOCK), 132)


def least_squares(tiles: IntegerTiles, times: Times) -> tuple[float, float]:
    """Start and step with the least relative error over what was measured of a variant."""
    weighted = []
    alone = any(tiles in found for problem, found in times.items() if not problem[3])
    for problem, found in times.items():
        if tiles in found and not (alone and problem[3]):
            starts, steps = parts(tiles, problem)
            weighted.append((starts / found[tiles], steps / found[tiles]))
    aa, ab, bb = (sum(x[i] * x[j] for x in weighted) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(x[i] for x in weighted) for i in (0, 1))
    if (det := aa * bb - ab * ab) > 1e-9 * aa * bb:
        start, step = (a * bb - b * ab) / det, (aa * b - ab * a) / det
        if start > 500 and step > 0:
            return start, step
    return 1500.0, max((b - 1500 * ab) / bb, 1.0)


class Fit:
    """The search over the problems of one range of tokens."""

    def __init__(self, times: Times, fixed: Rows | None = None) -> None:
        self.times, self.fixed = times, fixed or {}
        seen = {tiles for found in times.values() for tiles in found}
        often = [t for t in seen if sum(t in found for found in times.values()) >= max(2, len(times) // 12)]
        self.squares = {tiles: least_squares(tiles, times) for tiles in sorted(often, key=str)} | self.fixed
        self.parts = {(t, p): parts(t, p) for t in self.squares for p in times}

    def pick(self, rows: Rows, problem: Problem) -> IntegerTiles:
        """What the table would choose."""

        def estimate(tiles: IntegerTiles) -> float:
            starts, steps = self.parts[tiles, problem]
            return rows[tiles][0] * starts + rows[tiles][1] * steps

        return min(rows, key=estimate)

    def behind_best(self, rows: Rows, problem: Problem) -> float:
        """Log of the pick's time over the best one's."""
        found, tiles = self.times[problem], self.pick(rows, problem)
        if tiles in found:
            return log(found[tiles] / min(found.values()))
        starts, steps = self.parts[tiles, problem]
        guess = self.squares[tiles][0] * starts + self.squares[tiles][1] * steps
        return max(log(guess / min(found.values())), 0.0) + UNKNOWN

    def loss(self, rows: Rows) -> float:
        return sum(self.behind_best(rows, problem) for problem in self.times) / len(self.times)

    def moved(self, rows: Rows, rounds: int = 4) -> tuple[float, Rows]:
        """Numbers moved one row at a time while the loss falls."""
        least = self.loss(rows)
        for _ in range(rounds):
            before = least
            for tiles in [tiles for tiles in rows if tiles not in self.fixed]:
                start, step = rows[tiles]
                for tried in [(start + by, step * scale) for by in (*MOVES_NS, 0) for scale in SCALES]:
                    if any(not one / FAR <= x <= one * FAR for x, one in zip(tried, self.squares[tiles], strict=True)):
                        continue
                    if (loss := self.loss(rows | {tiles: tried})) < least - 2e-4:
                        least, rows = loss, rows | {tiles: tried}
            if least == before:
                break
        return least, rows

    def search(self, most: int) -> tuple[float, Rows]:
        """Rows, one more at a time while that brings LEAST_GAIN; then without those that bring nothing."""
        rows = Rows(self.fixed)
        least = self.loss(rows) if rows else float("inf")
        while len(rows) < most + len(self.fixed):
            added = [rows | {tiles: numbers} for tiles, numbers in self.squares.items() if tiles not in rows]
            tried = [self.moved(found, 1) for found in sorted(added, key=self.loss)[:6]]
            if not tried or min(tried, key=lambda one: one[0])[0] > least - LEAST_GAIN:
                break
            least, rows = self.moved(min(tried, key=lambda one: one[0])[1])
        for tiles in [tiles for tiles in rows if tiles not in self.fixed]:
            without = {t: numbers for t, numbers in rows.items() if t != tiles}
            if without and self.loss(without) < least + LEAST_GAIN / 2:
                rows, least = without, self.loss(without)
        return least, rows


def names_of(tiles: IntegerTiles) -> dict[str, int]:
    """What differs from a plain variant, as a row of the table names it."""
    return {f.name: getattr(tiles, f.name) for f in fields(tiles) if getattr(tiles, f.name) != f.default}


def row_of(tiles: IntegerTiles, numbers: tuple[float, float], first: int, last: int) -> dict[str, int]:
    """A row of the table."""
    measured = {"min_tokens": first, "max_tokens": last, "step_ns": round(numbers[1]), "start_ns": round(numbers[0])}
    return measured | names_of(tiles)


def rows_of_the_table(first: int, last: int) -> Rows:
    """Those that hold for all of a range."""
    rows = Rows()
    for row in integer_table():
        if row.get("min_tokens", 1) <= first and row.get("max_tokens", last) >= last:
            rows[tiles_of(row)] = (row["start_ns"], row["step_ns"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=Path, nargs="+")
    parser.add_argument("--ranges", default="1-8,9-16,17-32,33-64,65-128,129-256")
    parser.add_argument("--most", type=int, default=6, help="rows of each range of tokens")
    parser.add_argument("--beside", action="store_true", help="the table's rows for all of a range stay as they are")
    args = parser.parse_args()
    times = read_times(args.times)
    for first, last in (map(int, one.split("-")) for one in args.ranges.split(",")):
        inside = {problem: found for problem, found in times.items() if first <= problem[0] <= last}
        if not inside:
            continue
        fit = Fit(inside, rows_of_the_table(first, last) if args.beside else None)
        loss, rows = fit.search(args.most)
        worst = max(inside, key=lambda problem: fit.behind_best(rows, problem))
        print(f"{first} to {last} tokens: {exp(loss) - 1:.2%} behind the best of each of {len(inside)} problems,")
        print(f"  at most {exp(fit.behind_best(rows, worst)) - 1:.1%}: {worst}")
        for tiles in (tiles for tiles in rows if tiles not in fit.fixed):
            print(f" {json.dumps(row_of(tiles, rows[tiles], first, last))},")


if __name__ == "__main__":
    main()
