"""Options that several commands share, each spelled once, and what they mean for torch."""

import os
from pathlib import Path
from typing import Annotated

import typer

from comet_cuda.errors import CometError


def _aliases(typed: str) -> list[str]:
    """What the shell offers for MODEL; files it adds by itself where none fits."""
    from comet_core.model_source import alias_names

    return [name for name in alias_names() if name.startswith(typed)]


def _recipes(typed: str) -> list[str]:
    from comet_core.recipe import recipe_names

    return [name for name in recipe_names() if name.startswith(typed)]


Model = Annotated[
    str,
    typer.Argument(
        help="An alias (llama-7b, smollm2-135m, ...), a folder, a GGUF file or a hub id.",
        metavar="MODEL",
        autocompletion=_aliases,
    ),
]
Recipe = Annotated[
    str | None,
    typer.Option(
        help="Name of a recipe or a YAML file; w4a4kv4, tuned on a GPU that can, if not given.",
        metavar="NAME|FILE",
        autocompletion=_recipes,
    ),
]
Weights = Annotated[str, typer.Option(help="real; or random, to try a model whose weights are not here.")]
Layers = Annotated[int | None, typer.Option(help="Keep only the first N decoder layers.", min=1, metavar="N")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda (cuda:1, ...).")]
Devices = Annotated[
    str,
    typer.Option(help="auto, cpu or cuda (cuda:1, ...); cuda:0,cuda:1 share the windows, for faster calibrating."),
]
DType = Annotated[str, typer.Option(help="What the model computes in: auto, float32, bfloat16 or float16.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; all cores if not given.", min=1, metavar="N")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per result on stdout.")]

DEFAULT_RECIPE = "w4a4kv4"


def tidy_heap() -> None:
    """Let the heap give back what is freed: first thing in a command that holds models."""
    from comet_core.host_memory import give_back_freed

    give_back_freed()


def set_threads(threads: int | None) -> None:
    """Let torch use that many CPU threads. Imports torch if a number is given."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def check_weights(weights: str) -> None:
    """`--weights` is one of two words."""
    if weights not in ("real", "random"):
        raise CometError(f"--weights {weights} is not known", "It may be real or random.")


def check_record_file(record: Path | None) -> None:
    """Raise CometError if records cannot go to this file; asked before anything is measured."""
    if record is None:
        return
    if record.suffix != ".jsonl":
        raise CometError(f"--record {record}: records go to a file that ends in .jsonl", f"--record {record}.jsonl")
    check_writable(record, "--record", "Name a .jsonl file in a folder of yours.")


def check_writable(path: Path, flag: str, hint: str = "Name a place of yours.", *, folder: bool = False) -> None:
    """Raise CometError if no file (or folder) `path` can be written; asked before any work."""
    place = next(there for there in (path, *path.absolute().parents) if there.exists())
    if not os.access(place, os.W_OK) or (place.is_dir() != folder if place == path else not place.is_dir()):
        raise CometError(f"{flag} {path}: cannot be written", hint)
