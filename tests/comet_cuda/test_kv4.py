"""The KV4 ops on a CPU: prefill in any chunks equals decode token by token; padding rows; rotary embedding."""

import pytest
import torch
from torch import Tensor

from comet_cuda.kv4_append import KV4Pages, allocate_pages, kv4_append
from comet_cuda.kv4_decode import kv4_decode
from comet_cuda.kv4_decode_cuda import LONGEST, chunks_of, plan_chunk
from comet_cuda.kv4_prefill import kv4_prefill
from comet_cuda.rope import rope_append, rope_qk_, split_heads

PAGE, HEADS, Q_HEADS, DIM, SCALE = 16, 2, 4, 8, 0.35


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def new_cache(sinks: int) -> KV4Pages:
    return allocate_pages(8, 2, HEADS, DIM, PAGE, sinks, torch.float32, "cpu")


def prefill(
    q: Tensor, k: Tensor, v: Tensor, chunks: list[int], table: Tensor, cache: KV4Pages, **kinds: float
) -> Tensor:
    """One sequence in slot 1, fed in chunks."""
    parts, done = [], 0
    for size in chunks:
        rows = slice(done, done + size)
        parts.append(
            kv4_prefill(q[rows], k[rows], v[rows], ints(0, size), ints(1), ints(done), table, cache, SCALE, **kinds)  # type: ignore[arg-type]
        )
        done += size
    return torch.cat(parts)


@pytest.mark.parametrize("sinks", [0, 3, 20])
@pytest.mark.parametrize("kinds", [{}, {"window": 7}, {"softcap": 3.0}])
def test_prefill_in_any_chunks_equals_decode(sinks: int, kinds: dict[str, float]) -> None:
    torch.manual_seed(0)
    tokens = 45
    q, k, v = torch.randn(tokens, Q_HEADS, DIM), torch.randn(tokens, HEADS, DIM) + 2, torch.randn(tokens, HEADS, DIM)
    table = torch.randperm(8).view(2, 4).int()
    cache = new_cache(sinks)
    rows = []
    for t in range(tokens):
        kv4_append(k[t : t + 1], v[t : t + 1], ints(1), ints(t), table, cache)
        rows.append(kv4_decode(q[t : t + 1], ints(1), ints(t + 1), table, cache, SCALE, **kinds))  # type: ignore[arg-type]
    expected = torch.cat(rows)
    for chunks in ([45], [5, 40], [16, 16, 13], [1, 1, 30, 1, 12]):
        other = new_cache(sinks)
        got = prefill(q, k, v, chunks, table, other, **kinds)
        assert torch.allclose(got, expected, atol=1e-5), chunks
        for mine, its in zip(cache.tensors, other.tensors, strict=True):
            assert torch.equal(mine, its), chunks


def test_padding_rows_do_nothing() -> None:
    cache = new_cache(0)
    table = torch.arange(8).view(2, 4).int()
    k, v, q = torch.randn(2, HEADS, DIM), torch.randn(2, HEADS, DIM), torch.randn(2, Q_HEADS, DIM)
    kv4_append(k, v, ints(-1, 0), ints(0, 0), table, cache)
    assert torch.equal(cache.k_open[0, :, 0], k[1]) and not cache.k_open[1].any()
    out = kv4_decode(q, ints(-1, 0), ints(0, 1), table, cache, SCALE)
    assert not out[0].any() and out[1].any()
    out = kv4_prefill(q, k, v, ints(0, 1, 2), ints(-1, 1), ints(0, 0), table, cache, SCALE)
    assert not out[0].any() and torch.equal(cache.k_open[1, :, 0], k[1])


@pytest.mark.parametrize("rotary", [DIM, DIM // 2])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_rotates_pairs_by_their_angle(rotary: int, norm: bool) -> None:
    torch.manual_seed(0)
    tokens = 5
    qkv = torch.randn(tokens, (Q_HEADS + 2 * HEADS) * DIM)
    angle = torch.rand(50, rotary // 2) * 6
    weight = torch.rand(DIM) + 0.5 if norm else None
    position = ints(3, 49, 0, 7, 7)
    got = qkv.clone()
    rope_qk_(got, angle.cos(), angle.sin(), position, Q_HEADS, HEADS, weight, weight, 1e-6)
    q, k, v = split_heads(qkv, Q_HEADS, HEADS)
    assert torch.equal(split_heads(got, Q_HEADS, HEADS)[2], v)
    for before, after in zip((q, k), split_heads(got, Q_HEADS, HEADS), strict=False):
        if weight is not None:
            before = torch.nn.functional.rms_norm(before, (DIM,), weight, 1e-6)
        turn = torch.polar(torch.ones(tokens, rotary // 2), angle[position.long()])[:, None]
        pairs = torch.complex(before[..., : rotary // 2], before[..., rotary // 2 : rotary]) * turn
        expected = torch.cat((pairs.real, pairs.imag, before[..., rotary:]), -1)
        assert torch.allclose(after, expected, atol=1e-5)
    cache = new_cache(0)
    table = torch.arange(8).view(2, 4).int()
    out = rope_append(qkv[:2], angle.cos(), angle.sin(), ints(0, 1), ints(0, 0), table, cache, weight, weight)
    again = qkv[:2].clone()
    rope_qk_(again, angle.cos(), angle.sin(), ints(0, 0), Q_HEADS, HEADS, weight, weight)
    assert torch.equal(out, split_heads(again, Q_HEADS, HEADS)[0])
    assert torch.equal(cache.k_open[:, :, 0], split_heads(again, Q_HEADS, HEADS)[1])


def test_whole_sequences_that_fill_a_gpu_once_are_not_cut() -> None:
    long = 12 * LONGEST
    assert {plan_chunk(pairs, long, 132) for pairs in (396, 512, 528)} == {LONGEST}
    assert chunks_of(9, plan_chunk(512, 9, 132)) == 1  # 64 sequences of 8 kv heads, 1,281 tokens in pages of 128
    assert plan_chunk(395, 9, 132) < LONGEST and plan_chunk(529, 9, 132) < LONGEST
