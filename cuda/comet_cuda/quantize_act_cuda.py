"""quantize_act on the GPU: the canonical op and its tiled form for the GEMM (quantize_fused.py has the fused ones).

One launcher for four kernels: quantize_few.py, quantize_many.py and quantize_token_plan.py say when theirs are taken,
quantize_act.cu takes the rest. The decision made here is that one's launch plan (`plan_launch`).

The tiled op exists on every device; on the CPU it is the reference followed by the tiling of weight_layout.py.
The host's time counts at small M, so all that a shape decides is looked up, and the rest is one pack and one call.
"""

import dataclasses
import functools
import struct

import torch
from torch import Tensor

from comet_cuda import quantize_few, quantize_many, quantize_token_plan
from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.dispatch import device_arch, device_capability
from comet_cuda.driver import BoundLaunch, EmptyTensors, gpu_of
from comet_cuda.errors import CometError
from comet_cuda.jit import Configuration, compile_kernel
from comet_cuda.library import LIBRARY, define_op, is_plain_cuda
from comet_cuda.quantize_act import TOKEN, quantize_act_ref, wrong_share
from comet_cuda.weight_layout import ATOM, ATOM_BYTES, META_FLOATS, tile_activations_sm90, token_atoms
from comet_cuda.weight_layout_sm80 import tile_activations_sm80

SOURCE = "quantize_act.cu"
OPTIONS = ("-fmad=false",)  # additions and multiplications stay apart, as in the reference
ELEMENTS = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
ELEMENT_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
FUSE = {"none": 0, "rms_norm": 1, "silu_mul": 2}
LAYOUTS = {"canonical": 0, "sm_90": 1, "sm_80": 2, "portable": 3}
THREADS = 256  # a cta
MIN_CTAS = {2: 4, 4: 3, 8: 2}  # bytes of a gathered word -> ctas of 256 threads that registers must allow
RESERVED_SHARED = 1024  # bytes of a cta's shared memory that rows leave: the system's, and the norm's partial sums
PERM_ALIGNMENT = 512  # bytes, one block of indices; what torch's allocator gives
MOST_CODES = 1 << 33  # the kernel's indices of scales have 32 bits
DEFAULT_SHARED = 99 * 1024  # bytes a cta may use where torch does not say
QUANTIZE_ARGUMENTS = 'Tensor? perm, Tensor block_bits, Tensor clip, bool hadamard, str layout="sm_90", int share=1'
_POINTERS = 9  # of struct Params of quantize_scale.cuh,
_SIZES = struct.Struct("<3if")  # and the rest of it: M, K, NB, eps


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one shape is launched."""

    tokens: int  # that share a cta
    splits: int  # ctas that share a token's blocks
    stage: bool  # rows in shared memory
    shared_bytes: int
    threads: int = THREADS


def kernel_defines(
    dtype: torch.dtype,
    tokens: int,
    hadamard: bool,
    fuse: str,
    layout: str,
    vector: bool,
    stage: bool,
    threads: int = THREADS,
) -> dict[str, int | str]:
    """The preprocessor definitions of one configuration of quantize_act.cu."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "TOKENS": tokens,
        "HADAMARD": int(hadamard),
        "FUSE": FUSE[fuse],
        "OUT": LAYOUTS[layout],
        "VECTOR": int(vector),
        "STAGE": int(stage),
        "THREADS": threads,
        "MIN_CTAS": (MIN_CTAS[tokens * ELEMENT_BYTES[dtype]] - (fuse != "none" or not stage)) * THREADS // threads,
    }


def configurations(layout: str) -> list[Configuration]:
    """Every way that `launch` can compile the kernel on a GPU whose GEMM reads `layout`."""
    staged = [(1, False, THREADS)]  # tokens a cta, aligned rows, threads a cta
    staged += [(tokens, True, threads) for tokens in (1, 2) for threads in (THREADS, THREADS // 2)]
    found = []
    for dtype in ELEMENTS:
        for hadamard in (False, True):
            for tokens, vector, threads in staged:
                for fuse, target in (
                    ("none", "canonical"), ("none", layout), ("rms_norm", layout), ("silu_mul", layout)
                ):  # fmt: skip
                    found.append(kernel_defines(dtype, tokens, hadamard, fuse, target, vector, True, threads))
            for vector in (False, True):
                for target in ("canonical", layout):
                    found.append(kernel_defines(dtype, 1, hadamard, "none", target, vector, False))
    return [Configuration(SOURCE, defines, OPTIONS) for defines in found]


def plan_launch(rows: int, channels: int, element_bytes: int, sms: int, shared_limit: int, vector: bool = True) -> Plan:
    """Choose tokens a cta, threads a cta and ctas a token for x [rows, channels]; `vector`: rows are aligned.

    Few rows, or unaligned ones: one token a cta, and several ctas share it until the GPU has about two ctas a
    multiprocessor. More rows: two tokens a cta (one 32-bit word of two 16-bit channels), while three such ctas fit in
    a multiprocessor's shared memory. Narrow rows that fill the GPU go to ctas of half the threads: more of them load
    while others compute. The limits were measured on an H200 (results/LOG.md).
    """
    blocks = num_blocks(channels)
    row_bytes = blocks * BLOCK * element_bytes
    tokens, threads = 1, THREADS
    if vector and 2 * rows >= 3 * sms and 3 * (2 * row_bytes + RESERVED_SHARED) <= shared_limit:
        tokens = 2
        if blocks <= THREADS // 8 and rows >= 4 * sms:
            tokens, threads = (2 if rows >= 12 * sms else 1), THREADS // 2
    passes = -(-blocks // (threads // 8))  # eight threads a block
    splits = max(1, min(passes, 2 * sms // max(1, -(-rows // tokens))))
    stage = tokens * row_bytes <= shared_limit - RESERVED_SHARED
    return Plan(tokens, splits, stage, tokens * row_bytes if stage else 0, threads)


@functools.lru_cache(maxsize=4096)
def _bound(
    device: int,
    rows: int,
    channels: int,
    dtype: torch.dtype,
    hadamard: bool,
    fuse: str,
    layout: str,
    share: int,
    aligned: int,
    gathered: bool,
    eps: float,
) -> BoundLaunch:
    """The launch of one shape: all but the addresses. `aligned`: the rows' addresses modulo 16."""
    if share not in (1, TOKEN):
        raise wrong_share(share)
    if rows * num_blocks(channels) * BLOCK >= MOST_CODES:
        raise CometError(
            f"quantize_act: {rows} tokens of {channels} channels are more codes than 32-bit indices reach",
            "quantize them in several calls",
        )
    properties = torch.cuda.get_device_properties(device)
    vector = channels % 4 == 0 and aligned % (4 * ELEMENT_BYTES[dtype]) == 0
    sms = properties.multi_processor_count
    shared_limit = int(getattr(properties, "shared_memory_per_block_optin", DEFAULT_SHARED))
    overlap = device_capability(device) >= (9, 0)  # may start before the previous kernel ends
    tiles = token_atoms(rows) * ATOM if layout == "sm_90" else rows  # padding tokens of an atom are written as zeros

    def bind(
        source: str, defines: dict[str, int | str], grid: tuple[int, int], threads: int, shared: int
    ) -> BoundLaunch:
        kernel = compile_kernel(source, source.removesuffix(".cu"), device_arch(device), defines, OPTIONS)
        sizes = _SIZES.pack(rows, channels, num_blocks(channels), eps)
        return kernel.load(device).bind(grid, threads, _POINTERS, shared, overlap, sizes)

    if share == TOKEN:
        token = quantize_token_plan.plan_plain(rows, channels, fuse, gathered, vector, sms, shared_limit)
        source, defines = quantize_token_plan.SOURCE, token.defines(dtype, hadamard, fuse, LAYOUTS[layout])
        return bind(source, defines, (rows, 1), 32 * token.warps, token.shared_bytes)
    if aligned == 0:
        many = quantize_many.plan_many(rows, channels, dtype, fuse, layout, share, gathered, sms, shared_limit)
        if many is not None:
            defines, grid = quantize_many.many_defines(dtype, hadamard, fuse), (many.tokens, many.splits)
            return bind(quantize_many.SOURCE, defines, grid, 32 * many.warps, many.shared_bytes)
    few = quantize_few.plan_few(rows, channels, dtype, fuse, gathered, sms, shared_limit) if vector else None
    if few is not None:
        defines = few.defines(dtype, hadamard, FUSE[fuse], LAYOUTS[layout])
        return bind(quantize_few.SOURCE, defines, (tiles, few.splits), few.threads, few.shared_bytes)
    plan = plan_launch(rows, channels, ELEMENT_BYTES[dtype], sms, shared_limit, vector)
    if fuse != "none" and not plan.stage:
        raise CometError(
            f"quantize_act fused with {fuse}: a row of {channels} {dtype} channels does not fit in shared memory",
            "call the norm or activation first, then quantize_act",
        )
    defines = kernel_defines(dtype, plan.tokens, hadamard, fuse, layout, vector, plan.stage, plan.threads)
    return bind(SOURCE, defines, (-(-tiles // plan.tokens), plan.splits), plan.threads, plan.shared_bytes)


def _explain(x: Tensor, channels: int, perm: Tensor | None, block_bits: Tensor, clip: Tensor) -> CometError:
    """What is wrong with arguments that did not pass `launch`'s one-line check."""
    if x.dtype not in ELEMENTS:
        return CometError(f"quantize_act: x is {x.dtype}", "it must be float32, bfloat16 or float16")
    blocks = num_blocks(channels)
    for name, tensor, dtype, size in (
        ("block_bits", block_bits, torch.uint8, blocks),
        ("clip", clip, torch.float32, blocks),
        ("perm", perm, torch.int32, channels),
    ):
        if tensor is not None and (tensor.dtype != dtype or tensor.shape != (size,)):
            return CometError(
                f"quantize_act: {name} is {tensor.dtype} {tuple(tensor.shape)} for {channels} channels",
                f"it must be {dtype} ({size},)",
            )
    return CometError(
        f"quantize_act: x is on {x.device}, its permutation, bits or clip are not, or not contiguous",
        "move them there",
    )


@functools.lru_cache(maxsize=64)
def identity(channels: int, device: int) -> Tensor:
    """int32 [K], the permutation that keeps the order."""
    return torch.arange(channels, dtype=torch.int32, device=torch.device("cuda", device))


def launch(
    x: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    codes: Tensor,
    scale: Tensor,
    layout: str,
    share: int = 1,
    fuse: str = "none",
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Quantize contiguous x [M, K] (or [M, 2K] for silu_mul) into codes and scale, allocated by the caller."""
    rows, channels = x.shape
    channels = channels // 2 if fuse == "silu_mul" else channels
    device, dtype, blocks = x.get_device(), x.dtype, block_bits.numel()
    if device != torch._C._cuda_getDevice():
        with gpu_of(x, "quantize_act: x"):
            norm = (fuse, residual, residual_out, weight, eps)
            launch(x, perm, block_bits, clip, hadamard, codes, scale, layout, share, *norm)
        return
    if not (
        dtype in ELEMENTS
        and 0 <= blocks * BLOCK - channels < BLOCK
        and block_bits.dtype is torch.uint8
        and block_bits.get_device() == device
        and block_bits.is_contiguous()
        and clip.dtype is torch.float32
        and clip.numel() == blocks
        and clip.get_device() == device
        and clip.is_contiguous()
        and (perm is None or (perm.dtype is torch.int32 and perm.numel() == channels and perm.get_device() == device))
        and (perm is None or perm.is_contiguous())
    ):
        raise _explain(x, channels, perm, block_bits, clip)
    if rows == 0:
        return
    x_at = x.data_ptr()
    weight_at = 0 if weight is None else weight.data_ptr()
    residual_at, out_at = (
        (0, 0) if residual is None or residual_out is None else (residual.data_ptr(), residual_out.data_ptr())
    )
    aligned = (x_at | weight_at | residual_at | out_at) % 16  # 0: to 16 bytes
    bound = _bound(device, rows, channels, dtype, hadamard, fuse, layout, share, aligned, perm is not None, eps)
    perm = identity(channels, device) if perm is None else perm
    perm_at = perm.data_ptr()
    if perm_at % PERM_ALIGNMENT:
        perm = perm.clone()
        perm_at = perm.data_ptr()
    bound(
        x_at, residual_at, out_at, weight_at, perm_at, block_bits.data_ptr(), clip.data_ptr(),
        codes.data_ptr(), scale.data_ptr(),
    )  # fmt: skip


def as_rows(x: Tensor, op: str) -> Tensor:
    """x [M, K], copied only if it is not contiguous."""
    if x.dim() != 2:
        raise CometError(f"{op}: x is {tuple(x.shape)}", "it must be [tokens, channels]")
    return x if x.is_contiguous() else x.contiguous()


def quantize_act_gpu(
    x: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    share: int = 1,
) -> tuple[Tensor, Tensor]:
    """`quantize_act` on CUDA tensors."""
    if not quantize_token_plan.has_kernel(x, "canonical", share):
        return quantize_act_ref(x, perm, block_bits, clip, hadamard, share)
    x = as_rows(x, "quantize_act")
    codes, scale = _empty(x.shape[0], block_bits.numel(), "canonical").on(x.get_device())
    launch(x, perm, block_bits, clip, hadamard, codes, scale, "canonical", share)
    return codes, scale


def tiled_shapes(rows: int, blocks: int, layout: str) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of codes and meta in a tiled layout."""
    if layout == "sm_90":
        atoms = -(-rows // ATOM)
        return (blocks, atoms, ATOM_BYTES), (blocks, atoms, META_FLOATS)
    if layout in ("sm_80", "portable"):
        return (blocks, rows, BLOCK), (blocks, rows, 2)
    raise CometError(f"activation layout {layout!r}", "it must be sm_90, sm_80 or portable")


@functools.lru_cache(maxsize=4096)
def _empty(rows: int, blocks: int, layout: str) -> EmptyTensors:
    """What one shape's results are allocated with."""
    if layout == "canonical":
        return EmptyTensors(((rows, blocks, BLOCK), torch.int8), ((rows, blocks), torch.float32))
    codes, meta = tiled_shapes(rows, blocks, layout)
    return EmptyTensors((codes, torch.uint8), (meta, torch.float32))


def empty_tiled(x: Tensor, blocks: int, layout: str) -> tuple[Tensor, Tensor]:
    """Uninitialized codes and meta of the tiled form, for the rows of CUDA tensor x."""
    codes, meta = _empty(x.shape[0], blocks, layout).on(x.get_device())
    return codes, meta


def quantize_act_tiled_ref(
    x: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    layout: str = "sm_90",
    share: int = 1,
) -> tuple[Tensor, Tensor]:
    """`quantize_act`, then the tiled form of one architecture.

    Args:
        x, perm, block_bits, clip, hadamard, share: as in `quantize_act`.
        layout: "sm_90" (weight_layout.py), "sm_80" or "portable" (weight_layout_sm80.py).

    Returns:
        codes and meta in that layout; meta holds each token's scale and the sum of its codes in the block.
    """
    codes, scale = quantize_act_ref(x, perm, block_bits, clip, hadamard, share)
    if layout == "sm_90":
        return tile_activations_sm90(codes, scale, block_bits)
    tiled_shapes(0, 0, layout)  # raises for a layout that there is not
    return tile_activations_sm80(codes, scale, block_bits, portable=layout == "portable")


def quantize_act_tiled_gpu(
    x: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    layout: str = "sm_90",
    share: int = 1,
) -> tuple[Tensor, Tensor]:
    """`quantize_act_tiled_ref` on CUDA tensors."""
    if not quantize_token_plan.has_kernel(x, layout, share):
        return quantize_act_tiled_ref(x, perm, block_bits, clip, hadamard, layout, share)
    x = as_rows(x, "quantize_act_tiled")
    codes, meta = empty_tiled(x, block_bits.numel(), layout)
    launch(x, perm, block_bits, clip, hadamard, codes, meta, layout, share)
    return codes, meta


def tiled_fake(
    x: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    layout: str = "sm_90",
    share: int = 1,
) -> tuple[Tensor, Tensor]:
    """Shapes and types of `quantize_act_tiled`, for tracing."""
    codes, meta = tiled_shapes(x.shape[0], block_bits.shape[0], layout)
    return x.new_empty(codes, dtype=torch.uint8), x.new_empty(meta, dtype=torch.float32)


define_op(f"quantize_act_tiled(Tensor x, {QUANTIZE_ARGUMENTS}) -> (Tensor, Tensor)", quantize_act_tiled_ref, tiled_fake)
LIBRARY.impl("quantize_act", quantize_act_gpu, "CUDA")
LIBRARY.impl("quantize_act_tiled", quantize_act_tiled_gpu, "CUDA")


def quantize_act_tiled(
    x: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    layout: str = "sm_90",
    share: int = 1,
) -> tuple[Tensor, Tensor]:
    """The op behind `quantize_act_tiled_ref`, same arguments and results, on whatever device x is on."""
    if is_plain_cuda(x):
        return quantize_act_tiled_gpu(x, perm, block_bits, clip, hadamard, layout, share)
    codes, meta = torch.ops.comet.quantize_act_tiled(x, perm, block_bits, clip, hadamard, layout, share)
    return codes, meta
