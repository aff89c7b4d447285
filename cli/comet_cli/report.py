"""`comet report [RUN]`: one self-contained HTML page about a run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from comet_cli import console, options, runs
from comet_cli.dry_run import JustCheck, show


def report(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run or packed folder; the last one packed here if not given.", metavar="RUN"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The page; report.html in the run folder if not given.")] = None,
    records: Annotated[
        list[Path] | None, typer.Option(help="Further .jsonl files or folders of records.", metavar="FILE")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Also write each table as CSV and markdown.", metavar="DIR")
    ] = None,
    dry_run: JustCheck = False,
    json: options.Json = False,
) -> None:
    """Write one HTML page about a run.

    What was run, accuracy, errors by layer, outlier maps, speed, provenance.

    Example: comet report runs/smollm2-135m-w4a4kv4
    """
    from comet_core.report import find_records, write_report

    folder = run or runs.last_packed()
    home = folder.parent if folder.name == "packed" else folder
    page = out or home / "report.html"
    options.check_writable(page, "--out")
    options.check_writable(tables or page, "--tables", folder=tables is not None)
    kept = runs.RUNS / "eval.jsonl"  # where `comet eval` keeps records, wherever the packed folder lies
    found = find_records(home, [*([kept] if kept.is_file() else []), *(records or ())])
    if dry_run:
        check(home, page, found, tables, json=json)
        return
    page = write_report(home, page, found, tables)
    if json:
        console.data_json({"kind": "report", "page": str(page), "tables": str(tables) if tables else None})
    else:
        console.data(str(page))


def check(home: Path, page: Path, records: list[dict[str, Any]], tables: Path | None, *, json: bool) -> None:
    """Print what the page would hold."""
    from comet_core.inspection import inspect_packed

    found = inspect_packed(home / "packed" if (home / "packed").is_dir() else home)
    own = sum(record.get("model") == found["model"] for record in records)
    rows = {
        "model": f"{found['model']}, {len(found['layers'])} layers",
        "recipe": str(found["recipe"]),
        "records": f"{len(records)} found, {own} of this model",
        "outlier maps": "found" if (home / "calibration" / "outliers.png").is_file() else "none",
        "page": str(page),
        "tables": str(tables) if tables else "not asked for (--tables)",
    }
    show("report", rows, None, {}, {}, json=json)
