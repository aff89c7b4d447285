"""kv4_decode on the GPU: the launch plan and the launch.

The decision made here is how a batch is split: a cta takes `chunk` pages of one sequence and kv head. Few long chunks
cost least; more are taken until the GPU has a few ctas a multiprocessor at the batch's longest context, which is all
that the host knows. Lengths are read by the kernel, so a CUDA graph serves every step of its bucket.
"""

import dataclasses
import functools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from comet_cuda.dispatch import device_arch, device_capability
from comet_cuda.errors import CometError
from comet_cuda.jit import CompiledKernel, Configuration, compile_kernel
from comet_cuda.kv4_append_cuda import ELEMENTS, HEAD_DIMS, check_cache, pack_cache

SOURCE = "kv4_decode.cu"
WARPS = 4  # of a cta
OPEN_PAGES = 2  # pages of a chunk that the open page stands for
CTAS_PER_SM = 8  # ctas a multiprocessor that the split aims at
RESIDENT = 4  # ctas that a multiprocessor holds at head_dim 128
SHORTEST, LONGEST = 8, 32  # pages of a chunk where there is work enough
TICKETS = 1 << 20  # counters of unfinished chunks, handed out in turn

_PARAMS = struct.Struct("<96s6Q4i2f")


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """How kv4_decode is compiled for one head dimension and group size."""

    head_tiles: int  # tiles of 8 q heads that a cta takes: NT
    stages: int
    ctas: int  # a multiprocessor, that registers must allow

    def defines(self, element: torch.dtype, dim: int, page: int, softcap: bool) -> dict[str, int | str]:
        """The preprocessor definitions of kv4_decode.cu."""
        return {
            "ELEMENT": ELEMENTS[element], "DIM": dim, "PAGE": page, "NT": self.head_tiles, "SOFTCAP": int(softcap),
            "STAGES": self.stages, "MIN_CTAS": self.ctas,
        }  # fmt: skip

    def shared_bytes(self, dim: int, page: int) -> int:
        """Dynamic shared memory of a cta: `Shared` of kv4_decode.cu."""
        heads = 8 * self.head_tiles
        return WARPS * (self.stages * 32 * dim + 8 * (dim + page)) + 2 * heads * dim + 8 * WARPS * heads + 64


def decode_tiles(dim: int, page: int, softcap: bool) -> DecodeTiles:
    """The compilation for heads of `dim` channels: what fits without spilling registers."""
    if dim == 128 and (page < 128 or softcap):
        return DecodeTiles(1, min(3, 1 + page // 32), 3)
    return DecodeTiles(1, 2, {64: 4, 96: 4, 128: 4, 256: 2}[dim])


def plan_chunk(pairs: int, pages: int, sms: int) -> int:
    """Pages a chunk, for `pairs` sequences times kv heads of up to `pages` complete pages each.

    Eight ctas a multiprocessor, but chunks of 8 to 32 pages: shorter ones cost more than they balance, longer ones
    leave a tail (measured on an H200). A batch that would leave the GPU half empty takes shorter ones; where whole
    sequences fill it once, cutting them would only begin a second wave (head_dim 128; others were not measured).
    """
    if (RESIDENT - 1) * sms <= pairs <= RESIDENT * sms:
        return LONGEST
    if pairs * chunks_of(pages, 2 * WARPS) <= 2 * sms:
        return WARPS
    chunk = -(-pairs * (pages + OPEN_PAGES) // (CTAS_PER_SM * sms))
    return min(max(-(-chunk // WARPS) * WARPS, SHORTEST), LONGEST)


def chunks_of(pages: int, chunk: int) -> int:
    """Ctas that share a sequence of `pages` complete pages and an open one."""
    return 1 + max(0, -(-(pages - (chunk - OPEN_PAGES)) // chunk))


@functools.lru_cache(maxsize=256)
def _decode_kernel(
    device: int, element: torch.dtype, dim: int, page: int, softcap: bool, tiles: DecodeTiles
) -> tuple[CompiledKernel, int, bool, int]:
    defines = tiles.defines(element, dim, page, softcap)
    kernel = compile_kernel(SOURCE, "kv4_decode", device_arch(device), defines)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return kernel, tiles.shared_bytes(dim, page), device_capability(device) >= (9, 0), sms


class _Tickets:
    """Zeroed counters: a launch takes the next free ones and leaves them zero, so launches side by side differ."""

    def __init__(self) -> None:
        self._rings: dict[int, tuple[Tensor, int]] = {}

    def take(self, device: torch.device, count: int) -> Tensor:
        index = device.index or 0
        if index not in self._rings or count > TICKETS:
            counters = torch.zeros(max(TICKETS, count), dtype=torch.int32, device=device)
            if count > TICKETS or torch.cuda.is_current_stream_capturing():
                return counters  # its zeroing is part of the graph
            self._rings[index] = counters, 0
        counters, start = self._rings[index]
        start = 0 if start + count > TICKETS else start
        self._rings[index] = counters, start + count
        return counters[start : start + count]


_tickets = _Tickets()


def kv4_decode_gpu(
    q: Tensor,
    slot: Tensor,
    length: Tensor,
    page_table: Tensor,
    cache: Sequence[Tensor],
    softmax_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_length: int = 0,
    tiles: DecodeTiles | None = None,
    chunk: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """`kv4_decode` on CUDA tensors; `tiles` and `chunk` (pages) replace the plan, `out` is written if given."""
    check_cache("kv4_decode", cache, q.dtype, slot, length, page_table)
    heads, page, dim, sinks = cache[0].shape[1], cache[0].shape[2], cache[6].shape[3], cache[7].shape[2]
    rows, q_heads = q.shape[0], q.shape[1]
    if q.dim() != 3 or q.shape[2] != dim or q_heads % heads or slot.numel() != rows or length.numel() != rows:
        raise CometError(f"kv4_decode: q is {tuple(q.shape)}, slot {tuple(slot.shape)}, length {tuple(length.shape)}",
                         f"q must be [sequences, a multiple of {heads} heads, {dim}]")  # fmt: skip
    q = q if q.is_contiguous() else q.contiguous()
    out = torch.empty_like(q) if out is None else out
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device or not out.is_contiguous():
        raise CometError(f"kv4_decode: out is {out.dtype} {tuple(out.shape)}", "it must be contiguous, else as q is")
    if rows == 0:
        return out
    group = q_heads // heads
    tiles = tiles or decode_tiles(dim, page, softcap > 0)
    device = q.get_device()
    kernel, shared, overlap, sms = _decode_kernel(device, q.dtype, dim, page, softcap > 0, tiles)
    head_tiles = -(-group // (8 * tiles.head_tiles))
    capacity = page_table.shape[1] * page + sinks
    longest = min(max_length or capacity, capacity)
    pages = max(longest - sinks - 1, 0) // page
    if window > 0:
        pages = min(pages, window // page + 1)
    pairs = rows * heads * head_tiles
    chunk = chunk or plan_chunk(pairs, pages, sms)
    chunks = chunks_of(pages, chunk)
    partial_at = tickets_at = 0
    if chunks > 1:
        partial = torch.empty(pairs * chunks * 8 * tiles.head_tiles * (dim + 4), dtype=torch.float32, device=q.device)
        partial_at, tickets_at = partial.data_ptr(), _tickets.take(q.device, pairs).data_ptr()
    log2e = 1.4426950408889634
    scale, cap = (softmax_scale / softcap, softcap * log2e) if softcap > 0 else (softmax_scale * log2e, 0.0)
    params = _PARAMS.pack(
        pack_cache(cache, page_table), q.data_ptr(), out.data_ptr(), partial_at, tickets_at, slot.data_ptr(),
        length.data_ptr(), group, head_tiles, chunk, window, scale, cap,
    )  # fmt: skip
    kernel.launch_on(device, (heads * head_tiles, rows, chunks), 32 * WARPS, (params,), shared, overlap)
    return out


def configurations(family: str) -> list[Configuration]:
    """Every way that kv4_decode.cu is compiled, whatever the GPU."""
    found = []
    for element in ELEMENTS:
        for dim in HEAD_DIMS:
            for page in (64, 128):
                for softcap in (False, True):
                    tiles = decode_tiles(dim, page, softcap)
                    defines = tiles.defines(element, dim, page, softcap)
                    found.append(Configuration(SOURCE, defines, (), tiles.shared_bytes(dim, page)))
    return found
