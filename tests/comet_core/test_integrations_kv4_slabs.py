"""4-bit pages cut out of another program's memory hold and answer what a cache of their own does."""

import pytest
import torch
from torch import Tensor

from comet_core.integrations.kv4_slabs import EMPTY, PageTable, SlabFormat
from comet_cuda.kv4_append import allocate_pages, kv4_append
from comet_cuda.kv4_append_cuda import kv4_append_gpu
from comet_cuda.kv4_decode import kv4_decode
from comet_cuda.kv4_decode_cuda import kv4_decode_gpu
from comet_cuda.kv4_layout import untile_pages
from comet_cuda.kv4_prefill import kv4_prefill

HEADS, DIM, PAGE, SINKS = 2, 64, 32, 4
SLABS = [[5, 2, 9], [3, 7, 1]]  # of two sequences, as a server might hand them out; 0 is no slab


def slab(dtype: torch.dtype = torch.float32) -> SlabFormat:
    return SlabFormat(HEADS, DIM, PAGE, pages=2, sinks=SINKS, dtype=dtype)


@pytest.mark.parametrize("sinks", [0, 4])
def test_a_slab_is_as_large_as_what_is_cut_from_it(sinks: int) -> None:
    form = SlabFormat(8, 128, 128, 4, sinks, torch.bfloat16)
    cache = form.cut(torch.zeros(3 * form.nbytes, dtype=torch.int8))
    assert sum(tensor.nbytes for tensor in cache.tensors) == 3 * form.nbytes
    assert form.tokens == 512 and cache.page == 128 and cache.sinks == sinks
    assert cache.k_codes.shape[0] == 12 and cache.k_open.shape[0] == 3
    for number, tensor in enumerate(cache.tensors):  # no two share a byte
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(cache.tensors))
    assert all(tensor.data_ptr() % 16 == cache.k_codes.data_ptr() % 16 for tensor in cache.tensors)
    assert form.nbytes < 512 * 8 * 2 * 128  # less than 8 bit would take


def test_rows_without_a_sequence_get_no_slot_and_write_nothing() -> None:
    table = PageTable(10, 3, 2, "cpu")
    slabs = torch.tensor([[5, 2, 0], [0, 0, 0], [4, 0, 0], [3, 7, 1]], dtype=torch.int32)
    slot = table.enter(slabs, torch.tensor([70, 0, 0, 5], dtype=torch.int32))
    assert slot.tolist() == [5, EMPTY, EMPTY, 3] and slot.dtype == torch.int32
    assert table.pages_by_slot[5].tolist() == [10, 11, 4, 5, 0, 1]
    assert table.pages_by_slot[3].tolist() == [6, 7, 14, 15, 2, 3]
    assert not table.pages_by_slot[[0, 1, 2, 4, 6, 7, 8, 9]].any()


def steps(device: str, dtype: torch.dtype) -> "tuple[list[Tensor], list[Tensor]]":
    """Two sequences in chunks, then token by token: answers through slabs, and through a cache of their own."""
    generator = torch.Generator().manual_seed(3)

    def rows(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, DIM, generator=generator).to(dtype).to(device)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    form, table = slab(dtype), PageTable(10, 3, 2, device)
    ours = form.cut(torch.zeros(10 * form.nbytes, dtype=torch.uint8, device=device))
    plain = allocate_pages(12, 2, HEADS, DIM, PAGE, SINKS, dtype, device)
    plain_table = torch.arange(12, dtype=torch.int32, device=device).view(2, 6)
    slabs, got, wanted, held = torch.tensor(SLABS, dtype=torch.int32, device=device), [], [], [0, 0]
    for new in ([50, 3], [30, 90], [70, 1], [10, 40]):  # ends in sinks, within pages, past slabs
        starts, tokens = ints(0, new[0], sum(new)), sum(new)
        q, k, v = rows(tokens, 4), rows(tokens, HEADS), rows(tokens, HEADS)
        length = ints(held[0] + new[0], held[1] + new[1])
        slot, position = table.enter(slabs, length), ints(*held)
        where = (starts, slot, position, table.pages_by_slot)
        got.append(kv4_prefill(q, k, v, *where, ours, 0.125, max_new=max(new)))
        wanted.append(kv4_prefill(q, k, v, starts, ints(0, 1), position, plain_table, plain, 0.125, max_new=max(new)))
        held = length.tolist()
    for _ in range(3):
        q, k, v = rows(2, 4), rows(2, HEADS), rows(2, HEADS)
        length = ints(held[0] + 1, held[1] + 1)
        slot = table.enter(slabs, length)
        where = (slot, length - 1, table.pages_by_slot)
        if device == "cuda":  # as vllm_kv4.py launches them
            got.append(torch.empty_like(q))
            kv4_append_gpu(k, v, *where, *ours.tensors, max_new=1)
            kv4_decode_gpu(q, slot, length, table.pages_by_slot, ours.tensors, 0.125, out=got[-1])
        else:
            kv4_append(k, v, *where, ours)
            got.append(kv4_decode(q, slot, length, table.pages_by_slot, ours, 0.125))
        kv4_append(k, v, ints(0, 1), length - 1, plain_table, plain)
        wanted.append(kv4_decode(q, ints(0, 1), length, plain_table, plain, 0.125))
        held = length.tolist()
    if device == "cpu":
        pages = torch.tensor([[2 * n, 2 * n + 1] for n in SLABS[0]]).flatten()[: held[0] // PAGE]
        assert torch.equal(ours.k_codes[pages], plain.k_codes[: len(pages)]) and bool(ours.k_codes[pages].any())
    else:
        assert untile_pages(ours).k_codes.any()
    return got, wanted


def test_sequences_in_slabs_are_answered_as_in_a_cache_of_their_own() -> None:
    got, wanted = steps("cpu", torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.gpu
def test_the_same_through_the_kernels() -> None:
    got, wanted = steps("cuda", torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
