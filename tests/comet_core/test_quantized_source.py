"""AWQ and GPTQ checkpoints as inputs: written by the letter of their formats here, read back bit for bit."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from comet_core.model_source import resolve_model
from comet_core.recipe import KVCacheSpec
from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from conftest import Packed

GROUP = 64


def packed_words(codes: torch.Tensor, bits: int, order: list[int]) -> torch.Tensor:
    """int codes [R, C] -> int32 [R, C * bits / 32]; code order[i] of a word stands in the i-th lowest bits."""
    words = torch.zeros(codes.shape[0], codes.shape[1] * bits // 32, dtype=torch.int64)
    per_word = 32 // bits
    for place in range(per_word):
        words |= codes[:, order[place] :: per_word].long() << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantized(weight: torch.Tensor, method: str, bits: int, act_order: bool, offset: int) -> dict[str, torch.Tensor]:
    """One linear [N, K] in the checkpoint's parts, and its exact value under `weight`."""
    rows, width = weight.shape
    groups = width // GROUP
    group = torch.arange(width) // GROUP
    if act_order:
        group = group[torch.randperm(width)]
    top = 2**bits - 1
    codes = torch.randint(0, top + 1, (rows, width))
    zeros = torch.randint(0, top + 1, (groups, rows))
    scales = (torch.rand(groups, rows) * 0.01 + 0.001).to(torch.float16)
    value = (codes - zeros[group].T).float() * scales[group].T.float()
    parts = {"scales": scales, "value": value.to(torch.float16)}
    if method == "gptq":
        straight = list(range(32 // bits))
        parts["qweight"] = packed_words(codes, bits, straight).T.contiguous()
        parts["qzeros"] = packed_words((zeros - offset) & top, bits, straight)
        parts["g_idx"] = group.to(torch.int32)
    else:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        parts["qweight"] = packed_words(codes.T.contiguous(), bits, order)
        parts["qzeros"] = packed_words(zeros, bits, order)
    return parts


def checkpoint(
    folder: Path, llama_config: Any, quantization: dict[str, Any], act_order: bool = False
) -> dict[str, Any]:
    """Save a Llama (or another model) whose layers' linears are quantized; returns the exact weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        llama_config(num_hidden_layers=1, attention_bias=True), dtype=torch.float16
    )
    model.save_pretrained(folder)
    tensors, exact = load_file(folder / "model.safetensors"), {}
    offset = 1 if quantization["quant_method"] == "gptq" and quantization.get("checkpoint_format") != "gptq_v2" else 0
    for name in [name for name in tensors if name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight"))]:
        parts = quantized(
            tensors.pop(name).float(), quantization["quant_method"], quantization["bits"], act_order, offset
        )
        exact[name] = parts.pop("value")
        tensors |= {name.removesuffix("weight") + leaf: part for leaf, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return exact


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


@pytest.mark.parametrize(
    ("quantization", "act_order"),
    [
        (GPTQ, False), (GPTQ, True), (GPTQ | {"checkpoint_format": "gptq_v2"}, False), (GPTQ | {"bits": 8}, False),
        (AWQ, False),
    ],
    ids=["gptq", "act order", "gptq_v2", "8 bit", "awq"],
)  # fmt: skip
def test_weights_are_decoded_exactly(
    tmp_path: Path, llama_config: Any, quantization: dict[str, Any], act_order: bool
) -> None:
    exact = checkpoint(tmp_path / "m", llama_config, quantization, act_order)
    source = resolve_model(str(tmp_path / "m"))
    assert (
        source.note
        == f"dequantized from a {quantization['bits']}-bit {quantization['quant_method'].upper()} checkpoint"
    )
    assert not hasattr(source.config, "quantization_config")
    reader = source.weights()
    assert len(exact) == 7
    for name, weight in exact.items():
        assert torch.equal(reader.load(name), weight)
        assert reader.shape(name) == tuple(weight.shape)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert torch.equal(reader.load("model.norm.weight"), stored["model.norm.weight"])
    assert torch.equal(
        reader.load("model.layers.0.self_attn.q_proj.bias"), stored["model.layers.0.self_attn.q_proj.bias"]
    )
    digest = source.digest()
    stored["model.layers.0.mlp.up_proj.scales"] *= 2
    save_file(stored, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    assert resolve_model(str(tmp_path / "m")).digest() != digest


@pytest.mark.parametrize("quantization", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_experts_are_decoded_one_by_one(tmp_path: Path, quantization: dict[str, Any]) -> None:
    from transformers import MixtralConfig

    def mixtral(**_: Any) -> Any:
        return MixtralConfig(
            vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=3,
        )  # fmt: skip

    exact = checkpoint(tmp_path, mixtral, quantization)
    reader = resolve_model(str(tmp_path)).weights()
    for expert in range(3):
        for hub, name in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            stored = exact[f"model.layers.0.block_sparse_moe.experts.{expert}.{hub}.weight"]
            assert torch.equal(reader.load(f"model.layers.0.mlp.experts.{expert}.{name}.weight"), stored)


def test_such_a_model_packs(tmp_path: Path, llama_config: Any, tiny: "Packed") -> None:
    from dataclasses import replace

    from comet_core.calibrate import calibrate
    from comet_core.pack import pack
    from comet_core.packed import load_packed
    from comet_core.progress import SilentProgress

    checkpoint(tmp_path / "m", llama_config, AWQ)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.source.folder / name, tmp_path / "m" / name)
    source, recipe = resolve_model(str(tmp_path / "m")), replace(tiny.recipe, kv_cache=KVCacheSpec(bits=16))
    calibrate(source, recipe, tmp_path / "c", device="cpu", progress=SilentProgress())
    pack(source, tmp_path / "c", recipe, tmp_path / "p", device="cpu", progress=SilentProgress())
    packed = load_packed(tmp_path / "p")
    assert packed.manifest.model["note"] == "dequantized from a 4-bit AWQ checkpoint"
    assert torch.isfinite(packed.model(input_ids=torch.arange(20)[None]).logits).all()


@pytest.mark.parametrize(
    ("quantization", "word"),
    [
        (GPTQ | {"bits": 3}, "3 bits"),
        (AWQ | {"version": "gemv"}, "gemv"),
        (GPTQ | {"group_size": 128}, "qzeros is I32"),
        (GPTQ | {"group_size": None}, "groups of None"),
    ],
)
def test_variants_that_cannot_be_read_are_refused(
    tmp_path: Path, llama_config: Any, quantization: dict[str, Any], word: str
) -> None:
    checkpoint(tmp_path / "m", llama_config, GPTQ if quantization["quant_method"] == "gptq" else AWQ)
    config = json.loads((tmp_path / "m" / "config.json").read_text()) | {"quantization_config": quantization}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CometError, match=word):
        resolve_model(str(tmp_path / "m"))


def test_damaged_parts_are_named(tmp_path: Path, llama_config: Any) -> None:
    checkpoint(tmp_path / "m", llama_config, GPTQ)
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj"
    save_file({k: v for k, v in tensors.items() if k != f"{name}.scales"}, file)
    with pytest.raises(CometError, match=r"up_proj\.scales is missing"):
        resolve_model(str(tmp_path / "m"))
    tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"] + 9
    save_file(tensors, file)
    with pytest.raises(CometError, match="g_idx names a group"):
        resolve_model(str(tmp_path / "m")).weights().load(f"{name}.weight")
