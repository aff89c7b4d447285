"""quantize_act with scales that are integer multiples of one number a token, as the integer GEMM of sm_90 reads them.

In: x [M, K], or what a fused norm or SiLU makes x from. Out: codes in which INT4 blocks hold code * multiple, the
multiples of INT8 blocks, and one float32 scale a token, so that the GEMM's sums stay integers over all of K.

On sm_90 few tokens go to quantize_row.cu, many tokens and wide rows to quantize_stay.cu, and many tokens with a norm to
quantize_many.cu, where ctas stay; their plans are beside them. The rest, and all on other GPUs, goes to
quantize_token.cu (its plan is in quantize_token_plan.py).
"""

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comet_cuda import quantize_many, quantize_row, quantize_stay
from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.dispatch import device_arch, device_capability
from comet_cuda.driver import BoundLaunch, EmptyTensors, gpu_of, guard, nothing_alike
from comet_cuda.errors import CometError
from comet_cuda.jit import compile_kernel
from comet_cuda.library import LIBRARY, define_op, is_plain_cuda
from comet_cuda.quantize_act import TOKEN
from comet_cuda.quantize_act_cuda import (
    DEFAULT_SHARED,
    MOST_CODES,
    PERM_ALIGNMENT,
    as_rows,
    identity,
)
from comet_cuda.quantize_fused import norm_inputs
from comet_cuda.quantize_token_plan import ELEMENTS, MOST_CLUSTER, OPTIONS, SOURCE, WARP, plan_token
from comet_cuda.quantize_token_ref import (
    TokenOperand,
    check_blocks,
    quantize_token_ref,
    rms_norm_quantize_token_ref,
    silu_mul_quantize_token_ref,
    token_shapes,
)

_POINTERS = 9  # of struct TokenParams of token_scale.cuh,
_SIZES = struct.Struct("<3ifi4x")  # and the rest of it: M, K, NB, eps, INT8 blocks


def _bind(
    device: int,
    rows: int,
    channels: int,
    dtype: torch.dtype,
    hadamard: bool,
    fuse: str,
    aligned: int,
    gathered: bool,
    int8_blocks: int,
    eps: float,
) -> tuple[BoundLaunch, bool]:
    """The launch of one shape, and whether it reads a permutation. `aligned`: the rows' addresses modulo 16."""
    if rows * num_blocks(channels) * BLOCK >= MOST_CODES:
        raise CometError(
            f"quantize_token: {rows} tokens of {channels} channels are more codes than the GEMM can index",
            "quantize them in several calls",
        )
    properties = torch.cuda.get_device_properties(device)
    sms = properties.multi_processor_count
    limit = int(getattr(properties, "shared_memory_per_block_optin", DEFAULT_SHARED))
    hopper = device_capability(device)[0] == 9  # whose GEMM reads this; elsewhere it is right and no more

    def bind(
        source: str, defines: dict[str, int | str], ctas: tuple[int, int], warps: int, shared_bytes: int
    ) -> BoundLaunch:
        kernel = compile_kernel(source, source.removesuffix(".cu"), device_arch(device), defines, OPTIONS)
        overlap = device_capability(device) >= (9, 0)  # may start before the previous kernel ends
        sizes = _SIZES.pack(rows, channels, num_blocks(channels), eps, int8_blocks)
        return kernel.load(device).bind(ctas, WARP * warps, _POINTERS, shared_bytes, overlap, sizes)

    if hopper and aligned == 0:
        row = quantize_row.plan_row(rows, channels, fuse, gathered, int8_blocks, sms, limit)
        if row is not None:
            defines = row.defines(dtype, hadamard, fuse, gathered)
            bound = bind(quantize_row.SOURCE, defines, (rows, 1), row.warps, row.shared_bytes)
            return bound, gathered or fuse == "rms_norm"
        stay = quantize_stay.plan_stay(rows, channels, fuse, gathered, sms, limit)
        if stay is not None:
            defines, ctas = stay.defines(dtype, hadamard, fuse, gathered), (stay.tokens, stay.cluster)
            return bind(quantize_stay.SOURCE, defines, ctas, stay.warps, stay.shared_bytes), gathered
        many = quantize_many.plan_many(rows, channels, dtype, fuse, "sm_90", TOKEN, gathered, sms, limit)
        if many is not None:
            defines = quantize_many.many_defines(dtype, hadamard, fuse, TOKEN, int8_blocks)
            return bind(quantize_many.SOURCE, defines, (many.tokens, 1), many.warps, many.shared_bytes), True
    vector = channels % 4 == 0 and aligned % 8 == 0
    plan = plan_token(rows, channels, fuse, gathered, vector, sms, MOST_CLUSTER if hopper else 1)
    if plan.shared_bytes > limit - 1024:
        raise CometError(
            f"quantize_token: a row of {channels} channels takes {plan.shared_bytes} bytes of shared memory of {limit}",
            "only GPUs of compute capability 9.0 hold it, and only they have a GEMM for it",
        )
    return bind(
        SOURCE, plan.defines(dtype, hadamard, fuse), (rows, plan.cluster), plan.warps, plan.shared_bytes
    ), plan.gather


@dataclass(frozen=True)
class Call:
    """All of a launch that its shapes decide."""

    bound: BoundLaunch
    gather: bool  # it reads a permutation
    channels: int  # K
    blocks: int
    results: EmptyTensors  # codes, multiples, scale, and x + residual for the norm (empty without a residual)


@functools.lru_cache(maxsize=4096)
def _bound(
    device: int, rows: int, channels: int, dtype: torch.dtype, hadamard: bool, fuse: str, aligned: int, gathered: bool,
    int8_blocks: int, eps: float, summed: bool,
) -> Call:  # fmt: skip
    """`aligned`: the rows' addresses modulo 16. summed: there is a residual."""
    check_blocks(channels, int8_blocks)
    if dtype not in ELEMENTS:
        raise CometError(f"quantize_token: x is {dtype}", "it must be bfloat16 or float16 on a GPU")
    blocks = num_blocks(channels)
    codes, multiples, scale = token_shapes(rows, blocks, int8_blocks)
    results = [(codes, torch.uint8), (multiples, torch.int32), (scale, torch.float32)]
    if fuse == "rms_norm":
        results.append(((rows, channels) if summed else (0,), dtype))
    bound, gather = (lambda *_: None), False  # without tokens
    if rows > 0:
        bound, gather = _bind(device, rows, channels, dtype, hadamard, fuse, aligned, gathered, int8_blocks, eps)
    return Call(bound, gather, channels, blocks, EmptyTensors(*results))


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, size: int, device: int) -> None:
    if tensor.dtype != dtype or tensor.numel() != size or tensor.get_device() != device or not tensor.is_contiguous():
        raise CometError(
            f"quantize_token: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}",
            f"it must be contiguous {dtype} ({size},) on cuda:{device}",
        )


# What was launched, and the guard of its tensors. Shapes of as many values, and a permutation and a residual where only
# one is given, share a place; the guard tells them apart.
_CALLS: dict[tuple[object, ...], tuple[Callable[..., bool], Call]] = {}
_MOST_CALLS = 4096
_NEW: Any = (nothing_alike, None)


def launch(
    x: Tensor,
    perm: Tensor | None,
    int8_blocks: int,
    clip: Tensor,
    hadamard: bool,
    fuse: str = "none",
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> Any:
    """The CUDA implementation of all three: quantize x [M, K] (or [M, 2K] for silu_mul), and return their results."""
    x_at, clip_at = x.data_ptr(), clip.data_ptr()
    perm_at = 0 if perm is None else perm.data_ptr()
    weight_at = residual_at = sum_at = 0
    tensors: tuple[Tensor, ...]
    if weight is None:
        tensors = (x, clip) if perm is None else (x, clip, perm)
    else:
        weight_at = weight.data_ptr()
        if residual is None:
            tensors = (x, clip, weight) if perm is None else (x, clip, weight, perm)
        else:
            residual_at = residual.data_ptr()
            tensors = (x, clip, weight, residual) if perm is None else (x, clip, weight, residual, perm)
    device, aligned = torch._C._cuda_getDevice(), (x_at | weight_at | residual_at) % 16
    key = (device, x.numel(), len(tensors), hadamard, fuse, aligned, int8_blocks, eps)
    alike, call = _CALLS.get(key, _NEW)
    if not alike(*tensors):
        if x.get_device() != device:
            with gpu_of(x, "quantize_token: x"):
                return launch(x, perm, int8_blocks, clip, hadamard, fuse, residual, weight, eps)
        if x.dtype is torch.float32 and fuse == "none":  # packing and evaluation, where time is elsewhere
            return quantize_token_ref(x, perm, int8_blocks, clip, hadamard)
        op = "quantize_token" if fuse == "none" else f"{fuse}_quantize_token"
        if weight is None:
            rows, other, factors = as_rows(x, op), residual, weight
        else:
            rows, other, factors = norm_inputs(x, residual, weight, op)
        if rows is not x or other is not residual or factors is not weight:  # copied
            return launch(rows, perm, int8_blocks, clip, hadamard, fuse, other, factors, eps)
        tokens, channels = x.shape
        channels = channels // 2 if fuse == "silu_mul" else channels
        call = _bound(
            device, tokens, channels, x.dtype, hadamard, fuse, aligned, perm is not None, int8_blocks, eps,
            residual is not None,
        )  # fmt: skip
        _expect("clip", clip, torch.float32, call.blocks, device)
        if perm is not None:
            _expect("perm", perm, torch.int32, channels, device)
        if len(_CALLS) >= _MOST_CALLS:
            _CALLS.clear()
        _CALLS[key] = (guard(*tensors), call)
    if not call.gather:
        perm_at = 0
    elif perm is None:
        perm_at = identity(call.channels, device).data_ptr()
    elif perm_at % PERM_ALIGNMENT:
        perm = perm.clone()
        perm_at = perm.data_ptr()
    results = (*call.results.here(),)
    if residual_at:
        sum_at = results[3].data_ptr()
    call.bound(
        x_at, residual_at, sum_at, weight_at, perm_at, results[1].data_ptr(), clip_at, results[0].data_ptr(),
        results[2].data_ptr(),
    )  # fmt: skip
    return results


def _fake(x: Tensor, perm: Tensor | None, int8_blocks: int, clip: Tensor, hadamard: bool) -> TokenOperand:
    codes, multiples, scale = token_shapes(x.shape[0], clip.shape[0], int8_blocks)
    return (
        x.new_empty(codes, dtype=torch.uint8),
        x.new_empty(multiples, dtype=torch.int32),
        x.new_empty(scale, dtype=torch.float32),
    )


def _rms_norm_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    perm: Tensor | None,
    int8_blocks: int,
    clip: Tensor,
    hadamard: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = _fake(x, perm, int8_blocks, clip, hadamard)
    return *found, x.new_empty(0) if residual is None else torch.empty_like(x)


_ARGUMENTS = "Tensor? perm, int int8_blocks, Tensor clip, bool hadamard"
define_op(f"quantize_token(Tensor x, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)", quantize_token_ref, _fake)
define_op(
    f"silu_mul_quantize_token(Tensor gate_up, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    silu_mul_quantize_token_ref,
    _fake,
)
define_op(
    f"rms_norm_quantize_token(Tensor x, Tensor? residual, Tensor weight, float eps, {_ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    rms_norm_quantize_token_ref,
    _rms_norm_fake,
)
LIBRARY.impl("quantize_token", launch, "CUDA")
LIBRARY.impl("silu_mul_quantize_token", functools.partial(launch, fuse="silu_mul"), "CUDA")
LIBRARY.impl(
    "rms_norm_quantize_token",
    lambda x, residual, weight, eps, perm, int8_blocks, clip, hadamard: launch(
        x, perm, int8_blocks, clip, hadamard, "rms_norm", residual, weight, eps
    ),
    "CUDA",
)


def quantize_token(x: Tensor, perm: Tensor | None, int8_blocks: int, clip: Tensor, hadamard: bool) -> TokenOperand:
    """The op behind `quantize_token_ref`, same arguments and results, on whatever device x is on."""
    found: TokenOperand
    if is_plain_cuda(x):
        found = launch(x, perm, int8_blocks, clip, hadamard)
    else:
        found = torch.ops.comet.quantize_token(x, perm, int8_blocks, clip, hadamard)
    return found


def rms_norm_quantize_token(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    perm: Tensor | None,
    int8_blocks: int,
    clip: Tensor,
    hadamard: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op behind `rms_norm_quantize_token_ref`, same arguments and results, on whatever device x is on."""
    found: tuple[Tensor, Tensor, Tensor, Tensor]
    if is_plain_cuda(x):
        found = launch(x, perm, int8_blocks, clip, hadamard, "rms_norm", residual, weight, eps)
    else:
        arguments = (x, residual, weight, eps, perm, int8_blocks, clip, hadamard)
        found = torch.ops.comet.rms_norm_quantize_token(*arguments)
    return found


def silu_mul_quantize_token(
    gate_up: Tensor, perm: Tensor | None, int8_blocks: int, clip: Tensor, hadamard: bool
) -> TokenOperand:
    """The op behind `silu_mul_quantize_token_ref`, same arguments and results, on whatever device gate_up is on."""
    found: TokenOperand
    if is_plain_cuda(gate_up):
        found = launch(gate_up, perm, int8_blocks, clip, hadamard, "silu_mul")
    else:
        found = torch.ops.comet.silu_mul_quantize_token(gate_up, perm, int8_blocks, clip, hadamard)
    return found
