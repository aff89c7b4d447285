"""w4ax_gemm: integer activations times 4-bit weights, exact inside a block, float32 across blocks.

y[m, n] = sum_b sx[m, b] * sw[n, b] * sum_{k in b} qx[m, k] * (qw[n, k] - zw[n, b])  (+ bias[n])

|inner sum| <= 127 * 15 * 128 < 2^24, so the inner sum is an exact integer even when it is computed in float32.
"""

import torch
from torch import Tensor

from comet_cuda.affine import split_blocks
from comet_cuda.int4 import SYMMETRIC_ZERO, unpack_nibbles
from comet_cuda.library import define_op


def weight_integers(qweight: Tensor, w_zero: Tensor | None) -> Tensor:
    """qweight -> float32 [N, NB, 128] integers (code - zero), the values that enter the inner sum.

    uint8 qweight [N, 64 * NB] holds two 4-bit codes a byte; int8 qweight [N, 128 * NB] holds 8-bit weights
    (symmetric, schemes with 8-bit weights; reference only).
    """
    if qweight.dtype == torch.int8:
        return split_blocks(qweight.float())
    codes = split_blocks(unpack_nibbles(qweight).float())
    if w_zero is None:
        return codes - SYMMETRIC_ZERO
    return codes - w_zero.float()[..., None]


def w4ax_gemm_ref(
    qx: Tensor,
    sx: Tensor,
    qweight: Tensor,
    w_scale: Tensor,
    w_zero: Tensor | None,
    block_bits: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Mixed-precision matrix product of one linear layer.

    Args:
        qx: int8 [M, NB, 128], sx: float32 [M, NB]: what `quantize_act` returns. M may be 0.
        qweight: uint8 [N, 64 * NB], two 4-bit codes a byte (see int4.py).
        w_scale: bfloat16 [N, NB].
        w_zero: uint8 [N, NB], 0..15, or None for symmetric weights (zero point 8).
        block_bits: uint8 [NB], 4 or 8: which activation blocks are INT4. The result does not depend on it; kernels
            choose their tensor-core path by it.
        bias: float [N] or None, added in float32.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        y: out_dtype [M, N]. Blocks are added in ascending order in float32.
    """
    w = weight_integers(qweight, w_zero)
    y = torch.zeros(qx.shape[0], w.shape[0], dtype=torch.float32, device=qx.device)
    for b in range(w.shape[1]):
        dot = qx[:, b].float() @ w[:, b].T  # exact integers
        y.addcmul_(dot.mul_(sx[:, b, None]), w_scale[None, :, b].float())
    if bias is not None:
        y += bias.float()
    return y.to(out_dtype)


def _fake(
    qx: Tensor,
    sx: Tensor,
    qweight: Tensor,
    w_scale: Tensor,
    w_zero: Tensor | None,
    block_bits: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return qx.new_empty(qx.shape[0], qweight.shape[0], dtype=out_dtype)


define_op(
    "w4ax_gemm(Tensor qx, Tensor sx, Tensor qweight, Tensor w_scale, Tensor? w_zero, Tensor block_bits, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    w4ax_gemm_ref,
    _fake,
)


def w4ax_gemm(
    qx: Tensor,
    sx: Tensor,
    qweight: Tensor,
    w_scale: Tensor,
    w_zero: Tensor | None,
    block_bits: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The op behind `w4ax_gemm_ref`, same arguments and results, on canonical (un-tiled) operands."""
    y: Tensor = torch.ops.comet.w4ax_gemm(qx, sx, qweight, w_scale, w_zero, block_bits, bias, out_dtype)
    return y
