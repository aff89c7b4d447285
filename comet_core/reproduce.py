"""PaperTable -> measured cells: calibrate, pack and evaluate what this machine has weights for, one cell at a time.

A cell is a row's recipe on a model. A cell that has a record already (of an earlier run that broke, or of any records
folder) is not measured again; a packed folder is removed once its figures are written, unless it is to be kept.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comet_core.calibrate import calibrate
from comet_core.corpus import load_corpus
from comet_core.evaluate import evaluate_perplexity
from comet_core.model_source import alias_names, alias_shapes, resolve_model
from comet_core.pack import pack
from comet_core.paper_table import PaperTable, Row
from comet_core.preflight import packing_disk, require_disk
from comet_core.progress import Progress
from comet_core.recipe import Recipe, digest, load_recipe, with_calibration
from comet_core.results import append
from comet_core.whole_files import discard
from comet_core.zero_shot import evaluate_zero_shot, load_tasks
from comet_cuda.errors import CometError
from comet_cuda.folders import cache_dir

SPENT = "measured"  # a file that says that the folder may go


@dataclass(frozen=True)
class Cell:
    """One row on one model. `records` hold its figures once there are any."""

    row: Row
    model: str
    stand_in: bool
    recipe: Recipe
    here: bool
    records: tuple[dict[str, Any], ...]

    @property
    def stale(self) -> bool:
        """True if the records were made with another version of the recipe than today's."""
        made = {record["provenance"].get("recipe_digest") for record in self.records}
        return self.row.recipe != "fp16" and bool(self.records) and made != {digest(self.recipe)}

    def value(self, metric: str) -> float | None:
        """A figure: "perplexity", a task's accuracy or "average", accuracies in percent."""
        for record in self.records:
            if metric == "perplexity" == record["metric"]:
                return _number(record["value"])
            if record["metric"] == "acc" and record["task"] == metric:
                return None if record["value"] is None else 100 * float(record["value"])
        return None


def _number(value: Any) -> float:
    return float("inf") if value is None else float(value)


def is_here(model: str) -> bool:
    """Whether a model's weights are on this machine, so that nothing would be fetched."""
    if Path(model).exists():
        return True
    local = cache_dir() / "models" / model
    if any(local.glob("*.gguf")) or (local / "config.json").is_file():
        return True
    hub = alias_shapes(model)["hub"] if model in alias_names() else model
    if hub is None:
        return False
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub, local_files_only=True))
    except Exception:  # not in the hub's cache, or no id: the client has a class for each
        return False
    return any(folder.glob("*.safetensors"))


def cells(
    table: PaperTable,
    records: Iterable[dict[str, Any]],
    *,
    models: Sequence[str] | None = None,
    recipes: Sequence[str] | None = None,
) -> list[Cell]:
    """Every cell of the table, model by model, with what is measured of it already.

    Args:
        records: eval records; of two for one cell the later counts. models, recipes: only these.

    Errors:
        CometError if none is left.
    """
    wanted = [*table.models, *table.stand_ins] if models is None else list(models)
    known = list(records)
    found = []
    for model in wanted:
        here = is_here(model)
        for row in table.rows:
            if recipes is None or row.recipe in recipes or row.recipe_for(model) in recipes:
                recipe = with_calibration(load_recipe(row.recipe_for(model)), **table.calibration)
                own = tuple(_records_of(table, model, recipe, known))
                found.append(Cell(row, model, model not in table.models, recipe, here, own))
    if not found:
        raise CometError(
            f"no row of {table.name} has a recipe of {', '.join(recipes or ())}",
            f"rows have {', '.join(dict.fromkeys(row.recipe for row in table.rows))}",
        )
    return found


def _records_of(
    table: PaperTable, model: str, recipe: Recipe, records: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The cell's records, one per figure: today's recipe before older versions of it, later before earlier."""
    today = digest(recipe)
    latest: dict[str, dict[str, Any]] = {}
    for record in sorted(records, key=lambda r: r["provenance"].get("recipe_digest") == today):
        if record["kind"] != "eval" or record["model"] != _short(model) or record["recipe"] != recipe.name:
            continue
        if table.calibration and record["provenance"].get("recipe_digest") not in (today, None):
            continue  # another calibration is another figure
        engine = record["protocol"].get("engine", "comet")
        if (record["kv_quantized"], engine) != (recipe.kv_cache.bits < 16, "comet"):
            continue  # comet eval --kv16, or what another program made of the packed model
        if table.metric == "perplexity":
            windows = "all" if table.windows is None else table.windows
            fits = (record["metric"], record["windows"]) == ("perplexity", windows)
            fits = fits and record["task"] in _text_names(table) and record["seq_len"] == table.seq_len
        else:
            fits = record["metric"] == "acc" and record.get("kv_open_page") == "16bit"
            fits = fits and record.get("limit") == table.limit and record["task"] in (*table.tasks, "average")
        if fits:
            latest[record["task"]] = record
    complete = table.metric == "perplexity" or set(table.tasks) <= set(latest)
    return list(latest.values()) if complete else []


def _text_names(table: PaperTable) -> tuple[str, str]:
    return table.data, Path(table.data).name  # records name a file without its folder


def require_data(table: PaperTable) -> None:
    """Raise CometError, before anything is packed, if the table's text or tasks are not to be had."""
    if table.metric == "zero_shot":
        load_tasks(table.tasks)
    elif (found := load_corpus(table.data, role="perplexity").name) not in _text_names(table):
        raise CometError(
            f"{table.name} is about {table.data}, which is not here ({found} would stand in)",
            "Set COMET_DATA to a folder that holds it, or connect to the hub.",
        )


def require_cells(found: Iterable[Cell], table: PaperTable, out: Path) -> None:
    """Raise CometError, before anything is packed, if the table's data or the disk for its largest model is missing."""
    require_data(table)
    for cell in found:
        if cell.row.recipe != "fp16":
            require_disk(out, packing_disk(resolve_model(cell.model), cell.recipe), f"{cell.model}, {cell.recipe.name}")


def _short(model: str) -> str:
    return Path(model).resolve().name if Path(model).exists() else model


def sweep(cells: Iterable[Cell], out: Path) -> None:
    """Remove models that were measured and were to go when their run was stopped."""
    for cell in cells:
        folder = _home(cell, out)
        if cell.records and (not folder.exists() or (folder / SPENT).exists()):
            discard(folder)


def _home(cell: Cell, out: Path) -> Path:
    """Where a cell's calibration and packed model lie until it is measured."""
    return out / "models" / f"{_short(cell.model).replace('/', '--')}-{cell.recipe.name}-{digest(cell.recipe)}"


def measure(
    cell: Cell, table: PaperTable, out: Path, *, device: str, dtype: str, keep: bool, progress: Progress
) -> list[dict[str, Any]]:
    """Calibrate, pack and evaluate one cell; its records are appended to out/records.jsonl and returned.

    Errors:
        CometError of any of the three steps, for example for a family that cannot carry a rotation.
    """
    progress.log(f"{cell.model}: {cell.row.label} ({cell.recipe.name})")
    target: str | Path = cell.model
    folder = _home(cell, out)
    if cell.row.recipe != "fp16":
        target = folder / "packed"
        if not (target / "config.json").is_file():
            source = resolve_model(cell.model)
            calibrate(source, cell.recipe, folder / "calibration", device=device, dtype=dtype, progress=progress)
            pack(source, folder / "calibration", None, target, device=device, dtype=dtype, progress=progress)
    if table.metric == "perplexity":
        records = evaluate_perplexity(
            target,
            data=table.data,
            windows=table.windows,
            seq_len=table.seq_len,
            device=device,
            dtype=dtype,
            compare=False,
            progress=progress,
        )
    else:
        records = evaluate_zero_shot(
            target, tasks=table.tasks, limit=table.limit, device=device, dtype=dtype, progress=progress
        )
        records = [record for record in records if record["recipe"] == cell.recipe.name]
    if not keep and folder.exists():
        (folder / SPENT).touch()
    for record in records:
        append(out / "records.jsonl", record)
    if not keep:
        discard(folder)
    return [json.loads(json.dumps(record)) for record in records]
