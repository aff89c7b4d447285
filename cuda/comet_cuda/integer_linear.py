"""A linear with integer scales on plain CUDA tensors: two launches and two allocations, outside of tracing.

In: x, and a linear in the layout of w4ax_gemm_integer. Out: y. The same kernels as quantize_token and w4ax_gemm_integer
one after the other, less what only separate calls need: codes, multiples and scales of the activations lie in one
buffer that nobody else sees, so nothing between the launches is a tensor, or is checked. Saves a third of the host's
time.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from comet_cuda import quantize_token, w4ax_gemm_integer
from comet_cuda.driver import BoundLaunch, EmptyTensors, gpu_of
from comet_cuda.errors import CometError
from comet_cuda.quantize_act_cuda import PERM_ALIGNMENT, as_rows
from comet_cuda.quantize_token_ref import token_shapes
from comet_cuda.w4ax_gemm_integer import IntegerWeight
from comet_cuda.w4ax_gemm_sm90 import workspace

ALIGNMENT = 512  # bytes, of each part of the buffer: what torch's allocator gives a tensor


@dataclass(frozen=True)
class Step:
    """All of the two launches that their shapes decide."""

    quantize: BoundLaunch
    multiply: BoundLaunch
    results: EmptyTensors  # the buffer between the two, and y
    multiples_at: int  # bytes from the buffer's start
    scale_at: int
    blocks: int


@functools.lru_cache(maxsize=4096)
def _step(
    device: int, tokens: int, channels: int, dtype: torch.dtype, hadamard: bool, aligned: int, gathered: bool,
    int8_blocks: int, rows: int,
) -> Step:  # fmt: skip
    first = quantize_token._bound(
        device, tokens, channels, dtype, hadamard, "none", aligned, gathered, int8_blocks, 0.0, False
    )
    second = w4ax_gemm_integer._call(tokens, rows, first.blocks, int8_blocks, dtype, device, None, True)
    codes, multiples, scale = token_shapes(tokens, first.blocks, int8_blocks)
    multiples_at = _rounded(codes[0] * codes[1] * codes[2])
    scale_at = multiples_at + _rounded(4 * multiples[0] * multiples[1] * multiples[2])
    results = EmptyTensors(((scale_at + 4 * scale[0],), torch.uint8), ((tokens, rows), dtype))
    return Step(first.bound, second.bound, results, multiples_at, scale_at, first.blocks)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def check_format(perm: Tensor | None, clip: Tensor, weight: IntegerWeight) -> None:
    """Raise CometError unless the format of the activations, an `ActivationFormat`'s perm and clip, fits the weight."""
    blocks, device = weight.records.shape[1], weight.records.device
    for name, tensor, dtype in (("clip", clip, torch.float32), ("perm", perm, torch.int32)):
        if tensor is not None and (tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device != device):
            raise CometError(
                f"{name} is {tensor.dtype} on {tensor.device}", f"it must be contiguous {dtype} on {device}"
            )
    if clip.numel() != blocks:
        raise CometError(f"clip has {clip.numel()} values", f"the weight has {blocks} blocks")


def integer_linear(
    x: Tensor, perm: Tensor | None, clip: Tensor, hadamard: bool, weight: IntegerWeight, bias: Tensor | None
) -> Tensor:
    """x: bfloat16 or float16 [M, K] on a GPU of compute capability 9.0 -> the same type [M, N].

    Args:
        perm, clip, hadamard: an `ActivationFormat`'s; `check_format` was called on them. bias: float [N] or None.
    """
    device, records = x.get_device(), weight.records
    if device != torch._C._cuda_getDevice():
        with gpu_of(x, "linear: x"):
            return integer_linear(x, perm, clip, hadamard, weight, bias)
    x = as_rows(x, "linear")
    tokens, channels = x.shape
    x_at, perm_at, bias_at = x.data_ptr(), 0, 0
    if tokens == 0:
        return x.new_empty(0, weight.rows)
    gathered = perm is not None
    step = _step(
        device, tokens, channels, x.dtype, hadamard, x_at % 16, gathered, weight.int8_blocks, weight.rows
    )  # fmt: skip
    if step.blocks != clip.numel() or device != records.get_device():
        raise CometError(
            f"linear: x is {x.dtype} {tuple(x.shape)} on {x.device}",
            f"it must have {clip.numel()} blocks of 128 channels, on {records.device}",
        )
    if perm is not None:
        if perm.numel() != channels:
            raise CometError(f"linear: x has {channels} channels", f"its permutation has {perm.numel()}")
        perm_at = perm.data_ptr()
        if perm_at % PERM_ALIGNMENT:
            perm = perm.clone()
            perm_at = perm.data_ptr()
    if bias is not None:
        bias = w4ax_gemm_integer.float_bias(bias, weight.rows, records.device)
        bias_at = bias.data_ptr()
    buffer, y = step.results.here()
    codes = buffer.data_ptr()
    multiples, scale = codes + step.multiples_at, codes + step.scale_at
    step.quantize(x_at, 0, 0, 0, perm_at, multiples, clip.data_ptr(), codes, scale)
    step.multiply(
        records.data_ptr(), weight.base.data_ptr(), codes, multiples, scale, bias_at, y.data_ptr(),
        *workspace(device).addresses,
    )  # fmt: skip
    return y
