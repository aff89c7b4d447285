"""The linears of a decoder as it is served: those that share an input are one, and their input is prepared by whatever
comes before them (a norm, an activation), so that nothing else touches it in between.

One interface, one class a number format. The choice among kernels is made by the ops: on a GPU a packed linear takes
that GPU's layout, on a CPU the canonical one, where every op is its reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

import comet_cuda.sixteen_bit  # noqa: F401  (registers ops)
from comet_core.linear import W4AxLinear
from comet_cuda.errors import CometError
from comet_cuda.prepared_linear import ActivationFormat, PreparedLinear, prepare_linear
from comet_cuda.quantize_act import quantize_act, to_blocks
from comet_cuda.sixteen_bit import to_fp8
from comet_cuda.w4ax_gemm import w4ax_gemm, weight_integers

INT4PACK_TOKENS = 16  # at most so many tokens go through torch's weight-only INT4 product; it is made for few


class Operand(NamedTuple):
    """The input of a linear in the form that its product reads."""

    tensors: tuple[Tensor, ...]  # values, and what scales them
    tokens: int


class FusedLinear(Protocol):
    """y = x W^T + bias for stacked rows. K in-channels, N rows, M tokens."""

    def take(self, x: Tensor) -> Operand:
        """Prepare x, float [M, K]."""

    def take_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Operand, Tensor]:
        """Prepare RMSNorm(x + residual) and return it with x + residual."""

    def take_silu_mul(self, gate_up: Tensor) -> Operand:
        """Prepare SiLU(gate) * up of [gate | up], float [M, 2K]."""

    def multiply(self, operand: Operand) -> Tensor:
        """16-bit (on a CPU float) [M, N]."""

    def tensors(self) -> list[Tensor]:
        """What it keeps in memory."""

    def block_bits(self) -> Tensor | None:
        """uint8 [NB], bits of each block of its input; None if that is not quantized in blocks."""


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, fp8: bool) -> tuple[Tensor, Tensor, Tensor]:
    normed, scale, summed = torch.ops.comet.rms_norm(x, residual, weight, eps, fp8)
    return normed, scale, x if residual is None else summed


@dataclass(frozen=True)
class SixteenBitLinear:
    """16-bit weights and activations, by torch."""

    weight: Tensor  # [N, K]
    bias: Tensor | None

    def take(self, x: Tensor) -> Operand:
        return Operand((x,), x.shape[0])

    def take_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Operand, Tensor]:
        normed, _, summed = _norm(x, residual, weight, eps, False)
        return self.take(normed), summed

    def take_silu_mul(self, gate_up: Tensor) -> Operand:
        return self.take(torch.ops.comet.silu_mul(gate_up, False)[0])

    def multiply(self, operand: Operand) -> Tensor:
        return nn.functional.linear(operand.tensors[0], self.weight, self.bias)

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.weight, self.bias) if t is not None]

    def block_bits(self) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Fp8Linear:
    """e4m3 weights with a scale a row, e4m3 activations with a scale a token (torch's `_scaled_mm` on a GPU)."""

    weight: Tensor  # e4m3 [N, K]
    scale: Tensor  # f32 [1, N]
    bias: Tensor | None
    dtype: torch.dtype

    def take(self, x: Tensor) -> Operand:
        return Operand(torch.ops.comet.to_fp8(x), x.shape[0])

    def take_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Operand, Tensor]:
        values, scale, summed = _norm(x, residual, weight, eps, True)
        return Operand((values, scale), x.shape[0]), summed

    def take_silu_mul(self, gate_up: Tensor) -> Operand:
        return Operand(torch.ops.comet.silu_mul(gate_up, True), gate_up.shape[0])

    def multiply(self, operand: Operand) -> Tensor:
        values, scale = operand.tensors
        if values.is_cuda:
            return torch._scaled_mm(  # the fast accumulation is what FP8 serving uses
                values, self.weight.t(), scale, self.scale, self.bias, None, self.dtype, use_fast_accum=True
            )
        y = (values.float() * scale) @ (self.weight.float() * self.scale.T).T
        return (y if self.bias is None else y + self.bias.float()).to(self.dtype)

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.weight, self.scale, self.bias) if t is not None]

    def block_bits(self) -> Tensor | None:
        return None


def fp8_linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Fp8Linear:
    """16-bit weights [N, K] -> e4m3, one scale a row."""
    codes, scale = to_fp8(weight)
    return Fp8Linear(codes, scale.T.contiguous(), bias, dtype)


@dataclass(frozen=True)
class W4AxTiled:
    """A packed linear in a GPU's layout (on a CPU the ops that read this layout are references)."""

    prepared: PreparedLinear
    bias: Tensor | None
    dtype: torch.dtype

    def take(self, x: Tensor) -> Operand:
        return Operand(self.prepared.quantize(x), x.shape[0])

    def take_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Operand, Tensor]:
        tensors, summed = self.prepared.quantize_norm(x, residual, weight, eps)
        return Operand(tensors, x.shape[0]), x if residual is None else summed

    def take_silu_mul(self, gate_up: Tensor) -> Operand:
        return Operand(self.prepared.quantize_silu_mul(gate_up), gate_up.shape[0])

    def multiply(self, operand: Operand) -> Tensor:
        return self.prepared.multiply(operand.tensors, operand.tokens, self.bias, self.dtype)

    def tensors(self) -> list[Tensor]:
        weight = self.prepared.weight
        found = [value for value in vars(weight).values() if isinstance(value, Tensor)]
        found += [value for value in vars(self.prepared.inputs).values() if isinstance(value, Tensor)]
        return found + ([] if self.bias is None else [self.bias])

    def block_bits(self) -> Tensor | None:
        return self.prepared.inputs.block_bits


@dataclass(frozen=True)
class W4AxCanonical:
    """A packed linear as the checkpoint stores it, through the canonical ops: what a CPU runs."""

    qweight: Tensor  # uint8 [N, 64 * NB], or int8 [N, 128 * NB]: 8-bit weights
    w_scale: Tensor
    w_zero: Tensor | None
    inputs: ActivationFormat
    bias: Tensor | None
    dtype: torch.dtype

    def take(self, x: Tensor) -> Operand:
        f = self.inputs
        return Operand(quantize_act(x, f.perm, f.block_bits, f.clip, f.hadamard, f.share), x.shape[0])

    def take_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Operand, Tensor]:
        normed, _, summed = _norm(x, residual, weight, eps, False)
        return self.take(normed), summed

    def take_silu_mul(self, gate_up: Tensor) -> Operand:
        return self.take(torch.ops.comet.silu_mul(gate_up, False)[0])

    def multiply(self, operand: Operand) -> Tensor:
        codes, scale = operand.tensors
        bits = self.inputs.block_bits
        return w4ax_gemm(codes, scale, self.qweight, self.w_scale, self.w_zero, bits, self.bias, self.dtype)

    def tensors(self) -> list[Tensor]:
        found = (self.qweight, self.w_scale, self.w_zero, self.bias, *vars(self.inputs).values())
        return [t for t in found if isinstance(t, Tensor)]

    def block_bits(self) -> Tensor | None:
        return self.inputs.block_bits


@dataclass(frozen=True)
class WeightOnlyLinear:
    """4-bit weights, 16-bit activations.

    Few tokens go through torch's INT4 weight-only product on a GPU, if the weight was prepared for it. More tokens
    multiply decoded weights: decoded at each call, or, for timing alone, one dense matrix that all layers share. The
    latter counts no decoding at all, so it is never slower than a real weight-only kernel bound by computation.
    """

    perm: Tensor | None  # int32 [K]
    packed: Tensor | None  # of `_convert_weight_to_int4pack`
    scale_and_minimum: Tensor | None  # 16-bit [NB, N, 2]
    canonical: tuple[Tensor, Tensor, Tensor | None] | None  # qweight, w_scale, w_zero
    stand_in: Tensor | None  # 16-bit [N, K], shared
    bias: Tensor | None

    def take(self, x: Tensor) -> Operand:
        if self.canonical is not None or x.shape[1] % 128:
            x = to_blocks(x, self.perm).flatten(1)
        elif self.perm is not None:
            x = x[:, self.perm.long()]
        return Operand((x,), x.shape[0])

    def take_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Operand, Tensor]:
        normed, _, summed = _norm(x, residual, weight, eps, False)
        return self.take(normed), summed

    def take_silu_mul(self, gate_up: Tensor) -> Operand:
        return self.take(torch.ops.comet.silu_mul(gate_up, False)[0])

    def multiply(self, operand: Operand) -> Tensor:
        x = operand.tensors[0]
        if self.packed is not None and x.shape[0] <= INT4PACK_TOKENS:
            y = torch.ops.aten._weight_int4pack_mm(x, self.packed, 128, self.scale_and_minimum)
        else:
            y = x @ self._dense(x.dtype).T
        out: Tensor = y if self.bias is None else y + self.bias.to(y.dtype)
        return out

    def _dense(self, dtype: torch.dtype) -> Tensor:
        if self.canonical is None:
            assert self.stand_in is not None
            return self.stand_in
        qweight, w_scale, w_zero = self.canonical
        return (weight_integers(qweight, w_zero) * w_scale.float()[..., None]).flatten(1).to(dtype)

    def tensors(self) -> list[Tensor]:
        kept = (self.perm, self.packed, self.scale_and_minimum, self.bias, *(self.canonical or ()))
        return [t for t in kept if t is not None]

    def block_bits(self) -> Tensor | None:
        return None


def w4ax_linear(
    qweight: Tensor,
    w_scale: Tensor,
    w_zero: Tensor | None,
    inputs: ActivationFormat,
    bias: Tensor | None,
    dtype: torch.dtype,
    layout: str | None = None,
) -> FusedLinear:
    """A packed linear in the form of the device it is on; `layout` overrides that (tests)."""
    if qweight.dtype == torch.int8 or (layout is None and not qweight.is_cuda) or layout == "canonical":
        return W4AxCanonical(qweight, w_scale, w_zero, inputs, bias, dtype)
    wide = None if bias is None else bias.float()  # as the kernels add it, so that no call converts it
    return W4AxTiled(prepare_linear(qweight, w_scale, w_zero, inputs, layout), wide, dtype)


def fuse(name: str, linears: Sequence[nn.Module], dtype: torch.dtype, layout: str | None = None) -> FusedLinear:
    """The linears of one group of a loaded model, packed (W4AxLinear) or 16-bit (nn.Linear), as one.

    Args:
        name: of the group, for errors. dtype: of activations. layout: None takes the device's.

    Errors:
        CometError where the members differ in how they read their common input.
    """
    biases = [getattr(linear, "bias", None) for linear in linears]
    bias = None
    if any(b is not None for b in biases):
        sizes = [getattr(linear, "out_features", 0) for linear in linears]
        first = next(b for b in biases if b is not None)
        bias = torch.cat([first.new_zeros(n) if b is None else b for b, n in zip(biases, sizes, strict=True)])
        bias = bias.detach().to(dtype)
    if all(isinstance(linear, nn.Linear) for linear in linears):
        weights = [linear.weight.detach() for linear in linears if isinstance(linear, nn.Linear)]
        return SixteenBitLinear(torch.cat(weights).to(dtype), bias)
    packed = [linear for linear in linears if isinstance(linear, W4AxLinear)]
    same = len(packed) == len(linears) and all(_same_input(packed[0], other) for other in packed[1:])
    if not same:
        raise CometError(
            f"{name}: its linears do not read their common input in one format, so they cannot run as one",
            "pack them alike (recipe overrides and skips must name whole groups: q, k and v; gate and up)",
        )
    qweight, w_scale = torch.cat([p.qweight for p in packed]), torch.cat([p.w_scale for p in packed])
    zeros = [p.w_zero for p in packed if p.w_zero is not None]
    w_zero = torch.cat(zeros) if zeros else None
    if packed[0].act_bits == 16:
        canonical = (qweight, w_scale, w_zero)
        return WeightOnlyLinear(packed[0].perm, None, None, canonical, None, bias)
    return w4ax_linear(qweight, w_scale, w_zero, packed[0].inputs, bias, dtype, layout)


def _same_input(one: W4AxLinear, other: W4AxLinear) -> bool:
    a, b = one.inputs, other.inputs

    def same(x: Tensor | None, y: Tensor | None) -> bool:
        return (x is None) == (y is None) and (x is None or y is None or torch.equal(x, y))

    alike = (a.hadamard, a.share, one.qweight.dtype, one.w_zero is None)
    return (
        alike == (b.hadamard, b.share, other.qweight.dtype, other.w_zero is None)
        and same(a.perm, b.perm)
        and same(a.block_bits, b.block_bits)
        and same(a.clip, b.clip)
    )
