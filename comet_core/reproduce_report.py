"""Cells of a PaperTable -> markdown, CSV and a plot: published beside measured, protocols, the order of methods.

A model that the paper did not measure is a stand-in and is called so everywhere.
"""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from comet_core.paper_table import PUBLISHED_METRIC, PaperTable, Row, agreement, ordering
from comet_core.reproduce import Cell
from comet_core.results import markdown
from comet_core.whole_files import whole_file, write_text

STALE = "†"


def write_report(table: PaperTable, cells: Sequence[Cell], out: Path) -> list[Path]:
    """Write <table>.md, <table>.csv and <table>.png into `out`; returns their paths."""
    paths = [out / f"{table.name}.{end}" for end in ("md", "csv", "png")]
    write_text(paths[0], report(table, cells))
    write_csv(table, cells, paths[1])
    plot(table, cells, paths[2])
    return paths


def report(table: PaperTable, cells: Sequence[Cell]) -> str:
    """The whole report as markdown."""
    stand_ins = list(dict.fromkeys(cell.model for cell in cells if cell.stand_in))
    measured = list(dict.fromkeys(cell.model for cell in cells if not cell.stand_in and cell.records))
    parts = [f"# {table.title}", "## Published"]
    parts.append(_published(table) if table.published else "*The published figures are not at hand.*")
    parts.append("## Measured" + ("" if measured else ": none of the paper's models is on this machine"))
    if measured:
        parts.append(_measured(table, cells, measured))
    if stand_ins:
        parts += ["## Measured on stand-ins, which the paper does not have", _measured(table, cells, stand_ins)]
    if any(cell.stale for cell in cells):
        parts.append(f"{STALE} made with an earlier version of the recipe.")
    parts += ["## Order of methods, best first", _orders(table, cells), "## Protocols", _protocols(cells)]
    parts += ["## Notes", "\n".join(f"- {note}" for note in table.notes)] if table.notes else []
    return "\n\n".join(parts) + "\n"


def columns(table: PaperTable) -> tuple[str, ...]:
    """Figures of one cell."""
    return ("perplexity",) if table.metric == "perplexity" else (*table.tasks, "average")


def _published(table: PaperTable) -> str:
    rows = [row for row in table.rows if any(table.published_value(model, row) for model in table.models)]
    if table.metric == "perplexity":
        body = [
            [row.scheme, row.method, *(_figure(table.published_value(m, row)) for m in table.models)] for row in rows
        ]
        return markdown(["scheme", "method", *table.models], body)
    body = []
    for model in table.models:
        for row in rows:
            figures = table.published.get((model, row.scheme, row.method), {})
            body.append([model, row.label, *(_figure(figures.get(name), 1) for name in columns(table))])
    return markdown(["model", "method", *columns(table)], body)


def _measured(table: PaperTable, cells: Sequence[Cell], models: Sequence[str]) -> str:
    by_place = {(cell.model, cell.row.label): cell for cell in cells}
    rows = list({cell.row.label: cell.row for cell in cells}.values())
    if table.metric == "perplexity":
        body = []
        for row in rows:
            line = [row.scheme, row.method]
            for model in models:
                cell = by_place.get((model, row.label))
                line.append(_pair(table, cell) if cell is not None else "")
            body.append(line)
        return markdown(["scheme", "method", *models], body)
    body = []
    for model in models:
        for row in rows:
            cell = by_place.get((model, row.label))
            if cell is not None:
                figures = [_figure(cell.value(name), 1) + _mark(cell) for name in columns(table)]
                body.append([model, row.label, *figures, _drop(cell)])
    return markdown(["model", "method", *columns(table), "drop from 16-bit, paired"], body)


def _pair(table: PaperTable, cell: Cell) -> str:
    """The measured figure, behind the published one where there is one."""
    value = _figure(cell.value("perplexity")) + _mark(cell)
    published = table.published_value(cell.model, cell.row)
    return value if published is None else f"{_figure(published)} / {value}"


def _mark(cell: Cell) -> str:
    return STALE if cell.stale else ""


def _drop(cell: Cell) -> str:
    for record in cell.records:
        if record["task"] == "average" and "drop" in record:
            return f"{100 * record['drop']:.2f} ± {100 * record['drop_stderr']:.2f}"
    return ""


def _figure(value: float | None, digits: int = 2) -> str:
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if math.isfinite(value) else "not finite"


def _values(table: PaperTable, cells: Sequence[Cell], model: str) -> dict[str, float]:
    metric = PUBLISHED_METRIC[table.metric]
    values = {cell.row.label: cell.value(metric) for cell in cells if cell.model == model}
    return {label: value for label, value in values.items() if value is not None}


def mean_published_rank(table: PaperTable, rows: Sequence[Row]) -> dict[str, float]:
    """Mean place of each method over the paper's models, 0 the best."""
    places: dict[str, list[int]] = {}
    for model in table.models:
        values = {row.label: table.published_value(model, row) for row in rows}
        known = {label: value for label, value in values.items() if value is not None}
        for place, label in enumerate(ordering(known, lower_is_better=table.lower_is_better)):
            places.setdefault(label, []).append(place)
    return {label: sum(found) / len(found) for label, found in places.items()}


def _orders(table: PaperTable, cells: Sequence[Cell]) -> str:
    published = mean_published_rank(table, table.rows)
    lines = []
    if published:
        lines.append(f"- published, mean place: {' < '.join(ordering(published, lower_is_better=True))}")
    for model in dict.fromkeys(cell.model for cell in cells if cell.records):
        values = _values(table, cells, model)
        signed = values if table.lower_is_better else {label: -value for label, value in values.items()}
        tau = agreement(published, signed)
        close = "" if tau is None else f" (Kendall's tau with the published places: {tau:.2f})"
        order = " < ".join(ordering(values, lower_is_better=table.lower_is_better))
        lines.append(f"- {model}: {order}{close}")
    return "\n".join(lines) or "*Nothing measured yet.*"


def _protocols(cells: Sequence[Cell]) -> str:
    lines: dict[str, list[str]] = {}
    for cell in cells:
        for record in cell.records[:1]:
            protocol = record["protocol"]
            keys = [key for key in protocol if key not in ("sha256", "kv")]
            text = "; ".join(f"{key.replace('_', ' ')}: {protocol[key]}" for key in keys)
            lines.setdefault(f"{cell.model}: {text}", []).append(cell.recipe.name)
    return "\n".join(f"- {', '.join(names)} on {text}" for text, names in lines.items()) or "*Nothing measured yet.*"


def write_csv(table: PaperTable, cells: Sequence[Cell], path: Path) -> None:
    """One line a figure: published, measured, and under which protocol."""
    with whole_file(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["table", "model", "stand_in", "scheme", "method", "recipe", "metric", "published", "measured", "protocol"]
        )
        for cell in cells:
            for name in columns(table):
                published = table.published.get((cell.model, cell.row.scheme, cell.row.method), {}).get(name)
                value = cell.value(name)
                protocol = (
                    "; ".join(f"{k}: {v}" for k, v in cell.records[0]["protocol"].items()) if cell.records else ""
                )
                writer.writerow(
                    [
                        table.name, cell.model, "yes" if cell.stand_in else "no", cell.row.scheme, cell.row.method,
                        cell.recipe.name, name, "" if published is None else published,
                        "" if value is None else round(value, 4), protocol,
                    ]
                )  # fmt: skip


def plot(table: PaperTable, cells: Sequence[Cell], path: Path) -> None:
    """Loss against 16-bit per method: grey for the paper's models as published, a colour for each measured one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [row.label for row in table.rows if row.recipe != "fp16"]
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(labels) + 1.6))
    for model in table.models:
        values = {row.label: table.published_value(model, row) for row in table.rows}
        known = {label: value for label, value in values.items() if value is not None}
        _dots(axes, table, labels, known, table.published_base(model), "#b0b0b0", None)
    for index, model in enumerate(dict.fromkeys(cell.model for cell in cells if cell.records)):
        stand_in = next(cell.stand_in for cell in cells if cell.model == model)
        name = f"{model} (stand-in)" if stand_in else model
        own = _values(table, cells, model)
        base = own.get(next((row.label for row in table.rows if row.recipe == "fp16"), ""))
        _dots(axes, table, labels, own, base, f"C{index}", name)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    if table.lower_is_better:
        axes.set_xscale("symlog", linthresh=0.1)
        axes.set_xlim(left=min(0.0, axes.dataLim.x0))
    axes.set_xlabel(
        "log of perplexity over 16-bit perplexity" if table.lower_is_better else "points below 16-bit, average"
    )
    axes.set_title(f"{table.title}\ngrey: published", fontsize=10, loc="left")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    figure.tight_layout()
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def _dots(
    axes: object,
    table: PaperTable,
    labels: Sequence[str],
    values: dict[str, float],
    base: float | None,
    color: str,
    name: str | None,
) -> None:
    if base is None:
        return
    points = [
        (math.log(values[label] / base) if table.lower_is_better else base - values[label], place)
        for place, label in enumerate(labels)
        if label in values and math.isfinite(values[label])
    ]
    if points:
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, color=color, s=22, label=name, zorder=2 if name is None else 3)  # type: ignore[attr-defined]
