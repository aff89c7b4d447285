"""The packed checkpoint: a Hugging Face folder whose linears are stored as 4-bit codes. What it holds, and loading it.

  config.json                        the model's own, plus quantization_config {quant_method: comet, ...}
  model-0000i-of-0000n.safetensors   one shard a layer, the last one holds embeddings, final norm and lm_head
  model.safetensors.index.json       tensor -> shard
  comet.json                         manifest: recipe, model, data, every packed linear, every tensor's sha256
  tokenizer files, README.md         as the source had them; a model card

Canonical and un-tiled: one checkpoint serves every GPU architecture. A packed linear `L` has L.qweight, L.w_scale,
L.w_zero (asymmetric), L.block_bits, L.act_clip, L.perm (absent if the producer's rows carry it), L.weight_base (share
0, one scale a token: scales of a weight row are multiples of it) and L.bias (if any).
A shard that exists under its final name is complete; config.json is written last, so a folder that has one is whole.
Nothing that a folder says is believed unchecked: manifest, config, shards and model must agree on every tensor.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.calibration import BROKEN
from comet_core.decoder import all_finite, build_empty, find_layers, is_tied, put_tensor, stored_buffers
from comet_core.kv_cache import attention_name
from comet_core.linear import STORED, Int8Embedding, W4AxLinear, expected_shapes, replace_linear, unquantized_input
from comet_core.model_source import cut_config
from comet_core.plan import stored_recipe, stored_share
from comet_core.recipe import Recipe
from comet_core.shards import DAMAGED, read_shard, shard_files, shard_names, tensor_sha256
from comet_core.weight_reader import MOST_LAYERS
from comet_cuda.affine import BLOCK
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import TOKEN
from comet_cuda.quantize_token_ref import check_blocks
from comet_cuda.weight_grid import scale_fault

FORMAT_VERSION = 3  # 2: `share`, whose scales are tied; 3: a token has one, a weight row's are multiples of its base
MANIFEST = "comet.json"
STARTED = "packing.json"  # what a folder holds while packing is under way
PACK_TENSORS = tuple(name for name in STORED if name != "bias")


@dataclass(frozen=True)
class LinearEntry:
    """What the manifest says of one packed linear (or of the 8-bit lm_head)."""

    in_features: int
    out_features: int
    weight_bits: int
    symmetric: bool
    hadamard: bool
    folded: bool  # the permutation stands in the producer's rows
    share: int = 1  # blocks whose activation scales are tied to each other: 1, or 0: all of a token


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
    checks: list[dict[str, Any]]  # per layer: cosine and error beside the 16-bit layer; empty if packed without
    sha256: dict[str, str]
    made: dict[str, Any]  # version of COMET, calibration (sha256 of tokens and plans); empty in older folders


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
        if (folder / STARTED).is_file():
            again = "start the same `comet pack` command again, it goes on where it stopped"
            raise CometError(f"{folder}: packing has not finished", again)
        raise CometError(f"{folder}: no packed model ({MANIFEST} and config.json)", "run `comet pack`")
    return manifest_of(folder)


def manifest_of(folder: Path) -> Manifest:
    """comet.json, checked, whatever else is in the folder. Errors as in `read_manifest`."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version = content["format_version"]
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise CometError(
                f"{folder}: packed format_version is {version!r}, this COMET reads up to {FORMAT_VERSION}",
                "update COMET",
            )
        return Manifest(
            recipe=stored_recipe(content["recipe"]),
            recipe_digest=str(content["recipe_digest"]),
            model=_described(content["model"]),
            data=dict(content["data"]),
            int4_mac_fraction=float(content["int4_mac_fraction"]),
            linears={name: _entry(name, entry) for name, entry in content["linears"].items()},
            embedding_bits={8: 8, 16: 16}[content["embedding_bits"]],
            layers=[_note(note) for note in content["layers"]],
            checks=[_check(note) for note in content.get("checks", [])],
            sha256={name: str(digest) for name, digest in content["sha256"].items()},
            made=dict(content.get("made", {})),
        )
    except CometError as error:  # of the recipe or the version, which know no file
        where = "" if error.message.startswith(str(folder)) else f"{folder / MANIFEST}: "
        raise CometError(f"{where}{error.message}", error.hint or DAMAGED) from error
    except BROKEN as error:
        raise CometError(
            f"{folder / MANIFEST}: cannot be understood ({type(error).__name__}: {error})", DAMAGED
        ) from error


def _entry(name: str, given: dict[str, Any]) -> LinearEntry:
    entry = LinearEntry(**given)
    sizes, flags = (entry.in_features, entry.out_features), (entry.symmetric, entry.hadamard, entry.folded)
    whole = all(type(size) is int and size > 0 for size in sizes) and all(type(flag) is bool for flag in flags)
    tied = stored_share(entry.share) == TOKEN
    if not whole or entry.weight_bits not in (4, 8) or (tied and entry.weight_bits != 4):
        raise ValueError(f"{name}: {given}")
    return entry


def _note(note: dict[str, Any]) -> dict[str, Any]:
    """What packing noted of one linear: its name, the method, errors by method."""
    errors = note["relative_output_error"]
    if not all(isinstance(note[key], str) for key in ("linear", "method")) or not all(
        isinstance(error, int | float) for error in errors.values()
    ):
        raise ValueError(f"layers: {note}")
    return dict(note)


def _check(note: dict[str, Any]) -> dict[str, Any]:
    """What packing noted of one layer: its name, cosine and error."""
    if not isinstance(note["layer"], str) or not all(isinstance(note[key], int | float) for key in ("cosine", "error")):
        raise ValueError(f"checks: {note}")
    return dict(note)


def _described(model: dict[str, Any]) -> dict[str, Any]:
    for key in ("name", "note", "spec"):
        if not isinstance(model[key], str):
            raise ValueError(f"model.{key} is {model[key]!r}")
    return dict(model)


def check_linear(name: str, tensors: dict[str, Tensor], entry: LinearEntry) -> None:
    """Raise CometError unless the stored tensors of one packed linear make sense."""
    width, rows = entry.in_features, entry.out_features
    wanted = expected_shapes(width, rows, entry.weight_bits, entry.symmetric, entry.folded, entry.share)
    for leaf, (dtype, shape) in wanted.items():
        if leaf not in tensors:
            raise CometError(f"{name}.{leaf}: is missing", DAMAGED)
        found = tensors[leaf]
        if found.dtype != dtype or tuple(found.shape) != shape:
            raise CometError(f"{name}.{leaf}: is {found.dtype} {tuple(found.shape)}, not {dtype} {shape}", DAMAGED)
    for leaf in tensors:
        if leaf not in (*wanted, "bias"):
            raise CometError(f"{name}.{leaf}: is there although the manifest says that this linear has none", DAMAGED)
    bias = tensors.get("bias")
    if bias is not None and not (
        bias.is_floating_point() and tuple(bias.shape) == (entry.out_features,) and all_finite(bias)
    ):
        raise CometError(f"{name}.bias: is not {entry.out_features} finite floats", DAMAGED)
    bits = set(tensors["block_bits"].tolist())
    if not (bits <= {4, 8} or bits == {16}):
        raise CometError(f"{name}.block_bits: holds {sorted(bits)}, not 4 and 8 or only 16", DAMAGED)
    scale = tensors["w_scale"].float()
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise CometError(f"{name}.w_scale: holds a value that is not finite and positive", DAMAGED)
    clip = tensors["act_clip"]
    if not bool(((clip > 0) & (clip <= 1)).all()):
        raise CometError(f"{name}.act_clip: holds a value outside (0, 1]", DAMAGED)
    if "w_zero" in tensors and int(tensors["w_zero"].max()) > 15:
        raise CometError(f"{name}.w_zero: holds a zero point above 15", DAMAGED)
    if entry.share == TOKEN:
        _check_integer_scales(name, tensors)
    if "perm" in tensors:
        order = tensors["perm"].long()
        if not torch.equal(order.sort().values, torch.arange(entry.in_features)):
            raise CometError(f"{name}.perm: is no permutation of {entry.in_features} channels", DAMAGED)


def _check_integer_scales(name: str, tensors: dict[str, Tensor]) -> None:
    """What integer sums over all of K rely on, where a token has one scale."""
    fault = scale_fault(tensors["w_scale"], tensors["weight_base"], tensors.get("w_zero"))
    if fault is not None:
        raise CometError(f"{name}.w_scale and weight_base: hold {fault}", DAMAGED)
    bits = tensors["block_bits"].int()
    if not {4} <= set(bits.tolist()) <= {4, 8} or bool((bits.diff() > 0).any()):
        raise CometError(f"{name}.block_bits: 8-bit blocks do not come first", DAMAGED)
    check_blocks(BLOCK * len(bits), 0)


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
        entry, inside = entries[name], name.removeprefix(f"{prefix}.") if prefix else name
        linear = linear_of(parent, inside, name)
        if (linear.in_features, linear.out_features) != (entry.in_features, entry.out_features):
            raise CometError(
                f"{name}: the manifest says {entry.in_features} x {entry.out_features}, config.json implies "
                f"{linear.in_features} x {linear.out_features}",
                DAMAGED,
            )
        if linear.bias is not None and "bias" not in leaves:
            raise CometError(f"{name}.bias: is missing", DAMAGED)
        check_linear(name, leaves, entry)
        replace_linear(parent, inside, leaves, entry.hadamard, entry.share)


def linear_of(parent: nn.Module, inside: str, name: str) -> nn.Linear | W4AxLinear:
    """The linear called `inside` in `parent`; `name` is its full name, for the error."""
    try:
        found = parent.get_submodule(inside)
    except AttributeError:
        found = None
    if not isinstance(found, nn.Linear | W4AxLinear):
        raise CometError(f"{name}: is in the manifest, but the model of config.json has no such linear", DAMAGED)
    return found


@dataclass(frozen=True)
class PackedModel:
    """A packed checkpoint in memory."""

    folder: Path
    manifest: Manifest
    model: nn.Module


def load_packed(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    verify: bool = False,
    layers: int | None = None,
) -> PackedModel:
    """Load a packed checkpoint as a transformers model with W4AxLinear layers and the KV cache of its recipe.

    Args:
        folder: what `comet pack` wrote. device, dtype: of the 16-bit parts and of the computation.
        verify: recompute every tensor's sha256. layers: the first so many decoder layers only, without reading others.

    Errors:
        CometError naming the file or tensor that is missing, damaged, tampered with or of a later format.
    """
    manifest = read_manifest(folder)
    model = _empty_model(folder, manifest, dtype, layers)
    if layers is not None:
        manifest = _first_layers(manifest, f"{find_layers(model)[0]}.", layers)
    for name in manifest.linears:
        linear_of(model, name, name)
    buffers = set(stored_buffers(model))
    seen: set[str] = set()
    for shard in shard_files(folder):
        if layers is not None and not manifest.sha256.keys() & shard_names(shard):
            continue
        tensors, _ = read_shard(shard)
        for name, tensor in tensors.items():
            if name not in manifest.sha256:
                raise CometError(f"{shard}: {name} is not in the manifest", DAMAGED)
            if verify and tensor_sha256(tensor) != manifest.sha256[name]:
                raise CometError(f"{shard}: {name} does not have the sha256 that the manifest states", DAMAGED)
        seen |= set(tensors)
        if manifest.embedding_bits == 8:
            _put_embedding(model, tensors, manifest, dtype)
        put_linears(model, "", split_linear_tensors(tensors, manifest.linears), manifest.linears)
        for name, tensor in tensors.items():
            _assign(model, name, tensor, dtype)
    if is_tied(model) and manifest.embedding_bits == 16:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight  # type: ignore[operator]
    missing = sorted((set(manifest.sha256) | buffers) - seen)
    missing += [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if missing:
        raise CometError(f"{folder}: {missing[0]} and {len(missing) - 1} other tensors are missing", DAMAGED)
    absent = [name for name in manifest.linears if not isinstance(model.get_submodule(name), W4AxLinear)]
    if absent:
        raise CometError(f"{folder}: the packed linear {absent[0]} is missing", DAMAGED)
    if (manifest.embedding_bits == 8) != isinstance(model.get_input_embeddings(), Int8Embedding):  # type: ignore[operator]
        raise CometError(f"{folder / MANIFEST}: embedding_bits is {manifest.embedding_bits}, the files differ", DAMAGED)
    return PackedModel(folder, manifest, model.to(device).eval())


def _first_layers(manifest: Manifest, prefix: str, layers: int) -> Manifest:
    """What the manifest says of the first decoder layers, and of what lies outside the layers."""

    def kept(name: str) -> bool:
        return not name.startswith(prefix) or int(name.removeprefix(prefix).partition(".")[0]) < layers

    linears = {name: entry for name, entry in manifest.linears.items() if kept(name)}
    return replace(manifest, linears=linears, sha256={n: digest for n, digest in manifest.sha256.items() if kept(n)})


def packed_config(folder: Path) -> Any:
    """config.json of a packed folder. Raises CometError if it is not one of COMET's."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if config.quantization_config["quant_method"] != "comet":
            raise ValueError(f"quant_method is {config.quantization_config['quant_method']!r}")
        if not 0 <= (layers := config.get_text_config().num_hidden_layers) <= MOST_LAYERS:
            raise ValueError(f"num_hidden_layers is {layers}")
        return config
    except Exception as error:  # unknown model types and values out of range raise many kinds
        raise _not_understood(folder, error) from error


def _empty_model(folder: Path, manifest: Manifest, dtype: torch.dtype, layers: int | None) -> nn.Module:
    """The model of the folder's config.json, without weights."""
    config = packed_config(folder)
    try:
        del config.quantization_config
        config = config if layers is None else cut_config(config, layers)
        return build_empty(config, attention_name(manifest.recipe.kv_cache, config), dtype)
    except Exception as error:
        raise _not_understood(folder, error) from error


def _not_understood(folder: Path, error: Exception) -> CometError:
    first = (str(error).splitlines() or [""])[0]
    return CometError(f"{folder / 'config.json'}: cannot be understood ({type(error).__name__}: {first})", DAMAGED)


def module_name(model: nn.Module, wanted: nn.Module) -> str:
    """Name of a module inside the model."""
    return next(str(name) for name, module in model.named_modules() if module is wanted)


def _put_embedding(model: nn.Module, tensors: dict[str, Tensor], manifest: Manifest, dtype: torch.dtype) -> None:
    """Replace the input embedding by its 8-bit form, and a tied lm_head by a linear over the same codes."""
    old = model.get_input_embeddings()  # type: ignore[operator]
    name = module_name(model, old)
    if f"{name}.qweight" not in tensors:
        return
    leaves = {leaf: tensors.pop(f"{name}.{leaf}") for leaf in ("qweight", "w_scale") if f"{name}.{leaf}" in tensors}
    shared = leaves | unquantized_input(old.embedding_dim)
    check_linear(name, shared, LinearEntry(old.embedding_dim, old.num_embeddings, 8, True, False, True))
    codes, scale = leaves["qweight"], leaves["w_scale"]
    if is_tied(model):
        head = module_name(model, model.get_output_embeddings())  # type: ignore[operator]
        if head not in manifest.linears:
            raise CometError(f"{head}: shares the 8-bit embedding but is not in the manifest", DAMAGED)
        put_linears(model, "", {head: shared}, manifest.linears)
    factor = float(getattr(old, "scalar_embed_scale", 1.0))
    model.set_input_embeddings(Int8Embedding(codes, scale, old.embedding_dim, dtype, factor))  # type: ignore[operator]


def _assign(model: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Put a stored 16-bit tensor in place of the model's parameter `name`."""
    owner, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
        buffers = stored_buffers(module)
        current = buffers[leaf] if leaf in buffers else module.get_parameter(leaf)
    except AttributeError as error:
        raise CometError(f"{name}: the model of config.json has no such parameter", DAMAGED) from error
    if tuple(current.shape) != tuple(tensor.shape):
        raise CometError(
            f"{name}: the file has shape {tuple(tensor.shape)}, the model wants {tuple(current.shape)}", DAMAGED
        )
    if not tensor.is_floating_point() or not all_finite(tensor):
        raise CometError(f"{name}: holds {tensor.dtype} values that are not all finite floats", DAMAGED)
    put_tensor(module, leaf, tensor, dtype)
