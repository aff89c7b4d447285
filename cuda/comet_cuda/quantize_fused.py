"""quantize_act fused with what comes before it: RMSNorm (with a residual add), or SiLU(gate) * up.

Nothing else then touches the activation between two linears. Codes differ from those of the unfused sequence by
rounding alone: by one, in at most one code in ten thousand, because the kernels round where the unfused modules do.
"""

import torch
from torch import Tensor

from comet_cuda.errors import CometError
from comet_cuda.library import LIBRARY, define_op
from comet_cuda.quantize_act_cuda import (
    QUANTIZE_ARGUMENTS,
    contiguous,
    empty_tiled,
    launch,
    quantize_act_tiled_ref,
    tiled_fake,
)


def rms_norm_quantize_ref(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    layout: str = "sm_90",
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm (after an optional residual add), then `quantize_act_tiled`.

    The sum x + residual is rounded to x's type; the norm is taken in float32, rounded to x's type, then multiplied by
    the weight: the order of the Llama family's module, so that fused and unfused codes differ only by rounding.

    Returns:
        codes, meta as in `quantize_act_tiled`, and x + residual (empty [0] without a residual).
    """
    summed = x if residual is None else x + residual
    wide = summed.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    codes, meta = quantize_act_tiled_ref(normed.to(x.dtype), perm, block_bits, clip, hadamard, layout)
    return codes, meta, x.new_empty(0) if residual is None else summed


def rms_norm_quantize_gpu(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    layout: str = "sm_90",
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm_quantize_ref` on CUDA tensors."""
    x = contiguous(x)
    if weight.dtype != x.dtype or weight.shape != (x.shape[1],) or weight.device != x.device:
        raise CometError(
            f"rms_norm_quantize: weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}",
            f"it must be {x.dtype} ({x.shape[1]},) on {x.device}",
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device):
        raise CometError(
            f"rms_norm_quantize: residual is {residual.dtype} {tuple(residual.shape)} on {residual.device}",
            f"it must be like x: {x.dtype} {tuple(x.shape)} on {x.device}",
        )
    residual = None if residual is None else contiguous(residual)
    summed = x.new_empty(0) if residual is None else torch.empty_like(x)
    codes, meta = empty_tiled(x, block_bits.shape[0], layout)
    weight = contiguous(weight)
    launch(x, perm, block_bits, clip, hadamard, codes, meta, layout, "rms_norm", residual, summed, weight, eps)
    return codes, meta, summed


def silu_mul_quantize_ref(
    gate_up: Tensor, perm: Tensor | None, block_bits: Tensor, clip: Tensor, hadamard: bool, layout: str = "sm_90"
) -> tuple[Tensor, Tensor]:
    """SiLU(gate) * up of x = [gate | up], float [M, 2K], then `quantize_act_tiled` of the [M, K] product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return quantize_act_tiled_ref(torch.nn.functional.silu(gate) * up, perm, block_bits, clip, hadamard, layout)


def silu_mul_quantize_gpu(
    gate_up: Tensor, perm: Tensor | None, block_bits: Tensor, clip: Tensor, hadamard: bool, layout: str = "sm_90"
) -> tuple[Tensor, Tensor]:
    """`silu_mul_quantize_ref` on CUDA tensors."""
    gate_up = contiguous(gate_up)
    codes, meta = empty_tiled(gate_up, block_bits.shape[0], layout)
    launch(gate_up, perm, block_bits, clip, hadamard, codes, meta, layout, "silu_mul")
    return codes, meta


def _rms_norm_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    layout: str = "sm_90",
) -> tuple[Tensor, Tensor, Tensor]:
    codes, meta = empty_tiled(x, block_bits.shape[0], layout)
    return codes, meta, x.new_empty(0) if residual is None else torch.empty_like(x)


define_op(
    f"silu_mul_quantize(Tensor gate_up, {QUANTIZE_ARGUMENTS}) -> (Tensor, Tensor)", silu_mul_quantize_ref, tiled_fake
)
define_op(
    f"rms_norm_quantize(Tensor x, Tensor? residual, Tensor weight, float eps, {QUANTIZE_ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor)",
    rms_norm_quantize_ref,
    _rms_norm_fake,
)
LIBRARY.impl("silu_mul_quantize", silu_mul_quantize_gpu, "CUDA")
LIBRARY.impl("rms_norm_quantize", rms_norm_quantize_gpu, "CUDA")
