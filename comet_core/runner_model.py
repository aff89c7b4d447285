"""A Llama-like decoder as it is served: tokens in, hidden states and logits out, the cache written on the way.

A layer is seven steps: norm and quantize, qkv, rotate-append-attend, quantize, o, norm and quantize, gate and up, SiLU
and quantize, down. The residual is added by the norm that follows it, so no kernel does only that. The same code runs
every scheme on every device; what differs is in the FusedLinear and the Cache that it is given.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from comet_core.fused_linear import FusedLinear
from comet_core.llama_shape import LlamaShape
from comet_core.paged_cache import AttentionSpec, Cache, Chunk, Rotary, Step


@dataclass(frozen=True)
class RunnerLayer:
    """One decoder layer."""

    input_norm: Tensor  # [hidden]
    qkv: FusedLinear
    attention: AttentionSpec
    o: FusedLinear
    mlp_norm: Tensor  # [hidden]
    gate_up: FusedLinear
    down: FusedLinear


@dataclass(frozen=True)
class RunnerModel:
    """All of a model but its cache."""

    shape: LlamaShape
    embedding: Tensor  # 16-bit [V, hidden]
    layers: tuple[RunnerLayer, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # 16-bit [V, hidden]; the embedding itself where they are tied
    eps: float
    inverse_frequencies: Tensor  # f32 [D / 2] of the rotary embedding
    rotary_factor: float  # on its cosines and sines
    most_positions: int
    note: str  # what the weights are, printed with every number

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def rotary(self, positions: int) -> Rotary:
        """Angles of the first positions."""
        place = torch.arange(positions, dtype=torch.float32, device=self.device)
        angle = place[:, None] * self.inverse_frequencies[None].to(self.device)
        return Rotary(angle.cos() * self.rotary_factor, angle.sin() * self.rotary_factor)

    def hidden(self, tokens: Tensor, work: Step | Chunk, cache: Cache) -> tuple[Tensor, Tensor | None]:
        """Run all layers. Returns the last layer's output [N, hidden] and the residual that is still to be added.

        Args:
            tokens: int64 [N]. work: where they stand; a Step reads the cache as decode does, a Chunk as prefill.
        """
        cache.begin(work)
        x, residual = nn.functional.embedding(tokens, self.embedding), None
        for index in range(len(self.layers)):
            x, residual = self.attention(index, x, residual, work, cache)
            x, residual = self.mlp(index, x, residual)
        return x, residual

    def attention(
        self, index: int, x: Tensor, residual: Tensor | None, work: Step | Chunk, cache: Cache
    ) -> tuple[Tensor, Tensor]:
        """The first half of a layer on x + residual, [N, hidden] each: its output and that sum. The work has begun."""
        layer = self.layers[index]
        operand, residual = layer.qkv.take_norm(x, residual, layer.input_norm, self.eps)
        qkv = layer.qkv.multiply(operand)
        if isinstance(work, Step):
            attended = cache.decode(index, qkv, work, layer.attention)
        else:
            attended = cache.prefill(index, qkv, work, layer.attention)
        return layer.o.multiply(layer.o.take(attended)), residual

    def mlp(self, index: int, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The second half, likewise."""
        layer = self.layers[index]
        operand, residual = layer.gate_up.take_norm(x, residual, layer.mlp_norm, self.eps)
        return layer.down.multiply(layer.down.take_silu_mul(layer.gate_up.multiply(operand))), residual

    def logits(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """[N, hidden] twice -> 16-bit [N, V]."""
        normed = torch.ops.comet.rms_norm(x, residual, self.final_norm, self.eps, False)[0]
        return nn.functional.linear(normed, self.lm_head)

    def int4_share(self) -> float:
        """Share of the linears' multiply-adds whose activations are INT4 (padding counted)."""
        done = total = 0
        for layer in self.layers:
            for linear, (rows, channels) in zip(
                (layer.qkv, layer.o, layer.gate_up, layer.down), self.shape.linears.values(), strict=True
            ):
                bits = linear.block_bits()
                total += rows * channels
                done += 0 if bits is None else round(rows * channels * float((bits == 4).float().mean()))
        return done / total

    def weight_tensors(self) -> list[Tensor]:
        """Everything in memory that is not cache, each tensor once."""
        found = [self.embedding, self.final_norm, self.lm_head]
        for layer in self.layers:
            found += [layer.input_norm, layer.mlp_norm]
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                found += linear.tensors()
        return list({tensor.data_ptr(): tensor for tensor in found}.values())


def tensor_bytes(tensors: list[Tensor]) -> int:
    """Bytes of all of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
