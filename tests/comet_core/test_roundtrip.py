"""calibrate -> pack -> load -> forward: the packed model is the quantized model, for every recipe and family shape."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comet_core.evaluate import load_sixteen
from comet_core.linear import W4AxLinear
from comet_core.packed import PackedModel, load_packed
from comet_core.recipe import load_recipe, recipe_from_dict, recipe_to_dict
from comet_core.safetensors_files import read_header
from comet_core.shards import tensor_sha256
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import quantize_act
from comet_cuda.w4ax_gemm import weight_integers


@pytest.fixture(scope="module")
def smol(put_through: Any, llama_config: Any) -> Any:
    """Widths of SmolLM2-135M, 576 (padded to 640) and 1,536, nine heads on three, tied; two layers."""
    config = llama_config(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True
    )
    return put_through(config)


@pytest.fixture(scope="module")
def loaded(smol: Any) -> PackedModel:
    return load_packed(smol.packed, verify=True)


def linears(model: nn.Module) -> dict[str, W4AxLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, W4AxLinear)}


def tokens(count: int = 2, length: int = 96, seed: int = 0) -> Tensor:
    """int64 [count, length] below the vocabulary of the tiny models."""
    return torch.randint(0, 250, (count, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    return model(input_ids=x, use_cache=False).logits


@torch.no_grad()
def cosine_to_16_bit(made: Any) -> float:
    """Cosine between the logits of the packed model, their mean over the vocabulary taken off, and the 16-bit ones."""
    x = tokens(1, 80)
    ours = logits(load_packed(made.packed, verify=True).model, x)
    theirs = logits(load_sixteen(made.source, "cpu", torch.float32), x)
    assert bool(torch.isfinite(ours).all())
    assert float(theirs.std()) > 1e-3, "logits near zero would agree with anything"
    ours, theirs = (y - y.mean(-1, keepdim=True) for y in (ours, theirs))
    return float(torch.cosine_similarity(ours.flatten(), theirs.flatten(), 0))


def test_packed_linears_take_at_most_29_percent(smol: Any) -> None:
    stored = [tensor for file in smol.packed.glob("*.safetensors") for tensor in read_header(file).items()]
    packed = {name.removesuffix(".qweight") for name, _ in stored if name.endswith(".qweight")}
    size = sum(tensor.nbytes for name, tensor in stored if name.rpartition(".")[0] in packed)
    sixteen = 2 * 2 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 576 * 1536)  # bytes, two layers
    assert len(packed) == 2 * 7
    assert size <= 0.29 * sixteen
    assert size >= 0.25 * sixteen, "fewer than 4 bits a weight: something is not counted"


def test_reloading_gives_the_integers_that_packing_made(
    smol: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """What quantization hands to the writer, kept in memory, against what is read back from the first folder."""
    import comet_core.pack_job as pack_module

    made: dict[str, Tensor] = {}
    write = pack_module.write_checked_shard
    monkeypatch.setattr(
        pack_module,
        "write_checked_shard",
        lambda path, tensors, notes: (made.update(tensors), write(path, tensors, notes))[1],
    )
    smol.pack(tmp_path / "again")
    read = {
        f"{name}.{leaf}": value
        for name, linear in linears(load_packed(smol.packed).model).items()
        for leaf, value in linear.named_buffers()
    }
    assert len(read) > 60
    assert read.keys() <= made.keys()
    assert all(made[name].dtype == value.dtype and torch.equal(made[name], value) for name, value in read.items())


def test_a_packed_layer_equals_the_fake_quantized_one(loaded: PackedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, linear in linears(loaded.model).items():
        x = torch.randn(33, linear.in_features, generator=generator)
        x[:, 5] *= 50  # an outlier channel
        exact, ours = linear.fake_quantized(x), linear(x)
        assert float((ours - exact).norm() / exact.norm()) <= 1e-5, name


def test_given_the_same_codes_the_whole_model_equals_the_dequantized_one(smol: Any) -> None:
    """Integers times scales, block by block, against one float product, through all layers and the 4-bit cache."""
    packed, dense = (load_packed(smol.packed).model for _ in range(2))
    codes: dict[str, tuple[Tensor, Tensor]] = {}

    def recorded(name: str, linear: W4AxLinear, x: Tensor) -> Tensor:
        rows = x.reshape(-1, linear.in_features)
        f = linear.inputs
        codes[name] = quantize_act(rows, f.perm, f.block_bits, f.clip, f.hadamard, f.share)
        return W4AxLinear.forward(linear, x)

    def replayed(name: str, linear: W4AxLinear, x: Tensor) -> Tensor:
        integers, scale = codes[name]
        weight = weight_integers(linear.qweight, linear.w_zero) * linear.w_scale.float()[..., None]
        y = (integers * scale[..., None]).flatten(1) @ weight.flatten(1).T
        return y.view(*x.shape[:-1], linear.out_features)

    for model, run in ((packed, recorded), (dense, replayed)):
        for name, linear in linears(model).items():
            linear.forward = partial(run, name, linear)  # type: ignore[method-assign]
    x = tokens(4, 200)
    ours, theirs = (logits(model, x).log_softmax(-1) for model in (packed, dense))
    assert len(codes) == len(linears(packed)) > 0
    assert float(kl(theirs, ours).mean()) <= 1e-4
    assert float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()) >= 0.995


def test_the_whole_model_equals_the_fake_quantized_one(put_through: Any, llama_config: Any) -> None:
    """Most tokens agree to float rounding. In the few others a difference of 2e-7 made one code round the other way,
    and that grows through the layers, but stays far below what quantization itself changes.

    Embeddings stand out against what the layers add, as in trained models; the cache is 16 bit, because one float16
    scale of a cached key that rounds the other way reaches all tokens after it.
    """
    recipe = load_recipe("w4a4kv4")
    recipe = replace(recipe, kv_cache=replace(recipe.kv_cache, bits=16))
    factors = {"model.embed_tokens.weight": 5.0, "lm_head.weight": 4.0}
    shapes = {"hidden_size": 576, "intermediate_size": 768, "num_attention_heads": 9, "num_key_value_heads": 3}
    made = put_through(llama_config(**shapes), recipe, factors)
    packed, fake = (load_packed(made.packed).model for _ in range(2))
    for linear in linears(fake).values():
        linear.forward = linear.fake_quantized  # type: ignore[method-assign]
    x = tokens(16, 32)
    ours, theirs = (logits(model, x).log_softmax(-1) for model in (packed, fake))
    exact = logits(load_sixteen(made.source, "cpu", torch.float32), x).log_softmax(-1)
    noise, change = kl(theirs, ours), kl(exact, ours)  # [16, 32], nats a token
    assert float(change.median()) > 1e-2, "the bounds below would show nothing"
    assert float(noise.median()) <= 1e-6
    assert float(noise.mean()) <= 0.05 * float(change.mean())
    assert float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()) >= 0.95
    assert float((ours.argmax(-1) == exact.argmax(-1)).float().mean()) < 0.9


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL divergence from q to p, over the last axis."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def test_weights_are_close_to_those_of_the_source(smol: Any, loaded: PackedModel) -> None:
    """In the input's own channel order: a wrong permutation, rotation or padding would not come near."""
    source = load_sixteen(smol.source, "cpu", torch.float32)
    x = torch.randn(16, 576, generator=torch.Generator().manual_seed(1))
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"):
        ours, theirs = loaded.model.get_submodule(name)(x), source.get_submodule(name)(x)
        assert float(torch.cosine_similarity(ours.flatten(), theirs.flatten(), 0)) > 0.97


RECIPES: dict[str, dict[str, Any]] = {
    "w4a16": {},
    "w8a8": {},
    "w4a8kv4": {},
    "fp16": {},
    "fmpq-paper": {},
    "w4a4-naive": {},
    "w4a4kv4": {"weights": {"symmetric": True}, "kv_cache": {"key_granularity": "token", "page": 16, "sinks": 0}},
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_go_through(put_through: Any, llama_config: Any, name: str) -> None:
    plain = recipe_to_dict(load_recipe(name))
    for section, changes in RECIPES[name].items():
        plain[section] |= changes
    made = put_through(llama_config(), recipe_from_dict(plain))
    least = {"fp16": 0.9999, "w8a8": 0.999, "w4a16": 0.97, "w4a8kv4": 0.96}.get(name, 0.9)
    assert cosine_to_16_bit(made) > least
    found = linears(load_packed(made.packed).model)
    assert len(found) == (0 if name == "fp16" else 14)
    assert all((linear.qweight.dtype == torch.int8) == (name == "w8a8") for linear in found.values())


@pytest.mark.parametrize("tied", [True, False])
def test_eight_bit_embedding_and_lm_head(put_through: Any, llama_config: Any, tied: bool) -> None:
    recipe = replace(load_recipe("fp16"), embedding_bits=8, lm_head_bits=8)
    made = put_through(llama_config(tie_word_embeddings=tied), recipe)
    assert cosine_to_16_bit(made) > 0.999
    packed = load_packed(made.packed, verify=True)
    assert set(linears(packed.model)) == {"lm_head"}
    stored = {name for file in made.packed.glob("*.safetensors") for name in read_header(file)}
    assert "model.embed_tokens.qweight" in stored and "model.embed_tokens.weight" not in stored
    assert ("lm_head.qweight" in stored) != tied, "a tied tensor is stored once"


def test_eight_bit_lm_head_alone(put_through: Any, llama_config: Any) -> None:
    made = put_through(llama_config(), replace(load_recipe("fp16"), lm_head_bits=8))
    assert cosine_to_16_bit(made) > 0.999
    assert set(linears(load_packed(made.packed).model)) == {"lm_head"}


def test_skips_and_overrides_reach_the_linears_they_name(put_through: Any, llama_config: Any) -> None:
    plain = recipe_to_dict(load_recipe("w4a4kv4"))
    plain["blocks"]["int4_mac_fraction"] = 0.3
    plain["skip"] = ["*.0.mlp.down_proj", "*.1.self_attn.q_proj"]
    plain["overrides"] = [
        {"match": "*.1.mlp.*", "weights": {"bits": 8}, "activations": {"bits": 8}},
        {"match": "*.0.self_attn.o_proj", "activations": {"bits": 16}},
    ]
    made = put_through(llama_config(), recipe_from_dict(plain))
    assert cosine_to_16_bit(made) > 0.9
    found = linears(load_packed(made.packed, verify=True).model)
    assert len(found) == 12
    assert not {"model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"} & set(found)
    for name, linear in found.items():
        eight = name.startswith("model.layers.1.mlp.")
        assert (linear.qweight.dtype == torch.int8) == eight
        wanted = {16} if name == "model.layers.0.self_attn.o_proj" else {8} if eight else {4, 8}
        assert set(linear.block_bits.tolist()) <= wanted, name


def shapes(**changes: Any) -> dict[str, Any]:
    """Narrow shapes under the names that most configs use."""
    return {
        "vocab_size": 257, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "bos_token_id": None,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256,
        "eos_token_id": 256, "pad_token_id": None, "tie_word_embeddings": False,
    } | changes  # fmt: skip


def families() -> dict[str, Callable[[], Any]]:
    import transformers as t

    return {
        "QKV bias": lambda: t.Qwen2Config(**shapes()),
        "QK-norm": lambda: t.Qwen3Config(**shapes(head_dim=96)),
        "head_dim 80, GQA 4 to 2": lambda: t.LlamaConfig(
            **shapes(hidden_size=160, head_dim=80, num_attention_heads=4, num_key_value_heads=2)
        ),
        "head_dim 256, sliding windows, soft caps, tied": lambda: t.Gemma3TextConfig(
            **shapes(head_dim=256, sliding_window=32, sliding_window_pattern=2, query_pre_attn_scalar=256,
                     tie_word_embeddings=True)
        ),
        "sliding window": lambda: t.MistralConfig(**shapes(sliding_window=32)),
        "fused qkv and gate_up": lambda: t.Phi3Config(
            **shapes(num_key_value_heads=2), original_max_position_embeddings=256
        ),
        "OPT": lambda: t.OPTConfig(
            vocab_size=257, hidden_size=128, ffn_dim=320, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=256, word_embed_proj_dim=128, bos_token_id=2, eos_token_id=256, pad_token_id=1,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("family", families())
def test_families_go_through(put_through: Any, family: str) -> None:
    made = put_through(families()[family]())
    assert cosine_to_16_bit(made) > 0.8
    packed = load_packed(made.packed)
    assert len(linears(packed.model)) == len(packed.manifest.linears) >= 8
    assert packed.manifest.int4_mac_fraction >= 0.84
    state = packed.model.state_dict()
    integers = {name for name in packed.manifest.sha256 if name.endswith((".qweight", ".w_zero", ".perm"))}
    assert all(tensor_sha256(state[name]) == packed.manifest.sha256[name] for name in integers)


EXTREMES = {
    "a dead input": {"model.layers.0.input_layernorm.weight": 0.0},
    "a zero linear": {"model.layers.0.self_attn.o_proj.weight": 0.0, "model.layers.1.mlp.up_proj.weight": 0.0},
    "weights under the range of float16": {"model.layers.0.mlp.up_proj.weight": 1e-9},
    "activations above the range of float16": {"model.layers.1.post_attention_layernorm.weight": 3e4},
}


@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_values_go_through(put_through: Any, llama_config: Any, kind: str) -> None:
    made = put_through(llama_config(), "w4a4kv4", EXTREMES[kind])
    assert cosine_to_16_bit(made) > 0.8


def test_a_checkpoint_with_nan_is_refused(llama_config: Any, put_through: Any) -> None:
    with pytest.raises(CometError, match=r"layers\.1\.mlp\.up_proj\.weight: holds NaN or Inf"):
        put_through(llama_config(), "w4a4kv4", {"model.layers.1.mlp.up_proj.weight": float("nan")})
