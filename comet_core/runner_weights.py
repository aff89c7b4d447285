"""Packed folder, 16-bit model or random numbers -> RunnerModel.

Nothing here knows a family by name beyond llama_shape's list: a layer is read by the names of its parts, and one that
holds a part that the runner would not compute is refused. Random weights are made on the device, codes and scales
directly, in seconds for 70 billion: speed does not depend on values, and the note says what they are.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.decoder import Decoder, build_empty
from comet_core.fused_linear import FusedLinear, SixteenBitLinear, WeightOnlyLinear, fp8_linear, fuse, w4ax_linear
from comet_core.linear import Int8Embedding, W4AxLinear
from comet_core.llama_shape import LlamaShape, shape_of_config
from comet_core.model_source import ModelSource, resolve_model
from comet_core.packed import load_packed
from comet_core.paged_cache import AttentionSpec
from comet_core.runner_model import RunnerLayer, RunnerModel
from comet_core.serving_scheme import Scheme
from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.bank_order import spread_over_banks
from comet_cuda.errors import CometError
from comet_cuda.prepared_linear import ActivationFormat
from comet_cuda.quantize_act import TOKEN

ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")  # kinds whose frequencies do not depend on the length
CLIP = 0.9  # of random packed weights, the default recipe's
WEIGHT_SPREAD = 0.02  # standard deviation of random weights


def runner_from_packed(
    folder: Path, device: torch.device | str, dtype: torch.dtype, layout: str | None = None
) -> RunnerModel:
    """A packed checkpoint. `layout` overrides the activation layout of the device (tests).

    Errors:
        CometError for a model that the runner does not compute, or groups that were packed unlike.
    """
    packed = load_packed(folder, device="cpu", dtype=dtype)
    name, note = packed.manifest.model["name"], packed.manifest.model["note"]
    return _from_modules(name, packed.model, device, dtype, note, layout)


def runner_from_source(source: ModelSource, device: torch.device | str, dtype: torch.dtype) -> RunnerModel:
    """A 16-bit model with its own weights."""
    decoder = Decoder(source, device="cpu", dtype=dtype)
    decoder.load_non_layers()
    for index in range(len(decoder.layers)):
        decoder.load_layer(index)
    return _from_modules(source.name, decoder.model, device, dtype, source.note, None)


def _from_modules(
    name: str, model: nn.Module, device: torch.device | str, dtype: torch.dtype, note: str, layout: str | None
) -> RunnerModel:
    shape = shape_of_config(name, model.config)
    base: Any = model.model
    layers = []
    for index, layer in enumerate(base.layers):
        _require_parts(f"{name}: layer {index}", layer)
        attention, mlp, label = layer.self_attn, layer.mlp, f"{name}: layer {index}"

        def group(what: str, *linears: nn.Module, label: str = label) -> FusedLinear:
            moved = [linear.to(device) for linear in linears]
            return fuse(f"{label} {what}", moved, dtype, layout)

        layers.append(
            RunnerLayer(
                input_norm=layer.input_layernorm.weight.detach().to(device, dtype),
                qkv=group("qkv", attention.q_proj, attention.k_proj, attention.v_proj),
                attention=_attention_spec(shape, model.config, attention, index, device, dtype),
                o=group("o", attention.o_proj),
                mlp_norm=layer.post_attention_layernorm.weight.detach().to(device, dtype),
                gate_up=group("gate_up", mlp.gate_proj, mlp.up_proj),
                down=group("down", mlp.down_proj),
            )
        )
    embedding = _table(base.embed_tokens, dtype).to(device)
    head = model.get_output_embeddings()  # type: ignore[operator]
    lm_head = embedding if shape.tied else _table(head, dtype).to(device)
    if getattr(head, "bias", None) is not None:
        raise CometError(f"{name}: lm_head has a bias", "the runner does not add one")
    return _model(shape, model.config, base, layers, embedding, lm_head, base.norm.weight, device, dtype, note)


def _model(
    shape: LlamaShape,
    config: Any,
    base: Any,
    layers: list[RunnerLayer],
    embedding: Tensor,
    lm_head: Tensor,
    norm: Tensor,
    device: torch.device | str,
    dtype: torch.dtype,
    note: str,
) -> RunnerModel:
    kind = getattr(base.rotary_emb, "rope_type", "default")
    if kind not in STATIC_ROTARY:
        raise CometError(f"{shape.name}: rotary embedding of type {kind}", f"the runner knows {STATIC_ROTARY}")
    return RunnerModel(
        shape=shape,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=norm.detach().to(device, dtype),
        lm_head=lm_head,
        eps=float(config.rms_norm_eps),
        inverse_frequencies=base.rotary_emb.inv_freq.detach().float().to(device),
        rotary_factor=float(base.rotary_emb.attention_scaling),
        most_positions=int(config.max_position_embeddings),
        note=note,
    )


def _require_parts(label: str, layer: nn.Module) -> None:
    """Refuse a layer that holds a part that would not be computed."""
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    for owner, known in ((layer, LAYER_PARTS), (attention, ATTENTION_PARTS), (mlp, MLP_PARTS)):
        found = {name for name, _ in owner.named_children()}
        extra = found - known - {"rotary_emb"}
        if extra:
            raise CometError(f"{label} holds {', '.join(sorted(extra))}", "the runner does not compute that")
    activation = mlp.get_submodule("act_fn")
    if not isinstance(activation, nn.SiLU) and type(activation).__name__ not in ("SiLU", "SiLUActivation"):
        raise CometError(f"{label}: its activation is {activation}", "the runner computes SiLU only")


def _attention_spec(
    shape: LlamaShape, config: Any, attention: Any, index: int, device: torch.device | str, dtype: torch.dtype
) -> AttentionSpec:
    norms = []
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name, None)
        weight = None if norm is None else norm.weight.detach()
        meta = weight is not None and weight.device.type == "meta"  # random weights
        norms.append(torch.ones(shape.head_dim, dtype=dtype, device=device) if meta else weight)
    kinds = getattr(config, "layer_types", None)
    window = getattr(attention, "sliding_window", None) or getattr(config, "sliding_window", None) or 0
    if kinds is not None and kinds[index] != "sliding_attention":
        window = 0
    moved = [None if norm is None else norm.to(device, dtype) for norm in norms]
    scale = float(getattr(attention, "scaling", shape.head_dim**-0.5))
    return AttentionSpec(scale, int(window), moved[0], moved[1], float(config.rms_norm_eps))


def _table(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """The embedding or lm_head as one 16-bit matrix, [V, hidden]; 8-bit ones are decoded."""
    if isinstance(module, Int8Embedding):
        rows = torch.arange(module.qweight.shape[0])
        return torch.cat([module(part) for part in rows.split(4096)]).to(dtype)
    if isinstance(module, W4AxLinear):  # an 8-bit lm_head
        scale = module.w_scale.float()[..., None]
        codes = module.qweight.float().unflatten(1, (-1, BLOCK))
        decoded: Tensor = (codes * scale).flatten(1)[:, : module.in_features].to(dtype)
        return decoded
    return module.get_parameter("weight").detach().to(dtype)


# --- random weights


class RandomLinears:
    """Linears of one scheme with random weights, made on the device."""

    def __init__(
        self, scheme: Scheme, device: torch.device | str, dtype: torch.dtype, seed: int, share: int, hadamard: bool
    ) -> None:
        self.scheme, self.device, self.dtype = scheme, device, dtype
        self.share, self.hadamard = share if scheme.int4_share else 1, hadamard  # INT8 blocks alone keep scales
        self.generator = torch.Generator(device).manual_seed(seed)
        self._stand_ins: dict[tuple[int, int], Tensor] = {}

    def normal(self, *size: int) -> Tensor:
        """16-bit, spread like a trained weight."""
        out = torch.empty(size, dtype=self.dtype, device=self.device)
        return out.normal_(0.0, WEIGHT_SPREAD, generator=self.generator)

    def integers(self, high: int, *size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Uniform in 0 .. high - 1."""
        return torch.empty(size, dtype=dtype, device=self.device).random_(0, high, generator=self.generator)

    def make(self, rows: int, channels: int, bias: bool, permuted: bool) -> FusedLinear:
        """One linear; `permuted`: it gathers its input (its producer cannot)."""
        added = self.normal(rows) if bias else None
        if self.scheme.linears == "bf16":
            return SixteenBitLinear(self.normal(rows, channels), added)
        if self.scheme.linears == "fp8":
            return fp8_linear(self.normal(rows, channels), added, self.dtype)
        if self.scheme.linears == "w4a16":
            return self._weight_only(rows, channels, added)
        return self._w4ax(rows, channels, added, permuted)

    def _w4ax(self, rows: int, channels: int, bias: Tensor | None, permuted: bool) -> FusedLinear:
        blocks = num_blocks(channels)
        qweight = self.integers(256, rows, 64 * blocks)
        spread = torch.rand(rows, blocks, device=self.device, generator=self.generator)
        scale = ((0.5 + spread) * (WEIGHT_SPREAD / 4)).to(torch.bfloat16)
        if self.share == TOKEN:  # each a small multiple of one number
            scale = (6 + (7 * spread).floor()).to(torch.bfloat16) * 2.0**-11
        zero = self.integers(4, rows, blocks) + 6
        int8 = blocks - int(-(-blocks * self.scheme.int4_share // 1))  # blocks; INT4 ones have at least their share
        bits = torch.full((blocks,), 4, dtype=torch.uint8, device=self.device)
        bits[:int8] = 8
        perm = None
        if permuted:
            perm = torch.randperm(channels, device=self.device, generator=self.generator).to(torch.int32)
            perm = spread_over_banks(perm, bits) if self.hadamard else perm
        clip = torch.full((blocks,), CLIP, dtype=torch.float32, device=self.device)
        inputs = ActivationFormat(perm, bits, clip, self.hadamard, self.share)
        return w4ax_linear(qweight, scale, zero, inputs, bias, self.dtype)

    def _weight_only(self, rows: int, channels: int, bias: Tensor | None) -> FusedLinear:
        """Weights for torch's INT4 product, and the dense stand-in for many tokens, shared by linears of one size."""
        if channels % BLOCK or rows % 8:
            raise CometError(f"{rows} x {channels} weights do not fit torch's INT4 product", "take another scheme")
        codes = self.integers(256, rows, channels // 2)
        packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8) if codes.is_cuda else None
        spread = torch.rand(channels // BLOCK, rows, 2, device=self.device, generator=self.generator)
        scales = ((0.5 + spread) * (WEIGHT_SPREAD / 4)).to(self.dtype)
        if (rows, channels) not in self._stand_ins:
            self._stand_ins[rows, channels] = self.normal(rows, channels)
        return WeightOnlyLinear(None, packed, scales, None, self._stand_ins[rows, channels], bias)


def random_runner(
    spec: str,
    scheme: Scheme,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    layers: int | None = None,
    share: int = TOKEN,
    hadamard: bool = True,
) -> RunnerModel:
    """Any Llama-like alias (or folder's config) with random weights in one scheme.

    Args:
        share, hadamard: how packed linears quantize activations (ActivationFormat).
    """
    source = resolve_model(spec, weights="random", layers=layers, seed=seed)
    shape = shape_of_config(source.name, source.config)
    model: Any = build_empty(source.config, "sdpa", dtype)
    base = model.model
    make = RandomLinears(scheme, device, dtype, seed, share, hadamard)
    made = []
    for index, layer in enumerate(base.layers):
        _require_parts(f"{source.name}: layer {index}", layer)
        sizes = shape.linears
        attention, mlp = layer.self_attn, layer.mlp
        made.append(
            RunnerLayer(
                input_norm=torch.ones(shape.hidden, dtype=dtype, device=device),
                qkv=make.make(*sizes["qkv"], bias=attention.q_proj.bias is not None, permuted=True),
                attention=_attention_spec(shape, source.config, attention, index, device, dtype),
                o=make.make(*sizes["o"], bias=attention.o_proj.bias is not None, permuted=True),
                mlp_norm=torch.ones(shape.hidden, dtype=dtype, device=device),
                gate_up=make.make(*sizes["gate_up"], bias=mlp.gate_proj.bias is not None, permuted=True),
                down=make.make(*sizes["down"], bias=mlp.down_proj.bias is not None, permuted=False),
            )
        )
    embedding = make.normal(shape.vocab, shape.hidden)
    lm_head = embedding if shape.tied else make.normal(shape.vocab, shape.hidden)
    norm = torch.ones(shape.hidden, dtype=dtype, device=device)
    note = f"random weights, seed {seed}"
    return _model(shape, source.config, base, made, embedding, lm_head, norm, device, dtype, note)
