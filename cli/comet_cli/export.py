"""`comet export PACKED`: a packed folder in a format that other programs read, and what that format cannot keep."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comet_cli import console, options
from comet_cli.dry_run import DryRun, takes
from comet_cli.dry_run import show as show_dry_run
from comet_cli.runs import last_packed
from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from comet_core.integrations.compressed_tensors import Exported

FORMATS = ("compressed-tensors",)


def export(
    packed: Annotated[
        Path | None, typer.Argument(help="A packed folder; the last one packed here if not given.", metavar="PACKED")
    ] = None,
    format: Annotated[str, typer.Option(help="compressed-tensors, for stock transformers and vLLM.")] = FORMATS[0],
    activations: Annotated[
        int, typer.Option(help="Bits of the activations: 16, 8 or 4, the same in all blocks.", metavar="BITS")
    ] = 16,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; beside PACKED if not given.", metavar="DIR")
    ] = None,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Round weights anew where the format cannot hold them as they are.")
    ] = False,
    contiguous: Annotated[
        bool,
        typer.Option("--contiguous", help="No reordered groups, which newer vLLM refuses; rounds such linears anew."),
    ] = False,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="No zero points; rounds asymmetric weights anew.")
    ] = False,
    dry_run: DryRun = False,
    json: options.Json = False,
) -> None:
    """Write PACKED for programs without COMET.

    Says what that format cannot keep.

    Example: comet export runs/smollm2-135m-w4a16/packed
    """
    options.tidy_heap()
    if format not in FORMATS:
        raise CometError(f"--format {format} is not known", f"It may be {' or '.join(FORMATS)}.")
    from comet_core.integrations.compressed_tensors import export as write

    source = packed or last_packed()
    target = out or beside(source)
    how = {"requantize": requantize, "contiguous": contiguous, "symmetric": symmetric}
    if dry_run:
        check(source, target, activations, how, json=json)
        return
    done = write(source, target, activations=activations, **how)
    show(done, source, activations, json=json)


def check(source: Path, target: Path, activations: int, how: dict[str, bool], *, json: bool) -> None:
    """Print what the export will take and cost, from one layer exported into a temporary folder."""
    from comet_core.inspection import inspect_packed
    from comet_core.integrations.compressed_tensors import refuse_used
    from comet_core.integrations.compressed_tensors_preflight import rehearse_export
    from comet_core.preflight import require_disk

    found = inspect_packed(source)
    refuse_used(target)
    estimate, layer = rehearse_export(source, activations=activations, **how)
    require_disk(target, estimate.disk, "the export")
    errors = list(layer.requantized.values())
    rows = {
        "model": f"{found['model']}, {len(found['layers'])} layers",
        "recipe": str(found["recipe"]),
        "format": f"{FORMATS[0]}, W4A{activations}",
        "of a layer": f"{len(layer.exact)} linears as packed, {len(errors)} rounded anew",
        "weight error added": f"{sum(errors) / len(errors):.1%} in the first layer" if errors else "0",
        "left out": "; ".join(layer.left_out) or "nothing",
        **takes(f"export {source}", estimate, "run it on a machine with more memory"),
        "disk": console.human_bytes(estimate.disk),
        "folder": str(target),
    }
    show_dry_run("export", rows, estimate, {}, {}, json=json)


def beside(packed: Path) -> Path:
    """Where the export of a packed folder goes if nothing else is said."""
    return packed.with_name(f"{packed.name}-{FORMATS[0]}")


def show(done: "Exported", source: Path, activations: int, *, json: bool) -> None:
    """Print what was written and what it cost: a table and notes, or one JSON object."""
    errors = list(done.requantized.values())
    if json:
        fields = {**vars(done), "folder": str(done.folder)}
        console.data_json(
            {"kind": "export", "format": FORMATS[0], "activations": activations, "source": str(source), **fields}
        )
    else:
        row = {
            "format": f"{FORMATS[0]}, W4A{activations}",
            "linears as packed": str(len(done.exact)),
            "rounded anew": str(len(errors)),
            "weight error added": f"{sum(errors) / len(errors):.1%}" if errors else "0",
            "size": console.human_bytes(done.bytes),
            "folder": str(done.folder),
        }
        console.table("Exported", [row])
    for words in done.left_out:
        console.talk(f"left out: {words}")
    if errors:
        console.talk(
            f"note: {len(errors)} linears are rounded to nearest once more, which undoes what GPTQ gained; a model "
            "packed with --recipe w4a16 keeps it"
        )
    if done.reordered:
        console.talk(
            f"note: {done.reordered} linears have reordered groups (weight_g_idx), which compressed-tensors 0.17 and "
            "vLLM 0.26 read, but compressed-tensors 0.20 and vLLM 0.32 do not; --contiguous is for those"
        )
    if done.asymmetric:
        console.talk(
            f"note: {done.asymmetric} linears have zero points, which transformers with compressed-tensors 0.20.1 "
            "cannot load; --symmetric is for that"
        )
