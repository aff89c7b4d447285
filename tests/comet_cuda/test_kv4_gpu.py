"""KV4 on a GPU against the references: the cache bit by bit, attention within the rounding of its output."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from comet_cuda import kv4_append_cuda
from comet_cuda.affine import choose_minmax_qparams
from comet_cuda.errors import CometError
from comet_cuda.kv4_append import KV4Pages, allocate_pages, kv4_append, kv4_append_ref
from comet_cuda.kv4_append_cuda import kv4_append_gpu
from comet_cuda.kv4_decode import kv4_decode, kv4_decode_ref
from comet_cuda.kv4_layout import untile_pages
from comet_cuda.kv4_prefill import kv4_prefill, kv4_prefill_ref
from comet_cuda.rope import rope_append, rope_append_ref, rope_qk_, rope_qk_ref

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LENGTHS = (300, 1, 130, 517, 64)
# Relative Frobenius error: rounding the output costs 1.6e-3 in bfloat16 and 2e-4 in float16; f16 products of q and key
# scales, of probabilities and value scales, add up to 1.1e-3 with these outliers: less than bfloat16's rounding.
BOUND = {torch.bfloat16: 2.2e-3, torch.float16: 1.6e-3}


@pytest.fixture(params=["rope_append", "rope_append_wave"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv4_append_cuda, "rope_entry", lambda _: request.param)


def ints(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).cuda()


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sequences of LENGTHS in slots 1, 2, ..., and where their pages lie. On the CPU."""

    k: list[Tensor]  # [length, H, D] of each sequence
    v: list[Tensor]
    table: Tensor
    dtype: torch.dtype
    page: int
    sinks: int

    def cache(self, device: str) -> KV4Pages:
        heads, dim = self.k[0].shape[1:]
        return allocate_pages(
            self.table.numel(), len(LENGTHS) + 1, heads, dim, self.page, self.sinks, self.dtype, device
        )

    def calls(self, chunk: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """k, v, slot, position of calls that append up to `chunk` tokens of each sequence."""
        for start in range(0, max(LENGTHS), chunk):
            parts = [(r, range(start, min(start + chunk, n))) for r, n in enumerate(LENGTHS) if start < n]
            yield (
                torch.cat([self.k[r][span.start : span.stop] for r, span in parts]),
                torch.cat([self.v[r][span.start : span.stop] for r, span in parts]),
                torch.tensor([r + 1 for r, span in parts for _ in span], dtype=torch.int32),
                torch.tensor([t for _, span in parts for t in span], dtype=torch.int32),
            )

    def reference(self) -> KV4Pages:
        cache = self.cache("cpu")
        for k, v, slot, position in self.calls(10000):
            kv4_append_ref(k, v, slot, position, self.table, cache)
        return cache


def problem(heads: int, dim: int, page: int, sinks: int, dtype: torch.dtype, seed: int = 0) -> Problem:
    """Keys with a mean and outlier channels, values with outlier tokens of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-max(LENGTHS) // page)
    offset = torch.randn(heads, dim, generator=generator) * 3
    offset[:, :: dim // 4] *= 4

    def tokens(n: int, kind: str) -> Tensor:
        x = torch.randn(n, heads, dim, generator=generator)
        size = 10 ** (2 * torch.rand(n, 1, 1, generator=generator) - 2)
        return (x + offset if kind == "k" else x * size).to(dtype)

    return Problem(
        [tokens(n, "k") for n in LENGTHS],
        [tokens(n, "v") for n in LENGTHS],
        torch.randperm((len(LENGTHS) + 1) * pages, generator=generator).view(-1, pages).int(),
        dtype,
        page,
        sinks,
    )


def assert_equal_caches(got: KV4Pages, expected: KV4Pages, page: int) -> None:
    canonical = untile_pages(dataclasses.replace(got, **{n: t.cpu() for n, t in vars(got).items()}))
    for name in ("k_scale", "k_min", "k_codes", "v_scale", "v_min", "v_codes", "k_sink", "v_sink"):
        assert torch.equal(getattr(canonical, name), getattr(expected, name)), name
    for r, n in enumerate(LENGTHS):
        open_slots = (n - expected.sinks - 1) % page + 1
        if n > expected.sinks:
            mine, its = (cache.k_open[r + 1, :, :open_slots] for cache in (canonical, expected))
            assert torch.equal(mine, its), f"open page of sequence {r}"


CASES = [
    (2, 128, 128, 0, torch.bfloat16), (2, 128, 128, 4, torch.float16), (1, 64, 64, 4, torch.bfloat16),
    (3, 96, 128, 3, torch.bfloat16), (2, 256, 64, 0, torch.float16), (2, 128, 64, 4, torch.bfloat16),
    (1, 64, 128, 40, torch.float16), (1, 256, 128, 4, torch.bfloat16), (1, 96, 64, 0, torch.float16),
]  # fmt: skip


def test_the_reference_finds_the_same_scales_on_a_gpu() -> None:
    """In float32, where a reciprocal's last bit shows."""
    low, high = -torch.rand(1 << 20), torch.rand(1 << 20)
    on_cpu = choose_minmax_qparams(low, high, 4, torch.float32)
    on_gpu = choose_minmax_qparams(low.cuda(), high.cuda(), 4, torch.float32)
    assert all(torch.equal(one, other.cpu()) for one, other in zip(on_cpu, on_gpu, strict=True))


@pytest.mark.parametrize(("heads", "dim", "page", "sinks", "dtype"), CASES)
def test_the_cache_equals_the_reference(
    heads: int, dim: int, page: int, sinks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = problem(heads, dim, page, sinks, dtype)
    expected, table = given.reference(), given.table.cuda()
    for chunk in (10000, 200, 37):
        cache = given.cache("cuda")
        for k, v, slot, position in given.calls(chunk):
            kv4_append(k.cuda(), v.cuda(), ints(slot), ints(position), table, cache)
        assert_equal_caches(cache, expected, page)
    one, zero = torch.ones(max(LENGTHS), dim // 2).cuda(), torch.zeros(max(LENGTHS), dim // 2).cuda()
    for way in ("rope_append", "rope_append_wave"):
        monkeypatch.setattr(kv4_append_cuda, "rope_entry", lambda _, way=way: way)
        cache = given.cache("cuda")
        for k, v, slot, position in given.calls(1):
            q = torch.randn(k.shape[0], 2 * heads, dim).to(dtype)
            qkv = torch.cat((q, k, v), 1).flatten(1).cuda()
            assert torch.equal(rope_append(qkv, one, zero, ints(slot), ints(position), table, cache).cpu(), q)
        assert_equal_caches(cache, expected, page)
    cache = given.cache("cuda")
    for k, v, slot, position in given.calls(1):
        kv4_append_gpu(k.cuda(), v.cuda(), ints(slot), ints(position), table, *cache.tensors, max_new=1)
    assert_equal_caches(cache, expected, page)


def error_of(got: Tensor, expected: Tensor) -> float:
    assert bool(torch.isfinite(got).all())
    return float((got.float().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("heads", "dim", "page", "sinks", "dtype"), CASES)
@pytest.mark.parametrize("group", [1, 4, 7, 12])
def test_decode_agrees(heads: int, dim: int, page: int, sinks: int, dtype: torch.dtype, group: int) -> None:
    given = problem(heads, dim, page, sinks, dtype, seed=group)
    expected_cache, table, cache = given.reference(), given.table.cuda(), given.cache("cuda")
    for k, v, slot, position in given.calls(10000):
        kv4_append(k.cuda(), v.cuda(), ints(slot), ints(position), table, cache)
    rows = len(LENGTHS)
    q = torch.randn(rows, heads * group, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    slot, length = torch.arange(1, rows + 1), torch.tensor(LENGTHS)
    for window, softcap in ((0, 0.0), (100, 0.0), (1, 0.0), (0, 20.0), (333, 5.0)):
        expected = kv4_decode_ref(q.float(), slot, length, given.table, expected_cache, dim**-0.5, window, softcap)
        for max_length in (0, max(LENGTHS)):
            args = (ints(slot), ints(length), table, cache, dim**-0.5, window, softcap, max_length)
            got = kv4_decode(q.cuda(), *args)
            assert torch.equal(got, kv4_decode(q.cuda(), *args)), "the same bits every time"
            for row in range(rows):
                assert error_of(got[row], expected[row]) < BOUND[dtype], (window, softcap, max_length, LENGTHS[row])


@pytest.mark.parametrize(("heads", "dim", "page", "sinks", "dtype"), CASES)
@pytest.mark.parametrize("group", [1, 4, 7])
def test_prefill_agrees_in_any_chunks(
    heads: int, dim: int, page: int, sinks: int, dtype: torch.dtype, group: int
) -> None:
    given = problem(heads, dim, page, min(sinks, page), dtype, seed=group)
    generator = torch.Generator().manual_seed(1)
    q = [torch.randn(n, heads * group, dim, generator=generator).to(dtype) for n in LENGTHS]
    for window, softcap in ((0, 0.0), (100, 10.0)):
        expected_cache, expected = given.cache("cpu"), []
        for r, n in enumerate(LENGTHS):
            slot, old = torch.tensor([r + 1]), torch.tensor([0])
            starts = torch.tensor([0, n])
            expected.append(
                kv4_prefill_ref(
                    q[r].float(), given.k[r], given.v[r], starts, slot, old, given.table, expected_cache, dim**-0.5,
                    window, softcap,
                )
            )  # fmt: skip
        for chunk in (10000, 190, 50) if window == 0 else (300,):
            cache, start = given.cache("cuda"), 0
            for k, v, _slot, _position in given.calls(chunk):
                rows = [r for r, n in enumerate(LENGTHS) if start < n]
                sizes = [min(chunk, LENGTHS[r] - start) for r in rows]
                starts = ints([0, *torch.tensor(sizes).cumsum(0)])
                qs = torch.cat([q[r][start : start + size] for r, size in zip(rows, sizes, strict=True)])
                qkv = torch.cat((qs, k, v), 1).cuda()  # as it comes from the fused linear: rows of all three
                parts = qkv.split((qs.shape[1], heads, heads), 1)
                out = kv4_prefill(
                    *parts, starts, ints([r + 1 for r in rows]), ints([start] * len(rows)), given.table.cuda(), cache,
                    dim**-0.5, window, softcap, max(sizes),
                )  # fmt: skip
                for r, got in zip(rows, out.split(sizes), strict=True):
                    its = expected[r][start : start + chunk]
                    assert error_of(got, its) < BOUND[dtype], (window, chunk, LENGTHS[r], start)
                start += chunk
            assert_equal_caches(cache, expected_cache, page)


def test_a_long_context_is_split_and_padding_rows_are_zero() -> None:
    torch.manual_seed(0)
    heads, dim, page, pages = 2, 128, 128, 40
    cache = allocate_pages(pages, 1, heads, dim, page, 0, torch.bfloat16, "cuda")
    table = torch.randperm(pages)[None].int().cuda()
    tokens = pages * page - 50
    k, v = (torch.randn(tokens, heads, dim).bfloat16().cuda() for _ in range(2))
    kv4_append(k, v, ints([0] * tokens), ints(range(tokens)), table, cache)
    q = torch.randn(3, 8, dim).bfloat16().cuda()
    out = kv4_decode(q, ints([-1, 0, -1]), ints([0, tokens, 5]), table, cache, dim**-0.5)
    canonical = untile_pages(dataclasses.replace(cache, **{n: t.cpu() for n, t in vars(cache).items()}))
    expected = kv4_decode_ref(
        q[1:2].float().cpu(), torch.tensor([0]), torch.tensor([tokens]), table.cpu(), canonical, dim**-0.5
    )
    assert error_of(out[1:2], expected) < BOUND[torch.bfloat16]
    assert not out[0].any() and not out[2].any()


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("rotary", "norm"), [(1, False), (2, False), (1, True)])
def test_rope_agrees(dim: int, rotary: int, norm: bool) -> None:
    torch.manual_seed(0)
    rows, q_heads, heads = 5, 6, 2
    dtype = torch.bfloat16
    qkv = torch.randn(rows, (q_heads + 2 * heads) * dim).to(dtype)
    angle = torch.rand(1000, dim // 2 // rotary) * 6
    weight = (torch.rand(dim) + 0.5).to(dtype) if norm else None
    on_gpu = None if weight is None else weight.cuda()
    position = torch.tensor([3, 999, 0, 17, 127], dtype=torch.int32)
    expected, got = qkv.clone(), qkv.cuda()
    rope_qk_ref(expected, angle.cos(), angle.sin(), position, q_heads, heads, weight, weight, 1e-6)
    rope_qk_(got, angle.cos().cuda(), angle.sin().cuda(), ints(position), q_heads, heads, on_gpu, on_gpu, 1e-6)
    if not norm:
        assert torch.equal(got.cpu(), expected)
    assert error_of(got, expected.float()) < 2e-4 and (got.cpu() != expected).float().mean() < 1e-2
    caches = [allocate_pages(rows * 8, rows, heads, dim, 128, 0, dtype, device) for device in ("cpu", "cuda")]
    table = torch.arange(rows * 8).view(rows, 8).int()
    slot = torch.arange(rows).int()
    rope = (angle.cos(), angle.sin(), slot, position, table)
    first = rope_append_ref(qkv, *rope, caches[0], weight, weight)
    second = rope_append(qkv.cuda(), *(x.cuda() for x in rope), caches[1], on_gpu, on_gpu)
    assert error_of(second, first.float()) < 2e-4
    assert error_of(caches[1].k_open, caches[0].k_open.float()) < 2e-4
    canonical = untile_pages(dataclasses.replace(caches[1], **{n: t.cpu() for n, t in vars(caches[1]).items()}))
    assert torch.equal(canonical.v_codes, caches[0].v_codes)


@pytest.mark.usefixtures("_both_ways")
def test_both_kernels_stand_in_a_graph() -> None:
    torch.manual_seed(0)
    rows, heads, group, dim, page = 3, 2, 4, 128, 64
    table = torch.arange(rows * 8).view(rows, 8).int().cuda()
    cache, other = (allocate_pages(rows * 8, rows, heads, dim, page, 4, torch.bfloat16, "cuda") for _ in range(2))
    angle = torch.rand(512, dim // 2).cuda()
    qkv = torch.zeros(rows, (group + 2) * heads * dim).bfloat16().cuda()
    slot, position = ints(range(rows)), ints([0, 0, 0])
    length = position + 1

    def step(into: KV4Pages) -> Tensor:
        q = rope_append(qkv, angle.cos(), angle.sin(), slot, position, table, into)
        return kv4_decode(q, slot, length, table, into, dim**-0.5)

    step(other)  # compile and load outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(cache)
    for t in range(150):
        qkv.copy_(torch.randn(qkv.shape))
        position.copy_(torch.tensor([t, t + 7, 2 * t]) if t else torch.zeros(3))
        length.copy_(position + 1)
        graph.replay()
        assert torch.equal(out, step(other)), t


def test_what_the_kernels_cannot_take_is_refused() -> None:
    cache = allocate_pages(2, 1, 1, 80, 64, 0, torch.bfloat16, "cuda")
    x, one, table = torch.zeros(1, 1, 80).bfloat16().cuda(), ints([0]), ints([[0, 1]])
    with pytest.raises(CometError, match="head dimension 80"):
        kv4_append(x, x, one, one, table, cache)
    cache = allocate_pages(2, 1, 1, 64, 64, 0, torch.bfloat16, "cuda")
    x = x[..., :64].contiguous()
    with pytest.raises(CometError, match="index tensor of torch.int64"):
        kv4_append(x, x, one.long(), one, table, cache)
    with pytest.raises(CometError, match="float16"):
        kv4_decode(x.half(), one, one, table, cache, 1.0)
