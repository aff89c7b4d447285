"""The tiled order of a page's codes: a bijection, and each code where the kernels look for it."""

import dataclasses

import pytest
import torch

from comet_cuda.int4 import pack_nibbles, unpack_nibbles
from comet_cuda.kv4_append import allocate_pages
from comet_cuda.kv4_layout import tile_pages, untile_pages


def key_byte(slot: int, channel: int, dim: int) -> int:
    """As `key_word` of kv4_cache.cuh, plus the byte in the word."""
    vector, pieces = channel // 8, dim // 32
    lane, word = 4 * (slot % 32 // 4) + vector % 4, slot % 4 * pieces + vector // 4
    return slot // 32 * 16 * dim + word // 4 * 512 + lane * 16 + word % 4 * 4 + channel % 8 // 2


def value_byte(slot: int, channel: int, dim: int) -> int:
    """As `value_word`, likewise."""
    piece = channel // 32 * 512 + (slot % 32 // 8 + 4 * (channel % 32 // 4)) * 16 + channel % 4 * 4
    return slot // 32 * 16 * dim + piece + slot % 8 // 2


@pytest.mark.parametrize(("dim", "page"), [(64, 64), (96, 128), (128, 32), (256, 64)])
def test_codes_lie_where_the_kernels_look(dim: int, page: int) -> None:
    torch.manual_seed(0)
    cache = allocate_pages(2, 1, 2, dim, page, 0, torch.bfloat16, "cpu")
    keys, values = (torch.randint(0, 16, (2, 2, page, dim), dtype=torch.uint8) for _ in range(2))
    cache = dataclasses.replace(cache, k_codes=pack_nibbles(keys), v_codes=pack_nibbles(values))
    tiled = tile_pages(cache)
    again = untile_pages(tiled)
    assert torch.equal(again.k_codes, cache.k_codes) and torch.equal(again.v_codes, cache.v_codes)
    assert tiled.k_codes.shape == cache.k_codes.shape
    k_nibbles = unpack_nibbles(tiled.k_codes[1, 0].flatten())
    v_nibbles = unpack_nibbles(tiled.v_codes[1, 0].flatten())
    for slot in range(page):
        for channel in range(0, dim, 5):
            assert k_nibbles[2 * key_byte(slot, channel, dim) + channel % 2] == keys[1, 0, slot, channel]
            assert v_nibbles[2 * value_byte(slot, channel, dim) + slot % 2] == values[1, 0, slot, channel]
