"""The KV4 kernels' own source, run on a CPU by the emulator, against the references: what CI can see of them."""

import ctypes
import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from comet_cuda import kv4_append_cuda
from comet_cuda.errors import CometError
from comet_cuda.kv4_append import KV4Pages, allocate_pages, kv4_append_ref
from comet_cuda.kv4_append_cuda import kv4_append_gpu, rope_append_gpu, rope_qk_gpu
from comet_cuda.kv4_decode import kv4_decode_ref
from comet_cuda.kv4_decode_cuda import kv4_decode_gpu
from comet_cuda.kv4_layout import untile_pages
from comet_cuda.kv4_prefill import kv4_prefill_ref
from comet_cuda.kv4_prefill_cuda import kv4_prefill_gpu
from comet_cuda.rope import rope_append_ref, rope_qk_ref

_spec = importlib.util.spec_from_file_location("emulated", Path(__file__).with_name("emulated.py"))
assert _spec is not None and _spec.loader is not None
emulated = importlib.util.module_from_spec(_spec)
sys.modules["emulated"] = emulated
_spec.loader.exec_module(emulated)

LENGTHS = (70, 1, 33)  # of the sequences in slots 1, 2, 3
CASES = [(2, 64, 32, 0, torch.bfloat16), (1, 128, 32, 3, torch.float16), (1, 96, 64, 4, torch.bfloat16)]
BOUND = {torch.bfloat16: 2.2e-3, torch.float16: 1.6e-3}  # as on a GPU (test_kv4_gpu.py)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the module's kernels are compiled, once."""
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    emulated.emulate(monkeypatch, folder)


@pytest.fixture(params=["rope_append", "rope_append_wave"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv4_append_cuda, "rope_entry", lambda _: request.param)


def ints(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tokens of all sequences, one after the other: k and v [N, H, D]."""

    k: Tensor
    v: Tensor
    slot: Tensor
    position: Tensor
    table: Tensor
    page: int
    sinks: int

    def cache(self) -> KV4Pages:
        heads, dim = self.k.shape[1:]
        return allocate_pages(
            self.table.numel(), len(LENGTHS) + 1, heads, dim, self.page, self.sinks, self.k.dtype, "cpu"
        )

    def filled(self) -> KV4Pages:
        cache = self.cache()
        kv4_append_ref(self.k, self.v, self.slot, self.position, self.table, cache)
        return cache


def problem(heads: int, dim: int, page: int, sinks: int, dtype: torch.dtype) -> Problem:
    generator = torch.Generator().manual_seed(dim)
    tokens = sum(LENGTHS)
    offset = torch.randn(heads, dim, generator=generator) * 3
    size = 10 ** (2 * torch.rand(tokens, 1, 1, generator=generator) - 2)
    pages = -(-max(LENGTHS) // page)
    return Problem(
        (torch.randn(tokens, heads, dim, generator=generator) + offset).to(dtype),
        (torch.randn(tokens, heads, dim, generator=generator) * size).to(dtype),
        torch.cat([ints([r + 1] * n) for r, n in enumerate(LENGTHS)]),
        torch.cat([ints(range(n)) for n in LENGTHS]),
        torch.randperm((len(LENGTHS) + 1) * pages, generator=generator).view(-1, pages).int(),
        page,
        sinks,
    )


def assert_equal_caches(got: KV4Pages, expected: KV4Pages) -> None:
    canonical = untile_pages(got)
    for name in ("k_scale", "k_min", "k_codes", "v_scale", "v_min", "v_codes", "k_sink", "v_sink"):
        assert torch.equal(getattr(canonical, name), getattr(expected, name)), name
    for r, n in enumerate(LENGTHS):
        slots = (n - expected.sinks - 1) % expected.page + 1 if n > expected.sinks else 0
        assert torch.equal(got.k_open[r + 1, :, :slots], expected.k_open[r + 1, :, :slots])


def error_of(got: Tensor, expected: Tensor) -> float:
    assert bool(torch.isfinite(got).all())
    return float((got.float() - expected).norm() / expected.norm())


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize(("heads", "dim", "page", "sinks", "dtype"), CASES)
def test_append(heads: int, dim: int, page: int, sinks: int, dtype: torch.dtype) -> None:
    given = problem(heads, dim, page, sinks, dtype)
    expected = given.filled()
    whole, rounds = given.cache(), given.cache()
    kv4_append_gpu(given.k, given.v, given.slot, given.position, given.table, *whole.tensors)
    assert_equal_caches(whole, expected)
    angle = torch.zeros(max(LENGTHS), dim // 2)
    for t in range(max(LENGTHS)):
        now = given.position == t
        k, v, slot, position = given.k[now], given.v[now], given.slot[now], given.position[now]
        if t % 3:
            kv4_append_gpu(k, v, slot, position, given.table, *rounds.tensors, max_new=1)
            continue
        qkv = torch.cat((torch.randn(k.shape[0], 2 * heads, dim).to(dtype), k, v), 1).flatten(1)
        q = rope_append_gpu(
            qkv, angle.cos(), angle.sin(), slot, position, given.table, *rounds.tensors, None, None, 0.0
        )
        assert torch.equal(q.flatten(1), qkv[:, : 2 * heads * dim])
    assert_equal_caches(rounds, expected)


@pytest.mark.parametrize(
    ("case", "group", "window", "softcap"), [(0, 1, 0, 0.0), (0, 9, 40, 0.0), (1, 4, 0, 20.0), (2, 3, 1, 0.0)]
)
def test_decode(case: int, group: int, window: int, softcap: float) -> None:
    heads, dim, page, sinks, dtype = CASES[case]
    given = problem(heads, dim, page, sinks, dtype)
    canonical, cache = given.filled(), given.cache()
    kv4_append_gpu(given.k, given.v, given.slot, given.position, given.table, *cache.tensors)
    q = torch.randn(4, heads * group, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    slot, length = ints([1, -1, 2, 3]), ints([LENGTHS[0], 5, LENGTHS[1], LENGTHS[2]])
    args = (slot, length, given.table)
    expected = kv4_decode_ref(q.float(), *args, canonical, dim**-0.5, window, softcap)
    for chunk in (4, 64):
        got = kv4_decode_gpu(q, *args, cache.tensors, dim**-0.5, window, softcap, chunk=chunk)
        assert not got[1].any()
        for row in (0, 2, 3):
            assert error_of(got[row], expected[row]) < BOUND[dtype], (row, chunk)


def test_decode_in_several_chunks() -> None:
    """Nine pages of 32 tokens in three chunks: partial outputs, tickets, the last cta's sum."""
    torch.manual_seed(0)
    heads, dim, page, tokens = 1, 64, 32, 300
    cache, canonical = (allocate_pages(10, 1, heads, dim, page, 0, torch.bfloat16, "cpu") for _ in range(2))
    table, slot = torch.randperm(10)[None].int(), ints([0] * tokens)
    k, v = (torch.randn(tokens, heads, dim).bfloat16() for _ in range(2))
    kv4_append_gpu(k, v, slot, ints(range(tokens)), table, *cache.tensors)
    kv4_append_ref(k, v, slot, ints(range(tokens)), table, canonical)
    q = torch.randn(1, 3, dim).bfloat16()
    expected = kv4_decode_ref(q.float(), ints([0]), ints([tokens]), table, canonical, 0.125)
    outputs = [kv4_decode_gpu(q, ints([0]), ints([tokens]), table, cache.tensors, 0.125, chunk=4) for _ in range(2)]
    assert error_of(outputs[0], expected) < BOUND[torch.bfloat16] and torch.equal(*outputs)


@pytest.mark.parametrize(
    ("case", "group", "window", "softcap"), [(0, 2, 0, 0.0), (0, 3, 20, 10.0), (1, 1, 0, 0.0), (2, 2, 30, 0.0)]
)
def test_prefill(case: int, group: int, window: int, softcap: float) -> None:
    heads, dim, page, sinks, dtype = CASES[case]
    given = problem(heads, dim, page, sinks, dtype)
    q = torch.randn(sum(LENGTHS), heads * group, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected_cache, cache = given.cache(), given.cache()
    done = [0] * len(LENGTHS)
    for chunk in (45, 100):  # two calls: the second begins inside a page
        sizes = [min(chunk, n - start) for n, start in zip(LENGTHS, done, strict=True)]
        begins = [sum(LENGTHS[:r]) + done[r] for r in range(len(LENGTHS))]
        rows = torch.cat([torch.arange(b, b + size) for b, size in zip(begins, sizes, strict=True)])
        starts = ints([0, *torch.tensor(sizes).cumsum(0)])
        parts = torch.cat((q, given.k, given.v), 1)[rows].split((heads * group, heads, heads), 1)
        args = (starts, ints([1, 2, 3]), ints(done), given.table)
        options = (dim**-0.5, window, softcap)
        expected = kv4_prefill_ref(parts[0].float(), *parts[1:], *args, expected_cache, *options)
        got = kv4_prefill_gpu(*parts, *args, cache.tensors, *options, max(sizes))
        assert error_of(got, expected) < BOUND[dtype]
        done = [start + size for start, size in zip(done, sizes, strict=True)]
    assert_equal_caches(cache, expected_cache)


@pytest.mark.usefixtures("_both_ways")
def test_rope() -> None:
    torch.manual_seed(0)
    dim, q_heads, heads = 96, 3, 1
    qkv = torch.randn(5, (q_heads + 2 * heads) * dim).bfloat16()
    angle, weight = torch.rand(50, dim // 4), (torch.rand(dim) + 0.5).bfloat16()
    position, cos, sin = ints([3, 49, 0, 7, 7]), angle.cos(), angle.sin()
    for norm in (None, weight):
        got, expected = qkv.clone(), qkv.clone()
        rope_qk_gpu(got, cos, sin, position, q_heads, heads, norm, norm, 1e-6)
        rope_qk_ref(expected, cos, sin, position, q_heads, heads, norm, norm, 1e-6)
        assert error_of(got, expected.float()) < 2e-4
        caches = [allocate_pages(10, 5, heads, dim, 32, 0, torch.bfloat16, "cpu") for _ in range(2)]
        rope = (cos, sin, ints(range(5)), position, torch.arange(10).view(5, 2).int())
        q = rope_append_gpu(qkv, *rope, *caches[0].tensors, norm, norm, 1e-6)
        assert error_of(q, rope_append_ref(qkv, *rope, caches[1], norm, norm, 1e-6).float()) < 2e-4
        assert torch.equal(untile_pages(caches[0]).v_codes, caches[1].v_codes)


def assert_rope_append_equals(
    heads: int, q_heads: int, sinks: int, page: int, dim: int, dtype: torch.dtype, slot: list[int], position: list[int]
) -> KV4Pages:
    """rope_append of these tokens into caches whose open pages hold something; returns the reference's cache."""
    torch.manual_seed(0)
    rows, width = len(slot), -(-(max(position) + 1) // page)
    caches = [allocate_pages(width * rows, rows, heads, dim, page, sinks, dtype, "cpu") for _ in range(2)]
    open_page = (torch.randn(caches[0].k_open.shape) * 10 ** (3 * torch.rand(dim) - 2)).to(dtype)
    open_page[..., :2] = 0.25  # one range of no width, and one that the newest key gives some
    for cache in caches:
        for tensor in cache.tensors:
            tensor.zero_()
        cache.k_open.copy_(open_page)
    qkv = torch.randn(rows, (q_heads + 2 * heads) * dim).to(dtype)
    angle = torch.rand(max(position) + 1, dim // 2)
    angle[:, 0] = 0.0  # channel 0 stays what it is
    qkv[:, ::dim] = 0.25
    args = (angle.cos(), angle.sin(), ints(slot), ints(position), torch.randperm(width * rows).view(rows, width).int())
    q = rope_append_gpu(qkv, *args, *caches[0].tensors, None, None, 0.0)
    assert torch.equal(q, rope_append_ref(qkv, *args, caches[1]))
    got = untile_pages(caches[0])
    for name in ("k_scale", "k_min", "k_codes", "v_scale", "v_min", "v_codes", "k_open", "k_sink", "v_sink"):
        assert torch.equal(getattr(got, name), getattr(caches[1], name)), name
    return caches[1]


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize(
    ("heads", "q_heads", "sinks", "dim", "page", "dtype"),
    [
        (5, 10, 0, 64, 32, torch.bfloat16),
        (5, 5, 3, 96, 64, torch.float16),
        (1, 7, 3, 256, 128, torch.bfloat16),
        (3, 3, 2, 128, 128, torch.bfloat16),
    ],
)
def test_rope_append_shares_out_every_head(
    heads: int, q_heads: int, sinks: int, dim: int, page: int, dtype: torch.dtype
) -> None:
    """Heads that leave warps and page ctas half empty; tokens that complete a page, are inside one, sinks, padding."""
    position = [sinks + page - 1, 5, max(sinks - 1, 0), page + 7, sinks + 2 * page - 1, sinks + page - 1]
    cache = assert_rope_append_equals(heads, q_heads, sinks, page, dim, dtype, [0, -1, 2, 3, 1, -1], position)
    assert cache.k_codes.any() and cache.v_codes.any()


@pytest.mark.usefixtures("_both_ways")
def test_any_of_many_tokens_may_complete_a_page() -> None:
    """More tokens than a warp looks at in one trip; neighbours, the first, the last, and several of 32."""
    done = (0, 31, 32, 33, 100, 255, 256, 289)
    position = [31 if row in done else row % 31 for row in range(290)]
    cache = assert_rope_append_equals(1, 1, 0, 32, 64, torch.bfloat16, list(range(290)), position)
    assert int(cache.k_codes.flatten(1).any(1).sum()) == len(done)


def test_few_and_many_tokens_are_appended_in_one_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule itself: what is asked of which entry, and that each runs."""
    ways = {1: "_wave", 16: "_wave", 17: "", 64: "", 127: "", 128: "_wave", 256: "_wave"}
    assert {tokens: kv4_append_cuda.rope_entry(tokens) for tokens in ways} == {
        tokens: f"rope_append{way}" for tokens, way in ways.items()
    }
    seen: list[str] = []
    kernel = kv4_append_cuda._append_kernel
    monkeypatch.setattr(kv4_append_cuda, "_append_kernel", lambda *args: seen.append(args[-1]) or kernel(*args))
    for tokens in (16, 17, 128):
        position = [31 if row == tokens - 1 else row % 31 for row in range(tokens)]
        assert_rope_append_equals(1, 1, 0, 32, 64, torch.bfloat16, list(range(tokens)), position)
    assert seen == ["rope_append_wave", "rope_append", "rope_append_wave"]


CODES = """
alignas(16) char memory[4];
extern "C" void codes(int n, const float* x, const float* minimum, const float* scale, unsigned* divided,
                      unsigned* other) {
  for (int i = 0; i < n; ++i) {
    const comet::Range r = {scale[i], minimum[i]};
    divided[i] = comet::code_of(x[i], r), other[i] = comet::code_of(x[i], r, 1.f / scale[i]);
  }
}
"""


def test_a_code_without_a_division_is_the_one_with_it(folder: Path) -> None:
    """Any scale, any minimum; values anywhere, infinite, not numbers, and on or next to the border of two codes."""
    library = emulated.compiled(
        folder, emulated.expanded("kv4_append.cu", {"ELEMENT": "BFloat16", "DIM": 64, "PAGE": 32, "ENTRY": 2}) + CODES
    )
    generator = torch.Generator().manual_seed(0)
    n = 1_000_000
    bits = torch.randint(-(2**15), 2**15, (3, n), generator=generator).short()
    scale = (bits[0] & 0x7FFF).view(torch.float16).float()
    minimum, anything = bits[1].view(torch.float16).float(), bits[2].view(torch.bfloat16).float()
    scale = torch.where((scale > 0) & (scale <= 65504), scale, 1.0)
    minimum = torch.where(minimum.abs() <= 65504, minimum, 0.0)
    border = minimum + scale * torch.randint(0, 32, (n,), generator=generator) / 2
    x = torch.where(torch.rand(n, generator=generator) < 0.3, anything, border)
    x = torch.where(torch.rand(n, generator=generator) < 0.5, x.bfloat16().float(), x.half().float())
    results = [torch.zeros(n, dtype=torch.int32) for _ in range(2)]
    library.codes(n, *(ctypes.c_void_p(t.data_ptr()) for t in (x, minimum, scale, *results)))
    quotient = (x - minimum) / scale
    assert int((quotient.frac() == 0.5).sum()) > n // 200 and not torch.isfinite(x).all()
    assert results[0].unique().tolist() == list(range(16)) and torch.equal(*results)


def test_shapes_that_would_be_read_past_their_end_are_refused() -> None:
    cache = allocate_pages(2, 2, 2, 64, 32, 0, torch.bfloat16, "cpu")
    table, angle = ints([[0], [1]]), torch.zeros(4, 32)
    qkv = torch.zeros(2, 8 * 64).bfloat16()
    with pytest.raises(CometError, match="one entry a token"):
        rope_append_gpu(qkv, angle, angle, ints([0]), ints([0]), table, *cache.tensors, None, None, 0.0)
    with pytest.raises(CometError, match="one entry a token"):
        rope_qk_gpu(qkv, angle, angle, ints([0]), 4, 2, None, None, 0.0)
    with pytest.raises(CometError, match="3 q heads for 2 kv heads"):
        odd = qkv[:, : 7 * 64].contiguous()
        rope_append_gpu(odd, angle, angle, ints([0, 1]), ints([0, 0]), table, *cache.tensors, None, None, 0.0)
    k = torch.zeros(2 * 2 * 64 + 1).bfloat16()[1:].view(2, 2, 64)
    with pytest.raises(CometError, match="16 bytes"):
        kv4_append_gpu(k, k, ints([0, 1]), ints([0, 0]), table, *cache.tensors)
    with pytest.raises(CometError, match="one entry a token"):
        kv4_append_gpu(k.clone(), k.clone(), ints([0]), ints([0]), table, *cache.tensors)
