"""Time decode attention over the 4-bit cache against the best bf16 attention, and write one record a case.

    python -m comet_core.bench_attention --out results/measured/attention_h200.jsonl

One token of each sequence: kv4_append, then kv4_decode. Sequences are ragged, between half the context and all of it,
and each ends in the middle of a page. The cache is cold (several sets of sequences are walked in turn where one would
fit in the L2), codes are random. Two sequences of each case are compared with the reference before a time is taken. The
baseline holds as many tokens, spread evenly, contiguous, and appends nothing: the fastest of what is installed.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from comet_core.provenance import provenance
from comet_core.results import Record, append
from comet_cuda.kv4_append import KV4Pages, allocate_pages
from comet_cuda.kv4_append_cuda import kv4_append_gpu
from comet_cuda.kv4_decode import kv4_decode, kv4_decode_ref
from comet_cuda.kv4_layout import untile_pages
from comet_cuda.timing import copies_for_cold_l2, median_microseconds

PAGE, SEED = 128, 0
BANDWIDTH = 4.3e12  # bytes a second that a large copy moves on an H200
HEADS = [(32, 32), (32, 8)]  # q, kv
BATCHES, CONTEXTS = [16, 64, 256], [4096, 16384]
CHECKED = 2  # sequences of each case that are compared with the reference
BOUND = 2.2e-3  # relative error: rounding the output to bf16 alone costs 1.6e-3
LARGE = 1 << 29  # bytes of a case that need no second set to be cold
SLOW_US = 3000.0  # candidates for the baseline are tried once before they are timed; far slower ones are dropped


@dataclasses.dataclass
class Case:
    """One batch: its cache, several disjoint sets of its pages, and one new token of each sequence."""

    batch: int
    context: int
    q_heads: int
    kv_heads: int
    dim: int = 128  # of a head

    def __post_init__(self) -> None:
        dim = self.dim
        self.length = torch.randint(self.context // 2 // PAGE, self.context // PAGE, (self.batch,)) * PAGE + PAGE // 2
        self.tokens = int(self.length.sum())
        pages = self.context // PAGE
        full = int((self.length // PAGE).sum()) * self.kv_heads
        page_bytes = PAGE * dim + 4 * (PAGE + dim)
        open_bytes = PAGE // 2 * (2 * dim + dim // 2 + 4)
        self.bytes = full * page_bytes + self.batch * self.kv_heads * open_bytes
        sets = copies_for_cold_l2(self.bytes) if self.bytes < LARGE else 1
        pool = sets * self.batch * pages
        self.cache = allocate_pages(pool, sets * self.batch, self.kv_heads, dim, PAGE, 0, torch.bfloat16, "cuda")
        for codes in (self.cache.k_codes, self.cache.v_codes):
            codes.random_(0, 256)
        for scale in (self.cache.k_scale, self.cache.v_scale):
            scale.uniform_(0.1, 0.3)
        for minimum in (self.cache.k_min, self.cache.v_min):
            minimum.uniform_(-2.0, -1.0)
        self.cache.k_open.normal_()
        self.table = torch.randperm(pool).view(-1, pages).int().cuda()
        self.slots = list(torch.arange(sets * self.batch).int().cuda().view(sets, -1))
        self.length = self.length.int().cuda()
        self.position = self.length - 1
        self.q = torch.randn(self.batch, self.q_heads, dim, device="cuda").bfloat16()
        self.k, self.v = (torch.randn(self.batch, self.kv_heads, dim, device="cuda").bfloat16() for _ in range(2))

    def step(self, slot: Tensor) -> Tensor:
        kv4_append_gpu(self.k, self.v, slot, self.position, self.table, *self.cache.tensors, max_new=1)
        return kv4_decode(self.q, slot, self.length, self.table, self.cache, self.dim**-0.5, max_length=self.context)

    def steps(self) -> list[Callable[[], Tensor]]:
        """`step` of each set of sequences."""
        return [functools.partial(self.step, slot) for slot in self.slots]

    def check(self) -> float:
        """Largest relative error of the sampled sequences."""
        got, worst = self.step(self.slots[0]), 0.0
        for row in torch.randperm(self.batch)[:CHECKED].tolist():
            pages = self.table[row].long()
            some = KV4Pages(
                *(tensor[pages] for tensor in self.cache.tensors[:6]),
                *(tensor[row : row + 1] for tensor in self.cache.tensors[6:]),
            )
            expected = kv4_decode_ref(
                self.q[row : row + 1].float(),
                torch.zeros(1, dtype=torch.int32),
                self.length[row : row + 1],
                torch.arange(len(pages))[None],
                untile_pages(some),
                self.dim**-0.5,
            )
            assert bool(torch.isfinite(got[row]).all())
            newest = some.k_open[0, :, (int(self.length[row]) - 1) % PAGE]
            assert torch.equal(newest, self.k[row]), "the new key is in the open page"
            worst = max(worst, float((got[row].float() - expected[0]).norm() / expected.norm()))
        assert worst < BOUND, worst
        return worst


def candidates(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Ways to attend in bf16: q [B, Hq, D], k and v [B, H, T, D]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    batch, q_heads, dim = q.shape
    heads = k.shape[1]
    grouped = q.view(batch, heads, q_heads // heads, dim)  # q heads of a kv head as its queries
    found: dict[str, Callable[[], Tensor]] = {}

    def with_backend(backend: SDPBackend, query: Tensor, gqa: bool) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return sdpa(query, k, v, enable_gqa=gqa)

        return run

    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
    ):
        found[f"sdpa {name}"] = with_backend(backend, grouped, False)
        if heads != q_heads:
            found[f"sdpa {name}, enable_gqa"] = with_backend(backend, q[:, :, None], True)
    try:
        from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

        found["flash_attn"] = lambda: flash_attn_with_kvcache(q[:, None], k.transpose(1, 2), v.transpose(1, 2))
    except ImportError:
        pass
    return found


def best_baseline(case: Case) -> dict[str, float]:
    """Microseconds of each bf16 attention over as many tokens as the case has."""
    length = round(case.tokens / case.batch)
    size = 4 * case.batch * case.kv_heads * length * case.dim
    shape = (case.batch, case.kv_heads, length, case.dim)
    sets = [
        tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for _ in range(copies_for_cold_l2(size) if size < LARGE else 1)
    ]
    ways = [candidates(case.q, k, v) for k, v in sets]
    times: dict[str, float] = {}
    for name in ways[0]:
        try:
            variants = [way[name] for way in ways]
            variants[0]()
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            variants[0]()
            end.record()
            torch.cuda.synchronize()
            if 1000 * start.elapsed_time(end) < SLOW_US + 4e6 * size / BANDWIDTH:
                times[name] = median_microseconds(variants, max(2, 2 * len(variants)), replays=5)
        except RuntimeError as error:
            print(f"    {name}: {str(error).splitlines()[0][:90]}")
    return times


def record_of(case: Case, us: float, times: dict[str, float], error: float, where: dict[str, Any]) -> Record:
    name = min(times, key=lambda one: times[one])
    major, minor = torch.cuda.get_device_capability()
    return {
        "kind": "bench", "op": "kv4_append+kv4_decode", "arch": f"sm_{major}{minor}",
        "path": f"pages of {PAGE}, half-full open page, ragged lengths", "m": case.batch, "n": None, "k": None,
        "int4_fraction": 1.0, "weight_symmetry": None, "ablation": None, "includes_quantize": True,
        "median_us": round(us, 3), "baseline": f"bf16 {name}, even lengths, no append",
        "baseline_us": round(times[name], 3), "speedup": round(times[name] / us, 4),
        "bound_fraction": round(1e6 * case.bytes / BANDWIDTH / us, 4), "bytes": case.bytes, "batch": case.batch,
        "context": case.context, "tokens": case.tokens, "q_heads": case.q_heads, "kv_heads": case.kv_heads,
        "head_dim": case.dim, "relative_error": round(error, 6),
        "others_us": {key: round(value, 3) for key, value in times.items()},
        "provenance": where,
    }  # fmt: skip


def bench_attention(
    heads: Sequence[tuple[int, int, int]],
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    command: str | None = None,
) -> Iterator[Record]:
    """Records of every case, one by one as they are measured.

    Args:
        heads: (q heads, kv heads, head dimension). contexts: at least two pages of 128 tokens each.
        command: what was typed, for the records.
    """
    for (q_heads, kv_heads, dim), batch, context in itertools.product(heads, batches, contexts):
        torch.manual_seed(SEED)
        case = Case(batch, context, q_heads, kv_heads, dim)
        error = case.check()
        us = median_microseconds(case.steps(), replays=5)
        yield record_of(case, us, best_baseline(case), error, provenance(command, seed=SEED, device="cuda"))
        del case
        torch.cuda.empty_cache()


def row_of(record: Record) -> dict[str, str]:
    """A record as a table row."""
    return {
        "q/kv heads": f"{record['q_heads']}/{record['kv_heads']}",
        "batch": str(record["batch"]),
        "context": f"{record['context']:,}",
        "4 bit, us": f"{record['median_us']:.1f}",
        "TB/s": f"{record['bytes'] / record['median_us'] / 1e6:.2f}",
        "16 bit, us": f"{record['baseline_us']:.1f}",
        "over 16 bit": f"{record['speedup']:.2f}",
        "baseline": record["baseline"],
    }


def main() -> None:
    """Measure, print and record the twelve cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="records are appended to this file")
    args = parser.parse_args()
    ratios = []
    command = f"python -m comet_core.bench_attention --out {args.out.name}"
    for record in bench_attention([(*heads, 128) for heads in HEADS], BATCHES, CONTEXTS, command=command):
        append(args.out, record)
        ratios.append(record["speedup"])
        print(", ".join(f"{key} {value}" for key, value in row_of(record).items()), flush=True)
    mean = geometric_mean(ratios)
    print(f"geometric mean {mean:.3f}, smallest {min(ratios):.3f}")


if __name__ == "__main__":
    main()
