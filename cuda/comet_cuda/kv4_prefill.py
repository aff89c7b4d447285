"""kv4_prefill: a chunk of each sequence's tokens is appended to the 4-bit cache and attends to all before it.

The rule is the one of kv4_decode: query t reads key j in 4 bit if j's page is complete and comes before t's page, else
in 16 bit; values always in 4 bit; sinks in 16 bit. Appending belongs to the op, because 16-bit keys of the first page,
written by earlier chunks, lie in the open page, which the chunk's last page overwrites. One shot, chunks of any size
and decode give the same cache, and the same answers up to rounding.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from comet_cuda.kv4_append import CACHE_SCHEMA, KV4Pages, kv4_append_ref
from comet_cuda.kv4_decode import gather_sequence
from comet_cuda.library import LIBRARY, define_op

if TYPE_CHECKING:
    from comet_cuda.jit import Configuration


def _attend(q: Tensor, keys: Tensor, values: Tensor, first: int, scale: float, window: int, softcap: float) -> Tensor:
    """Queries [n, Hq, D] at positions first, first + 1, ... over keys and values f32 [H, length, D] -> f32."""
    repeat = q.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
    scores = torch.einsum("nhd,htd->hnt", q.float(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(first, first + q.shape[0], device=q.device)[:, None]
    column = torch.arange(keys.shape[1], device=q.device)
    hidden = column > own
    if window > 0:
        hidden |= column <= own - window
    return torch.einsum("hnt,htd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def kv4_prefill_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    slot: Tensor,
    position: Tensor,
    page_table: Tensor,
    cache: KV4Pages,
    softmax_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_new: int = 0,
) -> Tensor:
    """Append N tokens of R sequences and attend.

    Args:
        q: float [N, Hq, D], k, v: float [N, H, D], after the rotary embedding; rows may be strided.
        starts: int [R + 1]; rows starts[r] to starts[r + 1] are the new tokens of sequence r, in order.
        slot: int [R], its sequence slot; negative: skipped, its rows become zeros.
        position: int [R], position of its first new token: the tokens that the cache held before.
        page_table: int [S, pages a sequence], by slot.
        cache: the layer's cache, written in place.
        softmax_scale, window, softcap: as in kv4_decode.
        max_new: no sequence has more new tokens; 0 is N. Plans the launch only.

    Returns:
        q's type [N, Hq, D]; softmax and sums in float32.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for r in range(slot.shape[0]):
        s, begin, end, old = int(slot[r]), int(starts[r]), int(starts[r + 1]), int(position[r])
        if s < 0 or begin == end:
            continue
        base = cache.sinks + max(old - cache.sinks, 0) // cache.page * cache.page  # first token of the open page
        waiting = cache.k_open[s, :, : max(old - base, 0)].clone()
        new = end - begin
        table = page_table.to(k.device)
        positions = torch.arange(old, old + new)
        kv4_append_ref(k[begin:end], v[begin:end], torch.full((new,), s), positions, table, cache)
        keys, values = gather_sequence(cache, s, old + new, table[s])
        exact = keys.clone()  # keys in 16 bit from the first query's page on
        exact[:, old - waiting.shape[1] : old] = waiting
        exact[:, old : old + new] = k[begin:end].transpose(0, 1)
        done = 0
        while done < new:
            first = old + done
            page_start = cache.sinks + (first - cache.sinks) // cache.page * cache.page
            stop = min(cache.sinks if first < cache.sinks else page_start + cache.page, old + new)
            low = 0 if first < cache.sinks else page_start
            seen = torch.cat((keys[:, :low], exact[:, low:stop]), 1)
            rows = slice(begin + done, begin + stop - old)
            out[rows] = _attend(q[rows], seen, values[:, :stop], first, softmax_scale, window, softcap)
            done = stop - old
    return out.to(q.dtype)


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    slot: Tensor,
    position: Tensor,
    page_table: Tensor,
    *cache_and_options: Tensor | float,
) -> Tensor:
    cache, options = KV4Pages(*cache_and_options[:9]), cache_and_options[9:]  # type: ignore[arg-type]
    return kv4_prefill_ref(q, k, v, starts, slot, position, page_table, cache, *options)  # type: ignore[arg-type]


def _fake(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


define_op(
    "kv4_prefill(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor slot, Tensor position, Tensor page_table,"
    f" {CACHE_SCHEMA}, float softmax_scale, int window, float softcap, int max_new) -> Tensor",
    _prefill,
    _fake,
)


def _prefill_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    slot: Tensor,
    position: Tensor,
    page_table: Tensor,
    *cache_and_options: Tensor | float,
) -> Tensor:
    from comet_cuda.kv4_prefill_cuda import kv4_prefill_gpu

    cache, options = cache_and_options[:9], cache_and_options[9:]
    return kv4_prefill_gpu(q, k, v, starts, slot, position, page_table, cache, *options)  # type: ignore[arg-type]


LIBRARY.impl("kv4_prefill", _prefill_gpu, "CUDA")


def configurations(family: str) -> "list[Configuration]":
    """How kv4_prefill.cu is compiled on a GPU family."""
    from comet_cuda.kv4_prefill_cuda import configurations

    return configurations(family)


def kv4_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    slot: Tensor,
    position: Tensor,
    page_table: Tensor,
    cache: KV4Pages,
    softmax_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_new: int = 0,
) -> Tensor:
    """The op behind `kv4_prefill_ref`, on whatever device the cache is on; on a GPU index tensors are int32."""
    out: Tensor = torch.ops.comet.kv4_prefill(
        q, k, v, starts, slot, position, page_table, *cache.tensors, softmax_scale, window, softcap, max_new
    )
    return out
