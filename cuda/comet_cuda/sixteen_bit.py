"""What stands between the linears where these read 16-bit or FP8 activations, and the append to a 16-bit KV cache.

The packed schemes never come here (quantize_fused.py has their forms); the 16-bit and W8A8 schemes that they are
compared with do, so that a comparison measures number formats and not missing fusion. FP8 is e4m3, one scale a token:
absmax / 448.
"""

import functools
import struct

import torch
from torch import Tensor

from comet_cuda.dispatch import device_arch, device_capability
from comet_cuda.errors import CometError
from comet_cuda.jit import CompiledKernel, Configuration, compile_kernel
from comet_cuda.library import LIBRARY, define_op
from comet_cuda.rope import rope_qk_ref, split_heads

SOURCE = "sixteen_bit.cu"
ELEMENTS = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
FUSE = {"none": 0, "rms_norm": 1, "silu_mul": 2}
THREADS, WIDE = 256, 8  # a cta; channels a thread loads at once
WIDEST = {"none": THREADS * WIDE * 14, "silu_mul": THREADS * WIDE * 14, "rms_norm": THREADS * WIDE * 8}  # channels
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
_ROW = struct.Struct("<6Q2if4x")  # Params of sixteen_bit.cu
_ROPE = struct.Struct("<10Q5if")  # RopeParams


def _defines(dtype: torch.dtype, fuse: str, fp8: bool, channels: int) -> dict[str, int | str]:
    vectors = -(-channels // (THREADS * WIDE))
    vectors = vectors if vectors <= 2 else -(-vectors // 2) * 2  # fewer variants to compile
    return {"ELEMENT": ELEMENTS[dtype], "FUSE": FUSE[fuse], "FP8": int(fp8), "VECTORS": vectors}


def configurations(family: str) -> list[Configuration]:
    """Every way that the source is compiled on a GPU family."""
    return [
        Configuration(SOURCE, _defines(dtype, fuse, fp8, channels))
        for dtype in ELEMENTS
        for channels in (576, 4096, 8192, 14336, 28672)
        for fuse, fp8 in [(fuse, False) for fuse in ("rms_norm", "silu_mul")]
        + [(fuse, True) for fuse in FUSE if family != "sm_80"]  # sm_80 and sm_86 have no FP8
        if channels <= WIDEST[fuse]
    ]


@functools.lru_cache(maxsize=1024)
def _kernel(device: int, dtype: torch.dtype, fuse: str, fp8: bool, channels: int) -> CompiledKernel:
    return compile_kernel(SOURCE, "row_op", device_arch(device), _defines(dtype, fuse, fp8, channels))


def _fits_kernel(x: Tensor, fuse: str, channels: int) -> bool:
    wide = x.is_contiguous() and channels % WIDE == 0 and x.data_ptr() % 16 == 0  # rows of whole 16-byte words
    return x.dtype in ELEMENTS and wide and channels <= WIDEST[fuse]


def _row_op(
    x: Tensor, fuse: str, fp8: bool, residual: Tensor | None = None, weight: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch row_op: (out, scale [M, 1] of FP8 or empty, x + residual or empty)."""
    rows, channels = x.shape[0], x.shape[1] // 2 if fuse == "silu_mul" else x.shape[1]
    device = x.get_device()
    if fp8 and device_capability(device) < (8, 9):
        raise CometError("this GPU has no FP8 tensor cores", "the W8A8 scheme needs compute capability 8.9 or later")
    out = x.new_empty((rows, channels), dtype=FP8 if fp8 else x.dtype)
    scale = x.new_empty((rows if fp8 else 0, 1), dtype=torch.float32)
    summed = x.new_empty(0) if residual is None else torch.empty_like(x)
    if rows:
        params = _ROW.pack(
            x.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if residual is None else summed.data_ptr(),
            out.data_ptr(),
            scale.data_ptr() if fp8 else 0,
            rows,
            channels,
            eps,
        )
        pdl = device_capability(device) >= (9, 0)
        _kernel(device, x.dtype, fuse, fp8, channels).launch_on(device, rows, THREADS, (params,), pdl=pdl)
    return out, scale, summed


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale a row: float [M, K] -> e4m3 [M, K], float32 [M, 1]; the reference of every FP8 form here."""
    scale = x.float().abs().amax(-1, keepdim=True) / FP8_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (x.float() / scale).to(FP8), scale


def rms_norm_ref(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, fp8: bool) -> tuple[Tensor, ...]:
    """RMSNorm after an optional residual add, rounded where the Llama family's module rounds.

    Args:
        x, residual: float [M, K]; weight: x's type [K]. fp8: quantize the result.

    Returns:
        x's type or e4m3 [M, K]; float32 [M, 1] scale (empty [0, 1] without fp8); x + residual (empty [0] without one).
    """
    summed = x if residual is None else x + residual
    wide = summed.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    kept = x.new_empty(0) if residual is None else summed
    return (*to_fp8(normed), kept) if fp8 else (normed, x.new_empty(0, 1, dtype=torch.float32), kept)


def silu_mul_ref(gate_up: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    """SiLU(gate) * up of [gate | up], float [M, 2K] -> x's type or e4m3 [M, K], and the FP8 scale or empty."""
    gate, up = gate_up.chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * up
    return to_fp8(product) if fp8 else (product, gate_up.new_empty(0, 1, dtype=torch.float32))


def rope_append_16_ref(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    row: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    by_group: bool,
) -> Tensor:
    """Norm heads (if weights are given), rotate q and k, and write k and v into the cache.

    Args:
        qkv: float [N, (Hq + 2 H) * D]. q_norm, k_norm: [D] or None, with eps.
        cos, sin: float32 [positions, D / 2]. position: int32 [N]. row: int32 [N], each token's row of the cache.
        k_cache, v_cache: float [rows, H, D], written in place.
        by_group: return query heads that read different kv heads side by side: an attention that takes the queries of
            a group as so many tokens then reads them as they lie.

    Returns:
        q, rotated: [N, Hq, D], or by_group [N * Hq / H, H, D].
    """
    kv_heads, dim = k_cache.shape[1:]
    q_heads = qkv.shape[1] // dim - 2 * kv_heads
    rotated = qkv.clone()
    rope_qk_ref(rotated, cos, sin, position, q_heads, kv_heads, q_norm, k_norm, eps)
    q, k, v = split_heads(rotated, q_heads, kv_heads)
    k_cache[row.long()], v_cache[row.long()] = k, v
    if by_group:
        q = q.reshape(q.shape[0], kv_heads, -1, dim).transpose(1, 2).flatten(0, 1)
    return q.contiguous()


def _rms_norm_gpu(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, fp8: bool) -> tuple[Tensor, ...]:
    channels = x.shape[1]
    others = (weight,) if residual is None else (weight, residual)
    same = all(t.dtype == x.dtype and _fits_kernel(t, "rms_norm", channels) for t in others)
    if not (same and _fits_kernel(x, "rms_norm", channels)):
        return rms_norm_ref(x, residual, weight, eps, fp8)
    return _row_op(x, "rms_norm", fp8, residual, weight, eps)


def _silu_mul_gpu(gate_up: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    if not _fits_kernel(gate_up, "silu_mul", gate_up.shape[1] // 2):
        return silu_mul_ref(gate_up, fp8)
    return _row_op(gate_up, "silu_mul", fp8)[:2]


def _to_fp8_gpu(x: Tensor) -> tuple[Tensor, Tensor]:
    return _row_op(x, "none", True)[:2] if _fits_kernel(x, "none", x.shape[1]) else to_fp8(x)


def _rope_append_16_gpu(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    row: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    by_group: bool,
) -> Tensor:
    kv_heads, dim = k_cache.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    fits = (
        qkv.dtype in ELEMENTS
        and qkv.dtype == k_cache.dtype == v_cache.dtype
        and cos.dtype == sin.dtype == torch.float32
        and cos.shape[1] == sin.shape[1] == dim // 2  # all channels are rotated
        and position.dtype == row.dtype == torch.int32
        and all(t.is_contiguous() for t in (qkv, cos, sin, position, row, k_cache, v_cache))
    )
    if not fits:
        return rope_append_16_ref(qkv, q_norm, k_norm, eps, cos, sin, position, row, k_cache, v_cache, by_group)
    shape = (qkv.shape[0] * (heads // kv_heads), kv_heads, dim) if by_group else (qkv.shape[0], heads, dim)
    q = qkv.new_empty(shape)
    norms = [0 if norm is None else norm.data_ptr() for norm in (q_norm, k_norm)]
    tensors = [t.data_ptr() for t in (cos, sin, position, row, q, k_cache, v_cache)]
    params = _ROPE.pack(qkv.data_ptr(), *norms, *tensors, qkv.shape[0], heads, kv_heads, dim, by_group, eps)
    device = qkv.get_device()
    kernel = compile_kernel(SOURCE, "rope_append", device_arch(device), _defines(qkv.dtype, "none", False, WIDE))
    ctas = -(-qkv.shape[0] * (heads + 2 * kv_heads) * 32 // THREADS)
    if ctas:
        kernel.launch_on(device, ctas, THREADS, (params,), pdl=device_capability(device) >= (9, 0))
    return q


def _like(x: Tensor, channels: int, fp8: bool) -> tuple[Tensor, Tensor]:
    rows = x.shape[0]
    out = x.new_empty((rows, channels), dtype=FP8 if fp8 else x.dtype)
    return out, x.new_empty((rows if fp8 else 0, 1), dtype=torch.float32)


def _rope_fake(qkv: Tensor, *rest: Tensor | float | None) -> Tensor:
    k_cache, by_group = rest[-3], rest[-1]
    assert isinstance(k_cache, Tensor)
    kv_heads, dim = k_cache.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    if by_group:
        return qkv.new_empty((qkv.shape[0] * (heads // kv_heads), kv_heads, dim))
    return qkv.new_empty((qkv.shape[0], heads, dim))


define_op(
    "rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, bool fp8) -> (Tensor, Tensor, Tensor)",
    rms_norm_ref,
    lambda x, residual, weight, eps, fp8: (
        *_like(x, x.shape[1], fp8),
        x.new_empty(0) if residual is None else torch.empty_like(x),
    ),
)
define_op(
    "silu_mul(Tensor gate_up, bool fp8) -> (Tensor, Tensor)",
    silu_mul_ref,
    lambda gate_up, fp8: _like(gate_up, gate_up.shape[1] // 2, fp8),
)
define_op("to_fp8(Tensor x) -> (Tensor, Tensor)", to_fp8, lambda x: _like(x, x.shape[1], True))
define_op(
    "rope_append_16(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, Tensor sin, Tensor position,"
    " Tensor row, Tensor(a!) k_cache, Tensor(b!) v_cache, bool by_group) -> Tensor",
    rope_append_16_ref,
    _rope_fake,
)
LIBRARY.impl("rms_norm", _rms_norm_gpu, "CUDA")
LIBRARY.impl("silu_mul", _silu_mul_gpu, "CUDA")
LIBRARY.impl("to_fp8", _to_fp8_gpu, "CUDA")
LIBRARY.impl("rope_append_16", _rope_append_16_gpu, "CUDA")
