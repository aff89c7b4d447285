"""quantize_act on the GPU: the canonical op, its tiled form for the GEMM, and the forms fused with a norm or SiLU.

One kernel source (quantize_act.cu), one launcher. The decision made here is the launch plan: how many tokens share a
cta (more tokens, fewer shared-memory reads of the gather; fewer tokens, more ctas) and how many ctas share a token.

The tiled ops exist on every device; on the CPU they are the reference followed by the tiling of weight_layout.py.
"""

import dataclasses
import functools
import struct

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.dispatch import device_arch, device_capability
from comet_cuda.errors import CometError
from comet_cuda.jit import CompiledKernel, Configuration, compile_kernel
from comet_cuda.library import LIBRARY, define_op
from comet_cuda.quantize_act import quantize_act_ref
from comet_cuda.weight_layout import ATOM_BYTES, META_FLOATS, tile_activations_sm90, token_atoms
from comet_cuda.weight_layout_sm80 import tile_activations_sm80

SOURCE = "quantize_act.cu"
OPTIONS = ("-fmad=false",)  # additions and multiplications stay apart, as in the reference
ELEMENTS = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
ELEMENT_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
FUSE = {"none": 0, "rms_norm": 1, "silu_mul": 2}
LAYOUTS = {"canonical": 0, "sm_90": 1, "sm_80": 2, "portable": 3}
THREADS = 256
BLOCKS_PER_PASS = THREADS // 8  # blocks of 128 channels that a cta quantizes at a time
MIN_CTAS = {2: 4, 4: 3, 8: 2}  # bytes of a gathered word -> ctas a multiprocessor that registers must allow
PERM_ALIGNMENT = 512  # bytes, one block of indices; what torch's allocator gives
DEFAULT_SHARED = 99 * 1024  # bytes a cta may use where torch does not say
_PARAMS = struct.Struct("<9Q3if")  # Params of quantize_act.cu


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one shape is launched."""

    tokens: int  # that share a cta
    splits: int  # ctas that share a token's blocks
    stage: bool  # rows in shared memory
    shared_bytes: int
    overlap: bool = False  # may start before the previous kernel ends (programmatic dependent launch)


def kernel_defines(
    dtype: torch.dtype,
    tokens: int,
    hadamard: bool,
    fuse: str,
    layout: str,
    vector: bool,
    stage: bool,
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
        "THREADS": THREADS,
        "MIN_CTAS": MIN_CTAS[tokens * ELEMENT_BYTES[dtype]] - (fuse != "none"),
    }


def configurations(layout: str) -> list[Configuration]:
    """Every way that `_launch` can compile the kernel on a GPU whose GEMM reads `layout`."""
    staged = [(tokens, vector, True) for tokens in (1, 2) for vector in (False, True)]
    found = []
    for dtype in ELEMENTS:
        for hadamard in (False, True):
            for tokens, vector, stage in (*staged, (1, False, False), (1, True, False)):
                for target in ("canonical", layout):
                    defines = kernel_defines(dtype, tokens, hadamard, "none", target, vector, stage)
                    found.append(Configuration(SOURCE, defines, OPTIONS))
            for tokens, vector, stage in staged:
                for fuse in ("rms_norm", "silu_mul"):
                    defines = kernel_defines(dtype, tokens, hadamard, fuse, layout, vector, stage)
                    found.append(Configuration(SOURCE, defines, OPTIONS))
    return found


def plan_launch(rows: int, channels: int, element_bytes: int, sms: int, shared_limit: int) -> Plan:
    """Choose tokens a cta and ctas a token for x [rows, channels].

    Few rows: one token a cta, and several ctas share it until the GPU has about two ctas a multiprocessor. Many rows:
    2 tokens a cta (one 32-bit word of two 16-bit channels), while two ctas fit in a multiprocessor's shared memory.
    """
    blocks = num_blocks(channels)
    row_bytes = blocks * BLOCK * element_bytes
    tokens = 1
    if rows >= 4 * sms and 2 * row_bytes <= shared_limit // 2:
        tokens = 2
    passes = -(-blocks // BLOCKS_PER_PASS)
    splits = max(1, min(passes, 2 * sms // max(1, -(-rows // tokens))))
    stage = tokens * row_bytes <= shared_limit - 1024  # the norm keeps its partial sums in static shared memory
    return Plan(tokens, splits, stage, tokens * row_bytes if stage else 0)


@functools.lru_cache(maxsize=4096)
def _prepared(
    device: int, rows: int, channels: int, dtype: torch.dtype, hadamard: bool, fuse: str, layout: str, aligned: int
) -> tuple[CompiledKernel, Plan]:
    properties = torch.cuda.get_device_properties(device)
    plan = plan_launch(
        rows,
        channels,
        ELEMENT_BYTES[dtype],
        properties.multi_processor_count,
        int(getattr(properties, "shared_memory_per_block_optin", DEFAULT_SHARED)),
    )
    vector = channels % 4 == 0 and aligned % (4 * ELEMENT_BYTES[dtype]) == 0
    if fuse != "none" and not plan.stage:
        raise CometError(
            f"quantize_act fused with {fuse}: a row of {channels} {dtype} channels does not fit in shared memory",
            "call the norm or activation first, then quantize_act",
        )
    defines = kernel_defines(dtype, plan.tokens, hadamard, fuse, layout, vector, plan.stage)
    plan = dataclasses.replace(plan, overlap=device_capability(device) >= (9, 0))
    return compile_kernel(SOURCE, "quantize_act", device_arch(device), defines, OPTIONS), plan


def _explain(x: Tensor, channels: int, perm: Tensor | None, block_bits: Tensor, clip: Tensor) -> CometError:
    """What is wrong with arguments that did not pass `_launch`'s one-line check."""
    if x.dtype not in ELEMENTS:
        return CometError(f"quantize_act: x is {x.dtype}", "it must be float32, bfloat16 or float16")
    if x.dim() != 2:
        return CometError(f"quantize_act: x is {tuple(x.shape)}", "it must be [tokens, channels]")
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
    return CometError(f"quantize_act: x is on {x.device}, its permutation, bits or clip are not", "move them there")


@functools.lru_cache(maxsize=64)
def _identity(channels: int, device: int) -> Tensor:
    """int32 [K], the permutation that keeps the order."""
    return torch.arange(channels, dtype=torch.int32, device=torch.device("cuda", device))


def _launch(
    x: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    codes: Tensor,
    scale: Tensor,
    layout: str,
    fuse: str = "none",
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Quantize contiguous x [M, K] (or [M, 2K] for silu_mul) into codes and scale, allocated by the caller."""
    rows = x.shape[0]
    channels = x.shape[1] // 2 if fuse == "silu_mul" else x.shape[1]
    device = x.get_device()
    blocks = block_bits.numel()
    if not (
        x.dtype in ELEMENTS
        and x.dim() == 2
        and 0 <= blocks * BLOCK - channels < BLOCK
        and clip.numel() == blocks
        and block_bits.dtype == torch.uint8
        and clip.dtype == torch.float32
        and block_bits.get_device() == device == clip.get_device()
        and (perm is None or (perm.dtype == torch.int32 and perm.numel() == channels and perm.get_device() == device))
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
    kernel, plan = _prepared(device, rows, channels, x.dtype, hadamard, fuse, layout, aligned)
    perm = _identity(channels, device) if perm is None else perm
    perm_at = perm.data_ptr()
    if perm_at % PERM_ALIGNMENT:
        perm = perm.clone()
        perm_at = perm.data_ptr()
    params = _PARAMS.pack(
        x_at,
        residual_at,
        out_at,
        weight_at,
        perm_at,
        block_bits.data_ptr(),
        clip.data_ptr(),
        codes.data_ptr(),
        scale.data_ptr(),
        rows,
        channels,
        blocks,
        eps,
    )
    tiles = token_atoms(rows) * 8 if layout == "sm_90" else rows  # padding tokens of an atom are written as zeros
    grid = (-(-tiles // plan.tokens), plan.splits)
    kernel.launch_on(device, grid, THREADS, (params,), plan.shared_bytes, plan.overlap)


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def quantize_act_gpu(
    x: Tensor, perm: Tensor | None, block_bits: Tensor, clip: Tensor, hadamard: bool
) -> tuple[Tensor, Tensor]:
    """`quantize_act` on CUDA tensors."""
    x = _contiguous(x)
    rows, blocks = x.shape[0], block_bits.shape[0]
    codes = torch.empty((rows, blocks, BLOCK), dtype=torch.int8, device=x.device)
    scale = torch.empty((rows, blocks), dtype=torch.float32, device=x.device)
    _launch(x, perm, block_bits, clip, hadamard, codes, scale, "canonical")
    return codes, scale


def _empty_tiled(x: Tensor, blocks: int, layout: str) -> tuple[Tensor, Tensor]:
    rows = x.shape[0]
    if layout == "sm_90":
        atoms = token_atoms(rows)
        return (
            torch.empty((blocks, atoms, ATOM_BYTES), dtype=torch.uint8, device=x.device),
            torch.empty((blocks, atoms, META_FLOATS), dtype=torch.float32, device=x.device),
        )
    if layout in ("sm_80", "portable"):
        return (
            torch.empty((blocks, rows, BLOCK), dtype=torch.uint8, device=x.device),
            torch.empty((blocks, rows, 2), dtype=torch.float32, device=x.device),
        )
    raise CometError(f"activation layout {layout!r}", "it must be sm_90, sm_80 or portable")


def _tile_ref(codes: Tensor, scale: Tensor, block_bits: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    if layout == "sm_90":
        return tile_activations_sm90(codes, scale, block_bits)
    return tile_activations_sm80(codes, scale, block_bits, portable=layout == "portable")


def quantize_act_tiled_ref(
    x: Tensor, perm: Tensor | None, block_bits: Tensor, clip: Tensor, hadamard: bool, layout: str = "sm_90"
) -> tuple[Tensor, Tensor]:
    """`quantize_act`, then the tiled form of one architecture.

    Args:
        x, perm, block_bits, clip, hadamard: as in `quantize_act`.
        layout: "sm_90" (weight_layout.py), "sm_80" or "portable" (weight_layout_sm80.py).

    Returns:
        codes and meta in that layout; meta holds each token's scale and the sum of its codes in the block.
    """
    return _tile_ref(*quantize_act_ref(x, perm, block_bits, clip, hadamard), block_bits, layout)


def quantize_act_tiled_gpu(
    x: Tensor, perm: Tensor | None, block_bits: Tensor, clip: Tensor, hadamard: bool, layout: str = "sm_90"
) -> tuple[Tensor, Tensor]:
    """`quantize_act_tiled_ref` on CUDA tensors."""
    x = _contiguous(x)
    codes, meta = _empty_tiled(x, block_bits.shape[0], layout)
    _launch(x, perm, block_bits, clip, hadamard, codes, meta, layout)
    return codes, meta


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
    x = _contiguous(x)
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
    residual = None if residual is None else _contiguous(residual)
    summed = x.new_empty(0) if residual is None else torch.empty_like(x)
    codes, meta = _empty_tiled(x, block_bits.shape[0], layout)
    weight = _contiguous(weight)
    _launch(x, perm, block_bits, clip, hadamard, codes, meta, layout, "rms_norm", residual, summed, weight, eps)
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
    gate_up = _contiguous(gate_up)
    codes, meta = _empty_tiled(gate_up, block_bits.shape[0], layout)
    _launch(gate_up, perm, block_bits, clip, hadamard, codes, meta, layout, "silu_mul")
    return codes, meta


def _tiled_fake(
    x: Tensor, perm: Tensor | None, block_bits: Tensor, clip: Tensor, hadamard: bool, layout: str = "sm_90"
) -> tuple[Tensor, Tensor]:
    return _empty_tiled(x, block_bits.shape[0], layout)


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
    codes, meta = _empty_tiled(x, block_bits.shape[0], layout)
    return codes, meta, x.new_empty(0) if residual is None else torch.empty_like(x)


_QUANTIZE_ARGS = 'Tensor? perm, Tensor block_bits, Tensor clip, bool hadamard, str layout="sm_90"'
define_op(f"quantize_act_tiled(Tensor x, {_QUANTIZE_ARGS}) -> (Tensor, Tensor)", quantize_act_tiled_ref, _tiled_fake)
define_op(
    f"silu_mul_quantize(Tensor gate_up, {_QUANTIZE_ARGS}) -> (Tensor, Tensor)", silu_mul_quantize_ref, _tiled_fake
)
define_op(
    f"rms_norm_quantize(Tensor x, Tensor? residual, Tensor weight, float eps, {_QUANTIZE_ARGS})"
    " -> (Tensor, Tensor, Tensor)",
    rms_norm_quantize_ref,
    _rms_norm_fake,
)
LIBRARY.impl("quantize_act", quantize_act_gpu, "CUDA")
LIBRARY.impl("quantize_act_tiled", quantize_act_tiled_gpu, "CUDA")
LIBRARY.impl("silu_mul_quantize", silu_mul_quantize_gpu, "CUDA")
LIBRARY.impl("rms_norm_quantize", rms_norm_quantize_gpu, "CUDA")
