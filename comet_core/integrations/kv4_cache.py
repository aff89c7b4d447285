"""A transformers Cache whose pages are 4 bit: what `generate` on a packed model fills and reads.

transformers hands a layer's new keys and values to the cache and the cache's answer to the attention function. This
cache answers with the new tokens alone and its own layer attached, so that kv_cache.py's attention comes back here
with query and mask: one prompt in one shot runs the same function as scoring does; everything after reads the pages,
one page of queries at a time, which is the rule of kv_cache.py word by word. `decode` is the same for single tokens
through the ops kv4_append and kv4_decode, where their kernels take the model's shape; codes are then tiled as those
read them (kv4_layout.py).

B sequences, H kv heads, T tokens a page, D head dimension. Page p of sequence b has number p * B + b in the pool, so
the pool grows at its end. Sequences that start in different columns (left padding) are served group by group.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from comet_core.kv_cache import PAGED, attend, kv4_attention
from comet_core.recipe import KVCacheSpec
from comet_cuda.affine import dequantize_minmax
from comet_cuda.errors import CometError
from comet_cuda.int4 import pack_nibbles, unpack_nibbles
from comet_cuda.kv4_append import KV4Pages, allocate_pages, kv4_append, quantize_key_page, quantize_tokens
from comet_cuda.kv4_append_cuda import ELEMENTS, HEAD_DIMS, PAGES
from comet_cuda.kv4_decode import kv4_decode
from comet_cuda.kv4_layout import tile_keys, tile_values, untile_keys, untile_values

GROWTH = 8  # the pool grows by at least 1 / 8
POOLED = ("k_codes", "k_scale", "k_min", "v_codes", "v_scale", "v_min")  # fields of KV4Pages that are by page


def cache_for(model: nn.Module) -> "KV4Cache | None":
    """An empty cache for a model whose attention is a 4-bit one of kv_cache.py with keys per channel, else None."""
    quantizer = getattr(model, "hf_quantizer", None)
    spec = quantizer.manifest.recipe.kv_cache if quantizer is not None else KVCacheSpec(bits=16)
    config: Any = model.config
    config = config.get_text_config(decoder=True)
    ours = str(config._attn_implementation).startswith("comet-kv4-")
    return KV4Cache(spec, config.num_hidden_layers) if ours and spec.key_granularity == "channel" else None


@lru_cache(maxsize=4)
def _indices(places: tuple[int, ...], pages: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, positions and page table of one token a sequence, the same in all layers of a step."""
    position = torch.tensor(places, dtype=torch.int32, device=device)
    slot = torch.arange(len(places), dtype=torch.int32, device=device)
    numbers = torch.arange(pages, dtype=torch.int32, device=device)
    return slot, position, numbers.view(-1, len(places)).T.contiguous()


class KV4Cache(Cache):  # type: ignore[misc]
    """One KV4Layer per decoder layer."""

    def __init__(self, spec: KVCacheSpec, layers: int) -> None:
        super().__init__(layers=[KV4Layer(spec) for _ in range(layers)])

    @property
    def nbytes(self) -> int:
        """Memory of all codes, parameters, open pages and sinks."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, KV4Layer))


class KV4Layer(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one decoder layer."""

    is_sliding = False  # windows are the mask's business; every key is kept
    is_compileable = False

    def __init__(self, spec: KVCacheSpec) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spec = spec
        self.tokens = 0  # columns seen
        self.pages: KV4Pages | None = None
        self.tiled = False  # the codes lie as the kernels read them, and single tokens go through the ops

    @property
    def nbytes(self) -> int:
        """Memory of this layer."""
        return 0 if self.pages is None else sum(tensor.nbytes for tensor in vars(self.pages).values())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Called with the first keys [B, H, n, D]."""
        batch, heads, _, width = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        shape = (0, batch, heads, width, self.spec.page, self.spec.sinks)
        self.pages = allocate_pages(*shape, key_states.dtype, key_states.device)
        taken = width in HEAD_DIMS and self.spec.page in PAGES and key_states.dtype in ELEMENTS
        self.tiled = key_states.is_cuda and taken
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """New keys and values [B, H, n, D] -> the same, with this layer attached; `attend` stores them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.tokens += key_states.shape[2]
        keys = key_states.view_as(key_states)
        setattr(keys, PAGED, self)
        return keys, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float, window: int
    ) -> Tensor:
        """Attention of new tokens over all, by the rule of kv_cache.py; stores the new tokens.

        Args:
            query [B, Hq, n, D]; key, value [B, H, n, D]: new tokens. mask: bool [B, 1, n, columns].
            window: tokens that a query reads if positive (the mask says so too).
        """
        if getattr(mask, "comet_gaps", False):
            raise CometError("the attention mask has gaps or pads on the right", "pad on the left to generate")
        past = self.tokens - key.shape[2]
        starts = getattr(mask, "comet_starts", [0] * query.shape[0])
        if self.tiled and past and key.shape[2] == 1:
            return self.decode(query, key, value, starts, scale, softcap, window)
        out = (
            kv4_attention(query, key, value, mask, self.spec, scale, softcap) if past == 0 else torch.empty_like(query)
        )
        for start in sorted(set(starts)):
            rows = torch.tensor([b for b, own in enumerate(starts) if own == start], device=query.device)
            for low, high in self._steps(past, start, whole=past == 0):
                new = slice(max(low, start) - past, high - past)
                if new.start < new.stop:
                    self._append(rows, key[rows, :, new], value[rows, :, new], max(low, start) - start)
                if past and high > start:
                    keys, values = self.gather(rows, high - start)
                    part = mask[rows, :, low - past : high - past, start:high]
                    read = attend(query[rows, :, low - past : high - past].float(), keys, values, part, scale, softcap)
                    out[rows, :, low - past : high - past] = read.to(out.dtype)
        return out

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, starts: list[int], scale: float, softcap: float, window: int
    ) -> Tensor:
        """`attend` for one new token a sequence, through the ops kv4_append and kv4_decode. starts: by sequence."""
        places = tuple(self.tokens - 1 - start for start in starts)
        longest = max(places) + 1
        self._grow(-(-(longest - self.spec.sinks) // self.spec.page))
        assert self.pages is not None
        slot, position, table = _indices(places, self.pages.k_codes.shape[0], query.device)
        new = [tensor[:, :, 0].contiguous() for tensor in (query, key, value)]
        kv4_append(new[1], new[2], slot, position, table, self.pages)
        out = kv4_decode(new[0], slot, position + 1, table, self.pages, scale, window, softcap, longest)
        return out[:, :, None]

    def _steps(self, past: int, start: int, *, whole: bool) -> list[tuple[int, int]]:
        """Columns [past, tokens) cut where a page of sequences that start in column `start` begins."""
        if whole:
            return [(past, self.tokens)]
        first, page = start + self.spec.sinks, self.spec.page
        cuts = [column for column in range(past + 1, self.tokens) if column > first and (column - first) % page == 0]
        edges = [past, *cuts, self.tokens]
        return list(pairwise(edges))

    def _append(self, rows: Tensor, k: Tensor, v: Tensor, position: int) -> None:
        """Store tokens [R, H, n, D] of sequences `rows`, the first at `position`: kv4_append for whole stretches."""
        assert self.pages is not None
        sinks, page = self.spec.sinks, self.spec.page
        in_sinks = max(min(sinks - position, k.shape[2]), 0)
        if in_sinks:
            self.pages.k_sink[rows, :, position : position + in_sinks] = k[:, :, :in_sinks]
            self.pages.v_sink[rows, :, position : position + in_sinks] = v[:, :, :in_sinks]
        k, v = k[:, :, in_sinks:], v[:, :, in_sinks:]
        begin = max(position - sinks, 0)
        end = begin + k.shape[2]
        if begin == end:
            return
        self._grow(-(-end // page))
        pool, batch = self.pages, self.pages.k_open.shape[0]
        at = torch.arange(begin, end, device=k.device)
        number, slot = (at // page)[None] * batch + rows[:, None], (at % page)[None].expand(len(rows), -1)  # [R, n]
        codes, scale, minimum = quantize_tokens(v.transpose(1, 2))  # [R, n, H, D]
        touched, index = number.unique(return_inverse=True)
        values = self._as(untile_values, pool.v_codes[touched])
        values[index, :, slot] = pack_nibbles(codes)
        pool.v_codes[touched] = self._as(tile_values, values)
        pool.v_scale[number, :, slot], pool.v_min[number, :, slot] = scale, minimum
        held = begin % page
        keys = torch.cat((pool.k_open[rows, :, :held], k), 2)  # from the start of the open page
        whole = keys.shape[2] // page
        if whole:
            done = keys[:, :, : whole * page].unflatten(2, (whole, page))  # [R, H, pages, T, D]
            codes, scale, minimum = quantize_key_page(done)
            numbers = (torch.arange(whole, device=k.device) + begin // page)[None] * batch + rows[:, None]
            packed = pack_nibbles(codes).transpose(1, 2)  # [R, pages, H, T, D / 2]
            pool.k_codes[numbers.flatten()] = self._as(tile_keys, packed.flatten(0, 1))
            pool.k_scale[numbers], pool.k_min[numbers] = scale.transpose(1, 2), minimum.transpose(1, 2)
        rest = keys[:, :, whole * page :] if keys.shape[2] % page else keys[:, :, -page:]  # a full page stays open
        pool.k_open[rows, :, : rest.shape[2]] = rest

    def _as(self, order: Callable[[Tensor], Tensor], codes: Tensor) -> Tensor:
        """codes uint8 [P, H, T, D / 2] in another order, in a layer that has two."""
        return order(codes) if self.tiled else codes

    def _grow(self, needed: int) -> None:
        """Make room for `needed` pages a sequence."""
        assert self.pages is not None
        batch = self.pages.k_open.shape[0]
        have = self.pages.k_codes.shape[0] // batch
        if needed <= have:
            return
        room = max(needed, have + have // GROWTH)
        grown = {}
        for name in POOLED:
            old: Tensor = getattr(self.pages, name)
            new = old.new_zeros(room * batch, *old.shape[1:])
            new[: old.shape[0]] = old
            grown[name] = new
        self.pages = replace(self.pages, **grown)

    def gather(self, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `length` tokens as the newest of them reads them, float32 [R, H, length, D] each."""
        assert self.pages is not None
        pool, batch, page = self.pages, self.pages.k_open.shape[0], self.spec.page
        sinks = min(self.spec.sinks, length)
        paged = length - sinks
        before, total = max(paged - 1, 0) // page, -(-paged // page)  # pages before the newest token's own; all
        numbers = torch.arange(total, device=rows.device)[None] * batch + rows[:, None]  # [R, pages]
        old = numbers[:, :before]
        k_codes = self._as(untile_keys, pool.k_codes[old.flatten()]).unflatten(0, old.shape)
        v_codes = self._as(untile_values, pool.v_codes[numbers.flatten()]).unflatten(0, numbers.shape)
        keys = dequantize_minmax(
            unpack_nibbles(k_codes), pool.k_scale[old][..., None, :], pool.k_min[old][..., None, :]
        )
        values = dequantize_minmax(
            unpack_nibbles(v_codes), pool.v_scale[numbers][..., None], pool.v_min[numbers][..., None]
        )
        flat = [x.transpose(1, 2).flatten(2, 3) for x in (keys, values)]  # [R, pages, H, T, D] -> [R, H, pages * T, D]
        own = pool.k_open[rows, :, : paged - before * page].float()
        k_sink, v_sink = pool.k_sink[rows, :, :sinks].float(), pool.v_sink[rows, :, :sinks].float()
        return torch.cat((k_sink, flat[0], own), 2), torch.cat((v_sink, flat[1][:, :, :paged]), 2)

    def get_seq_length(self) -> int:
        """Columns seen."""
        return self.tokens

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of the mask for `query_length` new tokens, and the first of them."""
        return self.tokens + query_length, 0

    def reset(self) -> None:
        """Forget everything."""
        self.tokens, self.pages, self.is_initialized = 0, None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes what sequence beam_idx[b] was."""
        if self.pages is None:
            return
        batch = self.pages.k_open.shape[0]
        index = beam_idx.to(self.pages.k_open.device)
        moved = {}
        for name, tensor in vars(self.pages).items():
            by_sequence = tensor.unflatten(0, (-1, batch)) if name in POOLED else tensor[None]
            moved[name] = by_sequence.index_select(1, index).flatten(0, 1)
        self.pages = KV4Pages(**moved)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times."""
        if self.pages is not None:
            batch = self.pages.k_open.shape[0]
            self.reorder_cache(torch.arange(batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: the keys of a quantized page are gone."""
        if tokens_to_remove:
            raise CometError("a 4-bit KV cache cannot take tokens back", "generate without an assistant model")
