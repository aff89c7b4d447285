"""`comet reproduce [TABLE]...`: the paper's tables on the models that this machine has, published beside measured."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comet_cli import console, options
from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from comet_core.paper_table import PaperTable

OUT = Path("runs") / "reproduce"


def reproduce(
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="table1, table2, ... or a YAML file; both tables if not given.", metavar="TABLE"),
    ] = None,
    models: Annotated[str | None, typer.Option(help="Only these models.", metavar="A,B,...")] = None,
    recipes: Annotated[str | None, typer.Option(help="Only rows with these recipes.", metavar="A,B,...")] = None,
    windows: Annotated[
        int | None, typer.Option(help="Only the first N windows of the text.", min=1, metavar="N")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N documents of a task.", min=1, metavar="N")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Calibration windows (table or recipe).", min=1, metavar="N")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(help="Records that count as measured too: a file or folder.", metavar="PATH")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for records, tables and plots.", metavar="DIR")] = OUT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be measured, and stop.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Measure nothing; write what is known.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep packed models.")] = False,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    threads: options.Threads = None,
) -> None:
    """Measure the paper's tables on models that are here.

    Example: comet reproduce table1 --models smollm2-135m --dry-run
    """
    options.tidy_heap()
    options.check_writable(out, "--out", folder=True)
    from comet_core.paper_table import check, load_table
    from comet_core.results import read

    options.set_threads(threads)
    loaded = [load_table(name) for name in tables or ["table1", "table2"]]
    loaded = [resized(table, windows, limit, samples) for table in loaded]
    from comet_core.reproduce import cells, measure, require_cells, sweep
    from comet_core.reproduce_report import write_report
    from comet_core.whole_files import CannotWrite

    chosen = {"models": _names(models), "recipes": _names(recipes)}
    complaints: list[str] = []

    def known() -> list[dict[str, object]]:
        own = read(out / "records.jsonl") if (out / "records.jsonl").exists() else []
        return [*(read(records) if records is not None else []), *own]

    for table in loaded:
        found = cells(table, known(), **chosen)
        missing = [cell for cell in found if cell.here and not cell.records]
        for model in dict.fromkeys(cell.model for cell in found if models and not cell.here and not cell.records):
            console.talk(f"{table.name}: {model} is left out, its weights are not on this machine")
        if dry_run:
            for cell in found:
                state = "measured" if cell.records else "would be measured" if cell.here else "no weights here"
                console.data(f"{table.name}\t{cell.model}\t{cell.row.label}\t{cell.recipe.name}\t{state}")
            if missing:
                require_cells(missing, table, out)
            continue
        if not report_only and missing and has_data(table):
            for number, cell in enumerate(missing, 1):
                console.talk(f"{table.name}: cell {number} of {len(missing)}")
                try:
                    measure(cell, table, out, device=device, dtype=dtype, keep=keep, progress=console.progress())
                except CannotWrite:  # the next cell would fare no better
                    raise
                except CometError as error:
                    console.talk(f"{cell.model}, {cell.row.label}: left out. {error.message}")
        found = cells(table, known(), **chosen)
        sweep(found, out)
        for path in write_report(table, found, out):
            console.data(str(path))
        values = {(cell.model, cell.row.label): cell.value("perplexity") for cell in found}
        complaints += check(table, {place: value for place, value in values.items() if value is not None})
    if not dry_run:
        from comet_core.bits_plot import bits_plot, bits_table
        from comet_core.whole_files import write_text

        everything = known()
        write_text(out / "bits.md", bits_table(everything) + "\n")
        console.data(str(out / "bits.md"))
        if bits_plot(everything, out / "bits.png"):
            console.data(str(out / "bits.png"))
    if complaints:
        raise CometError("; ".join(complaints), "The figures above moved. Find out why, or state the new ones.")


def has_data(table: "PaperTable") -> bool:
    """Whether the table's text or tasks are here; says why not, and what to do."""
    from comet_core.reproduce import require_data

    try:
        require_data(table)
    except CometError as error:
        console.talk(f"{table.name}: nothing is measured, {error.message}\nhint: {error.hint}")
        return False
    return True


def resized(table: "PaperTable", windows: int | None, limit: int | None, samples: int | None) -> "PaperTable":
    """The table with another size of the evaluation or calibration; what is None stays."""
    return replace(
        table,
        windows=table.windows if windows is None else windows,
        limit=table.limit if limit is None else limit,
        calibration=table.calibration if samples is None else {**table.calibration, "samples": samples},
    )


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
