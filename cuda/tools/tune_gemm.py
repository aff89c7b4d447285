"""Check, tune and time the sm_90a GEMM on a GPU: one call builds, checks and times many variants.

    python cuda/tools/tune_gemm.py check                       # exactness, and what the tables choose
    python cuda/tools/tune_gemm.py tune --m 1,16 --shapes 4096x4096,22016x4096 [--variants name=value,...;...]
        (with --share 0 each behind a quantization, as a decoder has it; --alone: without; --out FILE: for fit_tiles.py)
    python cuda/tools/tune_gemm.py bench --out FILE.jsonl      # the table's choices against bf16 cuBLAS, all shapes
    python cuda/tools/tune_gemm.py compile                     # every variant that tune would use; needs no GPU

No time is printed for a variant whose output was not first compared with the reference, and found bit-equal over
repeated runs. Shapes are all linears with N * K >= 2^24 of the models of the paper.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from math import exp, log
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fit_tiles import names_of
from integer_variants import IntegerProblem, integer_candidates, integer_problems

from comet_cuda import w4ax_gemm_integer as integer
from comet_cuda import w4ax_gemm_sm90 as gemm
from comet_cuda.quantize_act import TOKEN
from comet_cuda.timing import copies_for_cold_l2, median_microseconds
from comet_cuda.w4ax_gemm import w4ax_gemm_ref
from comet_cuda.weight_layout import record_bytes, tile_activations_sm90, untile_weight_sm90, zero_terms_sm90

MODELS: dict[str, tuple[tuple[int, int], ...]] = {  # (N, K): fused qkv, o, fused gate_up (or fc1), down (or fc2)
    "llama-7b": ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)),
    "llama-13b": ((15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824)),
    "llama-30b": ((19968, 6656), (6656, 6656), (35840, 6656), (6656, 17920)),
    "llama-65b": ((24576, 8192), (8192, 8192), (44032, 8192), (8192, 22016)),
    "llama-2-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "qwen2-72b": ((10240, 8192), (8192, 8192), (59136, 8192), (8192, 29568)),
    "opt-13b": ((15360, 5120), (5120, 5120), (20480, 5120), (5120, 20480)),
    "opt-175b": ((36864, 12288), (12288, 12288), (49152, 12288), (12288, 49152)),
}
SHAPES = tuple(dict.fromkeys(shape for shapes in MODELS.values() for shape in shapes))
BATCHES = (1, 16, 64, 256, 1024, 4096)
INT4_FRACTION = 0.84
PEAK_BYTES = 4.3e12  # per second, measured copy rate of an H200
PEAK_OPS = 1.54e15  # per second, FP8 cuBLAS at its best on an H200

Tiles = gemm.Tiles


def block_bits_for(blocks: int, fraction: float = INT4_FRACTION) -> torch.Tensor:
    """8-bit blocks first, as packing orders them."""
    bits = torch.full((blocks,), 4, dtype=torch.uint8)
    bits[: round((1 - fraction) * blocks)] = 8
    return bits


def random_activations(m: int, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [M, NB, 128] and f32 [M, NB] on the GPU."""
    wide = torch.randint(-127, 128, (m, len(bits), 128), dtype=torch.int8, device="cuda")
    narrow = torch.randint(-7, 8, wide.shape, dtype=torch.int8, device="cuda")
    codes = torch.where((bits == 4).cuda()[None, :, None], narrow, wide)
    return codes, torch.rand(m, len(bits), device="cuda") * 0.1 + 0.01


def random_records(rows: int, blocks: int, has_zero: bool) -> torch.Tensor:
    """Weight records with random codes, scales and zero points."""
    records = torch.randint(0, 256, (-(-rows // 64), blocks, record_bytes(has_zero)), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(*records.shape[:2], 64, device="cuda") * 0.02 + 0.01).to(torch.bfloat16)
    records[..., 4096:4224] = scales.view(torch.uint8)
    if has_zero:
        records[..., 4224:] &= 15
    return records


def terms_of(records: torch.Tensor, rows: int, bits: torch.Tensor) -> torch.Tensor:
    """zero_terms of records."""
    _, scale, zero = untile_weight_sm90(records, rows, bits)
    return zero_terms_sm90(scale, zero)


def error_of(y: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference; infinite where not finite."""
    if want.numel() == 0:
        return 0.0
    error = ((y.float() - want).norm() / want.norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-5}  # output rounding; 2^-17 of a zero term


def verify(m: int, rows: int, bits: torch.Tensor, tiles: Tiles | None, **options: Any) -> str:
    """Empty if right, else what is wrong. Output poisoned by construction of fresh memory; runs compared bit by bit."""
    has_zero, dtype = options.get("has_zero", True), options.get("dtype", torch.bfloat16)
    x, meta = tile_activations_sm90(*random_activations(m, bits), bits)
    if m % 8:
        meta.view(len(bits), -1, 4, 2, 2)[:, -1].permute(0, 1, 3, 2).reshape(len(bits), 8, 2)[:, m % 8 :] = float("nan")
    records = random_records(rows, len(bits), has_zero)
    mask = gemm.int8_mask_words(bits)
    bias = torch.randn(rows, device="cuda") if options.get("bias") else None
    terms = terms_of(records, rows, bits)
    want = gemm.w4ax_gemm_tiled_ref(x, meta, records, terms, bias, m, rows, mask, torch.float32)
    poison = torch.full((m, rows), float("nan"), dtype=dtype, device="cuda")
    del poison  # the caching allocator hands this memory to the output
    runs = [
        gemm.launch(x, meta, records, terms, bias, m, rows, mask, dtype, tiles) for _ in range(options.get("runs", 3))
    ]
    torch.cuda.synchronize()
    error = error_of(runs[0], want)
    if not error < TOLERANCE[dtype]:
        return f"error {error:.3g}"
    if any(not torch.equal(runs[0], run) for run in runs[1:]):
        return "runs differ"
    return ""


def exactness() -> list[str]:
    """Worst-case integers with scales of one, float32 out: the sums must be the exact numbers."""
    problems = []
    tiles = Tiles(16)
    for bits_value, low, high in ((4, -7, 7), (8, -127, 127)):
        bits = torch.full((3,), bits_value, dtype=torch.uint8)
        for name, codes in (
            ("largest", torch.full((16, 3, 128), high, dtype=torch.int8)),
            ("smallest", torch.full((16, 3, 128), low, dtype=torch.int8)),
            ("random", torch.randint(low, high + 1, (16, 3, 128), dtype=torch.int8)),
        ):
            weight = torch.full((64, 192), 255, dtype=torch.uint8)
            weight[32:] = torch.randint(0, 256, (32, 192), dtype=torch.uint8)
            zero = torch.randint(0, 16, (64, 3), dtype=torch.uint8)
            zero[:8], zero[8:16] = 0, 15
            ones = torch.ones(64, 3, dtype=torch.bfloat16)
            scale = torch.ones(16, 3)
            want = w4ax_gemm_ref(codes, scale, weight, ones, zero, bits, None, torch.float32)
            x, meta = tile_activations_sm90(codes.cuda(), scale.cuda(), bits)
            tiled = gemm.prepare_weight_sm90(weight.cuda(), ones.cuda(), zero.cuda(), bits)
            operands = (x, meta, tiled.records, tiled.zero_terms, None, 16, 64, tiled.int8_mask, torch.float32)
            wrong = int((gemm.launch(*operands, tiles).cpu() != want).sum())
            case = f"{bits_value}-bit, {name}, {short(tiles)}"
            print(f"exact integers, {case}: {wrong} of {want.numel()} differ; max {want.abs().max().item():.0f}")
            if wrong:
                problems.append(case)
    return problems


def check() -> int:
    problems = exactness() + [f"integer scales: {wrong}" for wrong in integer_problems(None)]
    mixed = (torch.rand(19, generator=torch.Generator().manual_seed(1)) < 0.4).to(torch.uint8) * 4 + 4
    mixes = {"all 4": block_bits_for(16, 1.0), "all 8": block_bits_for(16, 0.0), "84%": block_bits_for(25)}
    mixes["mixed"] = mixed
    batches = [*range(18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4096]
    for name, bits in mixes.items():
        for m in batches:
            for has_zero in (True, False) if m in (1, 16, 64, 257) else (True,):
                wrong = verify(m, 4104 if m < 1000 else 2056, bits, None, has_zero=has_zero, bias=m % 2 == 1)
                if wrong:
                    problems.append(f"m={m} blocks {name} zero={has_zero}: {wrong}")
    for rows in (8, 64, 100, 1023):
        for dtype in (torch.float16, torch.float32):
            for m in (5, 70, 300):
                wrong = verify(m, rows, mixed, None, dtype=dtype, bias=True)
                if wrong:
                    problems.append(f"m={m} rows={rows} {dtype}: {wrong}")
    print(f"{len(problems)} problems")
    for problem in problems[:40]:
        print(" ", problem)
    return len(problems)


class Problem:
    """Operands of one shape and batch, several sets, and its cuBLAS time."""

    def __init__(self, m: int, n: int, k: int, has_zero: bool = True) -> None:
        self.m, self.n, self.k = m, n, k
        blocks = -(-k // 128)
        self.bits = block_bits_for(blocks)
        self.mask = gemm.int8_mask_words(self.bits)
        self.x, self.meta = tile_activations_sm90(*random_activations(m, self.bits), self.bits)
        records = random_records(n, blocks, has_zero)
        self.bytes = records.numel() + self.x.numel() + 4 * self.meta.numel() + 2 * m * n
        self.sets = [records, *(records.clone() for _ in range(copies_for_cold_l2(records.numel()) - 1))]
        columns = min(n, 8192)  # the reference on a part of the rows, all of them where small
        self.part = slice(0, columns)
        self.terms = terms_of(records, n, self.bits)
        part = (records[: -(-columns // 64)], self.terms[: -(-columns // 64)])
        self.want = gemm.w4ax_gemm_tiled_ref(self.x, self.meta, *part, None, m, columns, self.mask, torch.float32)

    def launcher(self, records: torch.Tensor, tiles: Tiles | None, pdl: bool) -> Callable[[], torch.Tensor]:
        rest = (None, self.m, self.n, self.mask, torch.bfloat16, tiles, pdl)
        return lambda: gemm.launch(self.x, self.meta, records, self.terms, *rest)

    def time(self, tiles: Tiles | None, pdl: bool = True) -> float:
        """Microseconds, or infinity with the reason printed."""
        run = self.launcher(self.sets[0], tiles, pdl)
        y = run()
        error = error_of(y[:, self.part], self.want)
        if not error < TOLERANCE[torch.bfloat16] or not torch.equal(y, run()):
            print(f"  WRONG m={self.m} {self.n}x{self.k} {tiles}: error {error:.3g}")
            return float("inf")
        return median_microseconds([self.launcher(records, tiles, pdl) for records in self.sets])


def time_cublas(m: int, n: int, k: int) -> float:
    """Microseconds of bf16 cuBLAS."""
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
    sets = [w, *(w.clone() for _ in range(copies_for_cold_l2(2 * w.numel()) - 1))]
    return median_microseconds([(lambda w=each: torch.nn.functional.linear(x, w)) for each in sets])  # type: ignore[misc]


def problem_of(m: int, n: int, k: int, share: int) -> Problem | IntegerProblem:
    """A random problem with the usual share of INT4 blocks."""
    if share != TOKEN:
        return Problem(m, n, k)
    return IntegerProblem(m, n, k, int((block_bits_for(-(-k // 128)) == 8).sum()))


def bound_us(problem: Problem | IntegerProblem, k: int) -> float:
    """The larger of bytes over the memory rate and operations over the tensor-core rate."""
    return 1e6 * max(problem.bytes / PEAK_BYTES, 2.0 * problem.m * problem.n * k / PEAK_OPS)


def parse_variants(text: str, share: int) -> list[Any]:
    """Such as tokens=64,cluster=2;tokens=32 -> two Tiles, or IntegerTiles."""
    kind: Any = integer.IntegerTiles if share == TOKEN else Tiles
    return [kind(**{k: int(v) for k, v in (item.split("=") for item in part.split(","))}) for part in text.split(";")]


def short(tiles: Any) -> str:
    if isinstance(tiles, integer.IntegerTiles):
        text = f"n{tiles.tokens}x{tiles.token_tiles} w{tiles.row_wgs} s{tiles.stages}"
        text += f" b{tiles.batch} band {tiles.band}"
        if tiles.split > 1:
            return text + f" split {tiles.split}"
        return text + " quick" * tiles.quick + " whole" * (not tiles.stream)
    text = f"n{tiles.tokens} w{tiles.row_wgs}x{tiles.row_tiles} c{tiles.cluster} s{tiles.stages} x{tiles.ctas_per_sm}"
    text += f" b{tiles.batch} f{tiles.flight}" + " zp" * tiles.zero_product
    return text + " whole" * (not tiles.stream)


def candidates(m: int, share: int) -> list[Any]:
    """What tune tries for a batch, when no variants are given."""
    if share == TOKEN:
        return integer_candidates(m)
    if m > 64:
        return [Tiles(128, zero_product=1), Tiles(128, cluster=2), Tiles(128, cluster=2, zero_product=1)]
    if m > 32:
        return [Tiles(64, stages=12, batch=batch) for batch in (2, 4)] + [Tiles(64, row_tiles=2, stages=8, batch=2)]
    n, few = (8 if m <= 8 else 16 if m <= 16 else 32), m > 16
    return [
        Tiles(n, stages=7 if few else 10, ctas_per_sm=2, batch=2),
        Tiles(n, stages=7 if few else 10, ctas_per_sm=2, batch=4),
        Tiles(n, row_wgs=3, stages=10 if few else 13, batch=2),
        Tiles(n, row_tiles=2, stages=8 if few else 10, batch=2, flight=4),
    ]


def compile_all(variants: Iterable[Any], verbose: bool = False) -> None:
    """Compile in parallel, and say what spills."""

    def build(tiles: Any) -> str:
        if isinstance(tiles, integer.IntegerTiles):
            return f"{short(tiles):32s} {tiles.kernel(torch.bfloat16).resources}, shared {tiles.shared_bytes}"
        resources = tiles.kernel(True, torch.bfloat16).resources
        return f"{short(tiles):32s} {resources}, shared {tiles.shared_bytes(True)}, consumer {tiles.consumer_registers}"

    with ThreadPoolExecutor(8) as pool:
        for line in pool.map(build, dict.fromkeys(variants)):
            if verbose or "spill_bytes=0" not in line:
                print(line)


def tune(
    batches: list[int],
    shapes: list[tuple[int, int]],
    given: list[Any],
    pdl: bool,
    share: int,
    behind: bool,
    out: Path | None,
) -> None:
    compile_all(tiles for m in batches for tiles in (given or candidates(m, share)))
    for m in batches:
        totals: dict[Any, list[float]] = {}
        for n, k in shapes:
            problem = problem_of(m, n, k, share)
            base, bound = time_cublas(m, n, k), bound_us(problem, k)
            what = ", each behind a quantization, which neither holds" if behind else ""
            print(f"m={m} {n}x{k}: cuBLAS {base:.2f} us, bound {bound:.2f} us ({base / bound:.2f}x){what}")
            for tiles in given or candidates(m, share):
                us = problem.time(tiles, pdl, behind=True) if behind else problem.time(tiles, pdl)
                totals.setdefault(tiles, []).append(base / us)
                if out and us < float("inf"):
                    found = {"m": m, "n": n, "k": k, "behind": behind, "us": us, "tiles": names_of(tiles)}
                    with out.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                print(f"    {short(tiles):30s} {us:9.2f} us  {base / us:5.2f}x  {bound / us:5.1%} of bound")
            del problem
        for tiles, ratios in sorted(totals.items(), key=lambda item: -geometric_mean(item[1])):
            print(f"  m={m} mean {geometric_mean(ratios):5.3f}x  {short(tiles)}")


def geometric_mean(values: Iterable[float]) -> float:
    logs = [log(max(value, 1e-9)) for value in values]
    return exp(sum(logs) / len(logs))


def bench(out: Path | None, batches: list[int], shapes: list[tuple[int, int]], pdl: bool, share: int) -> None:
    def output_of(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"

    provenance = {
        "command": " ".join(["python", "cuda/tools/tune_gemm.py", *sys.argv[1:]]),
        "git_sha": os.environ.get("COMET_GIT_SHA") or output_of("git", "rev-parse", "HEAD"),
        "gpu": torch.cuda.get_device_name(),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "seed": 0,
    }
    lines = []
    for m in batches:
        ratios = []
        for n, k in shapes:
            problem = problem_of(m, n, k, share)
            base, us, bound = time_cublas(m, n, k), problem.time(None, pdl), bound_us(problem, k)
            ratios.append(base / us)
            tiles: Any = integer.choose_integer_tiles(m, n, len(problem.bits))
            if share != TOKEN:
                tiles = gemm.choose_tiles(m, n, len(problem.bits))
            source = integer.SOURCE if share == TOKEN else gemm.SOURCE
            print(f"m={m} {n}x{k}: {us:.2f} us, cuBLAS {base:.2f}, {base / us:.2f}x, {bound / us:.1%}  {short(tiles)}")
            lines.append(
                {
                    "kind": "bench",
                    "op": "w4ax_gemm",
                    "arch": "sm_90a",
                    "path": Path(source).stem + ("" if pdl else " without dependent launch"),
                    "m": m,
                    "n": n,
                    "k": k,
                    "int4_fraction": float((problem.bits == 4).float().mean()),
                    "weight_symmetry": "asymmetric",
                    "share": share,
                    "ablation": None,
                    "includes_quantize": False,
                    "median_us": round(us, 3),
                    "baseline": "cublas_bf16",
                    "baseline_us": round(base, 3),
                    "speedup": round(base / us, 4),
                    "bound_fraction": round(bound / us, 4),
                    "provenance": provenance
                    | {"utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")},
                }
            )
            del problem
        print(f"== m={m}: geometric mean {geometric_mean(ratios):.3f}x, smallest {min(ratios):.2f}x")
        if out:  # after each batch, so that a run that is cut short keeps what it measured
            out.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("check", "tune", "bench", "compile"))
    parser.add_argument("--m", default=",".join(map(str, BATCHES)))
    parser.add_argument("--shapes", default="")
    parser.add_argument("--variants", default="")
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--alone", action="store_true", help="tune integer scales without a quantization before each")
    parser.add_argument("--share", type=int, default=1, choices=(1, TOKEN), help="0: integer scales; 1: one a block")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.verb == "tune" and args.out and args.share != TOKEN:
        parser.error("tune keeps times of integer scales alone: --out wants --share 0")
    batches = [int(m) for m in args.m.split(",")]
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",") if s] or list(SHAPES)
    given = parse_variants(args.variants, args.share) if args.variants else []
    if args.verb == "compile":
        compile_all([t for m in batches for t in (given or candidates(m, args.share))], verbose=True)
        return
    torch.manual_seed(0)
    if args.verb == "check":
        sys.exit(check() > 0)
    if args.verb == "tune":
        behind = args.share == TOKEN and not args.alone
        tune(batches, shapes, given, not args.no_pdl, args.share, behind, args.out)  # type: ignore[arg-type]
    else:
        bench(args.out, batches, shapes, not args.no_pdl, args.share)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
