"""Calibration: what `calibrate` found and `pack` starts from, as a value and as a folder.

The folder holds `statistics.safetensors` (the token windows; per group the channel maxima and the plan) and
`calibration.json` (recipe, model, data, groups, outlier report), which is written last and makes it valid.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comet_core.decoder import LinearGroup
from comet_core.experts import any_expert
from comet_core.model_source import ModelSource
from comet_core.outliers import draw_heat_map
from comet_core.plan import BlockPlan, stored_recipe, stored_share
from comet_core.recipe import Recipe, TransformSpec, digest, recipe_to_dict
from comet_core.whole_files import cannot_write, whole_file, write_text
from comet_cuda.affine import num_blocks
from comet_cuda.errors import CometError

FORMAT_VERSION = 2
# What json, pathlib and torch raise on damaged input.
BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, RuntimeError)
MANIFEST, STATISTICS = "calibration.json", "statistics.safetensors"


@dataclass(frozen=True)
class GroupPlan:
    """One LinearGroup of one layer with its plan. `quantized` are the linears whose weights are not kept in 16 bit."""

    layer: int
    group: LinearGroup
    quantized: tuple[str, ...]
    plan: BlockPlan
    absmax: Tensor  # f32 [K]
    report: dict[str, Any]

    @property
    def folded(self) -> bool:
        """True if the producer's rows carry the permutation."""
        return bool(self.group.producers)


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found; `save` and `load_calibration` are inverse."""

    recipe: Recipe
    model: dict[str, Any]  # name, origin, note, digest
    data: dict[str, Any]  # name, origin, sha256, samples, seq_len, seed
    tokens: Tensor  # int64 [samples, seq_len]
    groups: tuple[GroupPlan, ...]
    layer_prefix: str
    int4_mac_fraction: float

    def sha256(self) -> str:
        """Digest of the tokens and of every plan: two calibrations with equal ones pack into the same bytes."""
        whole = hashlib.sha256(self.tokens.numpy().tobytes())
        for item in self.groups:
            whole.update(f"{item.layer} {item.group} {item.quantized} {item.plan.hadamard} {item.plan.share}".encode())
            for tensor in (item.plan.perm, item.plan.block_bits, item.plan.clip):
                whole.update(tensor.numpy().tobytes())
        return whole.hexdigest()


def calibrate_alike(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes calibrate alike on the same windows: they may differ in what only packing reads."""
    packing = ("name", "description", "calibration", "weights", "kv_cache", "tuning", "checks")
    aligned = replace(one, **{key: getattr(other, key) for key in (*packing, "embedding_bits", "lm_head_bits")})
    return digest(aligned) == digest(other)


def is_of(model: dict[str, Any], source: ModelSource, recipe: Recipe) -> bool:
    """Whether a manifest's `model` is `source`. A transformed model's digest is known only when it has been made: such
    a one is told by its name."""
    known = "digest" if recipe.transform == TransformSpec() else "name"
    return bool(model[known] == (source.digest() if known == "digest" else source.name))


def refuse_other(out: Path, source: ModelSource, recipe: Recipe) -> None:
    """Raise CometError if `out` holds the finished calibration of another model, recipe or choice of windows."""
    try:
        found = load_calibration(out)
    except CometError:  # none, or none that could be read
        return
    wrong = ["model"] * (not is_of(found.model, source, recipe))
    wrong += ["recipe"] * (not calibrate_alike(recipe, found.recipe))
    wrong += ["windows"] * (recipe.calibration != found.recipe.calibration)
    if wrong:
        raise CometError(
            f"{out}: holds the calibration of {found.model['name']} by recipe {found.recipe.name}, not what is asked "
            f"for ({source.name} by recipe {recipe.name}); they differ in {', '.join(wrong)}",
            "choose another folder with --out, or remove this one",
        )


def writable_folder(out: Path) -> Path:
    """Make `out` before any work, so that an unwritable place is named at once."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise cannot_write(out, error) from error
    return out


def save(calibration: Calibration, out: Path) -> None:
    """Write the artifact: statistics first, the manifest that makes it valid last, both by rename."""
    from safetensors.torch import save_file

    writable_folder(out)
    tensors = {"tokens": calibration.tokens.to(torch.int32)}
    groups = []
    for item in calibration.groups:
        key = f"{calibration.layer_prefix}.{item.layer}.{item.group.names[0]}"
        tensors |= {
            f"{key}.absmax": item.absmax,
            f"{key}.perm": item.plan.perm,
            f"{key}.block_bits": item.plan.block_bits,
            f"{key}.act_clip": item.plan.clip,
        }
        groups.append(
            {
                "layer": item.layer,
                "group": asdict(item.group),
                "quantized": item.quantized,
                "hadamard": item.plan.hadamard,
                "share": item.plan.share,
                "report": item.report,
            }
        )
    (out / MANIFEST).unlink(missing_ok=True)
    with whole_file(out / STATISTICS) as partial:
        save_file(tensors, partial)
    manifest = {
        "format_version": FORMAT_VERSION,
        "recipe": recipe_to_dict(calibration.recipe),
        "recipe_digest": digest(calibration.recipe),
        "model": calibration.model,
        "data": calibration.data,
        "layer_prefix": calibration.layer_prefix,
        "int4_mac_fraction": calibration.int4_mac_fraction,
        "groups": groups,
    }
    write_text(out / MANIFEST, json.dumps(manifest, indent=1))


def load_calibration(folder: Path) -> Calibration:
    """Read an artifact back.

    Errors:
        CometError if it is missing, unfinished, damaged, or from a later version.
    """
    from safetensors import SafetensorError, safe_open

    redo = "run `comet calibrate` again"
    if not (folder / MANIFEST).is_file():
        raise CometError(f"{folder}: no {MANIFEST} in this folder, so it holds no finished calibration", redo)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["format_version"]
        if type(version) is not int or version != FORMAT_VERSION:
            raise CometError(
                f"{folder}: calibration format_version is {version!r}, this COMET reads {FORMAT_VERSION}",
                "update COMET, or " + redo,
            )
        with safe_open(folder / STATISTICS, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        groups = tuple(_load_group(item, manifest["layer_prefix"], tensors) for item in manifest["groups"])
        return Calibration(
            recipe=stored_recipe(manifest["recipe"]),
            model={key: str(manifest["model"][key]) for key in ("name", "origin", "note", "digest")},
            data=dict(manifest["data"]),
            tokens=_windows(tensors["tokens"]),
            groups=groups,
            layer_prefix=manifest["layer_prefix"],
            int4_mac_fraction=float(manifest["int4_mac_fraction"]),
        )
    except CometError as error:  # of the recipe or the version
        where = "" if error.message.startswith(str(folder)) else f"{folder / MANIFEST}: "
        raise CometError(f"{where}{error.message}", error.hint or redo) from error
    except (*BROKEN, SafetensorError) as error:
        raise CometError(f"{folder}: the calibration is damaged ({type(error).__name__}: {error})", redo) from error


def _windows(tokens: Tensor) -> Tensor:
    if tokens.dtype != torch.int32 or tokens.dim() != 2 or tokens.numel() == 0 or int(tokens.min()) < 0:
        raise ValueError(f"tokens are {tokens.dtype} {tuple(tokens.shape)}, not windows of token numbers")
    return tokens.long()


def _load_group(item: dict[str, Any], prefix: str, tensors: dict[str, Tensor]) -> GroupPlan:
    given = item["group"]
    group = LinearGroup(
        tuple(given["names"]), int(given["in_channels"]), int(given["out_rows"]), tuple(given["producers"])
    )
    key = f"{prefix}.{item['layer']}.{group.names[0]}"
    perm, bits, clip = tensors[f"{key}.perm"], tensors[f"{key}.block_bits"], tensors[f"{key}.act_clip"]
    blocks = num_blocks(group.in_channels)
    if perm.dtype != torch.int32 or not torch.equal(perm.long().sort().values, torch.arange(group.in_channels)):
        raise ValueError(f"{key}.perm is no permutation of {group.in_channels} channels")
    if bits.dtype != torch.uint8 or bits.shape != (blocks,) or not set(bits.tolist()) <= {4, 8, 16}:
        raise ValueError(f"{key}.block_bits must be {blocks} values of 4, 8 or 16")
    if clip.dtype != torch.float32 or clip.shape != (blocks,) or not bool(((clip > 0) & (clip <= 1)).all()):
        raise ValueError(f"{key}.act_clip must be {blocks} values in (0, 1]")
    absmax = tensors[f"{key}.absmax"]
    if absmax.dtype != torch.float32 or absmax.shape != perm.shape or not bool((absmax >= 0).all()):
        raise ValueError(f"{key}.absmax must be {group.in_channels} values from 0 up")
    plan = BlockPlan(perm, bits, clip, bool(item["hadamard"]), stored_share(item["share"]))
    return GroupPlan(int(item["layer"]), group, tuple(item["quantized"]), plan, absmax, dict(item["report"]))


def heat_map(calibration: Calibration, png: Path) -> None:
    """Picture of channel maxima by layer (and expert), before and after permutation, for every kind of group."""
    kinds: dict[str, list[GroupPlan]] = {}
    for item in calibration.groups:
        if bool(item.absmax.any()):  # an expert that was never reached has none
            kinds.setdefault(f"input of {any_expert(item.group.names[0])}", []).append(item)
    rows = [
        (
            name,
            torch.stack([item.absmax for item in items]),
            torch.stack([item.absmax[item.plan.perm.long()] for item in items]),
        )
        for name, items in kinds.items()
        if len({item.group.in_channels for item in items}) == 1
    ]
    draw_heat_map(f"{calibration.model['name']}, {calibration.recipe.name}", rows, png)
