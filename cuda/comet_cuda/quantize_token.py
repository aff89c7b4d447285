"""quantize_act with scales that are integer multiples of one number a token, as the integer GEMM of sm_90 reads them.

In: x [M, K], or what a fused norm or SiLU makes x from. Out: codes in which INT4 blocks hold code * multiple, the
multiples of INT8 blocks, and one float32 scale a token, so that the GEMM's sums stay integers over all of K.

The decision made here is how a token's blocks are shared out to warps: a block a warp while tokens are few and latency
counts, in a cluster of ctas if one is not enough; several blocks a warp (half as many threads a cta) once the GPU is
full; rows too wide for registers are computed twice. Many tokens go to quantize_many.cu, where ctas stay.
"""

import dataclasses
import functools
import struct

import torch
from torch import Tensor

from comet_cuda import quantize_many
from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.dispatch import device_arch, device_capability
from comet_cuda.driver import BoundLaunch, EmptyTensors
from comet_cuda.errors import CometError
from comet_cuda.jit import Configuration, compile_kernel
from comet_cuda.library import LIBRARY, define_op, is_plain_cuda
from comet_cuda.quantize_act import TOKEN
from comet_cuda.quantize_act_cuda import (
    DEFAULT_SHARED,
    FUSE,
    MOST_CODES,
    PERM_ALIGNMENT,
    as_rows,
    identity,
)
from comet_cuda.quantize_fused import norm_inputs
from comet_cuda.quantize_token_ref import (
    TokenOperand,
    check_blocks,
    quantize_token_ref,
    rms_norm_quantize_token_ref,
    silu_mul_quantize_token_ref,
    token_shapes,
)

SOURCE = "quantize_token.cu"
OPTIONS = ("-fmad=false",)  # additions and multiplications stay apart, as in the reference
ELEMENTS = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
WARP = 32
FEW_WARPS, MOST_WARPS = 16, 32  # of a cta
MOST_CLUSTER = 8  # ctas that share a token
ROUNDS = (1, 2, 4, 7)  # blocks of a warp that registers keep
MOST_BATCH = 4  # groups of four channels that a thread loads before it stages the first
ROW_SOURCE = "quantize_row.cu"
ROW = True  # take it for few tokens
EIGHTS = (8, 16, 32)  # INT8 blocks at most, of kernels in which every thread adds their scales alone
ROW_TOKENS = 512  # from here on it is not taken
ROW_CTAS = {10: 3, 18: 1, MOST_WARPS: 1}  # warps a cta at most: ctas a multiprocessor at least
_PARAMS = struct.Struct("<10Q3ifQi4x")  # TokenParams of quantize_token.cu


@dataclasses.dataclass(frozen=True)
class TokenPlan:
    """How one shape is launched: a cta a token."""

    warps: int  # of a cta
    cluster: int  # ctas that share a token
    rounds: int  # blocks a warp takes; 0: as many as it needs, their values computed twice
    gather: bool  # through a row in shared memory
    vector: bool  # rows are aligned to four channels
    shared_bytes: int

    def defines(self, dtype: torch.dtype, hadamard: bool, fuse: str) -> dict[str, int | str]:
        """The preprocessor definitions of quantize_token.cu."""
        wide = self.warps > FEW_WARPS or self.cluster > 1
        return {
            "ELEMENT": ELEMENTS[dtype], "TOKENS": 1, "VECTOR": int(self.vector), "STAGE": 1, "OUT": 1, "SHARE": 1,
            "HADAMARD": int(hadamard), "FUSE": FUSE[fuse], "GATHER": int(self.gather), "ROUNDS": max(1, self.rounds),
            "CLUSTER": self.cluster, "KEEP": int(self.rounds > 0),
            "BATCH": min(MOST_BATCH, self.cluster * self.rounds or MOST_BATCH),
            "THREADS": WARP * (MOST_WARPS if wide else FEW_WARPS), "MIN_CTAS": 1 if wide else 2,
        }  # fmt: skip


def most_eights(int8_blocks: int) -> int | None:
    """Which of EIGHTS a kernel is compiled for; None: there are more."""
    return next((most for most in EIGHTS if int8_blocks <= most), None)


def row_warps(rows: int, channels: int, eights: int | None) -> int | None:
    """Warps of quantize_row.cu's ctas for x [rows, channels] whose rows are aligned to 16 bytes; None: not its case."""
    warps = -(-num_blocks(channels) // 4) + 1
    return warps if ROW and eights and rows < ROW_TOKENS and channels % 8 == 0 and warps <= MOST_WARPS else None


def row_defines(
    warps: int, dtype: torch.dtype, hadamard: bool, fuse: str, gather: bool, eights: int
) -> dict[str, int | str]:
    """The preprocessor definitions of quantize_row.cu."""
    most = min(each for each in ROW_CTAS if each >= warps)
    return {
        "ELEMENT": ELEMENTS[dtype], "TOKENS": 1, "VECTOR": 1, "STAGE": 1, "OUT": 1, "SHARE": 1,
        "DIRECT": 4 * most, "EIGHTS": eights, "HADAMARD": int(hadamard), "FUSE": FUSE[fuse],
        "GATHER": int(gather or fuse == "rms_norm"), "THREADS": WARP * most, "MIN_CTAS": ROW_CTAS[most],
    }  # fmt: skip


def row_shared_bytes(channels: int, fuse: str, gather: bool) -> int:
    """Dynamic shared memory of a cta of quantize_row.cu."""
    blocks, cell = num_blocks(channels), 4 if fuse == "rms_norm" else 2
    return max(blocks + 3, 32) // 4 * 16 + (blocks * BLOCK * cell if gather or fuse == "rms_norm" else 0)


def plan_token(
    rows: int, channels: int, fuse: str, gathered: bool, vector: bool, sms: int, most_cluster: int = MOST_CLUSTER
) -> TokenPlan:
    """The plan for x [rows, channels].

    Args:
        fuse: "none", "rms_norm" or "silu_mul". gathered: there is a permutation.
        vector: rows are aligned to four channels. sms: multiprocessors of the GPU.
        most_cluster: ctas that may share a token.
    """
    blocks = num_blocks(channels)
    gather = gathered or fuse == "rms_norm"  # the norm needs the whole row
    cell = 4 if fuse == "rms_norm" else 2  # bytes of a staged channel, its norm's weight included
    shared_bytes = -(-blocks // 4) * 16 + (blocks * BLOCK * cell if gather else 0)
    cluster = 1  # while multiprocessors are free, in ctas of few warps: instructions bound those of many
    while vector and 2 * cluster <= most_cluster and 2 * cluster * rows <= sms and cluster * FEW_WARPS < blocks:
        cluster *= 2
    for warps in (MOST_WARPS,) if rows <= sms else (FEW_WARPS, MOST_WARPS):
        kept = [rounds for rounds in ROUNDS if rounds * warps * cluster >= blocks]
        if kept and vector:
            return TokenPlan(-(-blocks // (cluster * kept[0])), cluster, kept[0], gather, vector, shared_bytes)
    return TokenPlan(min(blocks, MOST_WARPS if vector else FEW_WARPS), 1, 0, gather, vector, shared_bytes)


def configurations(family: str) -> list[Configuration]:
    """Every way that quantize_token.cu is compiled on a GPU family."""
    if family != "sm_90":
        return []
    ways = [(warps, 1, rounds, True) for warps in (FEW_WARPS, MOST_WARPS) for rounds in ROUNDS]
    ways += [(MOST_WARPS, ctas, rounds, True) for ctas in (2, 4, 8) for rounds in ROUNDS if rounds * ctas <= 16]
    ways += [(MOST_WARPS, 1, 0, True), (FEW_WARPS, 1, 0, False)]
    forms = [(fuse, gather) for fuse in FUSE for gather in (True, False) if gather or fuse != "rms_norm"]
    return [
        Configuration(SOURCE, TokenPlan(warps, ctas, rounds, gather, vector, 0).defines(dtype, hadamard, fuse), OPTIONS)
        for warps, ctas, rounds, vector in ways
        for fuse, gather in forms
        for dtype in ELEMENTS
        for hadamard in (False, True)
    ]


@functools.lru_cache(maxsize=4096)
def _bound(
    device: int,
    rows: int,
    channels: int,
    dtype: torch.dtype,
    hadamard: bool,
    fuse: str,
    aligned: int,
    gathered: bool,
    eights: int | None,
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
        return kernel.load(device).bind(ctas, WARP * warps, _PARAMS, shared_bytes, overlap)

    if hopper and aligned == 0:
        many = quantize_many.plan_many(rows, channels, dtype, fuse, "sm_90", TOKEN, gathered, sms, limit)
        if many is not None:
            defines = quantize_many.many_defines(dtype, hadamard, fuse, TOKEN, gathered, many, eights)
            bound = bind(quantize_many.SOURCE, defines, (many.tokens, 1), many.warps, many.shared_bytes)
            return bound, gathered or fuse == "rms_norm"
    warps = row_warps(rows, channels, eights)
    if hopper and aligned == 0 and warps is not None and eights is not None:
        defines = row_defines(warps, dtype, hadamard, fuse, gathered, eights)
        shared_bytes = row_shared_bytes(channels, fuse, gathered)
        return bind(ROW_SOURCE, defines, (rows, 1), warps, shared_bytes), gathered or fuse == "rms_norm"
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


@functools.lru_cache(maxsize=4096)
def _empty(rows: int, blocks: int, int8_blocks: int) -> EmptyTensors:
    """What one shape's results are allocated with."""
    codes, multiples, scale = token_shapes(rows, blocks, int8_blocks)
    return EmptyTensors((codes, torch.uint8), (multiples, torch.int32), (scale, torch.float32))


def _check(x: Tensor, channels: int, perm: Tensor | None, int8_blocks: int, clip: Tensor) -> None:
    """Raises CometError, naming the argument, for what the kernel cannot take; of `channels` channels."""
    check_blocks(channels, int8_blocks)
    if x.dtype not in ELEMENTS:
        raise CometError(f"quantize_token: x is {x.dtype}", "it must be bfloat16 or float16 on a GPU")
    device, blocks = x.get_device(), num_blocks(channels)
    for name, tensor, dtype, size in (("clip", clip, torch.float32, blocks), ("perm", perm, torch.int32, channels)):
        if tensor is None or (
            tensor.dtype is dtype
            and tensor.numel() == size
            and tensor.get_device() == device
            and tensor.is_contiguous()
        ):
            continue
        raise CometError(
            f"quantize_token: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}",
            f"it must be contiguous {dtype} ({size},) on {x.device}",
        )


def launch(
    x: Tensor,
    perm: Tensor | None,
    int8_blocks: int,
    clip: Tensor,
    hadamard: bool,
    fuse: str = "none",
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> TokenOperand:
    """Quantize contiguous x [M, K] (or [M, 2K] for silu_mul) on its GPU."""
    rows, channels = x.shape
    channels = channels // 2 if fuse == "silu_mul" else channels
    device, blocks = x.get_device(), num_blocks(channels)
    _check(x, channels, perm, int8_blocks, clip)
    codes, multiples, scale = _empty(rows, blocks, int8_blocks).on(device)
    if rows == 0:
        return codes, multiples, scale
    x_at = x.data_ptr()
    weight_at = 0 if weight is None else weight.data_ptr()
    residual_at, out_at = (
        (0, 0) if residual is None or residual_out is None else (residual.data_ptr(), residual_out.data_ptr())
    )
    aligned = (x_at | weight_at | residual_at | out_at) % 16
    bound, gather = _bound(
        device, rows, channels, x.dtype, hadamard, fuse, aligned, perm is not None, most_eights(int8_blocks)
    )
    if gather:
        perm = identity(channels, device) if perm is None else perm
        perm = perm if perm.data_ptr() % PERM_ALIGNMENT == 0 else perm.clone()
    bound(
        x_at, residual_at, out_at, weight_at, 0 if perm is None else perm.data_ptr(), 0,
        clip.data_ptr(), 0, codes.data_ptr(), scale.data_ptr(), rows, channels,
        blocks, eps, multiples.data_ptr(), int8_blocks,
    )  # fmt: skip
    return codes, multiples, scale


def quantize_token_gpu(x: Tensor, perm: Tensor | None, int8_blocks: int, clip: Tensor, hadamard: bool) -> TokenOperand:
    """`quantize_token_ref` on CUDA tensors."""
    if x.dtype is torch.float32:  # packing and evaluation in float32, where time is elsewhere
        return quantize_token_ref(x, perm, int8_blocks, clip, hadamard)
    return launch(as_rows(x, "quantize_token"), perm, int8_blocks, clip, hadamard)


def rms_norm_quantize_token_gpu(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    perm: Tensor | None,
    int8_blocks: int,
    clip: Tensor,
    hadamard: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rms_norm_quantize_token_ref` on CUDA tensors."""
    x, residual, summed, weight = norm_inputs(x, residual, weight, "rms_norm_quantize_token")
    found = launch(x, perm, int8_blocks, clip, hadamard, "rms_norm", residual, summed, weight, eps)
    return *found, x.new_empty(0) if summed is None else summed


def silu_mul_quantize_token_gpu(
    gate_up: Tensor, perm: Tensor | None, int8_blocks: int, clip: Tensor, hadamard: bool
) -> TokenOperand:
    """`silu_mul_quantize_token_ref` on CUDA tensors."""
    return launch(as_rows(gate_up, "silu_mul_quantize_token"), perm, int8_blocks, clip, hadamard, "silu_mul")


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
LIBRARY.impl("quantize_token", quantize_token_gpu, "CUDA")
LIBRARY.impl("silu_mul_quantize_token", silu_mul_quantize_token_gpu, "CUDA")
LIBRARY.impl("rms_norm_quantize_token", rms_norm_quantize_token_gpu, "CUDA")


def quantize_token(x: Tensor, perm: Tensor | None, int8_blocks: int, clip: Tensor, hadamard: bool) -> TokenOperand:
    """The op behind `quantize_token_ref`, same arguments and results, on whatever device x is on."""
    if is_plain_cuda(x):
        return quantize_token_gpu(x, perm, int8_blocks, clip, hadamard)
    codes, multiples, scale = torch.ops.comet.quantize_token(x, perm, int8_blocks, clip, hadamard)
    return codes, multiples, scale


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
    arguments = (x, residual, weight, eps, perm, int8_blocks, clip, hadamard)
    if is_plain_cuda(x):
        return rms_norm_quantize_token_gpu(*arguments)
    codes, multiples, scale, summed = torch.ops.comet.rms_norm_quantize_token(*arguments)
    return codes, multiples, scale, summed


def silu_mul_quantize_token(
    gate_up: Tensor, perm: Tensor | None, int8_blocks: int, clip: Tensor, hadamard: bool
) -> TokenOperand:
    """The op behind `silu_mul_quantize_token_ref`, same arguments and results, on whatever device gate_up is on."""
    if is_plain_cuda(gate_up):
        return silu_mul_quantize_token_gpu(gate_up, perm, int8_blocks, clip, hadamard)
    codes, multiples, scale = torch.ops.comet.silu_mul_quantize_token(gate_up, perm, int8_blocks, clip, hadamard)
    return codes, multiples, scale
