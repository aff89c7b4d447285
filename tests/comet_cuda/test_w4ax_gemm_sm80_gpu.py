"""The mma.sync GEMM: layouts, schedule and bank conflicts on the CPU; products against the reference on a GPU."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comet_cuda.errors import CometError
from comet_cuda.int4 import pack_nibbles
from comet_cuda.w4ax_gemm import w4ax_gemm_ref, weight_integers
from comet_cuda.w4ax_gemm_sm80 import make_schedule, prepare_weight_sm80, tile_tokens, w4ax_gemm_sm80
from comet_cuda.weight_layout_sm80 import (
    bank_conflicts,
    int8_offset,
    shared_reads_int4,
    shared_reads_int8,
    shared_reads_weights,
    tile_activations_sm80,
    tile_weight_sm80,
    untile_activations_sm80,
    untile_weight_sm80,
)

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def operands(
    tokens: int, rows: int, bits: list[int], symmetric: bool, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """qx, sx, qweight, w_scale, w_zero, block_bits with extreme codes in the first token and row."""
    generator = torch.Generator().manual_seed(seed)
    blocks = len(bits)
    block_bits = torch.tensor(bits, dtype=torch.uint8)
    bound = torch.where(block_bits == 4, 7, 127)[None, :, None]
    qx = torch.randint(-127, 128, (tokens, blocks, 128), generator=generator)
    qx = torch.maximum(torch.minimum(qx, bound), -bound)
    codes = torch.randint(0, 16, (rows, blocks * 128), generator=generator)
    if tokens:
        qx[0] = bound[0]
    codes[0] = 15
    w_zero = None if symmetric else torch.randint(0, 16, (rows, blocks), generator=generator).to(torch.uint8)
    if w_zero is not None:
        w_zero[0] = 0
    sx = torch.rand(tokens, blocks, generator=generator) + 0.01
    w_scale = (torch.rand(rows, blocks, generator=generator) * 0.1 + 0.001).bfloat16()
    values = (qx.to(torch.int8), sx, pack_nibbles(codes.to(torch.uint8)), w_scale, w_zero, block_bits)
    qx8, sx, qweight, w_scale, w_zero, block_bits = (None if v is None else v.to(device) for v in values)
    assert qx8 is not None and sx is not None and qweight is not None and w_scale is not None
    assert block_bits is not None
    return qx8, sx, qweight, w_scale, w_zero, block_bits


BITS = st.lists(st.sampled_from([4, 8]), min_size=1, max_size=4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9), BITS, st.booleans())
def test_activation_layout_round_trips(tokens: int, bits: list[int], portable: bool) -> None:
    qx, sx, _, _, _, block_bits = operands(tokens, 8, bits, True)
    codes, scale, total = untile_activations_sm80(
        *tile_activations_sm80(qx, sx, block_bits, portable), block_bits, portable
    )
    assert torch.equal(codes, qx) and torch.equal(scale, sx) and torch.equal(total, qx.float().sum(-1))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([8, 120, 128, 136]), BITS, st.booleans(), st.booleans())
def test_weight_layout_round_trips(rows: int, bits: list[int], symmetric: bool, portable: bool) -> None:
    _, _, qweight, w_scale, w_zero, block_bits = operands(1, rows, bits, symmetric)
    records = tile_weight_sm80(qweight, w_scale, w_zero, block_bits, portable)
    back = untile_weight_sm80(records, rows, block_bits, portable)
    assert torch.equal(back[0], qweight) and torch.equal(back[1], w_scale)
    assert (back[2] is None) == symmetric
    assert w_zero is None or (back[2] is not None and torch.equal(back[2], w_zero))


def test_fragments_multiply_as_the_kernel_reads_them() -> None:
    """One m16 x n8 product computed lane by lane from the tiled bytes, in the kernel's order of words and steps."""
    for bit in (4, 8):
        qx, sx, qweight, w_scale, w_zero, block_bits = operands(8, 16, [bit], False)
        records = tile_weight_sm80(qweight, w_scale, w_zero, block_bits)[0, 0]
        codes = tile_activations_sm80(qx, sx, block_bits)[0][0]
        got = torch.zeros(16, 8, dtype=torch.int64)
        for lane in range(32):
            g, t = lane // 4, lane % 4
            for token in range(8):  # the mma sums the lanes t of a row with those of a column
                for half in range(2):
                    words = [records[j // 2 * 512 + lane * 16 + j % 2 * 8 + half * 4 :][:4] for j in range(4)]
                    row = torch.cat(words)
                    nibbles = torch.stack((row & 15, row >> 4), -1).flatten()
                    if bit == 4:
                        packed = codes.flatten()[token * 64 + t * 16 :][:16]
                        x = ((torch.stack((packed & 15, packed >> 4), -1).flatten() ^ 8).long()) - 8
                        w = nibbles.long()
                    else:
                        x = codes[token].view(torch.int8)[32 * t : 32 * t + 32].long()
                        w = torch.cat([torch.cat((word[0::2], word[1::2])) for word in nibbles.view(4, 8)]).long()
                    got[2 * g + half, token] += (x * w).sum()
        expected = (weight_integers(qweight, torch.zeros(16, 1, dtype=torch.uint8))[:, 0] @ qx[:, 0].float().T).long()
        assert torch.equal(got, expected)


def test_shared_memory_reads_have_no_bank_conflicts() -> None:
    for token0 in range(0, 128, 8):
        assert bank_conflicts(shared_reads_int4(token0)) == 0
        assert all(bank_conflicts(shared_reads_int8(token0, half)) == 0 for half in (0, 1))
    assert all(bank_conflicts(shared_reads_weights(tile, step)) == 0 for tile in range(8) for step in (0, 1))
    assert len({int8_offset(token, chunk) for token in range(8) for chunk in range(8)}) == 64
    natural = [lane // 4 * 128 + lane % 4 * 32 for lane in range(32)]
    assert bank_conflicts(natural) > 0  # without the swizzle there are some: the measure can tell


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.lists(st.sampled_from([4, 8]), min_size=1, max_size=40),
    st.booleans(),
    st.integers(1, 64),
)
def test_schedule_covers_every_block_once(
    row_tiles: int, token_tiles: int, bits: list[int], portable: bool, ctas: int
) -> None:
    schedule = make_schedule(row_tiles, token_tiles, tuple(bits), portable, ctas)
    assert len(schedule.work) == ctas
    covered: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for segments in schedule.work:
        for s in segments:
            covered.setdefault((s.row_tile, s.token_tile), []).append((s.first_block, s.end_block, s.slot))
    assert len(covered) == row_tiles * token_tiles
    cut = {(row, token): (first, count) for row, token, first, count in schedule.splits}
    slots = []
    for tile, parts in covered.items():
        parts.sort()
        assert [p[0] for p in parts] == [0, *(p[1] for p in parts[:-1])] and parts[-1][1] == len(bits)
        if len(parts) == 1:
            assert parts[0][2] == -1 and tile not in cut
        else:  # slots ascend with K, so the reduction's order is fixed
            first, count = cut[tile]
            assert [p[2] for p in parts] == list(range(first, first + count))
            slots += [p[2] for p in parts]
    assert sorted(slots) == list(range(schedule.slots))


def test_schedule_is_balanced() -> None:
    """LLaMA-7B's down projection, 16 tokens, on 108 multiprocessors: ctas are even to the grain of one block."""
    bits = tuple([8] * 14 + [4] * 72)
    schedule = make_schedule(32, 1, bits, False, 216)
    cost = [sum(2 if bits[b] == 8 else 1 for s in w for b in range(s.first_block, s.end_block)) for w in schedule.work]
    mean = Fraction(sum(cost), len(cost))
    assert (max(cost) - mean) / mean < 0.15  # one block of 15 is the grain
    unaware = make_schedule(32, 1, bits, True, 216)
    uneven = [sum(2 if bits[b] == 8 else 1 for s in w for b in range(s.first_block, s.end_block)) for w in unaware.work]
    assert max(uneven) > max(cost)  # dealing by blocks instead of cost is worse


@pytest.mark.parametrize("portable", [False, True])
def test_the_op_is_the_reference_without_a_gpu(portable: bool) -> None:
    qx, sx, qweight, w_scale, w_zero, block_bits = operands(5, 136, [8, 4, 4], False)
    weight = prepare_weight_sm80(qweight, w_scale, w_zero, block_bits, portable)
    bias = torch.randn(136)
    tiled = tile_activations_sm80(qx, sx, block_bits, portable)
    y = w4ax_gemm_sm80(*tiled, weight, bias, torch.float32)
    assert torch.equal(y, w4ax_gemm_ref(qx, sx, qweight, w_scale, w_zero, block_bits, bias, torch.float32))
    with pytest.raises(CometError, match="meta"):
        w4ax_gemm_sm80(tiled[0], tiled[1][:, :4], weight, bias, torch.float32)
    with pytest.raises(CometError, match="bias"):
        w4ax_gemm_sm80(*tiled, weight, bias[:8], torch.float32)


def test_the_op_traces() -> None:
    qx, sx, qweight, w_scale, w_zero, block_bits = operands(5, 136, [8, 4, 4], False)
    weight = prepare_weight_sm80(qweight, w_scale, w_zero, block_bits)
    tiled = tile_activations_sm80(qx, sx, block_bits)
    arguments = (*tiled, weight.records, block_bits, weight.bits, 136, False, None, torch.bfloat16)
    torch.library.opcheck(torch.ops.comet.w4ax_gemm_mma_sync, arguments, test_utils="test_faketensor")


def test_tiles_of_tokens() -> None:
    assert [tile_tokens(m) for m in (1, 8, 9, 64, 65, 5000)] == [8, 8, 16, 64, 128, 128]


class TestOnGpu:
    pytestmark = gpu

    def check(
        self, tokens: int, rows: int, bits: list[int], symmetric: bool, portable: bool, out: torch.dtype, biased: bool
    ) -> None:
        qx, sx, qweight, w_scale, w_zero, block_bits = operands(tokens, rows, bits, symmetric, "cuda", tokens)
        bias = torch.randn(rows, device="cuda") if biased else None
        weight = prepare_weight_sm80(qweight, w_scale, w_zero, block_bits, portable)
        tiled = tile_activations_sm80(qx, sx, block_bits, portable)
        y = w4ax_gemm_sm80(*tiled, weight, bias, out)
        expected = w4ax_gemm_ref(qx, sx, qweight, w_scale, w_zero, block_bits, bias, torch.float32)
        assert y.shape == expected.shape and y.dtype == out
        size = expected.abs().amax() if tokens else 1.0  # rounding of the output, and of float32 sums in another order
        limit = {torch.float32: 2**-18, torch.bfloat16: 2**-8, torch.float16: 2**-11}[out]
        assert tokens == 0 or (y.float() - expected).abs().max() <= limit * size
        ones = torch.ones_like(sx), torch.ones_like(w_scale)
        exact = w4ax_gemm_ref(qx, ones[0], qweight, ones[1], w_zero, block_bits, None, torch.float32)
        weight = prepare_weight_sm80(qweight, ones[1], w_zero, block_bits, portable)
        tiled = tile_activations_sm80(qx, ones[0], block_bits, portable)
        if len(bits) <= 64:  # sums of integers below 2^24 are exact in any order
            assert exact.abs().amax() < 2**24 if tokens else True
            assert torch.equal(w4ax_gemm_sm80(*tiled, weight, None, torch.float32), exact)

    @pytest.mark.parametrize("portable", [False, True])
    @pytest.mark.parametrize("tokens", [*range(18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000])
    def test_products(self, tokens: int, portable: bool) -> None:
        mixes = ([4] * 5, [8] * 5, [8, 4, 4, 8, 4])
        for i, bits in enumerate(mixes):
            out = (torch.bfloat16, torch.float16, torch.float32)[(i + tokens) % 3]
            self.check(tokens, 264, bits, symmetric=(i + tokens) % 2 == 0, portable=portable, out=out, biased=i == 0)

    @pytest.mark.parametrize(("rows", "blocks"), [(8, 1), (4096, 32), (11008, 32), (4096, 86), (1024, 224)])
    def test_shapes_of_models(self, rows: int, blocks: int) -> None:
        bits = [8 if b < blocks // 6 else 4 for b in range(blocks)]
        for tokens in (1, 16, 300):
            self.check(tokens, rows, bits, symmetric=False, portable=False, out=torch.bfloat16, biased=True)

    def test_a_thousand_runs_are_equal(self) -> None:
        qx, sx, qweight, w_scale, w_zero, block_bits = operands(20, 1024, [8] * 4 + [4] * 28, False, "cuda")
        weight = prepare_weight_sm80(qweight, w_scale, w_zero, block_bits)
        tiled = tile_activations_sm80(qx, sx, block_bits)
        first = w4ax_gemm_sm80(*tiled, weight, None, torch.float32)
        same = torch.ones((), dtype=torch.bool, device="cuda")
        for _ in range(1000):
            same &= (w4ax_gemm_sm80(*tiled, weight, None, torch.float32) == first).all()
        assert bool(same)
