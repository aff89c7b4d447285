"""`--dry-run`: check everything, measure a layer where the work is long, say what the run will take, do nothing.

`fits` and `show` are what the dry runs of all commands end with; those of calibrate and pack, and of eval, are here,
the others beside their commands.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comet_cli import console, doctor
from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from comet_core.model_source import ModelSource
    from comet_core.preflight import Estimate
    from comet_core.recipe import Recipe

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only check, and say what the run will take, from its first layers.")
]
JustCheck = Annotated[bool, typer.Option("--dry-run", help="Only check, and say what would be done.")]
Rows = Sequence[Mapping[str, str]]


def dry_run(
    command: str,
    cut: "Callable[[int], ModelSource]",
    recipe: "Recipe",
    folder: Path,
    device: str,
    dtype: str,
    then: "Callable[[Path], object]" = lambda packed: None,
    *,
    json: bool,
) -> None:
    """Print what `command` ("calibrate" or "pack") into `folder` will take. `cut`: layers -> model, 0 is all; `then`:
    what follows with the packed folder.

    Errors:
        CometError where the run could not be finished: data missing, memory or disk too small.
    """
    from comet_core.calibrate import calibration_tokens
    from comet_core.preflight import SPARE_DISK, rehearse, require_disk

    source = cut(0)
    _, data = calibration_tokens(source, recipe)
    console.talk(f"measuring the first layers of {source.name}, a few times over")
    found = rehearse(cut, recipe, command, device=device, dtype=dtype, then=then, progress=console.progress())
    require_disk(folder, found.disk + SPARE_DISK, "the result")
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    config = source.config.get_text_config()
    keys = ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size")
    widths = {key: getattr(config, key) for key in keys if isinstance(getattr(config, key, None), int)}
    rows = {
        "model": f"{source.name}, {config.num_hidden_layers} layers",
        "widths": ", ".join(f"{key.removesuffix('_size')} {width:,}" for key, width in widths.items()),
        "tensor parallel": degrees(recipe.blocks.tp_granularity),
        "recipe": recipe.name,
        "data": f"{data['name']} ({data['origin']}), {data['samples']} x {data['seq_len']} tokens",
        **takes(f"{command} {source.name}", found, "use fewer or shorter windows (--samples, --seq-len)"),
        "disk": f"{console.human_bytes(found.disk)}, {console.human_bytes(shutil.disk_usage(place).free)} are free",
        "folder": str(folder),
    }
    paths = doctor.op_paths(integer=has_integer_scales(recipe))
    tables = {"What would run the result here": paths} if command == "pack" else {}
    show(command, rows, found, {"paths": paths}, tables, json=json)


def dry_run_eval(
    model: str,
    ppl: str | None,
    windows: int | None,
    seq_len: int,
    tasks: str | None,
    limit: int | None,
    kv_open_page: str,
    prompt: str | None,
    device: str,
    dtype: str,
    *,
    compare: bool,
    kv16: bool,
    json: bool,
) -> None:
    """Print what `comet eval` will take; arguments are its own.

    Errors:
        CometError where it could not be finished: model, text, tasks or memory are not there.
    """
    from comet_core.calibrate import resolve_compute
    from comet_core.evaluate import find_subject, plan_perplexity, subject_bytes
    from comet_core.preflight import Estimate, require_room
    from comet_core.preflight_eval import rehearse_perplexity, rehearse_tasks, together

    device, compute = resolve_compute(device, dtype)
    subject, parts = find_subject(model), []
    require_room(subject_bytes(subject, compute), subject.name, device)
    rows = {"model": f"{subject.name}, {subject.layers} layers", "recipe": subject.recipe}
    names: list[Any] = []
    if tasks is not None:
        from comet_core.zero_shot import base_of, load_tasks
        from comet_core.zero_shot_store import describe
        from comet_core.zero_shot_tasks import parse_tasks

        names = load_tasks(parse_tasks(tasks), kv_open_page)
        rows["tasks"] = ", ".join(
            f"{task.name} ({task.origin}), {min(task.documents, limit or task.documents):,} documents" for task in names
        )
    if ppl is not None:
        start = time.perf_counter()
        plan = plan_perplexity(
            model,
            data=ppl,
            windows=windows,
            seq_len=seq_len,
            compare=compare,
            kv16=kv16,
            progress=console.progress(),
        )
        parts.append(Estimate(time.perf_counter() - start, 0, 0, 0))  # the run reads and tokenizes all of the text too
        count, length = plan.tokens.shape
        rows["text"] = f"{plan.corpus.name}, {plan.corpus.split} ({plan.corpus.origin}), {count} x {length:,} tokens"
        rows["beside it"] = "the 16-bit model" if plan.beside is not None else "nothing"
        console.talk(f"measuring {min(2, subject.layers)} layers of {subject.name}")
        parts.append(rehearse_perplexity(plan, device, compute))
    if names:
        who = describe(model, kv_open_page, device, compute)
        base = base_of(who, console.progress()) if compare else None
        console.talk(f"measuring {min(2, subject.layers)} layers of {subject.name} on answers")
        parts += [rehearse_tasks(one, subject.layers, names, limit) for one in (who, base) if one is not None]
    if prompt is not None:
        rows["prompt"] = f"{len(subject.tokenizer(prompt)['input_ids'])} tokens"
    found = together(parts)
    if parts:
        rows |= takes(f"eval {subject.name}", found, "shorten the windows (--seq-len), or give --no-compare", device)
    rows["computes on"] = f"{device}, {str(compute).removeprefix('torch.')}"
    paths = _paths_of(model, device) if subject.source is None else []
    show("eval", rows, found, {"paths": paths}, {"What runs this model here": paths} if paths else {}, json=json)


def takes(what: str, found: "Estimate", hint: str, device: str = "auto") -> dict[str, str]:
    """Rows on time and memory of an estimate.

    Errors:
        CometError where this machine, or the GPU, has less memory than that.
    """
    from comet_core.host_memory import free_memory, total_memory

    rows = {"time": about(found.seconds)}
    rows["memory"] = _fits(what, found.memory, free_memory(), total_memory(), "this machine", hint)
    if found.gpu_memory:
        import torch

        free, held = torch.cuda.mem_get_info(device if device.startswith("cuda") else None)
        rows["GPU memory"] = _fits(what, found.gpu_memory, free, held, "the GPU", hint)
    return rows


def _fits(what: str, wanted: int, free: int, held: int, place: str, hint: str) -> str:
    if wanted > held:
        needs = f"{what} needs about {wanted / (1 << 30):.1f} GiB of memory"
        raise CometError(f"{needs}, {place} has {held / (1 << 30):.1f} GiB", hint)
    return f"{console.human_bytes(wanted)}, {console.human_bytes(free)} are free"


def show(
    command: str,
    rows: Mapping[str, str],
    found: "Estimate | None",
    more: Mapping[str, Any],
    tables: Mapping[str, Rows],
    *,
    json: bool,
) -> None:
    """Print a dry run: one JSON object with `more`, or `rows` as a table and `tables` (title -> rows) after it."""
    if json:
        estimate = {} if found is None else {"estimate": vars(found)}
        console.data_json({"kind": "dry-run", "command": command, **rows, **estimate, **more})
        return
    title = f"comet {command} would take" if found is not None else f"comet {command} would do"
    console.table(title, [{"what": key, "value": value} for key, value in rows.items()])
    for name, content in tables.items():
        console.table(name, content)


def _paths_of(packed: str, device: str) -> Rows:
    """What runs each op of a packed model on this device; reads the folder's headers."""
    from comet_core.inspection import inspect_packed

    paths: list[dict[str, str]] = inspect_packed(Path(packed))["paths"]
    if not device.startswith("cuda"):
        return [row for row in paths if row["gpu"].startswith("none")]
    import torch

    from comet_cuda.dispatch import nearest

    major, minor = nearest(torch.cuda.get_device_capability(device))
    return [row for row in paths if row["gpu"].startswith((f"sm_{major}{minor} ", "any"))]


def has_integer_scales(recipe: "Recipe") -> bool:
    """Whether the linears of a recipe have scales that are multiples of one number."""
    return recipe.activations.share == "token" and recipe.activations.bits == 4


def degrees(granularity: int) -> str:
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
