"""`comet report [RUN]`: one self-contained HTML page about a run."""

from pathlib import Path
from typing import Annotated

import typer

from comet_cli import console, options, runs


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
    json: options.Json = False,
) -> None:
    """Write one HTML page: what was run, accuracy, errors by layer, outlier maps, speed, provenance.

    Example: comet report runs/smollm2-135m-w4a4kv4
    """
    from comet_core.report import find_records, write_report

    folder = run or runs.last_packed()
    home = folder.parent if folder.name == "packed" else folder
    page = write_report(home, out or home / "report.html", find_records(home, records or ()), tables)
    if json:
        console.data_json({"kind": "report", "page": str(page), "tables": str(tables) if tables else None})
    else:
        console.data(str(page))
