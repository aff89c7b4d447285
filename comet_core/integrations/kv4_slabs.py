"""4-bit pages in memory that another program hands out: how it is cut, and where a sequence's pages are.

A server gives a sequence memory in slabs (vLLM calls them blocks) of several pages, and a table of slabs by sequence.
A layer's memory, all slabs of it, is cut here into the tensors of KV4Pages: pages are numbered slab by slab, and every
slab has room for one open page and for the sinks. A sequence uses those of its first slab, whose number is therefore
its slot: it stays the same from the first token to the last, no other sequence has it, and nobody has to be told when
a sequence ends. The price is the room in all other slabs, the smaller the more pages a slab has (`nbytes`).

No server's code in here.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from comet_cuda.kv4_append import PARAM_DTYPE, KV4Pages

EMPTY = -1  # the slot of a row that is padding


@dataclass(frozen=True)
class SlabFormat:
    """What one slab of one layer holds."""

    kv_heads: int
    head_dim: int
    page: int  # tokens
    pages: int  # of a slab
    sinks: int  # tokens
    dtype: torch.dtype  # of open keys and sinks

    @property
    def tokens(self) -> int:
        """Tokens of a sequence that a slab stands for."""
        return self.page * self.pages

    @property
    def _parts(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each tensor of KV4Pages, for one slab."""
        heads, dim, page = self.kv_heads, self.head_dim, self.page
        codes = (torch.uint8, (self.pages, heads, page, dim // 2))
        of_keys, of_values = (self.pages, heads, dim), (self.pages, heads, page)
        sink = (self.dtype, (1, heads, self.sinks, dim))
        return [
            codes, (PARAM_DTYPE, of_keys), (PARAM_DTYPE, of_keys),
            codes, (PARAM_DTYPE, of_values), (PARAM_DTYPE, of_values),
            (self.dtype, (1, heads, page, dim)), sink, sink,
        ]  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of a slab."""
        return sum(dtype.itemsize * prod(shape) for dtype, shape in self._parts)

    def cut(self, memory: Tensor) -> KV4Pages:
        """A layer's memory, bytes [slabs * nbytes], contiguous -> the cache that lies in it."""
        slabs, rest = divmod(memory.numel(), self.nbytes)
        assert memory.element_size() == 1 and memory.is_contiguous() and not rest
        memory, tensors, begin = memory.view(-1), [], 0
        for dtype, shape in self._parts:
            end = begin + slabs * dtype.itemsize * prod(shape)
            tensors.append(memory[begin:end].view(dtype).view(slabs * shape[0], *shape[1:]))
            begin = end
        return KV4Pages(*tensors)


class PageTable:
    """Page numbers by slot, as the KV4 ops read them; sequences are entered as the server's rows name their slabs."""

    def __init__(self, slabs: int, slabs_a_sequence: int, pages: int, device: torch.device | str) -> None:
        """slabs: that a layer has. pages: of a slab."""
        self.slabs, self.pages = slabs, pages
        rows = slabs + 1  # the last one takes what padding rows write
        self.pages_by_slot = torch.zeros(rows, slabs_a_sequence * pages, dtype=torch.int32, device=device)
        self._within = torch.arange(pages, dtype=torch.int32, device=device)

    def enter(self, slabs: Tensor, length: Tensor) -> Tensor:
        """Write the rows of some sequences, without asking the device for anything.

        Args:
            slabs: int32 [R, n], numbers of each sequence's slabs in order; 0 is no slab. length: int32 [R], tokens of
            each sequence, those that are being added included.

        Returns:
            Slots, int32 [R]: EMPTY where a sequence has no slab or no token.
        """
        width = self.pages_by_slot.shape[1] // self.pages
        slabs = slabs[:, :width]
        first = slabs[:, 0]
        slot = torch.where((first > 0) & (length > 0), first, EMPTY)
        numbers = (slabs[:, :, None] * self.pages + self._within).flatten(1)
        row = torch.where(slot == EMPTY, self.slabs, slot)
        self.pages_by_slot[:, : numbers.shape[1]].index_copy_(0, row.long(), numbers)
        return slot
