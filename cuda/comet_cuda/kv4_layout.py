"""Where the codes of a page lie on a GPU: as the registers of the attention kernel want them, and back.

A page of T tokens is T / 32 tiles of 32 tokens. Each tile is read by one warp, lane 4 * g + t taking D / 32 pieces of
16 bytes (four words of eight codes each) for keys, and as many for values:

keys    word (token 4 g + a, j) holds channels 32 j + 8 t .. + 8 of one token: attention multiplies it with q
        along the channels. Its place in the lane's words is a * D / 32 + j; pieces are [piece, lane].
values  word (tokens 8 t .. 8 t + 8, channel) holds one channel of eight tokens: attention multiplies it with the
        probabilities along the tokens. Piece x of the lane holds channels 32 x + 4 g .. + 4; pieces are [x, lane].

Nibble i of a word is code i. Only the order changes, so a page takes the same bytes as the canonical one.
"""

import dataclasses

from torch import Tensor

from comet_cuda.int4 import pack_nibbles, unpack_nibbles
from comet_cuda.kv4_append import KV4Pages

TILE = 32  # tokens


def _split_keys(codes: Tensor) -> Tensor:
    """[P, H, T, D] -> [P, H, tile, g, a, j, t, nibble]."""
    p, h, tokens, dim = codes.shape
    return codes.view(p, h, tokens // TILE, 8, 4, dim // 32, 4, 8)


def tile_keys(codes: Tensor) -> Tensor:
    """Canonical k_codes, uint8 [P, H, T, D / 2] -> the same bytes tiled."""
    words = _split_keys(unpack_nibbles(codes)).permute(0, 1, 2, 4, 5, 3, 6, 7)  # tile, a, j, g, t, nibble
    p, h, tiles = words.shape[:3]
    words = words.reshape(p, h, tiles, -1, 4, 32, 8).transpose(4, 5)  # tile, piece, lane, word, nibble
    return pack_nibbles(words.reshape(p, h, codes.shape[2], -1))


def untile_keys(codes: Tensor) -> Tensor:
    """The inverse of `tile_keys`."""
    p, h, tokens, half = codes.shape
    words = unpack_nibbles(codes).view(p, h, tokens // TILE, half // 16, 32, 4, 8).transpose(4, 5)
    words = words.reshape(p, h, tokens // TILE, 4, half // 16, 8, 4, 8).permute(0, 1, 2, 5, 3, 4, 6, 7)
    return pack_nibbles(words.reshape(p, h, tokens, 2 * half))


def tile_values(codes: Tensor) -> Tensor:
    """Canonical v_codes, uint8 [P, H, T, D / 2] -> the same bytes tiled."""
    p, h, tokens, half = codes.shape
    words = unpack_nibbles(codes).view(p, h, tokens // TILE, 4, 8, half // 16, 8, 4)  # tile, t, nibble, x, g, i
    return pack_nibbles(words.permute(0, 1, 2, 5, 6, 3, 7, 4).reshape(p, h, tokens, 2 * half))


def untile_values(codes: Tensor) -> Tensor:
    """The inverse of `tile_values`."""
    p, h, tokens, half = codes.shape
    words = unpack_nibbles(codes).view(p, h, tokens // TILE, half // 16, 8, 4, 4, 8)  # tile, x, g, t, i, nibble
    return pack_nibbles(words.permute(0, 1, 2, 5, 7, 3, 4, 6).reshape(p, h, tokens, 2 * half))


def tile_pages(cache: KV4Pages) -> KV4Pages:
    """A canonical cache -> one that the GPU ops read; the other tensors are shared."""
    return dataclasses.replace(cache, k_codes=tile_keys(cache.k_codes), v_codes=tile_values(cache.v_codes))


def untile_pages(cache: KV4Pages) -> KV4Pages:
    """The inverse of `tile_pages`: what the references read."""
    return dataclasses.replace(cache, k_codes=untile_keys(cache.k_codes), v_codes=untile_values(cache.v_codes))
