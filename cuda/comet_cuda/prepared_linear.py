"""A packed linear on one GPU: its weights in that GPU's layout, and quantize_act -> w4ax_gemm on them.

In: the canonical tensors of a packed linear, on a GPU. Out: a function of its input. Which layout, which kernel is
decided once, here, by the compute capability (dispatch.py) and by the scales: integer ones (share TOKEN) have a GEMM of
their own on sm_90. Everything after is two launches a call (integer_linear.py keeps
the host's share of them small).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from comet_cuda.dispatch import device_capability, family_of
from comet_cuda.integer_linear import check_format, integer_linear
from comet_cuda.library import is_plain_cuda
from comet_cuda.quantize_act import TOKEN
from comet_cuda.quantize_act_cuda import quantize_act_tiled
from comet_cuda.quantize_fused import rms_norm_quantize, silu_mul_quantize
from comet_cuda.quantize_token import quantize_token, rms_norm_quantize_token, silu_mul_quantize_token
from comet_cuda.w4ax_gemm_integer import IntegerWeight, count_int8_blocks, prepare_weight_integer, w4ax_gemm_integer
from comet_cuda.w4ax_gemm_sm80 import Sm80Weight, prepare_weight_sm80, w4ax_gemm_sm80
from comet_cuda.w4ax_gemm_sm90 import TiledWeight, prepare_weight_sm90, w4ax_gemm_tiled


@dataclass(frozen=True)
class ActivationFormat:
    """How the input of a linear becomes codes: the arguments of `quantize_act` after x. NB blocks, K channels."""

    perm: Tensor | None  # int32 [K]
    block_bits: Tensor  # uint8 [NB], 4 or 8
    clip: Tensor  # f32 [NB]
    hadamard: bool
    share: int = 1  # or TOKEN


@dataclass(frozen=True)
class PreparedLinear:
    """Weights in the layout of one GPU family, and the format of the activations that meet them."""

    layout: str  # of activations: "sm_90", "sm_80" or "portable"
    weight: IntegerWeight | TiledWeight | Sm80Weight
    inputs: ActivationFormat

    def __post_init__(self) -> None:
        if isinstance(self.weight, IntegerWeight):
            check_format(self.inputs.perm, self.inputs.clip, self.weight)

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        """x: float [M, K] -> what `multiply` reads: codes and meta, or codes, multiples and token_scale."""
        f = self.inputs
        if isinstance(self.weight, IntegerWeight):
            return quantize_token(x, f.perm, self.weight.int8_blocks, f.clip, f.hadamard)
        return quantize_act_tiled(x, f.perm, f.block_bits, f.clip, f.hadamard, self.layout, f.share)

    def quantize_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """`quantize` of RMSNorm(x + residual), and x + residual (empty without a residual)."""
        f = self.inputs
        if isinstance(self.weight, IntegerWeight):
            int8_blocks = self.weight.int8_blocks
            found = rms_norm_quantize_token(x, residual, weight, eps, f.perm, int8_blocks, f.clip, f.hadamard)
            return found[:3], found[3]
        codes, meta, summed = rms_norm_quantize(
            x, residual, weight, eps, f.perm, f.block_bits, f.clip, f.hadamard, self.layout, f.share
        )
        return (codes, meta), summed

    def quantize_silu_mul(self, gate_up: Tensor) -> tuple[Tensor, ...]:
        """`quantize` of SiLU(gate) * up of [gate | up], float [M, 2K]."""
        f = self.inputs
        if isinstance(self.weight, IntegerWeight):
            return silu_mul_quantize_token(gate_up, f.perm, self.weight.int8_blocks, f.clip, f.hadamard)
        return silu_mul_quantize(gate_up, f.perm, f.block_bits, f.clip, f.hadamard, self.layout, f.share)

    def multiply(self, operand: tuple[Tensor, ...], tokens: int, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What `quantize` (or a fused form of it) returned for M tokens -> dtype [M, N]."""
        if isinstance(self.weight, IntegerWeight):
            codes, multiples, token_scale = operand
            return w4ax_gemm_integer(codes, multiples, token_scale, self.weight, tokens, bias, dtype)
        codes, meta = operand
        if isinstance(self.weight, TiledWeight):
            return w4ax_gemm_tiled(codes, meta, self.weight, tokens, bias, dtype)
        return w4ax_gemm_sm80(codes, meta, self.weight, bias, dtype)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: float [M, K] -> the same type [M, N]."""
        f, weight = self.inputs, self.weight
        if isinstance(weight, IntegerWeight) and is_plain_cuda(x) and x.dtype is not torch.float32:
            return integer_linear(x, f.perm, f.clip, f.hadamard, weight, bias)
        return self.multiply(self.quantize(x), x.shape[0], bias, x.dtype)


def prepare_linear(
    qweight: Tensor, w_scale: Tensor, w_zero: Tensor | None, inputs: ActivationFormat, layout: str | None = None
) -> PreparedLinear:
    """Canonical 4-bit weights (w4ax_gemm.py) -> the layout of the GPU that they are on.

    Args:
        qweight: uint8 [N, 64 * NB]; w_scale: bf16 [N, NB]; w_zero: uint8 [N, NB] or None. Several linears that share
            an input are one linear whose rows are stacked.
        inputs: of their common input, on the same device.
        layout: overrides the GPU's own (tests; tensors on a CPU, where the ops are the references).

    Errors:
        CometError for a GPU older than compute capability 8.0.
    """
    layout = layout or family_of(device_capability(qweight.get_device())).name
    if layout == "sm_90" and inputs.share == TOKEN:
        integer = prepare_weight_integer(qweight, w_scale, w_zero, inputs.block_bits)
        return PreparedLinear(layout, integer, inputs)
    if layout == "sm_90":
        sm90 = prepare_weight_sm90(qweight, w_scale, w_zero, inputs.block_bits)
        return PreparedLinear(layout, sm90, inputs)
    if inputs.share == TOKEN:
        count_int8_blocks(inputs.block_bits)  # checks that they come first
    portable = layout == "portable"
    return PreparedLinear(layout, prepare_weight_sm80(qweight, w_scale, w_zero, inputs.block_bits, portable), inputs)
