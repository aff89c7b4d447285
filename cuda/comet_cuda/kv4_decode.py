"""kv4_decode: attention of one new token per sequence over the paged 4-bit cache.

The rule, the same in prefill, decode and evaluation: query t reads key j in 4 bit if j's page is complete and comes
before t's page, else in 16 bit; values always in 4 bit; sinks in 16 bit. In decode t is the newest token, so exactly
the pages before its own are read in 4 bit.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from comet_cuda.affine import dequantize_minmax
from comet_cuda.int4 import unpack_nibbles
from comet_cuda.kv4_append import KV4Pages
from comet_cuda.library import LIBRARY, define_op

if TYPE_CHECKING:
    from comet_cuda.jit import Configuration


def gather_sequence(cache: KV4Pages, slot: int, length: int, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as the newest token of one sequence reads them: float32 [H, length, D] each."""
    sinks = min(cache.sinks, length)
    keys, values = [cache.k_sink[slot, :, :sinks].float()], [cache.v_sink[slot, :, :sinks].float()]
    paged = length - sinks
    for index in range(-(-paged // cache.page)):
        page, count = int(pages[index]), min(cache.page, paged - index * cache.page)
        is_own_page = (index + 1) * cache.page >= paged
        if is_own_page:
            keys.append(cache.k_open[slot, :, :count].float())
        else:
            scale, minimum = cache.k_scale[page][:, None], cache.k_min[page][:, None]
            keys.append(dequantize_minmax(unpack_nibbles(cache.k_codes[page]), scale, minimum))
        codes = unpack_nibbles(cache.v_codes[page][:, :count])
        values.append(
            dequantize_minmax(codes, cache.v_scale[page][:, :count, None], cache.v_min[page][:, :count, None])
        )
    return torch.cat(keys, dim=1), torch.cat(values, dim=1)


def kv4_decode_ref(
    q: Tensor,
    slot: Tensor,
    length: Tensor,
    page_table: Tensor,
    cache: KV4Pages,
    softmax_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_length: int = 0,
) -> Tensor:
    """Attention of the newest token of each sequence.

    Args:
        q: float [N, Hq, D], after the rotary embedding; Hq is a multiple of the kv heads.
        slot: int [N], sequence slots; a row of a negative slot is padding and becomes zeros.
        length: int [N], tokens in the cache of each sequence, the newest included; at least 1.
        page_table: int [S, pages a sequence].
        cache: the layer's cache, the newest token already appended.
        softmax_scale: factor on q . k, usually D**-0.5.
        window: if positive, only the newest `window` tokens are read.
        softcap: if positive, scores become softcap * tanh(scores / softcap).
        max_length: no sequence is longer; 0 is what the page table holds. Plans the launch only: the result's last
            bits depend on it, nothing else.

    Returns:
        q's type [N, Hq, D]; softmax and sums in float32.
    """
    rows = []
    for i in range(q.shape[0]):
        s, n = int(slot[i]), int(length[i])
        if s < 0:
            rows.append(torch.zeros_like(q[i], dtype=torch.float32))
            continue
        keys, values = gather_sequence(cache, s, n, page_table[s])
        repeat = q.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
        scores = torch.einsum("hd,htd->ht", q[i].float(), keys) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if window > 0:
            scores[:, : max(n - window, 0)] = float("-inf")
        rows.append(torch.einsum("ht,htd->hd", scores.softmax(-1), values))
    return torch.stack(rows).to(q.dtype)


def _decode(
    q: Tensor,
    slot: Tensor,
    length: Tensor,
    page_table: Tensor,
    cache: list[Tensor],
    softmax_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_length: int = 0,
) -> Tensor:
    return kv4_decode_ref(q, slot, length, page_table, KV4Pages(*cache), softmax_scale, window, softcap, max_length)


def _fake(
    q: Tensor,
    slot: Tensor,
    length: Tensor,
    page_table: Tensor,
    cache: list[Tensor],
    softmax_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_length: int = 0,
) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


define_op(
    "kv4_decode(Tensor q, Tensor slot, Tensor length, Tensor page_table, Tensor[] cache, float softmax_scale,"
    " int window=0, float softcap=0.0, int max_length=0) -> Tensor",
    _decode,
    _fake,
)


def _decode_gpu(
    q: Tensor,
    slot: Tensor,
    length: Tensor,
    page_table: Tensor,
    cache: list[Tensor],
    softmax_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_length: int = 0,
) -> Tensor:
    from comet_cuda.kv4_decode_cuda import kv4_decode_gpu

    return kv4_decode_gpu(q, slot, length, page_table, cache, softmax_scale, window, softcap, max_length)


LIBRARY.impl("kv4_decode", _decode_gpu, "CUDA")


def configurations(family: str) -> "list[Configuration]":
    """How kv4_decode.cu is compiled on a GPU family."""
    from comet_cuda.kv4_decode_cuda import configurations

    return configurations(family)


def kv4_decode(
    q: Tensor,
    slot: Tensor,
    length: Tensor,
    page_table: Tensor,
    cache: KV4Pages,
    softmax_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    max_length: int = 0,
) -> Tensor:
    """The op behind `kv4_decode_ref`, on whatever device the cache is on; on a GPU index tensors are int32."""
    out: Tensor = torch.ops.comet.kv4_decode(
        q, slot, length, page_table, list(cache.tensors), softmax_scale, window, softcap, max_length
    )
    return out
