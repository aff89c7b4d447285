"""Folders that hold a model's shape and no weights, for vLLM's `load_format="dummy"`: bf16, comet and w4a16.

And what became of them: `kernels_of` and `weight_bytes` run in the processes that hold the model.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

GROUP = 128  # weights that share a scale, in w4a16
FREE = "comet-free"  # each block has a scale of its own; comet: a token has one
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def shape_only(alias: str, weights: str, folder: Path, *, layers: int | None = None, ranks: int = 1) -> Path:
    """config.json of an alias that says how its linears are stored, and for comet the manifest. No weights.

    Args:
        weights: bf16, fp8 (vLLM rounds bf16 itself), comet, comet-free, w4a16. folder: is made.
        layers: the first so many only. ranks: that shall share the model.
    """
    from transformers import AutoConfig

    from comet_core.model_source import alias_shapes

    shapes = alias_shapes(alias)
    kind = shapes.pop("model_type")
    shapes.pop("hub")
    if layers:
        shapes["num_hidden_layers"] = layers
    config = AutoConfig.for_model(kind, **shapes, architectures=[ARCHITECTURES[kind]], max_position_embeddings=4096)
    folder.mkdir(parents=True)
    text = config.to_dict() | {"architectures": [ARCHITECTURES[kind]], "dtype": "bfloat16"}
    if weights.startswith("comet"):
        from comet_cuda.quantize_act import TOKEN

        write_manifest(alias, config, folder, share=1 if weights == FREE else TOKEN, ranks=ranks)
        text["quantization_config"] = {"quant_method": "comet"}
    if weights.startswith("w4a16"):
        text["quantization_config"] = w4a16_config()
    (folder / "config.json").write_text(json.dumps(text, default=str))
    return folder


def write_manifest(alias: str, config: Any, folder: Path, *, share: int, ranks: int) -> None:
    """comet.json of a model whose weights never come: the default recipe, permutations that stay within a rank."""
    from comet_core.packed import LinearEntry, Manifest, manifest_json
    from comet_core.recipe import digest, load_recipe, recipe_to_dict

    recipe = load_recipe("w4a4kv4")
    recipe = replace(
        recipe,
        blocks=replace(recipe.blocks, tp_granularity=ranks),
        activations=replace(recipe.activations, share=share or "token"),
    )
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sizes = {
        "self_attn.q_proj": (hidden, q), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (q, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    # a token's one scale is no rank's: packing leaves linears whose input is split without it
    alone = {name: share or 1 for name in ("self_attn.o_proj", "mlp.down_proj") if ranks > 1}
    linears = {
        f"model.layers.{layer}.{name}": LinearEntry(
            *size,
            4,
            recipe.weights.symmetric,
            recipe.activations.hadamard,
            name == "mlp.down_proj",
            alone.get(name, share),
        )
        for layer in range(config.num_hidden_layers)
        for name, size in sizes.items()
    }
    model = {"name": alias, "note": "random weights", "spec": alias, "origin": "random", "digest": ""}
    manifest = Manifest(
        recipe, digest(recipe), model, data={}, int4_mac_fraction=0.84, linears=linears, embedding_bits=16, layers=[],
        checks=[], sha256={}, made={},
    )  # fmt: skip
    (folder / "comet.json").write_text(manifest_json(manifest, recipe_to_dict(recipe)))


def w4a16_config() -> dict[str, Any]:
    """`quantization_config` of symmetric 4-bit weights in groups, as `comet export` writes it."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False}, "format": "pack-quantized"}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"input_activations": None}}, "ignore": ["lm_head"],
    }  # fmt: skip


def kernels_of(model: Any) -> list[str]:
    """Names of what runs in the linears and the attention of a loaded model, for the record: not what was asked for."""
    from vllm.model_executor.layers.linear import LinearBase

    found = set()
    for module in model.modules():
        if hasattr(module, "impl") and hasattr(module, "attn_backend"):
            found.add(type(module.impl).__name__)
        if isinstance(module, LinearBase) and (method := module.quant_method) is not None:
            scheme = getattr(module, "scheme", None)
            parts = [getattr(scheme, "kernel", None), getattr(method, "fp8_linear", None), scheme, method]
            inner = next(part for part in parts if part is not None)
            prepared = getattr(module, "comet_prepared", None)
            layout = f" {prepared.layout}" if prepared is not None else ""
            found.add(type(inner).__name__ + layout)
    return sorted(found)


def weight_bytes(model: Any) -> int:
    """Bytes of a loaded model's weights on this rank, in the layout that its kernels read."""
    seen = {}
    for module in model.modules():
        prepared = getattr(getattr(module, "comet_prepared", None), "weight", None)
        extra = [value for value in vars(prepared).values() if hasattr(value, "data_ptr")] if prepared else []
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False), *extra]:
            seen[tensor.data_ptr()] = tensor.nbytes
    return sum(seen.values())
