"""Calibration -> packed checkpoint, one layer in memory at a time (pack_job.py), and tuned if the recipe says so.

Tuning needs the whole model. It starts from a finished folder of its own beside the one asked for, so that a run which
is killed while tuning finds the untuned model again.
"""

from dataclasses import replace
from pathlib import Path

import torch

from comet_core.calibrate import resolve_lanes
from comet_core.calibration import Calibration, calibrate_alike, load_calibration
from comet_core.decoder import load_sixteen
from comet_core.finished import asked_of, draft_folder, look_into
from comet_core.lanes import Lanes
from comet_core.ledger import PackedInfo
from comet_core.model_source import ModelSource
from comet_core.pack_job import PackJob
from comet_core.packed import load_packed
from comet_core.progress import Progress
from comet_core.recipe import Recipe, TuningSpec
from comet_core.shards import read_shard, write_shard
from comet_core.transform import transformed
from comet_core.tune import tune
from comet_core.whole_files import claimed, discard
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import TOKEN


@torch.no_grad()
def pack(
    source: ModelSource,
    calibration: Path,
    recipe: Recipe | None,
    out: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress,
    limit_share: float = 1.0,
    lanes: Lanes | None = None,
) -> PackedInfo:
    """Quantize and write the model to `out`; the same call after a crash goes on, and after the end does nothing.

    Args:
        source: the model that was calibrated. calibration: folder that `calibrate` wrote.
        recipe: None takes the calibration's; another one may differ in weights, kv_cache, tuning, checks, embedding and
            lm_head only.
        out: folder to write. device, dtype: as in `calibrate`. progress: told about every step.
        limit_share, lanes: as in `calibrate`.

    Errors:
        CometError if the parts do not belong together, the folder holds something else, or the disk is full.
    """
    found = load_calibration(calibration)
    recipe = _agreed_recipe(found, recipe)
    named, compute = resolve_lanes(device, dtype)
    lanes = lanes or named
    device = str(lanes.devices[0])
    source = transformed(source, recipe.transform, found.tokens, device=device, dtype=compute, progress=progress)
    if source.digest() != found.model["digest"]:
        raise CometError(
            f"{calibration}: was made from {found.model['name']} (digest {found.model['digest']}), not from "
            f"{source.name} (digest {source.digest()})",
            "calibrate this model, or name the other one",
        )
    _check_embedding_bits(source, recipe)
    with claimed(out):
        info, why = look_into(out, asked_of(found, recipe))
        if info is not None:
            progress.log(f"{out}: already packed; remove the folder to pack it anew")
            return info
        if why:
            progress.log(f"{out}: {why}, so packing anew")
        if recipe.tuning.epochs:
            return _pack_tuned(source, found, recipe, out, device, compute, progress, limit_share, lanes)
        return PackJob(source, found, recipe, out, device, compute, progress, limit_share, lanes).run()


def _agreed_recipe(found: Calibration, recipe: Recipe | None) -> Recipe:
    if recipe is None:
        return found.recipe
    if not calibrate_alike(recipe, found.recipe):
        raise CometError(
            f"recipe {recipe.name}: its activations, blocks, skip or overrides differ from those of the calibration "
            f"({found.recipe.name})",
            "run `comet calibrate` with this recipe",
        )
    for item in found.groups:
        for name in (f"{found.layer_prefix}.{item.layer}.{name}" for name in item.quantized):
            if item.plan.share == TOKEN and recipe.for_linear(name).activations.share != "token":
                raise CometError(
                    f"recipe {recipe.name}: {name} was calibrated for one scale a token, which needs 4-bit weights "
                    "with a scale a block",
                    "run `comet calibrate` with this recipe",
                )
    return replace(recipe, calibration=found.recipe.calibration)


def _check_embedding_bits(source: ModelSource, recipe: Recipe) -> None:
    tied = bool(getattr(source.config, "tie_word_embeddings", False))
    if tied and recipe.embedding_bits != recipe.lm_head_bits:
        raise CometError(
            f"{source.name} ties embedding and lm_head to one tensor, but the recipe wants "
            f"embedding.bits={recipe.embedding_bits} and lm_head.bits={recipe.lm_head_bits}",
            "give both the same bits",
        )


def _pack_tuned(
    source: ModelSource,
    found: Calibration,
    recipe: Recipe,
    out: Path,
    device: str,
    dtype: torch.dtype,
    progress: Progress,
    limit_share: float,
    lanes: Lanes,
) -> PackedInfo:
    """Pack into a draft, distill the 16-bit model into it (tune.py), write the outcome to `out`."""
    job = PackJob(source, found, recipe, out, device, dtype, progress)
    untuned, aside = replace(recipe, tuning=TuningSpec()), draft_folder(out)
    draft = PackJob(source, found, untuned, aside, device, dtype, progress, limit_share, lanes)
    if not draft.is_done():
        draft.run()
    tuned = tune(
        load_packed(draft.out, device=device, dtype=dtype).model,
        load_sixteen(source, device, dtype),
        found.tokens,
        spec=recipe.tuning,
        kv_cache=recipe.kv_cache,
        holdout=recipe.weights.holdout,
        seed=recipe.calibration.seed,
        progress=progress,
    )
    job.begin()
    for index in range(job.count):
        tensors, notes = read_shard(draft.shard(index))
        for name in tensors.keys() & tuned.tensors.keys():
            tensors[name] = tuned.tensors[name].to("cpu", tensors[name].dtype)
        if index == 0:
            notes["layers"][0]["tuning"] = {"before": tuned.before, "after": tuned.after}
        write_shard(job.shard(index), tensors, notes)
        job.ledger.record(job.shard(index), tensors, notes)
    info = job.ledger.finish(source, found, recipe, out)
    discard(draft.out)
    return info
