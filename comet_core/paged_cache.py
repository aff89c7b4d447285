"""The KV cache of a running batch, 4-bit and paged or 16-bit and contiguous, behind one interface.

In: the fused output of q, k and v of one layer, and where its tokens stand. Out: the attention's output; keys and
values have been appended. Sequences live in slots. The decision: everything that changes from step to step (slots,
positions, lengths, page tables) is a tensor on the device, so one CUDA graph serves all steps of a batch size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

import comet_cuda.sixteen_bit  # noqa: F401  (registers rope_append_16)
from comet_core.llama_shape import LlamaShape
from comet_cuda.errors import CometError
from comet_cuda.kv4_append import allocate_pages
from comet_cuda.kv4_decode import kv4_decode
from comet_cuda.kv4_prefill import kv4_prefill
from comet_cuda.rope import rope_append, rope_qk_, split_heads

FILLS_A_GPU = 256  # sequences times kv heads from which attention needs no split along the keys


@dataclass(frozen=True)
class Rotary:
    """Angles of the rotary embedding, one row a position."""

    cos: Tensor  # f32 [positions, D / 2]
    sin: Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention needs beside q, k and v."""

    scale: float  # on q . k
    window: int  # newest tokens that are read; 0: all
    q_norm: Tensor | None  # [D], Qwen3
    k_norm: Tensor | None
    eps: float


@dataclass(frozen=True)
class Step:
    """One new token of each of B sequences. Slot -1 pads a batch: its row writes nothing and its output is void."""

    slot: Tensor  # int32 [B]
    position: Tensor  # int32 [B], of the new token
    length: Tensor  # int32 [B], position + 1
    most: int  # no length exceeds it
    uniform: int = 0  # if positive: every length is this and row i is slot i, which only a static batch can promise


@dataclass(frozen=True)
class Chunk:
    """New tokens of R sequences, one after the other, N in all."""

    slot: Tensor  # int32 [R]
    position: Tensor  # int32 [R], of the first new token
    starts: Tensor  # int32 [R + 1], its row
    token_slot: Tensor  # int32 [N]
    token_position: Tensor  # int32 [N]
    pieces: tuple[tuple[int, int, int], ...]  # the same by sequence on the host: slot, position, new tokens


class Cache(Protocol):
    """The keys and values of all layers."""

    context: int  # tokens a slot can hold
    slots: int

    def reserve(self, slot: int, tokens: int) -> bool:
        """Make room for a sequence of at most `tokens` in a free slot; False if there is none now."""

    def release(self, slot: int) -> None:
        """The sequence is done."""

    def begin(self, work: Step | Chunk) -> None:
        """Called before the first layer of each step or chunk: what all layers share is computed once."""

    def prefill(self, layer: int, qkv: Tensor, chunk: Chunk, spec: AttentionSpec) -> Tensor:
        """qkv: [N, (Hq + 2 H) D] -> [N, Hq * D]. qkv may be overwritten."""

    def decode(self, layer: int, qkv: Tensor, step: Step, spec: AttentionSpec) -> Tensor:
        """qkv: [B, (Hq + 2 H) D] -> [B, Hq * D]."""

    def tensors(self) -> list[Tensor]:
        """What it keeps in memory."""


class KV4Cache:
    """Pages of 4-bit keys and values, taken from one pool as sequences come and go."""

    def __init__(
        self,
        shape: LlamaShape,
        rotary: Rotary,
        slots: int,
        context: int,
        *,
        page: int,
        sinks: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Room for `slots` sequences of `context` tokens each."""
        self.shape, self.rotary, self.slots, self.context = shape, rotary, slots, context
        self.page, self.sinks = page, sinks
        a_slot = self._pages(context)
        self.layers = [
            allocate_pages(slots * a_slot, slots, shape.kv_heads, shape.head_dim, page, sinks, dtype, device)
            for _ in range(shape.layers)
        ]
        self.table = torch.zeros(slots, a_slot, dtype=torch.int32, device=device)  # page numbers, by slot
        self._free = list(range(slots * a_slot))
        self._held: dict[int, list[int]] = {}

    def _pages(self, tokens: int) -> int:
        return max(1, -(-(tokens - self.sinks) // self.page))

    def reserve(self, slot: int, tokens: int) -> bool:
        wanted = self._pages(tokens)
        if slot in self._held or wanted > len(self._free) or tokens > self.context:
            return False
        pages, self._free = self._free[:wanted], self._free[wanted:]
        self._held[slot] = pages
        self.table[slot, :wanted] = torch.tensor(pages, dtype=torch.int32)
        return True

    def release(self, slot: int) -> None:
        self._free = self._held.pop(slot) + self._free

    def begin(self, work: Step | Chunk) -> None:
        """Nothing: the kernels read slots and positions themselves."""

    def prefill(self, layer: int, qkv: Tensor, chunk: Chunk, spec: AttentionSpec) -> Tensor:
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        rope_qk_(
            qkv,
            self.rotary.cos,
            self.rotary.sin,
            chunk.token_position,
            heads,
            kv_heads,
            spec.q_norm,
            spec.k_norm,
            spec.eps,
        )
        q, k, v = split_heads(qkv, heads, kv_heads)
        return kv4_prefill(
            q,
            k,
            v,
            chunk.starts,
            chunk.slot,
            chunk.position,
            self.table,
            self.layers[layer],
            spec.scale,
            spec.window,
            0.0,
            max(new for _, _, new in chunk.pieces),
        ).flatten(1)

    def decode(self, layer: int, qkv: Tensor, step: Step, spec: AttentionSpec) -> Tensor:
        cache = self.layers[layer]
        angles = (self.rotary.cos, self.rotary.sin)
        q = rope_append(qkv, *angles, step.slot, step.position, self.table, cache, spec.q_norm, spec.k_norm, spec.eps)
        out = kv4_decode(q, step.slot, step.length, self.table, cache, spec.scale, spec.window, 0.0, step.most)
        return out.flatten(1)

    def tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in layer.tensors]


class _Places(NamedTuple):
    """Where the new tokens of a 16-bit cache go and what they read."""

    row: Tensor  # int32 [N], of each new token
    starts: Tensor  # int32 [R + 1], the first new token of each sequence
    group_starts: Tensor  # the same, counted in tokens times query heads of a group
    first: Tensor  # int32 [R + 1], the row of each sequence's first key (the last entry is not read)
    length: Tensor  # int32 [R], keys of each sequence


class SixteenBitCache:
    """Keys and values as they are, [slots * context + 1, H, D] a layer; the last row takes what padding rows write."""

    def __init__(
        self,
        shape: LlamaShape,
        rotary: Rotary,
        slots: int,
        context: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.shape, self.rotary, self.slots, self.context = shape, rotary, slots, context
        rows = slots * context + 1
        sizes = (rows, shape.kv_heads, shape.head_dim)
        self.keys = [torch.zeros(sizes, dtype=dtype, device=device) for _ in range(shape.layers)]
        self.values = [torch.zeros(sizes, dtype=dtype, device=device) for _ in range(shape.layers)]
        self._held: set[int] = set()

    def reserve(self, slot: int, tokens: int) -> bool:
        if slot in self._held or tokens > self.context:
            return False
        self._held.add(slot)
        return True

    def release(self, slot: int) -> None:
        self._held.remove(slot)

    def begin(self, work: Step | Chunk) -> None:
        first = torch.where(work.slot < 0, self.slots, work.slot) * self.context
        if isinstance(work, Step):
            slot, position = work.slot, work.position
            length = torch.where(slot < 0, 1, work.length)  # behind the padding's one row there is nothing to read
            starts = torch.arange(len(slot) + 1, dtype=torch.int32, device=slot.device)
        else:
            slot, position, starts = work.token_slot, work.token_position, work.starts
            length = work.position + starts.diff()
        row = torch.where(slot < 0, self.slots * self.context, slot * self.context + position)
        self._places = _Places(
            row, starts, starts * (self.shape.heads // self.shape.kv_heads), nn.functional.pad(first, (0, 1)), length
        )

    def _append(self, layer: int, qkv: Tensor, position: Tensor, spec: AttentionSpec, by_group: bool = False) -> Tensor:
        q: Tensor = torch.ops.comet.rope_append_16(
            qkv,
            spec.q_norm,
            spec.k_norm,
            spec.eps,
            self.rotary.cos,
            self.rotary.sin,
            position,
            self._places.row,
            self.keys[layer],
            self.values[layer],
            by_group,
        )
        return q

    def prefill(self, layer: int, qkv: Tensor, chunk: Chunk, spec: AttentionSpec) -> Tensor:
        q = self._append(layer, qkv, chunk.token_position, spec)
        if not q.is_cuda:
            return self._by_sequence(layer, q, chunk.pieces, spec)
        return self._flash(layer, q, max(new for _, _, new in chunk.pieces), self.context, spec)

    def decode(self, layer: int, qkv: Tensor, step: Step, spec: AttentionSpec) -> Tensor:
        batch, heads = qkv.shape[0], self.shape.kv_heads
        group = self.shape.heads // heads
        if step.uniform:
            return self._dense(layer, self._append(layer, qkv, step.position, spec), step.uniform, spec)
        if not qkv.is_cuda:
            q = self._append(layer, qkv, step.position, spec)
            pieces = [(s, p, 1) for s, p in zip(step.slot.tolist(), step.position.tolist(), strict=True)]
            return self._by_sequence(layer, q, pieces, spec)
        if group == 1 or spec.window or batch * heads < FILLS_A_GPU:  # torch splits the keys over ctas
            return self._flash(layer, self._append(layer, qkv, step.position, spec), 1, step.most, spec)
        q = self._append(layer, qkv, step.position, spec, by_group=True)
        out = self._flash(layer, q, group, step.most, spec, by_group=True)
        return out.view(batch, group, heads, -1).transpose(1, 2).reshape(batch, -1)

    def _flash(
        self, layer: int, q: Tensor, most_new: int, most: int, spec: AttentionSpec, by_group: bool = False
    ) -> Tensor:
        """torch's FlashAttention over ragged sequences; `by_group`: the queries of a group stand as its tokens."""
        window = spec.window - 1 if spec.window else -1
        out = torch.ops.aten._flash_attention_forward(
            q,
            self.keys[layer],
            self.values[layer],
            self._places.group_starts if by_group else self._places.starts,
            self._places.first,
            most_new,
            most,
            0.0,
            not by_group,
            False,
            scale=spec.scale,
            window_size_left=window,
            window_size_right=0 if spec.window else -1,
            seqused_k=self._places.length,
        )[0]
        return out.flatten(1)  # type: ignore[no-any-return]

    def _dense(self, layer: int, q: Tensor, length: int, spec: AttentionSpec) -> Tensor:
        """Sequences of one length: cuDNN's attention where torch has it, the fastest 16-bit one on a Hopper GPU."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        first = max(0, length - spec.window) if spec.window else 0
        keys, values = (
            rows[:-1].view(self.slots, self.context, *rows.shape[1:])[: len(q), first:length].transpose(1, 2)
            for rows in (self.keys[layer], self.values[layer])
        )
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(backends, set_priority=True):
            out = nn.functional.scaled_dot_product_attention(
                q[:, :, None], keys, values, scale=spec.scale, enable_gqa=True
            )
        return out.flatten(1)

    def _by_sequence(
        self, layer: int, q: Tensor, pieces: Sequence[tuple[int, int, int]], spec: AttentionSpec
    ) -> Tensor:
        """The same, one sequence at a time."""
        out, row = torch.zeros_like(q), 0
        for slot, position, new in pieces:
            if slot >= 0:
                rows = slice(slot * self.context, slot * self.context + position + new)
                own = torch.arange(position, position + new, device=q.device)[:, None]
                column = torch.arange(position + new, device=q.device)
                seen = column <= own
                if spec.window:
                    seen &= column > own - spec.window
                read = (q[row : row + new], self.keys[layer][rows], self.values[layer][rows])
                queries, keys, values = (tensor[None].transpose(1, 2) for tensor in read)
                mixed = nn.functional.scaled_dot_product_attention(
                    queries, keys, values, attn_mask=seen, scale=spec.scale, enable_gqa=True
                )
                out[row : row + new] = mixed[0].transpose(0, 1)
            row += new
        return out.flatten(1)

    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values]


def make_cache(
    kv_bits: int,
    shape: LlamaShape,
    rotary: Rotary,
    slots: int,
    context: int,
    *,
    page: int,
    sinks: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Cache:
    """An empty cache. Raises CometError where the angles do not reach as far as `context`."""
    if context > rotary.cos.shape[0]:
        raise CometError(
            f"a context of {context:,} tokens; {shape.name} knows {rotary.cos.shape[0]:,} positions",
            "ask for fewer tokens",
        )
    if kv_bits == 16:
        return SixteenBitCache(shape, rotary, slots, context, dtype=dtype, device=device)
    return KV4Cache(shape, rotary, slots, context, page=page, sinks=sinks, dtype=dtype, device=device)
