"""Options that several commands share, each spelled once, and what they mean for torch."""

from typing import Annotated

import typer

from comet_cuda.errors import CometError

DTYPES = ("auto", "float32", "bfloat16", "float16")

Model = Annotated[
    str,
    typer.Argument(help="An alias (llama-7b, smollm2-135m, ...), a folder, a GGUF file or a hub id.", metavar="MODEL"),
]
Recipe = Annotated[
    str | None, typer.Option(help="Name of a recipe or a YAML file; w4a4kv4 if not given.", metavar="NAME|FILE")
]
Weights = Annotated[str, typer.Option(help="real, or random for a dry run of a model that is not here.")]
Layers = Annotated[int | None, typer.Option(help="Keep only the first N decoder layers.", min=1, metavar="N")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda (cuda:1, ...).")]
DType = Annotated[str, typer.Option(help=f"What the model computes in: {', '.join(DTYPES)}.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; all cores if not given.", min=1, metavar="N")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per result on stdout.")]

DEFAULT_RECIPE = "w4a4kv4"


def use(device: str, dtype: str, threads: int | None) -> tuple[str, str]:
    """Check and settle device and dtype, set torch's threads. Imports torch.

    Returns:
        The device ("cpu", "cuda", "cuda:1") and the dtype's name: float32 on a CPU, bfloat16 on a GPU for "auto".
    """
    if dtype not in DTYPES:
        raise CometError(f"--dtype {dtype} is not known", f"It may be {', '.join(DTYPES)}.")
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    here = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if here else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise CometError(f"--device {device} is not known", "It may be auto, cpu, cuda or cuda:N.")
    if kind == "cuda" and int(index or 0) >= here:
        raise CometError(f"--device {device}: torch sees {here} CUDA devices here", "Use --device cpu, or auto.")
    if dtype == "auto":
        dtype = "bfloat16" if kind == "cuda" else "float32"
    return device, dtype


def check_weights(weights: str) -> None:
    """`--weights` is one of two words."""
    if weights not in ("real", "random"):
        raise CometError(f"--weights {weights} is not known", "It may be real or random.")
