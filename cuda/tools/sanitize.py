"""Run what decodes and prefills under compute-sanitizer: memcheck, initcheck and racecheck, side by side.

    python cuda/tools/sanitize.py --out results/sanitize.txt

Small problems of every variant in the integer GEMM's table (and one with the pipeline off), with odd sizes, every form
of quantize_token, and the KV4 cache: written by prefill, in one piece and token by token, then read. Operands are made
on the CPU and every tensor has memory of its own, so that what a kernel reads beyond them, or before it is written,
shows. Results are compared where a whole tensor is defined. The summary counts reports by tool, kernel and step; a tool
that ran out of time or found results wrong says so. Exit status 1 unless all is clean.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from integer_variants import random_operands

from comet_cuda import kv4_append_cuda
from comet_cuda import quantize_token as token
from comet_cuda import w4ax_gemm_integer as gemm
from comet_cuda.errors import CometError
from comet_cuda.jit import SOURCE_FOLDER, CompiledKernel
from comet_cuda.kv4_append import KV4Pages, allocate_pages, kv4_append, kv4_append_ref
from comet_cuda.kv4_append_cuda import ENTRIES
from comet_cuda.kv4_decode import kv4_decode, kv4_decode_ref
from comet_cuda.kv4_prefill import kv4_prefill
from comet_cuda.quantize_token_ref import quantize_token_ref
from comet_cuda.rope import rope_append
from comet_cuda.w4ax_gemm_integer import IntegerTiles

TOOLS = ("memcheck", "initcheck", "racecheck")
PORTS = 49152  # of the first tool; each has some of its own
ROWS, BLOCKS, EIGHTS = 577, 5, 2  # of the GEMM
BATCHES = (1, 17, 65, 257)
LENGTHS = (150, 1, 70, 580)  # tokens of sequences
KERNELS = tuple(sorted({*ENTRIES, *(path.stem for path in SOURCE_FOLDER.glob("*.cu"))}, key=len, reverse=True))
STEP, LAUNCHED, WRONG = "step: ", "launched: ", "WRONG: "
HEADING = re.compile(r"^=+ (?=\S)(?!COMPUTE-SANITIZER|.*SUMMARY|Target application|Host Frame)(.*)$")
TOTAL = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (.*)$")


def variants() -> list[IntegerTiles]:
    """Every variant of the table, one without a pipeline, and shared tiles: sums beside the ring, and in it."""
    shared = [IntegerTiles(128, stages=stages, stream=0, split=2) for stages in (7, 9)]
    shared += [IntegerTiles(32, stages=14, stream=0, batch=2, split=4)]
    return [*dict.fromkeys([*map(gemm.tiles_of, gemm.integer_table()), *shared]), replace(IntegerTiles(64), stages=1)]


def gemm_steps() -> Iterator[tuple[str, Callable[[], bool]]]:
    """Name of a step, and what launches it and says whether the result is right."""

    def step(m: int, eights: int, tiles: IntegerTiles | None) -> bool:
        operands = random_operands(m, ROWS, BLOCKS, eights, "cpu")
        want = gemm.w4ax_gemm_integer_ref(*operands, None, m, ROWS, eights, torch.bfloat16)
        on_gpu = [tensor.cuda() for tensor in operands]
        return torch.equal(gemm.launch(*on_gpu, None, m, ROWS, eights, torch.bfloat16, tiles).cpu(), want)

    for m in BATCHES:
        yield f"gemm, {m} tokens", lambda m=m: step(m, EIGHTS, None)  # type: ignore[misc]
    for tiles in variants():
        m = 257 if tiles.tokens > 64 else tiles.tokens + 1
        name = f"gemm, {m} tokens, n{tiles.tokens}x{tiles.token_tiles} w{tiles.row_wgs} s{tiles.stages}"
        name += " quick" * tiles.quick + f" split {tiles.split}" * (tiles.split > 1)
        yield name, lambda m=m, tiles=tiles: step(m, 0 if tiles.quick else BLOCKS, tiles)  # type: ignore[misc]


def quantize_steps() -> Iterator[tuple[str, Callable[[], bool]]]:
    """The same for quantize_token's forms: few tokens, many, channels in fours or not, fused or not, each kernel."""

    def step(m: int, k: int, form: str, gathered: bool, eights: int = EIGHTS) -> bool:
        torch.manual_seed(m + k)
        blocks, wide = -(-k // 128), 2 * k if form == "silu_mul" else k
        x, clip = torch.randn(m, wide).bfloat16(), torch.full((blocks,), 0.8)
        perm = torch.randperm(k).int() if gathered else None
        rest = (None if perm is None else perm.cuda(), eights, clip.cuda(), True)
        if form == "silu_mul":
            token.silu_mul_quantize_token(x.cuda(), *rest)
        elif form == "rms_norm":
            other = torch.randn(m, k).bfloat16().cuda() if m > 1 else None
            token.rms_norm_quantize_token(x.cuda(), other, torch.ones(k).bfloat16().cuda(), 1e-5, *rest)
        else:
            found = token.quantize_token(x.cuda(), *rest)
            if m % 8 == 0:  # tokens that pad an atom are not written
                want = quantize_token_ref(x, perm, eights, clip, True)
                return all(torch.equal(a.cpu(), b) for a, b in zip(found, want, strict=True))
        return True

    def all_of(name: str, sizes: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, Callable[[], bool]]]:
        for m, k in sizes:
            for form in ("none", "rms_norm", "silu_mul"):
                for gathered in (True, False):
                    yield (
                        f"quantize{name}, {m} x {k}, {form}{', gather' * gathered}",
                        lambda m=m, k=k, form=form, gathered=gathered: step(m, k, form, gathered),  # type: ignore[misc]
                    )

    yield from all_of("", ((1, 584), (17, 577), (64, 584), (200, 584)))
    stay = ((1400, 584), (24, 8840), (136, 16392))  # 1, 4 and 2 ctas a token, which take more than one, or not
    for (m, k), form, gathered in itertools.product(stay, ("none", "silu_mul"), (True, False)):
        yield (
            f"quantize, {m} x {k}, {form}{', gather' * gathered}",
            lambda m=m, k=k, form=form, gathered=gathered: step(m, k, form, gathered),  # type: ignore[misc]
        )
    clusters = ((16, 8844, EIGHTS), (16, 8844, 40), (24, 8844, EIGHTS), (40, 8844, EIGHTS))  # of 8, 8, 4 and 2 ctas
    for m, k, eights in (*clusters, (24, 8840, 40), (136, 16392, 40)):  # 40: more INT8 blocks than lanes
        yield (
            f"quantize, {m} x {k}, none, {eights} INT8 blocks",
            lambda m=m, k=k, eights=eights: step(m, k, "none", False, eights),  # type: ignore[misc]
        )


def kv4_steps() -> Iterator[tuple[str, Callable[[], bool]]]:
    """The same for the KV4 cache: all tokens but each sequence's last at once, the last as a decode step does it."""

    def step(dim: int, page: int, sinks: int, prefill: bool, window: int, entry: str) -> bool:
        torch.manual_seed(dim + page)
        heads, pages, sequences = 2, -(-max(LENGTHS) // page), len(LENGTHS)
        cache = allocate_pages(sequences * pages, sequences, heads, dim, page, sinks, torch.bfloat16, "cpu")
        mine = KV4Pages(*(tensor.clone().cuda() for tensor in cache.tensors))
        table = torch.randperm(sequences * pages).int().view(sequences, pages)
        slot = torch.cat([torch.full((n,), s) for s, n in enumerate(LENGTHS)]).int()
        position = torch.cat([torch.arange(n) for n in LENGTHS]).int()
        length, last = torch.tensor(LENGTHS).int(), torch.tensor(LENGTHS).cumsum(0) - 1
        k, v = (torch.randn(len(slot), heads, dim).bfloat16() for _ in range(2))
        kv4_append_ref(k, v, slot, position, table, cache)
        before = torch.ones(len(slot), dtype=torch.bool).index_fill(0, last, False)
        if prefill:
            q = torch.randn(int(before.sum()), 4 * heads, dim).bfloat16()
            starts = torch.cat((0 * length[:1], length - 1))
            indices = [x.int().cuda() for x in (starts.cumsum(0), torch.arange(sequences), 0 * length, table)]
            kv4_prefill(q.cuda(), k[before].cuda(), v[before].cuda(), *indices, mine, dim**-0.5, window)
        else:
            given = (x.cuda() for x in (k[before], v[before], slot[before], position[before], table))
            kv4_append(*given, mine)
        q = torch.randn(sequences, 4 * heads, dim).bfloat16()
        one, zero = (torch.full((max(LENGTHS), dim // 2), x).cuda() for x in (1.0, 0.0))
        qkv, where = torch.cat((q, k[last], v[last]), 1).flatten(1).cuda(), (slot[last].cuda(), position[last].cuda())
        with patch.object(kv4_append_cuda, "rope_entry", return_value=entry):
            q_there = rope_append(qkv, one, zero, *where, table.cuda(), mine)
        got = kv4_decode(q_there, where[0], length.cuda(), table.cuda(), mine, dim**-0.5, window)
        want = kv4_decode_ref(q, slot[last], length, table, cache, dim**-0.5, window)
        same = ("k_scale", "k_min", "v_scale", "v_min", "k_sink", "v_sink")  # codes lie elsewhere on a GPU
        return bool((got.cpu() - want).float().norm() < 0.01 * want.float().norm()) and all(
            torch.equal(getattr(mine, name).cpu(), getattr(cache, name)) for name in same
        )

    ways = ((128, 128, 4, True, 0), (128, 128, 0, False, 0), (64, 64, 4, False, 100), (64, 64, 0, True, 100))
    for (dim, page, sinks, prefill, window), entry in itertools.product(ways, ("rope_append", "rope_append_wave")):
        how = "prefill" if prefill else "append"
        name = f"kv4, heads of {dim}, pages of {page}, {sinks} sinks, {how}, window {window}, {entry}"
        yield name, lambda way=(dim, page, sinks, prefill, window, entry): step(*way)  # type: ignore[misc]


def run_child() -> None:
    """All steps, each announced before it starts."""
    seen: set[str] = set()
    load = CompiledKernel.load

    def noting(self: CompiledKernel, device: int) -> Any:
        seen.add(self.entry)
        return load(self, device)

    CompiledKernel.load = noting  # type: ignore[method-assign]
    for steps in (gemm_steps(), quantize_steps(), kv4_steps()):
        for name, launch in steps:
            print(STEP + name, flush=True)
            if not launch():
                print(WRONG + name, flush=True)
            torch.cuda.synchronize()
    print(LAUNCHED + ", ".join(sorted(seen)), flush=True)


@dataclass
class Outcome:
    """What one tool said."""

    tool: str
    steps: int
    launched: str  # names of kernels; empty if it did not get to the end
    wrong: list[str]  # steps whose results were wrong
    reports: Counter[tuple[str, str, str]]  # of kernel, what, step
    total: str  # the tool's own

    @property
    def clean(self) -> bool:
        return bool(self.launched and self.total) and not self.wrong and not self.reports


def parse(tool: str, text: str) -> Outcome:
    """Count the reports in a tool's output, between whose lines the steps are announced."""
    reports: list[list[str]] = []  # step, heading, then lines
    step, steps, launched, total, wrong = "before the first step", 0, "", "", []
    for line in text.splitlines():
        if line.startswith(STEP):
            step, steps = line.removeprefix(STEP), steps + 1
        elif line.startswith(WRONG):
            wrong.append(line.removeprefix(WRONG))
        elif line.startswith(LAUNCHED):
            launched = line.removeprefix(LAUNCHED)
        elif found := TOTAL.match(line):
            total = found.group(1)
        elif found := HEADING.match(line):
            reports.append([step, found.group(1)])
        elif line.startswith("==") and reports:
            reports[-1].append(line)
    counted: Counter[tuple[str, str, str]] = Counter()
    for where, heading, *lines in reports:
        kernel = next((name for name in KERNELS if any(name in line for line in (heading, *lines))), "elsewhere")
        what = re.sub(r"0x[0-9a-f]+|\[\d+ hazards\]|\(\S+:\d+\)", "", heading)
        counted[kernel, " ".join(what.split())[:160], where] += 1
    return Outcome(tool, steps, launched, wrong, counted, total)


def summary(outcomes: list[Outcome]) -> str:
    """One paragraph a tool."""
    lines = []
    for outcome in outcomes:
        state = (
            "clean" if outcome.clean else f"{sum(outcome.reports.values())} reports, {len(outcome.wrong)} steps wrong"
        )
        ended = f"to the end: {outcome.launched}" if outcome.launched else "NOT to the end"
        lines.append(f"{outcome.tool}: {state}; {outcome.steps} steps, {ended}; its total: {outcome.total or 'none'}")
        lines += [f"  wrong: {name}" for name in outcome.wrong]
        kernels = Counter[tuple[str, str]]()
        for (kernel, what, _), count in outcome.reports.items():
            kernels[kernel, what] += count
        for (kernel, what), count in kernels.most_common():
            where = dict.fromkeys(s for k, w, s in outcome.reports if (k, w) == (kernel, what))
            lines.append(f"  {kernel}, {count} x {what}; in {len(where)} steps, first: {next(iter(where))}")
    return "\n".join(lines)


def check(tool: str, number: int, folder: Path, seconds: float) -> Outcome:
    """Run the steps under one tool; its whole output goes to a file in `folder`."""
    command = [
        "compute-sanitizer", "--tool", tool, "--port", str(PORTS + 32 * number), "--report-api-errors", "no",
        "--show-backtrace", "device", "--print-limit", "400", sys.executable, __file__, "--child",
    ]  # fmt: skip
    log = folder / f"sanitize-{tool}.log"
    with log.open("w") as out:
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
    return parse(tool, log.read_text(errors="replace"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("sanitize.txt"), help="the summary; logs go beside it")
    parser.add_argument("--tools", default=",".join(TOOLS), help="separated by commas")
    parser.add_argument("--seconds", type=float, default=240.0, help="a tool may take")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child()
        return 0
    if shutil.which("compute-sanitizer") is None:
        raise CometError("compute-sanitizer is not on PATH", "it comes with the CUDA toolkit, in its bin folder")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:  # compile beforehand, several at once
        list(pool.map(lambda tiles: tiles.kernel(torch.bfloat16), variants()))
        tools = args.tools.split(",")
        outcomes = list(pool.map(lambda i: check(tools[i], i, args.out.parent, args.seconds), range(len(tools))))
    text = summary(outcomes)
    args.out.write_text(text + "\n")
    print(text)
    return 0 if all(outcome.clean for outcome in outcomes) else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except CometError as error:
        raise SystemExit(f"error: {error}") from None
