"""Packed folder -> compressed-tensors checkpoint (pack-quantized), which stock transformers and vLLM read.

The same 4-bit codes, scales and zero points, laid out their way. What differs between the formats:
  - Permutations. Where the producer's rows carry one, nothing is left to do. Where channels are gathered at run time,
    columns go back to the model's order and `weight_g_idx` says which group each belongs to (actorder: group). Newer
    readers (vLLM 0.32, compressed-tensors 0.20) refuse that: `contiguous` rounds such a linear anew, in groups of
    neighbouring channels. Moving the residual stream once for all layers would not help: each input has an order of
    its own, and attention lets no channel leave its head.
  - Zero points, which compressed-tensors 0.20.1 under transformers 5.24 fails to load: `symmetric` rounds anew.
  - Groups of 128 that pad the last channels: a width that 128 does not divide (SmolLM2: 576) is written in groups of 64
    or 32, each pair or four with equal scales.
  - What that format cannot say: a weight that is stored rotated (Hadamard) is refused, or with `requantize` turned
    back and rounded to nearest anew, and the loss that this adds is measured and returned. The KV cache stays in 16
    bit, 8-bit embeddings and heads become 16-bit ones. Activations are 16 bit, or of one width in all blocks (W4A8,
    W4A4: dynamic, symmetric, a scale a group), for which weights must be symmetric and their groups contiguous.

Facts of the format: int4 values are stored with 8 added, eight an int32, the first in the lowest bits; zero points
alike, but along the rows.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comet_core.experts import expert_of
from comet_core.ledger import TOKENIZER_FILES
from comet_core.packed import LinearEntry, Manifest, check_linear, read_manifest, split_linear_tensors
from comet_core.plan import BlockPlan
from comet_core.preflight import require_disk
from comet_core.quantize import quantize_rtn, rotate_int4, to_storage
from comet_core.recipe import Recipe, WeightSpec
from comet_core.shards import INDEX, read_shard, shard_files
from comet_core.whole_files import cannot_write, claimed, whole_file, write_text
from comet_cuda.affine import BLOCK, split_blocks
from comet_cuda.errors import CometError
from comet_cuda.int4 import unpack_nibbles
from comet_cuda.w4ax_gemm import weight_integers

STARTED = "exporting.txt"  # what a folder holds while an export is under way
PER_WORD = 8  # 4-bit values an int32
GROUP_SIZES = (128, 64, 32)  # what kernels for this format know
ACTIVATIONS = (16, 8, 4)  # bits


@dataclass
class Exported:
    """What `export` wrote and what it cost."""

    folder: Path
    bytes: int = 0
    exact: list[str] = field(default_factory=list)  # linears whose weights are the packed ones
    requantized: dict[str, float] = field(default_factory=dict)  # linear -> relative weight error that was added
    reordered: int = 0  # linears with a weight_g_idx
    asymmetric: int = 0  # linears with zero points
    left_out: list[str] = field(default_factory=list)  # in words


def export(
    folder: Path,
    out: Path,
    *,
    activations: int = 16,
    requantize: bool = False,
    contiguous: bool = False,
    symmetric: bool = False,
) -> Exported:
    """Write a compressed-tensors checkpoint of a packed folder, shard by shard.

    Args:
        folder: what `comet pack` wrote. out: a folder that does not exist or is empty.
        activations: bits that readers shall round activations to; below 16 implies `contiguous`.
        requantize: round weights anew that the format cannot hold (rotated, asymmetric below 16 bits of activations)
            instead of refusing them.
        contiguous: write no weight_g_idx; linears whose channels are gathered are rounded anew.
        symmetric: write no zero points; asymmetric weights are rounded anew.

    Errors:
        CometError for weights that the format cannot hold without `requantize`, 8-bit weights, experts, or an output
        folder that is in use.
    """
    manifest = read_manifest(folder)
    refuse(manifest, requantize, activations)
    shards = shard_files(folder)
    require_disk(out, sum(shard.stat().st_size for shard in shards), "the export")
    with claimed(out):
        _begin(out)
        done = export_shards(folder, manifest, out, activations, shards, contiguous=contiguous, symmetric=symmetric)
        (out / STARTED).unlink()
    done.bytes = sum(file.stat().st_size for file in out.iterdir())
    return done


def _begin(out: Path) -> None:
    """Mark the folder as ours; what an export that was stopped has left is written over."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        others = {file.name for file in out.iterdir()} - {f"{STARTED}.tmp"}
        if others and STARTED not in others:
            raise CometError(f"{out}: is not empty", "choose another folder with --out, or remove this one")
        write_text(out / STARTED, "An export into this folder has not finished; the same command starts it again.\n")
        (out / "config.json").unlink(missing_ok=True)  # without it no program takes the folder for a model
        for file in out.glob("*.safetensors*"):
            file.unlink()
        for file in out.glob("*.tmp"):
            file.unlink()
    except OSError as error:
        raise cannot_write(out, error) from error


def export_shards(
    folder: Path,
    manifest: Manifest,
    out: Path,
    activations: int,
    shards: Sequence[Path],
    *,
    contiguous: bool,
    symmetric: bool,
) -> Exported:
    """Write these shards of a packed folder, and config, index and tokenizer beside them, into the folder `out`."""
    done = Exported(out, left_out=_left_out(manifest, activations))
    weight_map: dict[str, str] = {}
    groups: dict[tuple[bool, bool, int], list[str]] = {}
    for shard in shards:
        tensors, _ = read_shard(shard)
        packed = split_linear_tensors(tensors, manifest.linears)
        written = _sixteen(tensors, packed, manifest)
        for name, leaves in packed.items():
            entry = manifest.linears[name]
            if entry.weight_bits == 8:
                continue
            check_linear(name, leaves, entry)
            rotated = entry.hadamard and bool((leaves["block_bits"] == 4).any())
            gathered = "perm" in leaves and _moves(leaves["perm"]) and (contiguous or activations < 16)
            lopsided = (symmetric or activations < 16) and not entry.symmetric
            if rotated or gathered or lopsided:
                entry = replace(entry, symmetric=entry.symmetric or lopsided)
                leaves, done.requantized[name] = _rounded_anew(leaves, entry)
            else:
                done.exact.append(name)
            size = _group_size(name, entry.in_features)
            stored = linear_tensors(leaves, entry, size)
            done.reordered += "weight_g_idx" in stored
            done.asymmetric += not entry.symmetric
            groups.setdefault((entry.symmetric, "weight_g_idx" in stored, size), []).append(name)
            written |= {f"{name}.{leaf}": tensor for leaf, tensor in stored.items()}
        _save(out / shard.name, written)
        weight_map |= dict.fromkeys(written, shard.name)
    index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(out / INDEX, json.dumps(index, indent=1) + "\n")
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            with whole_file(out / name) as partial:
                shutil.copyfile(folder / name, partial)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("experts_implementation", None)
    config["quantization_config"] = _quantization_config(groups, activations, weight_map)
    config["dtype"] = config.get("dtype") or "bfloat16"
    write_text(out / "config.json", json.dumps(config, indent=1, sort_keys=True) + "\n")
    return done


def check_recipe(recipe: Recipe, out: Path) -> None:
    """Raise CometError, before any work, if what this recipe packs cannot be exported as it is, or `out` is in use."""
    if recipe.weights.bits != 4:
        raise CometError(
            f"recipe {recipe.name}: has {recipe.weights.bits}-bit weights, only 4-bit ones are exported",
            "--recipe w4a16",
        )
    if recipe.activations.hadamard and recipe.activations.bits == 4:
        raise CometError(
            f"recipe {recipe.name}: stores weights rotated (activations.hadamard), which compressed-tensors cannot say",
            "--recipe w4a16; or pack without --format, and then: comet export --requantize, at a loss that is stated",
        )
    refuse_used(out)


def refuse_used(out: Path) -> None:
    """Raise CometError if the folder holds anything but an unfinished export."""
    if out.exists() and any(out.iterdir()) and not (out / STARTED).exists():
        raise CometError(f"{out}: is not empty", "remove it, or choose another --out")


def linear_tensors(leaves: dict[str, Tensor], entry: LinearEntry, size: int) -> dict[str, Tensor]:
    """The tensors of one linear in the other format, by leaf name; weights must not be rotated.

    Args:
        leaves: the packed linear's. size: channels a group, a divisor of 128 and of K.
    """
    rows, width = entry.out_features, entry.in_features
    codes = unpack_nibbles(leaves["qweight"])[:, :width]  # uint8 [N, K], stored order

    def spread(by_block: Tensor) -> Tensor:
        return by_block.repeat_interleave(BLOCK // size, 1)[:, : width // size].contiguous()

    found = {"weight_scale": spread(leaves["w_scale"]), "weight_shape": torch.tensor([rows, width])}
    if "perm" in leaves and _moves(leaves["perm"]):
        inverse = leaves["perm"].long().argsort()
        codes = codes[:, inverse]
        found["weight_g_idx"] = (inverse // size).to(torch.int32)
    found["weight_packed"] = _words(codes)
    if not entry.symmetric:
        found["weight_zero_point"] = _words(spread(leaves["w_zero"]).T).T.contiguous()
    if "bias" in leaves:
        found["bias"] = leaves["bias"]
    return found


def _words(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 [R, C] -> int32 [R, ceil(C / 8)]; code j of a word stands in bits 4j to 4j + 3."""
    short = -codes.shape[1] % PER_WORD
    wide = torch.nn.functional.pad(codes, (0, short)).unflatten(1, (-1, PER_WORD)).to(torch.int32)
    shifts = torch.arange(PER_WORD, dtype=torch.int32) * 4
    words: Tensor = (wide << shifts).sum(2, dtype=torch.int32)
    return words


def _group_size(name: str, width: int) -> int:
    for size in GROUP_SIZES:
        if width % size == 0:
            return size
    raise CometError(f"{name}: {width} channels do not split into groups of {GROUP_SIZES[-1]}", "skip this linear")


def refuse(manifest: Manifest, requantize: bool, activations: int) -> None:
    """Raise CometError if the format cannot hold the packed weights."""
    if activations not in ACTIVATIONS:
        raise CometError(f"{activations}-bit activations are not known", f"They may have {ACTIVATIONS} bits.")
    layers = {name: entry for name, entry in manifest.linears.items() if not (entry.weight_bits == 8 and entry.folded)}
    if experts := [name for name in layers if expert_of(name)]:
        raise CometError(
            f"{experts[0]}: is part of an expert, and programs that read this format each want experts in another way",
            "open the packed folder itself: comet eval, or transformers with `import comet_core`",
        )
    wide = [name for name, entry in layers.items() if entry.weight_bits != 4]
    if wide:
        raise CometError(f"{wide[0]}: has 8-bit weights, only 4-bit ones are exported", "use a recipe of 4-bit weights")
    rotated = [name for name, entry in layers.items() if entry.hadamard]
    if rotated and not requantize:
        raise CometError(
            f"{rotated[0]} and {len(rotated) - 1} other linears are stored rotated (activations.hadamard), which "
            "compressed-tensors cannot say",
            "pack with --recipe w4a16, or give --requantize to round them anew, at a loss that is then stated",
        )
    lopsided = [name for name, entry in layers.items() if not entry.symmetric]
    if lopsided and activations < 16 and not requantize:
        raise CometError(
            f"{lopsided[0]} and {len(lopsided) - 1} other linears have asymmetric weights, which readers of "
            f"W4A{activations} do not take",
            "pack with weights.symmetric: true, or give --requantize to round them anew, at a loss that is then stated",
        )


def _left_out(manifest: Manifest, activations: int) -> list[str]:
    recipe, lost = manifest.recipe, []
    packed = recipe.activations
    if packed.bits < 16 and activations == 16:
        lost.append(f"{packed.bits}-bit activations: they stay in 16 bit")
    if packed.bits < 8 and activations == 8:
        lost.append("4-bit blocks of activations: all have 8 bits")
    if packed.bits < 8 and activations == 4:
        wide = 1 - manifest.int4_mac_fraction
        lost.append(f"8-bit blocks for outliers, {wide:.1%} of multiply-adds: all activations have 4 bits")
    if packed.bits < 8 and activations < 16 and packed.clip < 1:
        lost.append(f"activations clipped at {packed.clip:g} of their largest value: readers do not clip")
    if activations < 16:
        lost.append(
            f"no promise of {activations}-bit products: some readers keep activations in 16 bit or FP8 where they have "
            "no such kernel (vLLM 0.26 on Hopper takes Machete, 16 bit, unless linear_backend=humming)"
        )
    if recipe.kv_cache.bits < 16:
        lost.append(f"{recipe.kv_cache.bits}-bit KV cache: it stays in 16 bit")
    if manifest.embedding_bits == 8 or any(entry.weight_bits == 8 for entry in manifest.linears.values()):
        lost.append("8-bit embedding or head: written in 16 bit")
    return lost


def _moves(perm: Tensor) -> bool:
    """Whether a permutation moves any channel."""
    return not torch.equal(perm, torch.arange(perm.shape[0], dtype=perm.dtype))


def _rounded_anew(leaves: dict[str, Tensor], entry: LinearEntry) -> tuple[dict[str, Tensor], float]:
    """A linear turned back to the model's own channels and rounded to nearest in their order, symmetrically if `entry`
    says so; the error that this adds, relative to the packed weight."""
    width, bits = entry.in_features, leaves["block_bits"]
    stored = weight_integers(leaves["qweight"], leaves.get("w_zero")) * leaves["w_scale"].float()[..., None]
    weight = rotate_int4(stored, bits) if entry.hadamard else stored  # the transform is its own inverse
    weight = weight.flatten(1)[:, :width]
    if "perm" in leaves:
        weight = weight[:, leaves["perm"].long().argsort()]
    identity = BlockPlan(torch.arange(width, dtype=torch.int32), bits, torch.ones_like(leaves["act_clip"]), False)
    blocks = to_storage(weight, identity)
    spec = WeightSpec(bits=4, symmetric=entry.symmetric, method="rtn", clip_search=True)
    fresh = quantize_rtn(blocks, torch.ones(blocks[0].numel()), spec)
    error = float((fresh.dequantize() - blocks).norm() / blocks.norm())
    made = {"qweight": fresh.qweight, "w_scale": fresh.scale, "w_zero": fresh.zero, "bias": leaves.get("bias")}
    return {leaf: tensor for leaf, tensor in made.items() if tensor is not None}, error


def _sixteen(tensors: dict[str, Tensor], packed: dict[str, dict[str, Tensor]], manifest: Manifest) -> dict[str, Tensor]:
    """What is not a 4-bit linear: as it is, or 8-bit embeddings and heads in bfloat16."""
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith((".qweight", ".w_scale"))}
    widths = [entry.in_features for entry in manifest.linears.values() if entry.weight_bits == 8]
    for name in (name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")):
        codes, scale = tensors[f"{name}.qweight"], tensors[f"{name}.w_scale"]
        plain[f"{name}.weight"] = _decoded(codes, scale, widths[0] if widths else codes.shape[1])
    for name, leaves in packed.items():
        if manifest.linears[name].weight_bits == 8:
            plain[f"{name}.weight"] = _decoded(leaves["qweight"], leaves["w_scale"], manifest.linears[name].in_features)
            plain |= {f"{name}.bias": leaves["bias"]} if "bias" in leaves else {}
    return plain


def _decoded(codes: Tensor, scale: Tensor, width: int) -> Tensor:
    """int8 [V, 128 * NB], bf16 [V, NB] -> bf16 [V, width]."""
    rows: Tensor = (split_blocks(codes.float()) * scale.float()[..., None]).flatten(1)[:, :width]
    return rows.to(torch.bfloat16)


def _quantization_config(
    groups: dict[tuple[bool, bool, int], list[str]], activations: int, stored: Iterable[str]
) -> dict[str, Any]:
    """config.json's quantization_config: one group of linears per kind of layout."""
    config_groups = {}
    for number, ((symmetric, ordered, size), names) in enumerate(sorted(groups.items())):
        config_groups[f"group_{number}"] = {
            "targets": names,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": symmetric,
                "strategy": "group",
                "group_size": size,
                "actorder": "group" if ordered else None,
                "dynamic": False,
            },
            "input_activations": _activation_scheme(activations, size),
            "output_activations": None,
            "format": "pack-quantized",
        }
    quantized = {name for names in groups.values() for name in names}
    owners = {name.removesuffix(".weight") for name in stored if name.endswith(".weight")}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": sorted((owners | {"lm_head"}) - quantized),
        "kv_cache_scheme": None,
    }


def _activation_scheme(bits: int, size: int) -> dict[str, Any] | None:
    """`input_activations` of one group of linears."""
    if bits == 16:
        return None
    shape = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}
    return shape | {"dynamic": True}


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    with whole_file(path) as partial:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata={"format": "pt"})
