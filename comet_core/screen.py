"""Many variants of a recipe, one after the other or a few at once -> eval records: how a lever earns its place.

A file names a base recipe and, per variant, the keys that differ (and `recipe: NAME`, if its base is another one). Each
variant is calibrated, packed and evaluated like any other recipe, under the name `base+variant`, in a process that does
one after the other; one that fails costs the others nothing. What several variants begin with, a calibration or the
packing before tuning, is done once. Variants whose record is in the file already (same recipe digest, model, text and
windows) are left out, so a run that was cut off goes on.

    python -m comet_core.screen results/ablations.yaml --model smollm2-135m --windows 40 --jobs 3 --record FILE

On a GPU, processes share its time: two or three keep it busy, more only wait.
"""

import argparse
import contextlib
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comet_core.model_source import resolve_model
from comet_core.progress import SilentProgress
from comet_core.recipe import (
    KVCacheSpec,
    Recipe,
    TuningSpec,
    WeightSpec,
    digest,
    load_recipe,
    recipe_from_dict,
    recipe_to_dict,
)
from comet_core.results import append, read
from comet_cuda.errors import CometError


@dataclass(frozen=True)
class Setting:
    """What all variants of one run share."""

    model: str
    layers: int | None  # only the first so many
    data: str
    windows: int | None
    seq_len: int
    device: str
    dtype: str  # of the evaluation
    pack_dtype: str
    compare: bool
    kv16: bool  # the KV cache left in 16 bit, whatever the recipe
    record: Path
    shared: Path  # folder of calibrations and packed models that several variants use
    recipes: tuple[Recipe, ...]  # all variants


def variants(file: Path) -> dict[str, Recipe]:
    """The recipes of an ablation file by variant: `base: NAME` and `variants: {name: {section: {key: value}}}`.

    Errors:
        CometError for a file that cannot be read, an unknown key or a value out of range, naming the variant.
    """
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        base, changes = content["base"], dict(content["variants"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise CometError(
            f"{file}: is no ablation file ({' '.join(str(error).split())})", "it holds `base` and `variants`"
        ) from None
    found = {}
    for name, change in changes.items():
        try:
            own = {"recipe": base} | (change or {})
            plain = recipe_to_dict(load_recipe(own.pop("recipe")))
            label = f"{plain['name']}+{name}" if own or plain["name"] == base else plain["name"]
            found[str(name)] = recipe_from_dict(_changed(plain, own) | {"name": label})
        except CometError as error:
            raise CometError(f"{file}: {name}: {error.message}", error.hint) from None
    return found


def _changed(plain: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(plain)
    for section, values in change.items():
        is_section = isinstance(values, dict) and isinstance(plain.get(section), dict)
        merged[section] = plain[section] | values if is_section else values
    return merged


def measured_already(recipe: Recipe, setting: Setting) -> bool:
    """Whether the record file holds this variant's perplexity."""
    records = read(setting.record) if setting.record.exists() else []
    wanted = (digest(recipe), setting.windows or "all", setting.seq_len, "perplexity")
    return any(
        (r["provenance"].get("recipe_digest"), r["windows"], r["seq_len"], r["metric"]) == wanted
        and r["kv_quantized"] == (recipe.kv_cache.bits < 16 and not setting.kv16)
        and _is_called(r["model"], setting.model)
        and _is_called(r["task"], setting.data)
        for r in records
        if r["kind"] == "eval"
    )


def _is_called(name: str, given: str) -> bool:
    """Whether a record's name is that of what was given: an alias or a data set, or a folder or file by its path."""
    return name in (given, Path(given).name, Path(given).stem)


def measure(recipe: Recipe, setting: Setting) -> None:
    """Calibrate, pack and evaluate one variant; append its records."""
    from comet_core.evaluate import evaluate_perplexity

    began = time.monotonic()
    packed = _packed(recipe, setting)
    packed_after = time.monotonic() - began
    records = evaluate_perplexity(
        packed,
        data=setting.data,
        windows=setting.windows,
        seq_len=setting.seq_len,
        device=setting.device,
        dtype=setting.dtype,
        compare=setting.compare,
        kv16=setting.kv16,
        progress=SilentProgress(),
    )
    for record in records:
        append(setting.record, record)
    value = next(r["value"] for r in records if r["metric"] == "perplexity" and r["recipe"] == recipe.name)
    seconds = f"{packed_after:.0f} s to pack, {time.monotonic() - began - packed_after:.0f} s to evaluate"
    print(f"{setting.model}  {recipe.name}  perplexity {value:.3f}  ({seconds})", flush=True)


def _packed(recipe: Recipe, setting: Setting) -> Path:
    """The packed folder of a variant: found, or made from what others made before."""
    from comet_core.calibrate import calibrate
    from comet_core.calibration import MANIFEST
    from comet_core.finished import draft_folder
    from comet_core.pack import pack
    from comet_core.packed import is_packed

    weights = WeightSpec(bits=recipe.weights.bits, group=recipe.weights.group)  # all of it that a calibration asks for
    measured = replace(recipe, weights=weights, kv_cache=KVCacheSpec(), tuning=TuningSpec())
    source, silent = resolve_model(setting.model, layers=setting.layers), SilentProgress()
    how: Any = {"device": setting.device, "dtype": setting.pack_dtype}
    calibration, packed = (setting.shared / kind / _content(r) for kind, r in (("c", measured), ("p", recipe)))
    with _alone(calibration):
        if not (calibration / MANIFEST).is_file():
            calibrate(source, measured, calibration, **how, progress=silent)
    untuned = replace(recipe, tuning=TuningSpec())
    if untuned != recipe:
        same = [other for other in setting.recipes if _content(other) == _content(untuned)]
        draft = _packed((same or [untuned])[0], setting)
    with _alone(packed):
        if not is_packed(packed):
            for folder in (packed, draft_folder(packed)):  # of a run that was cut off, maybe under another name
                shutil.rmtree(folder, ignore_errors=True)
            if untuned != recipe:
                shutil.copytree(draft, draft_folder(packed))
            pack(source, calibration, recipe, packed, **how, progress=silent)
    return packed


def _content(recipe: Recipe) -> str:
    """Digest of all that a recipe does, whatever it is called."""
    return digest(replace(recipe, name="-", description="-"))


def _alone(folder: Path) -> AbstractContextManager[Any]:
    """One process at a time makes a folder."""
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{folder}.making")


def _work(pipe: Any, setting: Setting) -> None:
    """A process that measures recipes, one after the other, until it is sent None. After an error that is not of the
    recipe (a GPU's stay with the process) it ends."""
    import gc

    import torch

    while (recipe := pipe.recv()) is not None:
        try:
            measure(recipe, setting)
            pipe.send(True)
        except CometError as error:
            print(f"{recipe.name}: {error.message}\nhint: {error.hint}", file=sys.stderr, flush=True)
            pipe.send(False)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # others share the GPU


class _Worker:
    """One process of `_work`, and what it is at."""

    def __init__(self, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU of its parent
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, setting), daemon=True)
        self.process.start()
        theirs.close()
        self.recipe: Recipe | None = None

    def give(self, recipe: Recipe | None) -> None:
        self.pipe.send(recipe)
        self.recipe = recipe

    def take(self) -> bool | None:
        """Whether its recipe was measured; None while it is at it. A process that ended has failed."""
        try:
            return bool(self.pipe.recv()) if self.pipe.poll() else None
        except (EOFError, OSError):
            self.process.join()
            print(f"{self.recipe and self.recipe.name}: its process ended", file=sys.stderr, flush=True)
            return False


def run(recipes: Sequence[Recipe], setting: Setting, jobs: int, seconds: float) -> int:
    """Measure every variant, `jobs` at a time; none is started after `seconds`. Returns how many failed."""
    began, waiting, failed = time.monotonic(), list(recipes), 0
    workers: list[_Worker] = []
    while True:
        for worker in [w for w in workers if w.recipe is not None]:
            outcome = worker.take()
            if outcome is not None:
                worker.recipe, failed = None, failed + (not outcome)
        workers = [w for w in workers if w.recipe is not None or w.process.is_alive()]
        idle = [w for w in workers if w.recipe is None]
        if waiting and time.monotonic() - began < seconds and (idle or len(workers) < jobs):
            if not idle:
                workers.append(_Worker(setting))
            (idle or workers[-1:])[0].give(waiting.pop(0))
        elif len(idle) == len(workers):
            break
        else:
            time.sleep(0.1)
    for worker in workers:
        with contextlib.suppress(OSError):  # one that ended while it waited
            worker.give(None)
        worker.process.join()
    if waiting:
        print(f"{len(waiting)} variants were not started in {seconds:.0f} s", file=sys.stderr)
    return failed + len(waiting)


def _chosen(recipes: dict[str, Recipe], only: str | None) -> list[Recipe]:
    """All variants, or those called by their name in the file or by their recipe's, in the order of the file."""
    if only is None:
        return list(recipes.values())
    names = set(only.split(","))
    for name in sorted(names - recipes.keys() - {recipe.name for recipe in recipes.values()}):
        print(f"warning: no variant is called {name}; there are {', '.join(recipes)}", file=sys.stderr)
    return [recipe for name, recipe in recipes.items() if {name, recipe.name} & names]


def main(arguments: list[str]) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m comet_core.screen", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--only", help="variants by name, separated by commas")
    parser.add_argument("--layers", type=int, help="of the model, to try a file out")
    parser.add_argument("--data", default="wikitext2")
    parser.add_argument("--windows", type=int)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--samples", type=int, help="calibration windows")
    parser.add_argument("--sample-len", type=int, help="tokens a calibration window")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pack-dtype", default="auto")
    parser.add_argument("--compare", action="store_true", help="run the 16-bit model too: KL and top-1")
    parser.add_argument("--kv16", action="store_true", help="leave the KV cache in 16 bit")
    parser.add_argument("--keep", type=Path, help="folder for calibrations and packed models; else they are removed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no variant after this time")
    given = parser.parse_args(arguments)
    from comet_core.recipe import with_calibration

    try:
        recipes = [
            with_calibration(recipe, samples=given.samples, seq_len=given.sample_len)
            for recipe in _chosen(variants(given.file), given.only)
        ]
        with tempfile.TemporaryDirectory(prefix="comet-screen-") as home:
            setting = Setting(
                given.model, given.layers, given.data, given.windows, given.seq_len, given.device, given.dtype,
                given.pack_dtype, given.compare, given.kv16, given.record, given.keep or Path(home), tuple(recipes),
            )  # fmt: skip
            todo = [recipe for recipe in recipes if not measured_already(recipe, setting)]
            print(f"{len(recipes)} variants, {len(todo)} to measure", flush=True)
            return 1 if run(todo, setting, given.jobs, given.seconds) else 0
    except CometError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
