"""`comet reproduce-speed`: the paper's performance figures beside this GPU's."""

from pathlib import Path
from typing import Annotated

import typer

from comet_cli import console, options
from comet_cli.bench import require_gpu
from comet_cli.dry_run import JustCheck
from comet_cuda.errors import CometError


def reproduce_speed(
    records: Annotated[
        Path | None, typer.Option(help="Records that count as measured: a .jsonl file or a folder.", metavar="PATH")
    ] = None,
    paper: Annotated[
        Path | None, typer.Option(help="The published figures; those of this checkout if not given.", metavar="FILE")
    ] = None,
    report_only: Annotated[bool, typer.Option("--report-only", help="Measure nothing; write what is known.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for records and tables.", metavar="DIR")] = Path("runs/reproduce"),
    dry_run: JustCheck = False,
) -> None:
    """Measure the paper's performance figures on this GPU.

    Only what the records do not cover yet is measured; the table is "paper | here | ratio".

    Example: comet reproduce-speed --records results/measured --report-only
    """
    from comet_core.recipe import recipe_folder

    paper = paper or recipe_folder().parent / "results" / "paper" / "speed.csv"
    if not paper.is_file():
        raise CometError(f"{paper} is not there", "Run this in a checkout of COMET, or give --paper FILE.")
    options.check_writable(out, "--out", folder=True)
    if not report_only and not dry_run:
        require_gpu()
    from comet_core.reproduce_speed import measure, speed_table, write_speed
    from comet_core.results import append, read

    own = out / "speed.jsonl"
    known = [*(read(records) if records is not None else []), *(read(own) if own.exists() else [])]
    if dry_run:
        for name, _, here, *_ in speed_table(known, paper)[1]:
            console.data(f"{name}\t{'would be measured' if here == 'not measured' else 'measured'}")
        require_gpu()
        return
    if not report_only:
        for one in measure(known, paper, console.progress()):
            known.append(one)
            append(own, one)
    head, rows = speed_table(known, paper)
    console.table("The paper's performance figures", [dict(zip(head, row, strict=True)) for row in rows])
    for path in write_speed(known, paper, out):
        console.talk(f"wrote {path}")
