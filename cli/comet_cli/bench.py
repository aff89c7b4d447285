"""`comet bench`: how fast the kernels and whole models run on this GPU. Each kind of benchmark is a sub-command."""

from pathlib import Path
from typing import Annotated

import typer

from comet_cli import options
from comet_cuda.errors import CometError

NEEDS = "comet bench needs an NVIDIA GPU of compute capability 8.0 or newer with a CUDA build of torch; none is here"

app = typer.Typer(help="Measure speed on an NVIDIA GPU.")


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.", metavar="N,N,...")] = "256",
    json: options.Json = False,
) -> None:
    """Measure speed on an NVIDIA GPU.

    Example: comet bench --batch 256
    """
    if context.invoked_subcommand is not None:
        return
    batch_sizes(batch)
    require_gpu()
    raise CometError("this version has no end-to-end benchmark", f"Run one of: {', '.join(sub_commands(context))}.")


def batch_sizes(text: str) -> list[int]:
    """ "1,16,64" -> [1, 16, 64]."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise CometError(f"--batch {text} is not a list of batch sizes", "For example --batch 1,16,256.")
    return [int(part) for part in parts]


def check_record_file(record: Path | None) -> None:
    """Raise CometError if records cannot go to this file."""
    if record is not None and record.suffix != ".jsonl":
        raise CometError(f"--record {record}: records go to a file that ends in .jsonl", f"--record {record}.jsonl")


def require_gpu() -> None:
    """Raise CometError in one line where nothing can be measured. Imports torch."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise CometError(NEEDS)


def sub_commands(context: typer.Context) -> list[str]:
    """The benchmarks that are there."""
    names = getattr(context.command, "commands", {})
    return [f"comet bench {name}" for name in names]
