"""The reference ops: packing, activation quantization, the mixed product, and the 4-bit KV cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comet_cuda.affine import choose_minmax_qparams, dequantize_minmax, num_blocks, quantize_minmax
from comet_cuda.int4 import pack_nibbles, unpack_nibbles
from comet_cuda.kv4_append import KV4Pages, allocate_pages, kv4_append_ref
from comet_cuda.kv4_decode import gather_sequence, kv4_decode_ref
from comet_cuda.quantize_act import HADAMARD_NORM, hadamard_blocks, quantize_act, quantize_act_ref, to_blocks
from comet_cuda.w4ax_gemm import w4ax_gemm, w4ax_gemm_ref, weight_integers


def uint8(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_the_even_code_lies_in_the_low_nibble() -> None:
    assert pack_nibbles(uint8(1, 2, 15, 0)).tolist() == [0x21, 0x0F]
    codes = torch.arange(256, dtype=torch.uint8).remainder(16).view(4, 64)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_hadamard_is_orthonormal_and_its_own_inverse() -> None:
    x = torch.randn(5, 128)
    matrix = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(128)] for i in range(128)]) * HADAMARD_NORM
    assert torch.allclose(hadamard_blocks(x), x @ matrix, atol=1e-5)
    assert torch.allclose(hadamard_blocks(hadamard_blocks(x)), x, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 9),
    channels=st.integers(1, 400),
    seed=st.integers(0, 99),
    hadamard=st.booleans(),
    clip=st.sampled_from([1.0, 0.9, 0.5]),
)
def test_quantized_activations_are_within_half_a_step_or_clipped(
    tokens: int, channels: int, seed: int, hadamard: bool, clip: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, channels, generator=generator) * 10 ** torch.randn(tokens, 1, generator=generator)
    perm = torch.randperm(channels, generator=generator).int()
    bits = torch.randint(0, 2, (num_blocks(channels),), generator=generator).mul(4).add(4).to(torch.uint8)
    clips = torch.where(bits == 4, clip, 1.0)
    codes, scale = quantize_act_ref(x, perm, bits, clips, hadamard)
    blocks = to_blocks(x, perm)
    if hadamard:
        blocks = torch.where((bits == 4)[None, :, None], hadamard_blocks(blocks), blocks)
    qmax = torch.where(bits == 4, 7, 127)[None, :, None]
    assert codes.dtype == torch.int8 and bool((codes.abs() <= qmax).all()) and bool((scale > 0).all())
    error = (codes * scale[..., None] - blocks).abs()
    inside = blocks.abs() <= (qmax * scale[..., None])
    assert bool((error[inside] <= 0.5001 * scale[..., None].expand_as(error)[inside]).all())
    assert bool((codes.abs() == qmax)[~inside].all())


def test_rounding_is_half_to_even_and_zero_blocks_have_scale_one() -> None:
    x = torch.zeros(2, 128)
    x[0, :4] = torch.tensor([7.0, 0.5, 1.5, -2.5])
    codes, scale = quantize_act_ref(x, None, uint8(4), torch.ones(1), False)
    assert scale.tolist() == [[1.0], [1.0]]
    assert codes[0, 0, :4].tolist() == [7, 0, 2, -2] and not codes[1].any()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [(0, 3, 128), (5, 7, 300), (33, 16, 576)])
def test_mixed_product_equals_integer_arithmetic(shape: tuple[int, int, int], symmetric: bool) -> None:
    tokens, rows, channels = shape
    blocks = num_blocks(channels)
    qx = torch.randint(-127, 128, (tokens, blocks, 128), dtype=torch.int8)
    sx = torch.rand(tokens, blocks) + 0.1
    qweight = torch.randint(0, 256, (rows, 64 * blocks), dtype=torch.uint8)
    w_scale = (torch.rand(rows, blocks) + 0.1).bfloat16()
    w_zero = None if symmetric else torch.randint(0, 16, (rows, blocks), dtype=torch.uint8)
    bias = torch.randn(rows)
    y = w4ax_gemm_ref(qx, sx, qweight, w_scale, w_zero, uint8(*[4] * blocks), bias, torch.float32)
    codes = unpack_nibbles(qweight).long().view(rows, blocks, 128)
    zero = torch.full((rows, blocks), 8) if w_zero is None else w_zero.long()
    dot = torch.einsum("mbk,nbk->mnb", qx.long(), codes - zero[..., None])
    exact = (dot.double() * sx.double()[:, None] * w_scale.double()[None]).sum(-1) + bias.double()
    assert torch.allclose(y.double(), exact, rtol=1e-5, atol=1e-2)  # float32 sums of terms up to 127 * 15 * 128
    assert torch.equal(weight_integers(qweight, w_zero).long(), codes - zero[..., None])


def test_largest_block_sum_is_exact_in_float32() -> None:
    qx = torch.full((1, 1, 128), 127, dtype=torch.int8)
    y = w4ax_gemm_ref(
        qx, torch.ones(1, 1), torch.full((1, 64), 0xFF, dtype=torch.uint8), torch.ones(1, 1).bfloat16(),
        torch.zeros(1, 1, dtype=torch.uint8), uint8(8), None, torch.float32,
    )  # fmt: skip
    assert y.item() == 127 * 15 * 128


def test_ops_trace_without_data() -> None:
    """torch.compile and meta tensors see the right shapes and types."""
    x = torch.empty(6, 300, device="meta")
    bits, clip = torch.empty(3, dtype=torch.uint8, device="meta"), torch.empty(3, device="meta")
    codes, scale = quantize_act(x, None, bits, clip, True)
    assert (codes.shape, codes.dtype, scale.shape) == ((6, 3, 128), torch.int8, (6, 3))
    packed = torch.empty(10, 192, dtype=torch.uint8, device="meta")
    w_scale = torch.empty(10, 3, dtype=torch.bfloat16, device="meta")
    y = w4ax_gemm(codes, scale, packed, w_scale, None, bits, None, torch.bfloat16)
    assert (y.shape, y.dtype) == ((6, 10), torch.bfloat16)


def test_minmax_codes_cover_the_range() -> None:
    x = torch.tensor([[-3.0, 5.0, 1.0], [2.0, 2.0, 2.0], [1e6, 1e6 + 1, 1e6]])
    scale, minimum = choose_minmax_qparams(x.amin(1), x.amax(1), 4, torch.float16)
    assert bool(torch.isfinite(scale).all()) and bool(torch.isfinite(minimum).all())
    codes = quantize_minmax(x, scale[:, None], minimum[:, None], 4)
    assert codes[0].tolist() == [0, 15, 8] or codes[0].tolist() == [0, 15, 7]
    assert dequantize_minmax(codes, scale[:, None], minimum[:, None])[1].tolist() == [2.0, 2.0, 2.0]


def fill(cache: KV4Pages, k: Tensor, v: Tensor, table: Tensor, chunks: list[int]) -> None:
    """Append sequences k, v [S, T, H, D] in chunks of the given lengths, all sequences together."""
    start = 0
    for size in chunks:
        for s in range(k.shape[0]):
            positions = torch.arange(start, start + size)
            part = slice(start, start + size)
            kv4_append_ref(k[s, part], v[s, part], torch.full((size,), s), positions, table, cache)
        start += size


@pytest.mark.parametrize("sinks", [0, 3])
def test_the_cache_does_not_depend_on_how_tokens_arrive(sinks: int) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 40, 2, 8) + 5, torch.randn(2, 40, 2, 8)
    table = torch.randperm(6).view(2, 3)
    caches = []
    for chunks in ([40], [1] * 40, [7, 16, 1, 16]):
        cache = allocate_pages(6, 2, 2, 8, 16, sinks, torch.float32, "cpu")
        fill(cache, k, v, table, chunks)
        caches.append(cache)
    for other in caches[1:]:
        for name in vars(other):
            assert torch.equal(getattr(caches[0], name), getattr(other, name)), name
    keys, values = gather_sequence(caches[0], 1, 40, table[1])
    whole = (40 - sinks) // 16 * 16
    own = sinks + (whole if (40 - sinks) % 16 else whole - 16)  # the page of the newest token stays in 16 bit
    assert torch.equal(keys[:, own:], k[1, own:].transpose(0, 1)) and torch.equal(
        keys[:, :sinks], k[1, :sinks].transpose(0, 1)
    )
    step = (k[1].amax(0) - k[1].amin(0)).max() / 15
    assert 0 < (keys - k[1].transpose(0, 1)).abs().max() < step
    assert 0 < (values - v[1].transpose(0, 1)).abs().max() < 0.5 * 1.01 * (v.amax() - v.amin()) / 15 + 1e-3


def test_decode_attends_with_window_and_softcap() -> None:
    torch.manual_seed(1)
    k, v, q = torch.randn(1, 20, 1, 8), torch.randn(1, 20, 1, 8), torch.randn(1, 2, 8)
    table = torch.arange(2)[None]
    cache = allocate_pages(2, 1, 1, 8, 16, 0, torch.float32, "cpu")
    fill(cache, k, v, table, [20])
    slot, length = torch.tensor([0]), torch.tensor([20])
    keys, values = gather_sequence(cache, 0, 20, table[0])
    for window, softcap in ((0, 0.0), (5, 0.0), (0, 2.0)):
        out = kv4_decode_ref(q, slot, length, table, cache, 0.35, window, softcap)
        scores = q[0] @ keys[0].T * 0.35
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if window:
            scores[:, :-window] = -torch.inf
        assert torch.allclose(out[0], scores.softmax(-1) @ values[0], atol=1e-5)


@pytest.mark.parametrize(("page", "dim"), [(128, 64), (128, 128), (64, 128)])
def test_cached_bytes_of_a_full_page(page: int, dim: int) -> None:
    """At most 0.28 of bfloat16."""
    cache = allocate_pages(1, 1, 1, dim, page, 4, torch.bfloat16, "cpu")
    stored = sum(
        t.nbytes for t in (cache.k_codes, cache.k_scale, cache.k_min, cache.v_codes, cache.v_scale, cache.v_min)
    )
    assert stored <= 0.28 * 2 * page * dim * 2
