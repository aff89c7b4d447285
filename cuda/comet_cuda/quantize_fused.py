"""quantize_act fused with what comes before it: RMSNorm (with a residual add), or SiLU(gate) * up.

Nothing else then touches the activation between two linears. Codes differ from those of the unfused sequence by
rounding alone: by one, in at most one code in ten thousand, because the kernels round where the unfused modules do.
"""

import torch
from torch import Tensor

from comet_cuda.errors import CometError
from comet_cuda.library import LIBRARY, define_op, is_plain_cuda
from comet_cuda.quantize_act_cuda import (
    QUANTIZE_ARGUMENTS,
    as_rows,
    empty_tiled,
    launch,
    quantize_act_tiled_ref,
    tiled_fake,
)
from comet_cuda.quantize_token_plan import has_kernel


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
    share: int = 1,
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
    codes, meta = quantize_act_tiled_ref(normed.to(x.dtype), perm, block_bits, clip, hadamard, layout, share)
    return codes, meta, x.new_empty(0) if residual is None else summed


def norm_inputs(x: Tensor, residual: Tensor | None, weight: Tensor, op: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """x, residual and weight as the kernels take them."""
    x = as_rows(x, op)
    device = x.get_device()
    if weight.dtype is not x.dtype or weight.shape != x.shape[1:] or weight.get_device() != device:
        raise CometError(
            f"{op}: weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}",
            f"it must be {x.dtype} ({x.shape[1]},) on {x.device}",
        )
    if residual is None:
        return x, None, weight.contiguous()
    if residual.shape != x.shape or residual.dtype is not x.dtype or residual.get_device() != device:
        raise CometError(
            f"{op}: residual is {residual.dtype} {tuple(residual.shape)} on {residual.device}",
            f"it must be like x: {x.dtype} {tuple(x.shape)} on {x.device}",
        )
    return x, as_rows(residual, op), weight.contiguous()


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
    share: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm_quantize_ref` on CUDA tensors."""
    if not has_kernel(x, layout, share):
        return rms_norm_quantize_ref(x, residual, weight, eps, perm, block_bits, clip, hadamard, layout, share)
    x, residual, weight = norm_inputs(x, residual, weight, "rms_norm_quantize")
    summed = None if residual is None else torch.empty_like(x)
    codes, meta = empty_tiled(x, block_bits.numel(), layout)
    norm = ("rms_norm", residual, summed, weight, eps)
    launch(x, perm, block_bits, clip, hadamard, codes, meta, layout, share, *norm)
    return codes, meta, x.new_empty(0) if summed is None else summed


def silu_mul_quantize_ref(
    gate_up: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    layout: str = "sm_90",
    share: int = 1,
) -> tuple[Tensor, Tensor]:
    """SiLU(gate) * up of x = [gate | up], float [M, 2K], then `quantize_act_tiled` of the [M, K] product."""
    gate, up = gate_up.chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * up
    return quantize_act_tiled_ref(product, perm, block_bits, clip, hadamard, layout, share)


def silu_mul_quantize_gpu(
    gate_up: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    layout: str = "sm_90",
    share: int = 1,
) -> tuple[Tensor, Tensor]:
    """`silu_mul_quantize_ref` on CUDA tensors."""
    if not has_kernel(gate_up, layout, share):
        return silu_mul_quantize_ref(gate_up, perm, block_bits, clip, hadamard, layout, share)
    gate_up = as_rows(gate_up, "silu_mul_quantize")
    codes, meta = empty_tiled(gate_up, block_bits.numel(), layout)
    launch(gate_up, perm, block_bits, clip, hadamard, codes, meta, layout, share, "silu_mul")
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
    share: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    codes, meta = tiled_fake(x, perm, block_bits, clip, hadamard, layout)
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


def rms_norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    layout: str = "sm_90",
    share: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op behind `rms_norm_quantize_ref`, same arguments and results, on whatever device x is on."""
    arguments = (x, residual, weight, eps, perm, block_bits, clip, hadamard, layout, share)
    if is_plain_cuda(x):
        return rms_norm_quantize_gpu(*arguments)
    codes, meta, summed = torch.ops.comet.rms_norm_quantize(*arguments)
    return codes, meta, summed


def silu_mul_quantize(
    gate_up: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    layout: str = "sm_90",
    share: int = 1,
) -> tuple[Tensor, Tensor]:
    """The op behind `silu_mul_quantize_ref`, same arguments and results, on whatever device gate_up is on."""
    arguments = (gate_up, perm, block_bits, clip, hadamard, layout, share)
    if is_plain_cuda(gate_up):
        return silu_mul_quantize_gpu(*arguments)
    codes, meta = torch.ops.comet.silu_mul_quantize(*arguments)
    return codes, meta
