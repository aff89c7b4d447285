"""kv4_append: new keys and values -> the paged 4-bit cache of one layer.

Token t of a sequence is a sink (t < sinks, kept in 16 bit) or lies in page (t - sinks) // page at slot
(t - sinks) % page. Values are quantized per token and head at once. Keys wait in 16 bit in the sequence's open page;
when its last slot fills, the page is quantized per channel, with one range per head and channel over its tokens.
Because a range never spans two pages, prefill in one shot, in chunks, and token by token give the same cache.

On a CPU the cache lies as `KV4Pages` says; on a GPU the codes of a page are tiled (kv4_layout.py).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from comet_cuda.affine import choose_minmax_qparams, quantize_minmax
from comet_cuda.int4 import pack_nibbles
from comet_cuda.library import LIBRARY, define_op

if TYPE_CHECKING:
    from comet_cuda.jit import Configuration

KV_BITS = 4
PARAM_DTYPE = torch.float16  # 11 significant bits: keys may have a large mean and a small range


@dataclass(frozen=True)
class KV4Pages:
    """The cache of one layer. P pages in the pool, S sequence slots, H kv heads, T tokens a page, D head dimension."""

    k_codes: Tensor  # uint8 [P, H, T, D / 2]
    k_scale: Tensor  # f16 [P, H, D]
    k_min: Tensor  # f16 [P, H, D]
    v_codes: Tensor  # uint8 [P, H, T, D / 2]
    v_scale: Tensor  # f16 [P, H, T]
    v_min: Tensor  # f16 [P, H, T]
    k_open: Tensor  # 16-bit [S, H, T, D]: the page that is being filled, kept until its successor starts
    k_sink: Tensor  # 16-bit [S, H, sinks, D]
    v_sink: Tensor  # 16-bit [S, H, sinks, D]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order above: how the ops take a cache."""
        return (
            self.k_codes, self.k_scale, self.k_min, self.v_codes, self.v_scale, self.v_min,
            self.k_open, self.k_sink, self.v_sink,
        )  # fmt: skip

    @property
    def page(self) -> int:
        """Tokens a page."""
        return self.k_codes.shape[2]

    @property
    def kv_heads(self) -> int:
        """H."""
        return self.k_codes.shape[1]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.k_open.shape[3]

    @property
    def sinks(self) -> int:
        """Leading tokens of each sequence that stay in 16 bit."""
        return self.k_sink.shape[2]


def allocate_pages(
    pages: int,
    sequences: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    sinks: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> KV4Pages:
    """An empty cache for one layer; `dtype` is the type of the 16-bit parts."""
    assert head_dim % 2 == 0

    def zeros(*shape: int, kind: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=kind, device=device)

    return KV4Pages(
        k_codes=zeros(pages, kv_heads, page, head_dim // 2, kind=torch.uint8),
        k_scale=zeros(pages, kv_heads, head_dim, kind=PARAM_DTYPE),
        k_min=zeros(pages, kv_heads, head_dim, kind=PARAM_DTYPE),
        v_codes=zeros(pages, kv_heads, page, head_dim // 2, kind=torch.uint8),
        v_scale=zeros(pages, kv_heads, page, kind=PARAM_DTYPE),
        v_min=zeros(pages, kv_heads, page, kind=PARAM_DTYPE),
        k_open=zeros(sequences, kv_heads, page, head_dim, kind=dtype),
        k_sink=zeros(sequences, kv_heads, sinks, head_dim, kind=dtype),
        v_sink=zeros(sequences, kv_heads, sinks, head_dim, kind=dtype),
    )


def quantize_key_page(k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One page of keys, float [..., T, D] -> codes uint8 [..., T, D], scale f16 [..., D], minimum f16 [..., D]."""
    scale, minimum = choose_minmax_qparams(k.amin(-2), k.amax(-2), KV_BITS, PARAM_DTYPE)
    return quantize_minmax(k, scale[..., None, :], minimum[..., None, :], KV_BITS), scale, minimum


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One range a token and head, float [..., D] -> codes uint8 [..., D], scale f16 [...], minimum f16 [...]."""
    scale, minimum = choose_minmax_qparams(x.amin(-1), x.amax(-1), KV_BITS, PARAM_DTYPE)
    return quantize_minmax(x, scale[..., None], minimum[..., None], KV_BITS), scale, minimum


def kv4_append_ref(k: Tensor, v: Tensor, slot: Tensor, position: Tensor, page_table: Tensor, cache: KV4Pages) -> None:
    """Write N tokens into the cache, in place.

    Args:
        k, v: float [N, H, D], keys after the rotary embedding. Tokens of one sequence come in ascending position.
        slot: int [N], the sequence slot of each token; a token of a negative slot is skipped (padding of a batch).
        position: int [N], the token's position in its sequence, from 0, without gaps between calls.
        page_table: int [S, pages a sequence], page number in the pool, by sequence slot and page index.
        cache: the layer's cache.
    """
    for i in range(k.shape[0]):
        s, t = int(slot[i]), int(position[i]) - cache.sinks
        if s < 0:
            continue
        if t < 0:
            cache.k_sink[s, :, t], cache.v_sink[s, :, t] = k[i], v[i]  # t counts from the end: -sinks .. -1
            continue
        index, offset = divmod(t, cache.page)
        page = int(page_table[s, index])
        codes, scale, minimum = quantize_tokens(v[i])
        cache.v_codes[page, :, offset] = pack_nibbles(codes)
        cache.v_scale[page, :, offset], cache.v_min[page, :, offset] = scale, minimum
        cache.k_open[s, :, offset] = k[i]
        if offset == cache.page - 1:
            codes, scale, minimum = quantize_key_page(cache.k_open[s])
            cache.k_codes[page] = pack_nibbles(codes)
            cache.k_scale[page], cache.k_min[page] = scale, minimum


# How a schema takes a cache that is written.
CACHE_SCHEMA = (
    "Tensor(a!) k_codes, Tensor(b!) k_scale, Tensor(c!) k_min, Tensor(d!) v_codes, Tensor(e!) v_scale,"
    " Tensor(f!) v_min, Tensor(g!) k_open, Tensor(h!) k_sink, Tensor(i!) v_sink"
)


def _append(k: Tensor, v: Tensor, slot: Tensor, position: Tensor, page_table: Tensor, *cache: Tensor) -> None:
    kv4_append_ref(k, v, slot, position, page_table, KV4Pages(*cache))


def _fake(k: Tensor, v: Tensor, slot: Tensor, position: Tensor, page_table: Tensor, *cache: Tensor) -> None:
    return None


define_op(
    f"kv4_append(Tensor k, Tensor v, Tensor slot, Tensor position, Tensor page_table, {CACHE_SCHEMA}) -> ()",
    _append,
    _fake,
)


def _append_gpu(k: Tensor, v: Tensor, slot: Tensor, position: Tensor, page_table: Tensor, *cache: Tensor) -> None:
    from comet_cuda.kv4_append_cuda import kv4_append_gpu  # which imports this file's siblings

    kv4_append_gpu(k, v, slot, position, page_table, *cache)


LIBRARY.impl("kv4_append", _append_gpu, "CUDA")


def configurations(family: str) -> "list[Configuration]":
    """How kv4_append.cu is compiled on a GPU family."""
    from comet_cuda.kv4_append_cuda import configurations

    return configurations(family)


def kv4_append(k: Tensor, v: Tensor, slot: Tensor, position: Tensor, page_table: Tensor, cache: KV4Pages) -> None:
    """The op behind `kv4_append_ref`, on whatever device the cache is on; on a GPU index tensors are int32."""
    torch.ops.comet.kv4_append(k, v, slot, position, page_table, *cache.tensors)
