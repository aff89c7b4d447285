"""`comet bench`: how fast the kernels and whole models run on this GPU. Each kind of benchmark is a sub-command."""

from pathlib import Path
from typing import Annotated

import typer

from comet_cli import console, options, runs
from comet_cli.dry_run import JustCheck
from comet_cuda.errors import CometError

NEEDS = "speed needs an NVIDIA GPU of compute capability 8.0 or newer with a CUDA build of torch, and none is here"
WITHOUT = "comet bench --roofline and comet reproduce-speed --report-only need none"

DEFAULT_MODEL = "llama-7b"
DEFAULT_BATCH = "256"
app = typer.Typer()


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Sequences at once, separated by commas; max is as many as fit. 256 if not given, with --roofline 1 "
            "to 256.",
            metavar="N,N,max,...",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A packed folder, or any model (random weights); the last packed one if not given."),
    ] = None,
    scheme: Annotated[str, typer.Option(help="Schemes to compare, or all.", metavar="NAME,...")] = "16-bit,W4A4KV4",
    load: Annotated[
        str, typer.Option(help="Prompt and output tokens of a request.", metavar="P/O,...")
    ] = "1024/512,128/128",
    layers: options.Layers = None,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="From shapes alone, no GPU: rooflines by batch, memory by context.")
    ] = False,
    gpu: Annotated[str, typer.Option(help="With --roofline: whose rates.")] = "H200",
    record: Annotated[Path | None, typer.Option(help="Append the records to this .jsonl file.", metavar="FILE")] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw pictures into this folder.", metavar="DIR")] = None,
    dry_run: JustCheck = False,
    json: options.Json = False,
) -> None:
    """Measure kernels and serving on an NVIDIA GPU.

    Example: comet bench --batch 256
    """
    if context.invoked_subcommand is not None:
        return
    options.check_record_file(record)
    if roofline:
        if record is not None:
            raise CometError("--roofline measures nothing that --record could keep", "For its figures: --json.")
        if dry_run:
            raise CometError("--roofline computes from shapes alone, so there is nothing to try dry", "Leave out one.")
        from comet_cli.bench_roofline import show

        show(model or DEFAULT_MODEL, gpu, [] if batch is None else batch_sizes(batch), plots, json=json)
        return
    sizes = serving_sizes(DEFAULT_BATCH if batch is None else batch)
    loads = [parse_load(text) for text in load.split(",")]
    if dry_run:
        from comet_cli.bench_serving import check

        check(model or default_model(), sizes, scheme, loads, layers, json=json)
        require_gpu()
        return
    require_gpu()
    from comet_cli.bench_serving import measure

    measure(model or default_model(), sizes, scheme, loads, layers, record, plots, json=json)


def default_model() -> str:
    """The last packed folder, else random weights of DEFAULT_MODEL."""
    try:
        model = str(runs.last_packed())
        console.talk(f"model: {model}, the last one packed from this folder")
    except CometError:
        model = DEFAULT_MODEL
        console.talk(f"model: {model} with random weights, since none has been packed from this folder")
    return model


def serving_sizes(text: str) -> list[int | str]:
    """ "1,64,max" -> [1, 64, "max"]."""
    return [size for part in text.split(",") for size in (["max"] if part.strip() == "max" else batch_sizes(part))]


def parse_load(text: str) -> tuple[int, int]:
    """ "1024/512" -> (1024, 512)."""
    prompt, _, output = text.partition("/")
    if not (prompt.strip().isdecimal() and output.strip().isdecimal() and int(prompt) > 0 and int(output) > 1):
        raise CometError(f"--load {text} is no pair of prompt and output tokens", "For example --load 1024/512.")
    return int(prompt), int(output)


def batch_sizes(text: str) -> list[int]:
    """ "1,16,64" -> [1, 16, 64]."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise CometError(f"--batch {text} is not a list of batch sizes", "For example --batch 1,16,256.")
    return [int(part) for part in parts]


def require_gpu() -> None:
    """Raise CometError where nothing can be measured. Imports torch."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise CometError(NEEDS, WITHOUT)
