"""KV4 on the GPU: what every launch checks, and the kernels that write the cache (kv4_append.cu).

The cache and its page table travel as one struct (`Cache` of kv4_cache.cuh). Lengths, positions and pages stay on the
GPU: the host knows shapes alone, so a launch can stand in a CUDA graph.
"""

import functools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from comet_cuda.dispatch import device_arch, device_capability
from comet_cuda.errors import CometError
from comet_cuda.jit import CompiledKernel, Configuration, compile_kernel

SOURCE = "kv4_append.cu"
OPTIONS = ("-fmad=false",)  # additions and multiplications stay apart, as in the reference
ELEMENTS = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
HEAD_DIMS = (64, 96, 128, 256)
PAGES = (32, 64, 128, 256)
ENTRIES = ("kv4_append", "rope_append", "rope_qk", "kv4_append_chunk", "kv4_append_token", "rope_append_wave")
HEADS_OF_PAGE_CTA = 4  # kv heads whose page a further cta of kv4_append_token quantizes
WAVE_FEW, WAVE_MANY = 16, 128  # tokens up to which, and from which on, rope_append_wave is taken
ROTATED = 4  # q and k heads of a warp of rope_append_wave
PAGE_CTAS_OF_SM = 2  # of rope_append_wave: ctas that complete pages, at most, for each multiprocessor

_CACHE = struct.Struct("<10Q4i")
_APPEND = struct.Struct("<96s10Q2q4if4x")


def pack_cache(cache: Sequence[Tensor], page_table: Tensor) -> bytes:
    """`Cache` of kv4_cache.cuh."""
    pointers = [tensor.data_ptr() for tensor in cache]
    heads, sinks = cache[0].shape[1], cache[7].shape[2]
    return _CACHE.pack(*pointers, page_table.data_ptr(), page_table.shape[1], heads, sinks, 0)


def check_cache(op: str, cache: Sequence[Tensor], element: torch.dtype, *indices: Tensor) -> None:
    """Raise CometError unless the cache is one that the kernels read, and every index tensor fits it."""
    k_open = cache[6]
    dim, page, device = k_open.shape[3], cache[0].shape[2], k_open.device
    if dim not in HEAD_DIMS or page not in PAGES:
        raise CometError(
            f"{op}: head dimension {dim}, pages of {page} tokens",
            f"the GPU kernels take head dimensions {HEAD_DIMS} and pages of {PAGES} tokens; others run on the CPU",
        )
    if element not in ELEMENTS or k_open.dtype != element:
        raise CometError(
            f"{op}: {element} input for a cache of {k_open.dtype}", "both must be bfloat16, or both float16"
        )
    for tensor in (*cache, *indices):
        if tensor.device != device or not tensor.is_contiguous():
            raise CometError(f"{op}: a tensor on {tensor.device}, contiguous: {tensor.is_contiguous()}; the cache is on"
                             f" {device}", "all must be contiguous and on the cache's device")  # fmt: skip
    for tensor in indices:
        if tensor.dtype != torch.int32:
            raise CometError(f"{op}: an index tensor of {tensor.dtype}", "slot, position, length, table: int32")


def heads_pitch(op: str, x: Tensor, dim: int) -> int:
    """Elements between rows of x [N, heads, D], whose rows must be dense and aligned to 16 bytes."""
    if x.dim() != 3 or x.shape[2] != dim or x.stride(2) != 1 or x.stride(1) != dim or x.stride(0) % 8:
        raise CometError(f"{op}: {tuple(x.shape)} with strides {x.stride()}", f"it must be [tokens, heads, {dim}]")
    if x.data_ptr() % 16:
        raise CometError(f"{op}: it does not begin at a multiple of 16 bytes", "pass a copy (.clone())")
    return x.stride(0)


def _check_indices(op: str, tokens: int, *indices: Tensor) -> None:
    for tensor in indices:
        if tensor.shape != (tokens,):
            raise CometError(f"{op}: an index tensor of {tuple(tensor.shape)}", f"one entry a token: ({tokens},)")


def append_shared_bytes(dim: int, entry: str) -> int:
    """Dynamic shared memory of a cta: `PageShared` of kv4_quantize.cuh, in rope_append_wave a key for each warp."""
    return {"rope_qk": 0, "rope_append_wave": dim // 16 * 2 * dim}.get(entry, 72 * dim)


def rope_entry(tokens: int) -> str:
    """The entry of kv4_append.cu that appends one token of each of so many sequences, with the rotary embedding.

    With decode attention behind it (H200, 32/8 heads of 128; old way, then the wave, microseconds), if one sequence in
    128 completes a page: 25.4 and 19.2 for 16 tokens, 45.8 and 40.3 for 64, 127.4 and 119.7 for 256. If none does,
    64 take 36.8 either way, since the old way is one wave too, and where 64 of equal length complete pages all at once
    the wave costs 0.8% of the tokens a second: so the old way keeps what lies between few and many. Where 256 complete
    pages all at once, one step in 128 is 4.7 ms longer (of 9): the wave's ctas for pages are too few for that.
    """
    return "rope_append" if WAVE_FEW < tokens < WAVE_MANY else "rope_append_wave"


def rope_append_wave_ctas(tokens: int, q_heads: int, heads: int, dim: int, multiprocessors: int) -> int:
    """Ctas of rope_append_wave: warps for heads, then ctas that complete pages: two for each head, or fewer."""
    warps = heads + -(-(q_heads + heads) // ROTATED)
    return -(-tokens * warps // (dim // 16)) + min(2 * tokens * heads, PAGE_CTAS_OF_SM * multiprocessors)


def append_defines(element: torch.dtype, dim: int, page: int, entry: str) -> dict[str, int | str]:
    """The preprocessor definitions of one entry of kv4_append.cu."""
    return {"ELEMENT": ELEMENTS[element], "DIM": dim, "PAGE": page, "ENTRY": ENTRIES.index(entry)}


@functools.lru_cache(maxsize=256)
def _append_kernel(device: int, element: torch.dtype, dim: int, page: int, entry: str) -> tuple[CompiledKernel, bool]:
    defines = append_defines(element, dim, page, entry)
    kernel = compile_kernel(SOURCE, entry, device_arch(device), defines, OPTIONS)
    return kernel, device_capability(device) >= (9, 0)


def kv4_append_gpu(
    k: Tensor, v: Tensor, slot: Tensor, position: Tensor, page_table: Tensor, *cache: Tensor, max_new: int = 0
) -> None:
    """`kv4_append` on CUDA tensors. max_new 1: no sequence has more than one token here, so one launch is enough."""
    check_cache("kv4_append", cache, k.dtype, slot, position, page_table)
    packed = pack_cache(cache, page_table)
    if max_new == 1:
        launch_append(k, v, slot, position, packed, cache, 0, entry="kv4_append_token")
        return
    launch_append(k, v, slot, position, packed, cache, 0)
    launch_append(k, v, slot, position, packed, cache, 2)


def launch_append(
    k: Tensor,
    v: Tensor,
    slot: Tensor,
    position: Tensor,
    packed: bytes,
    cache: Sequence[Tensor],
    stage: int,
    entry: str = "kv4_append",
    starts: Tensor | None = None,
    runs: int = 0,
) -> None:
    """One launch of kv4_append, kv4_append_token or kv4_append_chunk; `stage` as in kv4_append.cu.

    For chunks, slot and position are those of whole sequences that begin at `starts`, each of at most `runs` pages
    (sinks count as one).
    """
    tokens, heads, dim = k.shape[0], cache[0].shape[1], cache[6].shape[3]
    if k.shape != (tokens, heads, dim) or v.shape != k.shape or k.dtype != v.dtype:
        raise CometError(f"kv4_append: k {tuple(k.shape)}, v {tuple(v.shape)} for {heads} kv heads of {dim} channels")
    if starts is None:
        _check_indices("kv4_append", tokens, slot, position)
    if tokens == 0:
        return
    device = k.get_device()
    kernel, overlap = _append_kernel(device, k.dtype, dim, cache[0].shape[2], entry)
    pitches = heads_pitch("kv4_append k", k, dim), heads_pitch("kv4_append v", v, dim)
    params = _APPEND.pack(
        packed, k.data_ptr(), v.data_ptr(), 0, 0, 0, 0, 0, slot.data_ptr(), position.data_ptr(),
        0 if starts is None else starts.data_ptr(), *pitches, tokens, 0, 0, stage, 0.0,
    )  # fmt: skip
    grids = {
        "kv4_append": (tokens, heads),
        "kv4_append_token": (tokens, -(-heads // (dim // 16)) + -(-heads // HEADS_OF_PAGE_CTA)),
        "kv4_append_chunk": (runs, heads, slot.shape[0]),
    }
    kernel.launch_on(device, grids[entry], 2 * dim, (params,), append_shared_bytes(dim, entry), overlap)


def _check_rope(op: str, qkv: Tensor, cos: Tensor, sin: Tensor, dim: int, heads: int) -> None:
    width = qkv.shape[1] if qkv.dim() == 2 else 0
    if not qkv.is_contiguous() or width % dim or width // dim <= heads:
        raise CometError(f"{op}: qkv is {tuple(qkv.shape)}", f"it must be [tokens, heads * {dim}], contiguous")
    half = cos.shape[1]
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or sin.shape != cos.shape or 2 * half > dim:
        raise CometError(f"{op}: cos {cos.dtype} {tuple(cos.shape)}, sin {sin.dtype} {tuple(sin.shape)}",
                         f"both must be float32 [positions, at most {dim // 2}]")  # fmt: skip
    if not (cos.is_contiguous() and sin.is_contiguous()) or cos.device != qkv.device or sin.device != qkv.device:
        raise CometError(f"{op}: cos and sin must be contiguous and on {qkv.device}")


def _weight_pointer(op: str, weight: Tensor | None, qkv: Tensor, dim: int) -> int:
    if weight is None:
        return 0
    if weight.dtype != qkv.dtype or weight.shape != (dim,) or weight.device != qkv.device:
        raise CometError(
            f"{op}: a norm weight is {weight.dtype} {tuple(weight.shape)}", f"it must be {qkv.dtype} [{dim}]"
        )
    return weight.data_ptr()


def rope_append_gpu(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot: Tensor,
    position: Tensor,
    page_table: Tensor,
    *cache_and_norm: Tensor | float | None,
) -> Tensor:
    """`rope_append` on CUDA tensors."""
    cache: tuple[Tensor, ...] = cache_and_norm[:9]  # type: ignore[assignment]
    q_weight, k_weight, eps = cache_and_norm[9:]
    check_cache("rope_append", cache, qkv.dtype, slot, position, page_table)
    heads, page, dim = cache[0].shape[1], cache[0].shape[2], cache[6].shape[3]
    _check_rope("rope_append", qkv, cos, sin, dim, 2 * heads)
    tokens, q_heads = qkv.shape[0], qkv.shape[1] // dim - 2 * heads
    _check_indices("rope_append", tokens, slot, position)
    if q_heads % heads:
        raise CometError(f"rope_append: {q_heads} q heads for {heads} kv heads", "they must be a multiple of them")
    q = torch.empty((tokens, q_heads, dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    device = qkv.get_device()
    entry = rope_entry(tokens)
    kernel, overlap = _append_kernel(device, qkv.dtype, dim, page, entry)
    params = _APPEND.pack(
        pack_cache(cache, page_table), qkv.data_ptr(), 0, q.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        _weight_pointer("rope_append", q_weight, qkv, dim),  # type: ignore[arg-type]
        _weight_pointer("rope_append", k_weight, qkv, dim),  # type: ignore[arg-type]
        slot.data_ptr(), position.data_ptr(), 0, 0, 0, tokens, q_heads, cos.shape[1], 0, eps,
    )  # fmt: skip
    grid: tuple[int, ...] = (tokens, heads)
    if entry == "rope_append_wave":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        grid = (rope_append_wave_ctas(tokens, q_heads, heads, dim, multiprocessors),)
    kernel.launch_on(device, grid, 2 * dim, (params,), append_shared_bytes(dim, entry), overlap)
    return q


def rope_qk_gpu(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    q_heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> None:
    """`rope_qk_` on CUDA tensors."""
    dim = qkv.shape[1] // (q_heads + 2 * kv_heads)
    if dim not in HEAD_DIMS or qkv.dtype not in ELEMENTS or position.dtype != torch.int32:
        raise CometError(f"rope_qk_: {qkv.dtype}, head dimension {dim}, positions {position.dtype}",
                         f"16-bit, head dimensions {HEAD_DIMS}, int32")  # fmt: skip
    _check_rope("rope_qk_", qkv, cos, sin, dim, 2 * kv_heads)
    tokens = qkv.shape[0]
    _check_indices("rope_qk_", tokens, position)
    if position.device != qkv.device or not position.is_contiguous():
        raise CometError(f"rope_qk_: positions on {position.device}", f"they must be contiguous and on {qkv.device}")
    if tokens == 0:
        return
    device = qkv.get_device()
    kernel, overlap = _append_kernel(device, qkv.dtype, dim, 128, "rope_qk")
    weights = (_weight_pointer("rope_qk_", weight, qkv, dim) for weight in (q_weight, k_weight))
    params = _APPEND.pack(
        _CACHE.pack(*[0] * 10, 0, kv_heads, 0, 0), 0, 0, qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), *weights,
        0, position.data_ptr(), 0, 0, 0, tokens, q_heads, cos.shape[1], 0, eps,
    )  # fmt: skip
    warps = 2 * dim // 32
    kernel.launch_on(device, -(-tokens * (q_heads + kv_heads) // warps), 2 * dim, (params,), 0, overlap)


def configurations(family: str) -> list[Configuration]:
    """Every way that kv4_append.cu is compiled, whatever the GPU."""
    return [
        Configuration(SOURCE, append_defines(element, dim, page, entry), OPTIONS, append_shared_bytes(dim, entry))
        for element in ELEMENTS
        for dim in HEAD_DIMS
        for page in (64, 128)
        for entry in ENTRIES
    ]
