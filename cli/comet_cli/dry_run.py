"""`--dry-run` of calibrate and pack: check everything, measure one layer, say what the run will take, do nothing."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comet_cli import console, doctor
from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from comet_core.model_source import ModelSource
    from comet_core.recipe import Recipe

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only check, and say what the run will take, from one measured layer.")
]


def dry_run(
    command: str,
    cut: "Callable[[int], ModelSource]",
    recipe: "Recipe",
    folder: Path,
    device: str,
    dtype: str,
    *,
    json: bool,
) -> None:
    """Print what `command` ("calibrate" or "pack") into `folder` will take. `cut`: layers -> model, 0 is all.

    Errors:
        CometError where the run could not be finished: data missing, memory or disk too small.
    """
    from comet_core.calibrate import calibration_tokens
    from comet_core.preflight import GIB, SPARE_DISK, rehearse, require_disk

    source = cut(0)
    _, data = calibration_tokens(source, recipe)
    console.talk(f"measuring one and two layers of {source.name}")
    found = rehearse(cut, recipe, command, device=device, dtype=dtype)
    require_disk(folder, found.disk + SPARE_DISK, "the result")
    free_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if found.memory > total_memory:
        raise CometError(
            f"{command} {source.name} needs about {found.memory / GIB:.1f} GiB of memory, this machine has "
            f"{total_memory / GIB:.1f} GiB",
            "use fewer or shorter windows (--samples, --seq-len)",
        )
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    config = source.config.get_text_config()
    keys = ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size")
    widths = {key: getattr(config, key) for key in keys if isinstance(getattr(config, key, None), int)}
    rows = {
        "model": f"{source.name}, {config.num_hidden_layers} layers",
        "widths": ", ".join(f"{key.removesuffix('_size')} {width:,}" for key, width in widths.items()),
        "tensor parallel": _degrees(recipe.blocks.tp_granularity),
        "recipe": recipe.name,
        "data": f"{data['name']} ({data['origin']}), {data['samples']} x {data['seq_len']} tokens",
        "time": about(found.seconds),
        "memory": f"{console.human_bytes(found.memory)}, {console.human_bytes(free_memory)} are free",
        "disk": f"{console.human_bytes(found.disk)}, {console.human_bytes(shutil.disk_usage(place).free)} are free",
        "folder": str(folder),
    }
    if found.gpu_memory:
        rows["GPU memory"] = console.human_bytes(found.gpu_memory)
    paths = doctor.op_paths()
    if json:
        console.data_json({"kind": "dry-run", "command": command, **rows, "estimate": vars(found), "paths": paths})
        return
    console.table(f"comet {command} would take", [{"what": key, "value": value} for key, value in rows.items()])
    if command == "pack":
        console.table("What would run the result here", paths)


def _degrees(granularity: int) -> str:
    """Over how many GPUs the packed model can be split."""
    fitting = [n for n in range(1, granularity + 1) if granularity % n == 0]
    return f"{', '.join(map(str, fitting))} (blocks.tp_granularity {granularity})"


def about(seconds: float) -> str:
    """Seconds in words: "about 40 s", "about 12 min", "about 3.5 h"."""
    if seconds < 90:
        return f"about {seconds:.0f} s"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.1f} h"
