"""The sm_90a operand layouts: round trips, and single elements found where the documentation says."""

import pytest
import torch
from torch import Tensor

from comet_cuda.errors import CometError
from comet_cuda.int4 import pack_nibbles
from comet_cuda.weight_layout import (
    ATOM_BYTES,
    record_bytes,
    tile_activations_sm90,
    tile_weight_sm90,
    token_atoms,
    untile_activations_sm90,
    untile_weight_sm90,
    zero_terms_sm90,
)

BLOCK_BITS = torch.tensor([8, 4, 4, 8, 4], dtype=torch.uint8)


def random_activations(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (tokens, len(BLOCK_BITS), 128), generator=g, dtype=torch.int8)
    small = torch.randint(-7, 8, codes.shape, generator=g, dtype=torch.int8)
    codes = torch.where((BLOCK_BITS == 4)[None, :, None], small, codes)
    return codes, torch.rand(tokens, len(BLOCK_BITS), generator=g) + 0.1


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 64, 100])
def test_activations_round_trip(tokens: int) -> None:
    codes, scale = random_activations(tokens)
    tiled, meta = tile_activations_sm90(codes, scale, BLOCK_BITS)
    assert tiled.shape == (5, token_atoms(tokens), ATOM_BYTES) and meta.shape == (5, token_atoms(tokens), 16)
    back, back_scale, back_sum = untile_activations_sm90(tiled, meta, tokens, BLOCK_BITS)
    assert torch.equal(back, codes) and torch.equal(back_scale, scale)
    assert torch.equal(back_sum, codes.float().sum(-1))


def test_one_activation_lies_where_documented() -> None:
    codes, scale = random_activations(19)
    tiled, meta = tile_activations_sm90(codes, scale, BLOCK_BITS)
    for token, block, channel in [(0, 0, 0), (18, 1, 77), (13, 3, 127), (6, 4, 31)]:
        atom, r = divmod(token, 8)
        byte = tiled[block, atom, r * 128 + ((channel // 16) ^ r) * 16 + channel % 16].view(torch.uint8)
        kind = torch.float8_e4m3fn if BLOCK_BITS[block] == 4 else torch.int8
        assert byte.view(kind).float() == codes[token, block, channel].float()
        pair, e = divmod(r, 2)
        assert meta[block, atom, pair * 4 + e] == scale[token, block]
        assert meta[block, atom, pair * 4 + 2 + e] == codes[token, block].sum()


@pytest.mark.parametrize("rows", [1, 8, 64, 72, 200])
@pytest.mark.parametrize("has_zero", [False, True])
def test_weights_round_trip(rows: int, has_zero: bool) -> None:
    g = torch.Generator().manual_seed(rows)
    blocks = len(BLOCK_BITS)
    qweight = torch.randint(0, 256, (rows, 64 * blocks), generator=g, dtype=torch.uint8)
    scale = (torch.rand(rows, blocks, generator=g) + 0.01).to(torch.bfloat16)
    zero = torch.randint(0, 16, (rows, blocks), generator=g, dtype=torch.uint8) if has_zero else None
    records = tile_weight_sm90(qweight, scale, zero, BLOCK_BITS)
    assert records.shape == (-(-rows // 64), blocks, record_bytes(has_zero))
    back = untile_weight_sm90(records, rows, BLOCK_BITS)
    assert torch.equal(back[0], qweight) and torch.equal(back[1], scale)
    assert (back[2] is None) == (zero is None) and (zero is None or torch.equal(back[2], zero))


def test_one_weight_lies_where_documented() -> None:
    """Walk the fragment of wgmma m64k32 (8-bit A in registers) and find every code by its definition."""
    g = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (64, 128), generator=g, dtype=torch.uint8)
    scale = torch.arange(1, 65).to(torch.bfloat16)[:, None]
    zero = (torch.arange(64) % 16).to(torch.uint8)[:, None]
    record = tile_weight_sm90(pack_nibbles(codes), scale, zero, torch.tensor([4], dtype=torch.uint8))[0, 0]
    stored_scale = record[4096:4224].view(torch.bfloat16)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        quad_row, t = divmod(lane, 4)
        for step in range(4):
            for register in range(4):  # row g or g + 8, channels 4t.. or 16 + 4t..
                half, k_half = register % 2, register // 2
                row = warp * 16 + 4 * (quad_row // 2) + quad_row % 2 + 2 * half
                word = (step % 2) * 2 + k_half
                start = (step // 2) * 2048 + thread * 16 + word * 4
                nibbles = (record[start : start + 4] >> (4 * half)) & 15
                channel = 32 * step + 16 * k_half + 4 * t
                assert torch.equal(nibbles, codes[row, channel : channel + 4])
                pair = (warp * 8 + quad_row) * 2 + half
                assert stored_scale[pair] == scale[row, 0] * 512
                assert record[4224 + pair] == zero[row, 0]


def test_zero_terms_lie_in_the_fragment_of_bf16_wgmma_and_are_exact() -> None:
    g = torch.Generator().manual_seed(4)
    scale = (torch.rand(70, 40, generator=g) + 0.01).to(torch.bfloat16)
    zero = torch.randint(0, 16, (70, 40), generator=g, dtype=torch.uint8)
    terms = zero_terms_sm90(scale, zero)
    assert terms.shape == (2, 2, 4, 128, 8)
    places = [(0, 0, 0, 0, 0, 0), (0, 0, 1, 77, 3, 1), (1, 0, 1, 4, 1, 0), (0, 1, 0, 126, 2, 1)]
    for row_tile, group, sixteen, thread, register, k in places:
        warp, lane = divmod(thread, 32)
        quad_row, t = divmod(lane, 4)
        row = 64 * row_tile + warp * 16 + 4 * (quad_row // 2) + quad_row % 2 + 2 * (register % 2)
        block = 32 * group + 16 * sixteen + 8 * (register // 2) + 2 * t + k
        want = -zero[row, block].float() * scale[row, block].float() if row < 70 and block < 40 else torch.tensor(0.0)
        parts = terms[row_tile, group, 2 * sixteen : 2 * sixteen + 2, thread, 2 * register + k].float()
        assert parts.sum() == want, (row, block)


def test_wrong_weight_shape_is_named() -> None:
    with pytest.raises(CometError, match="qweight is"):
        tile_weight_sm90(
            torch.zeros(64, 60, dtype=torch.uint8), torch.ones(64, 1, dtype=torch.bfloat16), None, BLOCK_BITS[:1]
        )
