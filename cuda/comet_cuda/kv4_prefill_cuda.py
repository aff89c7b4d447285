"""kv4_prefill on the GPU: append, attend, then bring the open pages up to date.

Three launches, in this order because attention reads the 16-bit keys that earlier calls left in the open page, and the
chunk's last page overwrites them. The host knows shapes and `max_new` alone, so all three can stand in a CUDA graph.
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
from comet_cuda.kv4_append_cuda import ELEMENTS, HEAD_DIMS, check_cache, heads_pitch, launch_append, pack_cache

SOURCE = "kv4_prefill.cu"

_PARAMS = struct.Struct("<96s6Q2q4i2f")


@dataclasses.dataclass(frozen=True)
class PrefillTiles:
    """How kv4_prefill is compiled for one head dimension."""

    row_tiles: int  # tiles of 8 rows that a warp takes: NT
    stages: int
    warps: int  # a cta
    ctas: int  # a multiprocessor, that registers must allow

    def defines(self, element: torch.dtype, dim: int, page: int, softcap: bool) -> dict[str, int | str]:
        """The preprocessor definitions of kv4_prefill.cu."""
        return {
            "ELEMENT": ELEMENTS[element], "DIM": dim, "PAGE": page, "NT": self.row_tiles, "SOFTCAP": int(softcap),
            "STAGES": self.stages, "WARPS": self.warps, "MIN_CTAS": self.ctas,
        }  # fmt: skip

    def shared_bytes(self, dim: int, page: int) -> int:
        """Dynamic shared memory of a cta: `Shared` of kv4_prefill.cu."""
        of_rows = self.row_tiles * (2 * 16 * dim + 32)
        return self.warps * (self.stages * 32 * dim + 8 * (dim + page) + 32 + of_rows)


def prefill_tiles(dim: int) -> PrefillTiles:
    """The compilation for heads of `dim` channels."""
    return {
        64: PrefillTiles(4, 2, 4, 2),
        96: PrefillTiles(2, 2, 4, 2),
        128: PrefillTiles(2, 2, 4, 2),
        256: PrefillTiles(1, 2, 2, 4),
    }[dim]


@functools.lru_cache(maxsize=256)
def _prefill_kernel(
    device: int, element: torch.dtype, dim: int, page: int, softcap: bool, tiles: PrefillTiles
) -> tuple[CompiledKernel, int, bool]:
    kernel = compile_kernel(SOURCE, "kv4_prefill", device_arch(device), tiles.defines(element, dim, page, softcap))
    return kernel, tiles.shared_bytes(dim, page), device_capability(device) >= (9, 0)


def kv4_prefill_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    slot: Tensor,
    position: Tensor,
    page_table: Tensor,
    cache: Sequence[Tensor],
    softmax_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_new: int = 0,
    tiles: PrefillTiles | None = None,
) -> Tensor:
    """`kv4_prefill` on CUDA tensors."""
    check_cache("kv4_prefill", cache, q.dtype, starts, slot, position, page_table)
    heads, page, dim, sinks = cache[0].shape[1], cache[0].shape[2], cache[6].shape[3], cache[7].shape[2]
    tokens, sequences = q.shape[0], slot.shape[0]
    if q.shape[1] % heads or k.shape[0] != tokens or starts.shape[0] != sequences + 1 or sinks > page:
        raise CometError(
            f"kv4_prefill: q {tuple(q.shape)}, k {tuple(k.shape)}, {sequences} sequences, {starts.shape[0]} starts,"
            f" {sinks} sinks, pages of {page}",
            "q and k have a row a token, q a multiple of the kv heads; starts is one longer than slot; sinks <= page",
        )
    out = torch.zeros((tokens, q.shape[1], dim), dtype=q.dtype, device=q.device)  # rows of skipped sequences
    if tokens == 0:
        return out
    device, packed = q.get_device(), pack_cache(cache, page_table)
    pages = -(-min(max_new or tokens, tokens) // page) + 1 + (sinks > 0)
    launch_append(k, v, slot, position, packed, cache, 0, "kv4_append_chunk", starts, pages)
    tiles = tiles or prefill_tiles(dim)
    kernel, shared, overlap = _prefill_kernel(device, q.dtype, dim, page, softcap > 0, tiles)
    group = q.shape[1] // heads
    tiles_of_page = -(-page * group // (8 * tiles.row_tiles))
    log2e = 1.4426950408889634
    scale, cap = (softmax_scale / softcap, softcap * log2e) if softcap > 0 else (softmax_scale * log2e, 0.0)
    params = _PARAMS.pack(
        packed, q.data_ptr(), k.data_ptr(), out.data_ptr(), starts.data_ptr(), slot.data_ptr(), position.data_ptr(),
        heads_pitch("kv4_prefill q", q, dim), heads_pitch("kv4_prefill k", k, dim), group, tiles_of_page, window, 0,
        scale, cap,
    )  # fmt: skip
    grid = (-(-pages * tiles_of_page // tiles.warps), heads, sequences)
    kernel.launch_on(device, grid, 32 * tiles.warps, (params,), shared, overlap)
    launch_append(k, v, slot, position, packed, cache, 2, "kv4_append_chunk", starts, pages)
    return out


def configurations(family: str) -> list[Configuration]:
    """Every way that kv4_prefill.cu is compiled, whatever the GPU."""
    found = []
    for element in ELEMENTS:
        for dim in HEAD_DIMS:
            tiles = prefill_tiles(dim)
            for page in (64, 128):
                for softcap in (False, True):
                    defines = tiles.defines(element, dim, page, softcap)
                    found.append(Configuration(SOURCE, defines, (), tiles.shared_bytes(dim, page)))
    return found
