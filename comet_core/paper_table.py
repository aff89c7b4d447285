"""recipes/paper/*.yaml -> PaperTable: a published table as rows of recipes, with the figures that its authors report.

A table says what is measured, on which models, by which recipe each row is computed, and where the published figures
stand. A small table for CI has expected figures instead, each with a tolerance (`check`).
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comet_core.recipe import recipe_folder
from comet_core.recipe_rules import check_keys, nearest_hint
from comet_cuda.errors import CometError

METRICS = ("perplexity", "zero_shot")
PUBLISHED_METRIC = {"perplexity": "perplexity", "zero_shot": "average"}  # by which methods are ordered
KEYS = (
    "title", "published", "metric", "data", "seq_len", "windows", "tasks", "limit", "models", "stand_ins", "rows",
    "notes", "calibration", "tolerance", "base",
)  # fmt: skip
ROW_KEYS = ("scheme", "method", "recipe", "instead", "expect", "tolerance")


@dataclass(frozen=True)
class Row:
    """One method. `instead`: another recipe for a model that cannot have this one. `expect`: figure by model, within
    `tolerance` (relative; None for the table's)."""

    scheme: str
    method: str
    recipe: str
    instead: Mapping[str, str] = field(default_factory=dict)
    expect: Mapping[str, float] = field(default_factory=dict)
    tolerance: float | None = None

    def recipe_for(self, model: str) -> str:
        """The recipe of this row on a model."""
        return self.instead.get(model, self.recipe)

    @property
    def label(self) -> str:
        """Scheme and method in one."""
        return self.scheme if self.method == "none" else f"{self.scheme} {self.method}"


@dataclass(frozen=True)
class PaperTable:
    """What to measure, and what was published.

    Attributes:
        windows, limit: None for all. calibration: replaces keys of every recipe's calibration.
        published: figures by (model, scheme, method) and metric (perplexity, or tasks and average in percent).
        tolerance: relative, of the expected figures.
        base: 16-bit figures under this protocol, by model, where the published one belongs to another.
    """

    name: str
    title: str
    metric: str
    data: str
    seq_len: int
    windows: int | None
    tasks: tuple[str, ...]
    limit: int | None
    models: tuple[str, ...]
    stand_ins: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    calibration: Mapping[str, Any]
    published: Mapping[tuple[str, str, str], Mapping[str, float]]
    tolerance: float
    base: Mapping[str, float]

    @property
    def lower_is_better(self) -> bool:
        """Perplexity falls, accuracy rises."""
        return self.metric == "perplexity"

    def published_value(self, model: str, row: Row) -> float | None:
        """The figure by which the paper's methods are ordered."""
        return self.published.get((model, row.scheme, row.method), {}).get(PUBLISHED_METRIC[self.metric])

    def published_base(self, model: str) -> float | None:
        """The 16-bit figure that the model's published ones may be compared with."""
        rows = (row for row in self.rows if row.recipe == "fp16")
        return self.base.get(model) or next((self.published_value(model, row) for row in rows), None)


def table_names() -> list[str]:
    """The tables that come with COMET: files of recipes/paper that have rows."""
    files = (recipe_folder() / "paper").glob("*.yaml")
    return sorted(path.stem for path in files if "\nrows:" in path.read_text(encoding="utf-8"))


def load_table(name_or_path: str) -> PaperTable:
    """A table by name (table1) or by path.

    Errors:
        CometError if there is none, or a key is unknown or wrong.
    """
    import yaml

    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if name_or_path not in table_names():
            raise CometError(f"there is no table {name_or_path}", nearest_hint(name_or_path, table_names()))
        path = recipe_folder() / "paper" / f"{name_or_path}.yaml"
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CometError(f"{path}: cannot be read as a table ({error})", "Correct the file.") from None
    try:
        return _table(path.stem, check_keys(given, KEYS, ""))
    except CometError as error:
        raise CometError(f"{path}: {error.message}", error.hint) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CometError(
            f"{path}: {type(error).__name__}: {error}", f"A table has title, metric and rows; keys: {', '.join(KEYS)}."
        ) from None


def _table(name: str, given: Mapping[str, Any]) -> PaperTable:
    metric = given["metric"]
    if metric not in METRICS:
        raise CometError(f"metric is {metric!r}", f"It may be {' or '.join(METRICS)}.")
    rows = []
    for index, item in enumerate(given["rows"]):
        values = dict(check_keys(item, ROW_KEYS, f"rows[{index}]"))
        values["expect"] = {model: float(figure) for model, figure in (values.get("expect") or {}).items()}
        rows.append(Row(**values))
    published = recipe_folder().parent / "results" / "paper" / str(given.get("published"))
    return PaperTable(
        name=name,
        title=str(given["title"]),
        metric=metric,
        data=str(given.get("data", "wikitext2")),
        seq_len=int(given.get("seq_len", 2048)),
        windows=_count(given.get("windows", "all")),
        tasks=tuple(given.get("tasks", ())),
        limit=_count(given.get("limit", "all")),
        models=tuple(given.get("models", ())),
        stand_ins=tuple(given.get("stand_ins", ())),
        rows=tuple(rows),
        notes=tuple(given.get("notes", ())),
        calibration=dict(given.get("calibration", {})),
        published=read_published(published) if published.is_file() else {},
        tolerance=float(given.get("tolerance", 0.0)),
        base={model: float(figure) for model, figure in given.get("base", {}).items()},
    )


def _count(value: Any) -> int | None:
    return None if value == "all" else int(value)


def read_published(path: Path) -> dict[tuple[str, str, str], dict[str, float]]:
    """Published figures, from a CSV with one column per model, or with one row per model and a column per task."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            scheme, method = line.pop("scheme"), line.pop("method")
            if "model" in line:
                model = line.pop("model")
                found[model, scheme, method] = {task: float(value) for task, value in line.items()}
            else:
                for model, value in line.items():
                    found[model, scheme, method] = {"perplexity": float(value)}
    return found


def ordering(values: Mapping[str, float], *, lower_is_better: bool) -> list[str]:
    """Names, best first; equal ones by name."""
    return sorted(values, key=lambda name: (values[name] if lower_is_better else -values[name], name))


def agreement(one: Mapping[str, float], other: Mapping[str, float]) -> float | None:
    """Kendall's tau-b of two rankings over what they share: 1 the same order, -1 reversed; None for fewer than two."""
    names = sorted(set(one) & set(other))
    same = ties_one = ties_other = pairs = 0
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            x, y = _sign(one[a] - one[b]), _sign(other[a] - other[b])
            same, pairs = same + x * y, pairs + 1
            ties_one, ties_other = ties_one + (x == 0), ties_other + (y == 0)
    scale = math.sqrt((pairs - ties_one) * (pairs - ties_other))
    return same / scale if scale else None


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def check(table: PaperTable, measured: Mapping[tuple[str, str], float]) -> list[str]:
    """What moved, in words: figures that left their tolerance, and methods that changed places.

    Args:
        measured: by (model, row label).

    Two methods have places only where their expected figures differ by more than either may move.
    """
    complaints: list[str] = []
    for model in dict.fromkeys(model for row in table.rows for model in row.expect):
        rows = [row for row in table.rows if model in row.expect]
        for row in rows:
            value, wanted = measured.get((model, row.label)), row.expect[model]
            if value is None:
                complaints.append(f"{model}, {row.label}: was not measured")
            elif not abs(value - wanted) <= (limit := _tolerance(table, row)) * wanted:
                complaints.append(f"{model}, {row.label}: {value:.3f}, expected {wanted:.3f} within {limit:.1%}")
        complaints += _changed_places(table, model, rows, measured)
    return complaints


def _tolerance(table: PaperTable, row: Row) -> float:
    return table.tolerance if row.tolerance is None else row.tolerance


def _changed_places(
    table: PaperTable, model: str, rows: Sequence[Row], measured: Mapping[tuple[str, str], float]
) -> list[str]:
    found = []
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            one, other = a.expect[model], b.expect[model]
            values = measured.get((model, a.label)), measured.get((model, b.label))
            clear = abs(one - other) > max(_tolerance(table, a) * one, _tolerance(table, b) * other)
            if clear and None not in values and _sign(values[0] - values[1]) != _sign(one - other):  # type: ignore[operator]
                found.append(f"{model}: {a.label} and {b.label} changed places ({values[0]:.3f}, {values[1]:.3f})")
    return found
