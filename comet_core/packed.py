"""The packed checkpoint: a Hugging Face folder whose linears are stored as 4-bit codes. Reading and writing it.

  config.json                        the model's own, plus quantization_config {quant_method: comet, ...}
  model-0000i-of-0000n.safetensors   one shard a layer, the last one holds embeddings, final norm and lm_head
  model.safetensors.index.json       tensor -> shard
  comet.json                         manifest: recipe, model, data, every packed linear, every tensor's sha256
  tokenizer files, README.md         as the source had them; a model card

Canonical and un-tiled: one checkpoint serves every GPU architecture. A packed linear `L` has L.qweight, L.w_scale,
L.w_zero (asymmetric), L.block_bits, L.act_clip, L.perm (absent if the producer's rows carry it) and L.bias (if any).
A shard that exists under its final name is complete; config.json is written last, so a folder that has one is whole.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.decoder import build_empty, is_tied
from comet_core.kv_cache import attention_name
from comet_core.linear import Int8Embedding, W4AxLinear, expected_shapes, replace_linear, unquantized_input
from comet_core.recipe import Recipe, recipe_from_dict
from comet_cuda.errors import CometError

FORMAT_VERSION = 1
MANIFEST = "comet.json"
INDEX = "model.safetensors.index.json"
DAMAGED = "the folder is damaged; pack the model again"
PACK_TENSORS = ("qweight", "w_scale", "w_zero", "block_bits", "act_clip", "perm")


@dataclass(frozen=True)
class LinearEntry:
    """What the manifest says of one packed linear (or of the 8-bit lm_head)."""

    in_features: int
    out_features: int
    weight_bits: int
    symmetric: bool
    hadamard: bool
    folded: bool  # the permutation stands in the producer's rows


@dataclass(frozen=True)
class Manifest:
    """comet.json."""

    recipe: Recipe
    recipe_digest: str
    model: dict[str, Any]  # name, origin, note, digest, spec (what was typed)
    data: dict[str, Any]
    int4_mac_fraction: float
    linears: dict[str, LinearEntry]
    embedding_bits: int
    layers: list[dict[str, Any]]  # per linear: method, error, damping
    sha256: dict[str, str]


def shard_name(index: int, count: int) -> str:
    """File name of shard `index` (from 0) of `count`."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes in row-major order."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def write_atomic(path: Path, content: str) -> None:
    """Write a text file so that it exists under its name only when complete."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(content)
    with partial.open() as file:
        os.fsync(file.fileno())
    partial.rename(path)


def write_shard(path: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Write one shard under its final name when it is complete; `notes` go into its metadata as JSON."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CometError(
                f"{name}: holds NaN or Inf after quantization", "use --dtype float32, or `skip` this linear"
            )
    partial = path.with_name(path.name + ".tmp")
    stored = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in sorted(tensors.items())}
    try:
        save_file(stored, partial, metadata={"format": "pt", "comet": json.dumps(notes, sort_keys=True)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise CometError(
            f"{path}: cannot be written ({error})", "free disk space and start the same command again"
        ) from error
    partial.rename(path)


def read_shard(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and notes of one shard."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            notes = json.loads((file.metadata() or {}).get("comet", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, notes  # noqa: SIM118 - not a dict
    except (OSError, ValueError, SafetensorError) as error:
        raise CometError(f"{path}: cannot be read ({error})", DAMAGED) from error


def manifest_json(manifest: Manifest, recipe: dict[str, Any]) -> str:
    """The text of comet.json."""
    content = asdict(manifest) | {"format_version": FORMAT_VERSION, "recipe": recipe}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def is_packed(folder: Path) -> bool:
    """True if the folder looks like a finished packed checkpoint."""
    return (folder / MANIFEST).is_file() and (folder / "config.json").is_file()


def read_manifest(folder: Path) -> Manifest:
    """comet.json, checked.

    Errors:
        CometError if it is missing, damaged or of a later format.
    """
    if not is_packed(folder):
        unfinished = (folder / "packing.json").is_file()
        raise CometError(
            f"{folder}: "
            + ("packing has not finished" if unfinished else f"no packed model ({MANIFEST} and config.json)"),
            "start the same `comet pack` command again, it goes on where it stopped"
            if unfinished
            else "run `comet pack`",
        )
    try:
        content = json.loads((folder / MANIFEST).read_text())
        version = content["format_version"]
        if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
            raise CometError(
                f"{folder}: packed format_version is {version!r}, this COMET reads up to {FORMAT_VERSION}",
                "update COMET",
            )
        return Manifest(
            recipe=recipe_from_dict(content["recipe"]),
            recipe_digest=str(content["recipe_digest"]),
            model=dict(content["model"]),
            data=dict(content["data"]),
            int4_mac_fraction=float(content["int4_mac_fraction"]),
            linears={name: LinearEntry(**entry) for name, entry in content["linears"].items()},
            embedding_bits=int(content["embedding_bits"]),
            layers=list(content["layers"]),
            sha256=dict(content["sha256"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CometError(
            f"{folder / MANIFEST}: cannot be understood ({type(error).__name__}: {error})", DAMAGED
        ) from error


def shard_files(folder: Path) -> list[Path]:
    """The shards that the index names, each a plain file inside the folder."""
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CometError(f"{folder / INDEX}: cannot be read ({error})", DAMAGED) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CometError(f"{folder / INDEX}: names the shard {name!r}, which is outside the folder", DAMAGED)
        if not (folder / name).is_file():
            raise CometError(f"{folder / name}: this shard is missing", DAMAGED)
    return [folder / name for name in names]


def check_linear(name: str, tensors: dict[str, Tensor], entry: LinearEntry) -> None:
    """Raise CometError unless the stored tensors of one packed linear make sense."""
    wanted = expected_shapes(entry.in_features, entry.out_features, entry.weight_bits, entry.symmetric)
    for leaf, (dtype, shape) in wanted.items():
        if leaf not in tensors:
            if leaf == "perm" and entry.folded:
                continue
            raise CometError(f"{name}.{leaf}: is missing", DAMAGED)
        found = tensors[leaf]
        if found.dtype != dtype or tuple(found.shape) != shape:
            raise CometError(f"{name}.{leaf}: is {found.dtype} {tuple(found.shape)}, not {dtype} {shape}", DAMAGED)
    if not set(tensors["block_bits"].tolist()) <= {4, 8, 16}:
        raise CometError(
            f"{name}.block_bits: holds {sorted(set(tensors['block_bits'].tolist()))}, not only 4, 8, 16", DAMAGED
        )
    scale = tensors["w_scale"].float()
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise CometError(f"{name}.w_scale: holds a value that is not finite and positive", DAMAGED)
    clip = tensors["act_clip"]
    if not bool(((clip > 0) & (clip <= 1)).all()):
        raise CometError(f"{name}.act_clip: holds a value outside (0, 1]", DAMAGED)
    if "w_zero" in tensors and int(tensors["w_zero"].max()) > 15:
        raise CometError(f"{name}.w_zero: holds a zero point above 15", DAMAGED)
    if "perm" in tensors:
        order = tensors["perm"].long()
        if not torch.equal(order.sort().values, torch.arange(entry.in_features)):
            raise CometError(f"{name}.perm: is no permutation of {entry.in_features} channels", DAMAGED)


def split_linear_tensors(tensors: dict[str, Tensor], names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """Take the tensors of the packed linears `names` out of a shard's tensors, by linear and leaf name."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in names:
        leaves = {
            leaf: tensors.pop(f"{name}.{leaf}") for leaf in (*PACK_TENSORS, "bias") if f"{name}.{leaf}" in tensors
        }
        if leaves:
            found[name] = leaves
    return found


def put_linears(
    parent: nn.Module, prefix: str, packed: dict[str, dict[str, Tensor]], entries: dict[str, LinearEntry]
) -> None:
    """Replace linears of `parent` (called `prefix` in the model) by packed ones, after checking their tensors."""
    for name, leaves in packed.items():
        check_linear(name, leaves, entries[name])
        replace_linear(parent, name.removeprefix(f"{prefix}.") if prefix else name, leaves, entries[name].hadamard)


@dataclass(frozen=True)
class PackedModel:
    """A packed checkpoint in memory."""

    folder: Path
    manifest: Manifest
    model: nn.Module


def load_packed(
    folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, verify: bool = False
) -> PackedModel:
    """Load a packed checkpoint as a transformers model with W4AxLinear layers and the KV cache of its recipe.

    Args:
        folder: what `comet pack` wrote. device, dtype: of the 16-bit parts and of the computation.
        verify: recompute every tensor's sha256.

    Errors:
        CometError naming the file or tensor that is missing, damaged, tampered with or of a later format.
    """
    from transformers import AutoConfig

    manifest = read_manifest(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        del config.quantization_config
    except (OSError, ValueError, AttributeError) as error:
        raise CometError(f"{folder / 'config.json'}: cannot be understood ({error})", DAMAGED) from error
    model = build_empty(config, attention_name(manifest.recipe.kv_cache), dtype)
    for shard in shard_files(folder):
        tensors, _ = read_shard(shard)
        for name, tensor in tensors.items():
            if verify and tensor_sha256(tensor) != manifest.sha256.get(name):
                raise CometError(f"{shard}: {name} does not have the sha256 that the manifest states", DAMAGED)
        if manifest.embedding_bits == 8:
            _put_embedding(model, tensors, manifest, dtype)
        put_linears(model, "", split_linear_tensors(tensors, manifest.linears), manifest.linears)
        for name, tensor in tensors.items():
            _assign(model, name, tensor.to(dtype))
    if is_tied(model) and manifest.embedding_bits == 16:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight  # type: ignore[operator]
    missing = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if missing:
        raise CometError(f"{folder}: {missing[0]} and {len(missing) - 1} other tensors are missing", DAMAGED)
    absent = [name for name in manifest.linears if not isinstance(model.get_submodule(name), W4AxLinear)]
    if absent:
        raise CometError(f"{folder}: the packed linear {absent[0]} is missing", DAMAGED)
    return PackedModel(folder, manifest, model.to(device).eval())


def module_name(model: nn.Module, wanted: nn.Module) -> str:
    """Name of a module inside the model."""
    return next(str(name) for name, module in model.named_modules() if module is wanted)


def _put_embedding(model: nn.Module, tensors: dict[str, Tensor], manifest: Manifest, dtype: torch.dtype) -> None:
    """Replace the input embedding by its 8-bit form, and a tied lm_head by a linear over the same codes."""
    old = model.get_input_embeddings()  # type: ignore[operator]
    name = module_name(model, old)
    if f"{name}.qweight" not in tensors:
        return
    codes, scale = tensors.pop(f"{name}.qweight"), tensors.pop(f"{name}.w_scale")
    if is_tied(model):
        head = module_name(model, model.get_output_embeddings())  # type: ignore[operator]
        shared = {"qweight": codes, "w_scale": scale, **unquantized_input(old.embedding_dim)}
        put_linears(model, "", {head: shared}, manifest.linears)
    factor = float(getattr(old, "scalar_embed_scale", 1.0))
    model.set_input_embeddings(Int8Embedding(codes, scale, old.embedding_dim, dtype, factor))  # type: ignore[operator]


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
        current = getattr(module, leaf)
    except AttributeError as error:
        raise CometError(f"{name}: the model has no such parameter", DAMAGED) from error
    if current is None or tuple(current.shape) != tuple(tensor.shape):
        shape = None if current is None else tuple(current.shape)
        raise CometError(f"{name}: the file has shape {tuple(tensor.shape)}, the model wants {shape}", DAMAGED)
    setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
