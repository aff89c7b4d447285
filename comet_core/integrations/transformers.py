"""Packed folders in transformers: `from_pretrained`, `generate`, `pipeline`, lm-eval's `hf` model, `save_pretrained`.

In: a packed folder, or a hub id of one. Out: the model that `load_packed` gives, loaded by transformers itself (shards,
device_map, offline and hub cache are its business). The quantizer below puts empty W4AxLinear layers in place before
the weights are read, holds the manifest against the files, and checks every tensor after.

The 4-bit KV cache acts in attention (kv_cache.py), so scoring needs nothing else; `generate` gets a cache whose pages
really are 4 bit (kv4_cache.py). `model.set_attn_implementation("sdpa")` turns both off.

Imported by comet_core/integrations/__init__.py right after transformers' own table of quantizers.
"""

import functools
import json
import re
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from comet_cuda.errors import CometError

METHOD = "comet"


class CometConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a packed folder's config.json. The manifest beside it holds the rest."""

    def __init__(self, format_version: int = 1, recipe: str = "", recipe_digest: str = "", **_: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.format_version, self.recipe, self.recipe_digest = format_version, recipe, recipe_digest


class CometHfQuantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers calls before and after it reads the weights of a packed folder."""

    requires_calibration = True  # packed folders only; packing is `comet pack`
    quantization_config: CometConfig

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        from comet_core.experts import separate_experts
        from comet_core.kv_cache import attention_name
        from comet_core.packed import read_manifest

        if not checkpoint_files or model.get_output_embeddings() is None:  # type: ignore[operator]
            raise CometError(
                f"{type(model).__name__}: a packed model opens from its folder as a causal language model",
                "use AutoModelForCausalLM.from_pretrained(folder), without state_dict",
            )
        folder = Path(checkpoint_files[0]).parent
        _fetch_manifest(model.config, folder)
        self.manifest = read_manifest(folder)
        model.set_attn_implementation(attention_name(self.manifest.recipe.kv_cache, model.config))  # type: ignore[operator]
        separate_experts(model)
        with torch.device("cpu"):
            stored = _Stored(checkpoint_files)
            stored.agree_with(self.manifest.sha256, folder)
            _put_empty_layers(model, self.manifest, stored)
        expected = set(model.state_dict()) - set(getattr(model, "all_tied_weights_keys", None) or {})
        wrong = sorted(expected ^ set(stored.tensors))
        if wrong:
            missing = (
                "is missing" if wrong[0] in expected else "is in the files, but config.json implies no such tensor"
            )
            raise CometError(f"{folder}: {wrong[0]} {missing} ({len(wrong)} such tensors)", "pack the model again")

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        from comet_core.linear import W4AxLinear
        from comet_core.packed import check_linear

        _tie_eight_bit_head(model, self.manifest)
        for name, entry in self.manifest.linears.items():
            linear = model.get_submodule(name)
            assert isinstance(linear, W4AxLinear)
            leaves = dict(linear.named_buffers(recurse=False))
            if all(tensor.device.type != "meta" for tensor in leaves.values()):  # else offloaded to the disk
                check_linear(name, {leaf: tensor.cpu() for leaf, tensor in leaves.items()}, entry)
        _bind(model, "generate", _generate)
        _bind(model, "save_pretrained", _save_pretrained)
        return model

    def update_weight_conversions(self, *_: Any, **__: Any) -> list[Any]:
        """None: a packed folder names its tensors as the model does, experts one by one."""
        return []

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """What is saved: a tied 8-bit head shares the embedding's codes, which are stored once."""
        head = _tied_eight_bit_head(model, self.manifest)
        if head is None:
            return None, {}
        return {name: value for name, value in model.state_dict().items() if not name.startswith(f"{head}.")}, {}

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Saved as it was loaded."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Integer weights have no gradient."""
        return False


class _Stored:
    """Headers of the checkpoint's files: type and shape of every tensor, and reading one."""

    def __init__(self, files: list[str]) -> None:
        from comet_core.shards import DTYPE

        kinds = {word: kind for kind, word in DTYPE.items()}
        self.tensors: dict[str, tuple[str, torch.dtype, tuple[int, ...]]] = {}
        for file in files:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    part = opened.get_slice(name)
                    if part.get_dtype() not in kinds:
                        raise CometError(f"{file}: {name} is of type {part.get_dtype()}", "pack the model again")
                    self.tensors[name] = (file, kinds[part.get_dtype()], tuple(part.get_shape()))

    def agree_with(self, sha256: dict[str, str], folder: Path) -> None:
        """Raise CometError unless the manifest lists the tensors that are there."""
        wrong = sorted(set(self.tensors) ^ set(sha256))
        if wrong:
            where = "missing in the files" if wrong[0] in sha256 else "not in the manifest"
            raise CometError(f"{folder}: {wrong[0]} is {where}", "the folder is damaged; pack the model again")

    def empty(self, name: str) -> Tensor:
        """A tensor without memory, of the stored type and shape."""
        _, kind, shape = self.tensors[name]
        return torch.empty(shape, dtype=kind, device="meta")

    def read(self, name: str) -> Tensor:
        """One tensor."""
        with safe_open(self.tensors[name][0], "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor


def _fetch_manifest(config: Any, folder: Path) -> None:
    """Have the hub client put the manifest beside the weights, where the folder is a snapshot in its cache."""
    from comet_core.packed import MANIFEST

    if not (folder / MANIFEST).is_file() and not Path(config.name_or_path).is_dir():
        cached_file(config.name_or_path, MANIFEST, revision=getattr(config, "_commit_hash", None))


def _put_empty_layers(model: nn.Module, manifest: Any, stored: _Stored) -> None:
    """Replace every linear and embedding that is packed by its packed form, without weights."""
    from comet_core.linear import Int8Embedding, replace_linear
    from comet_core.packed import PACK_TENSORS, linear_of, module_name

    tied_head = _tied_eight_bit_head(model, manifest)
    for name, entry in manifest.linears.items():
        linear_of(model, name, name)
        if name == tied_head:
            continue
        names = {leaf: f"{name}.{leaf}" for leaf in (*PACK_TENSORS, "bias") if f"{name}.{leaf}" in stored.tensors}
        if not {"qweight", "block_bits"} <= set(names):
            raise CometError(f"{name}: its packed tensors are missing", "pack the model again")
        tensors = {leaf: stored.empty(full) for leaf, full in names.items()}
        tensors["block_bits"] = stored.read(names["block_bits"])
        replace_linear(model, name, tensors, entry.hadamard, entry.share)
    if manifest.embedding_bits == 8:
        old = model.get_input_embeddings()  # type: ignore[operator]
        name = module_name(model, old)
        codes, scale = stored.empty(f"{name}.qweight"), stored.empty(f"{name}.w_scale")
        factor = float(getattr(old, "scalar_embed_scale", 1.0))
        model.set_input_embeddings(Int8Embedding(codes, scale, old.embedding_dim, old.weight.dtype, factor))  # type: ignore[operator]
    if tied_head is not None:
        owner, _, leaf = tied_head.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Identity())  # until the embedding's codes are there
        model.all_tied_weights_keys = {}  # type: ignore[assignment]


def _tied_eight_bit_head(model: nn.Module, manifest: Any) -> str | None:
    """Name of a head that shares an 8-bit embedding."""
    from comet_core.decoder import is_tied
    from comet_core.packed import module_name

    if manifest.embedding_bits != 8 or not is_tied(model):
        return None
    return module_name(model, model.get_output_embeddings())  # type: ignore[operator]


def _tie_eight_bit_head(model: nn.Module, manifest: Any) -> None:
    from comet_core.linear import W4AxLinear, unquantized_input

    name = _tied_eight_bit_head(model, manifest)
    if name is None:
        return
    embedding, entry = model.get_input_embeddings(), manifest.linears[name]  # type: ignore[operator]
    device = embedding.qweight.device
    leaves = {key: value.to(device) for key, value in unquantized_input(entry.in_features).items()}
    leaves |= {"qweight": embedding.qweight, "w_scale": embedding.w_scale}
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, W4AxLinear(entry.in_features, entry.out_features, leaves, False))


def _bind(model: nn.Module, name: str, function: Any) -> None:
    """Let `function(original, model, ...)` answer for the model's method `name`."""
    original = getattr(type(model), name)

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(original, self, *args, **kwargs)

    setattr(model, name, MethodType(method, model))


def _generate(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` with a 4-bit cache, where the recipe has one and the caller gives no other."""
    from comet_core.evaluate import cache_argument
    from comet_core.integrations.kv4_cache import cache_for

    name = cache_argument(model)
    config = kwargs.get("generation_config") or model.generation_config
    chosen = any(kwargs.get(key) is not None for key in (name, "past_key_values", "cache_implementation"))
    wanted = kwargs.get("use_cache", config.use_cache) is not False and config.cache_implementation is None
    if wanted and not chosen and (cache := cache_for(model)) is not None:
        kwargs[name] = cache
    return original(model, *args, **kwargs)


def _save_pretrained(original: Any, model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    """`save_pretrained`, followed by what makes the folder a packed one: index, manifest, guard in config.json."""
    from comet_core.ledger import GUARD
    from comet_core.packed import MANIFEST, manifest_json
    from comet_core.recipe import recipe_to_dict
    from comet_core.shards import INDEX, read_shard, tensor_sha256
    from comet_core.whole_files import write_text

    original(model, save_directory, *args, **kwargs)
    folder, manifest = Path(save_directory), model.hf_quantizer.manifest
    if (folder / INDEX).is_file():
        _regroup(folder)
    sha256: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    total = 0
    for shard in sorted(folder.glob("model*.safetensors")):
        tensors, _ = read_shard(shard)
        sha256 |= {name: tensor_sha256(tensor) for name, tensor in tensors.items()}
        weight_map |= dict.fromkeys(tensors, shard.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
    recipe = recipe_to_dict(manifest.recipe)
    write_text(folder / MANIFEST, manifest_json(type(manifest)(**vars(manifest) | {"sha256": sha256}), recipe))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"experts_implementation": GUARD}
    write_text(folder / "config.json", json.dumps(config, indent=1, sort_keys=True) + "\n")


def _regroup(folder: Path) -> None:
    """Shards that transformers cut by size -> one a layer and one for the rest: a packed linear stays in one shard."""
    from comet_core.shards import INDEX, shard_files, shard_name, write_shard

    stored = _Stored([str(file.rename(file.with_suffix(".cut"))) for file in shard_files(folder)])
    groups: dict[str, list[str]] = {}
    for name in stored.tensors:
        layer = re.match(r".*?\.\d+(?=\.)", name)
        groups.setdefault(layer[0] if layer else "", []).append(name)
    for index, names in enumerate(groups.values()):
        write_shard(folder / shard_name(index, len(groups)), {name: stored.read(name) for name in names}, {})
    for file in folder.glob("*.cut"):
        file.unlink()
    (folder / INDEX).unlink()


def _register() -> None:
    """Enter the quantizer, and the word that guards packed folders against a transformers without it."""
    from transformers.integrations.moe import ExpertsInterface

    from comet_core.ledger import GUARD

    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(CometConfig)
        register_quantizer(METHOD)(CometHfQuantizer)

    def no_experts(*_: object, **__: object) -> None:
        raise CometError("packed models have no stacked experts")

    ExpertsInterface.register(GUARD, no_experts)


_register()
