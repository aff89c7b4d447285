"""The sm_90a GEMM for scales shared in quads: check every variant, stop at the first that is wrong, then time them all.

    python cuda/tools/tune_quads.py [--check] [--out FILE.jsonl]

In: the variants of w4ax_gemm_quads_sm90.py. Out: one line a time, beside the tile table's choice for the same operands.
What wins here becomes rows with `"share": 4` of tiles_sm90.json; `tune_gemm.py bench --share 4` makes the records then.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import tune_gemm

from comet_cuda.tiles_sm90 import choose_tiles
from comet_cuda.w4ax_gemm_quads_sm90 import LARGE, SMALL, VARIANTS


def quad_problems() -> Iterable[str]:
    """What is wrong with the kernel for shared scales, as it is found: worst-case integers, edges, repeated runs."""
    yield from tune_gemm.exactness()
    mixed = (torch.rand(39, generator=torch.Generator().manual_seed(1)) < 0.4).to(torch.uint8) * 4 + 4
    mixes = {
        "all 4": tune_gemm.block_bits_for(16, 1.0),
        "all 8": tune_gemm.block_bits_for(9, 0.0),
        "84%": tune_gemm.block_bits_for(70),
        "mixed": mixed,
    }
    for tiles in dict.fromkeys(VARIANTS):
        cases = [(name, m, 1023, True) for name in mixes for m in (1, 65, 300)]
        cases += [("84%", 1024, 4096, True), ("mixed", 513, 2056, False), ("mixed", 9, 8, True)]
        for name, m, rows, has_zero in cases:
            wrong = tune_gemm.verify(m, rows, mixes[name], tiles, share=4, bias=True, has_zero=has_zero)
            if wrong:
                yield f"{tune_gemm.short(tiles)}: m={m} rows={rows} blocks {name} zero={has_zero}: {wrong}"
        for dtype in (torch.float16, torch.float32):
            if wrong := tune_gemm.verify(70, 1023, mixed, tiles, share=4, dtype=dtype):
                yield f"{tune_gemm.short(tiles)}: {dtype}: {wrong}"
    for tiles in (SMALL[0], LARGE[0]):
        if wrong := tune_gemm.verify(300, 4096, tune_gemm.block_bits_for(32), tiles, share=4, runs=1000):
            yield f"{tune_gemm.short(tiles)}: 1000 runs: {wrong}"


def quads(out: Path | None, check_only: bool) -> None:
    """Check all variants, stop at the first wrong one; then time them and the table's choice, a line each in `out`."""
    tune_gemm.compile_all(VARIANTS)
    for problem in quad_problems():
        sys.exit(f"WRONG: {problem}")
    print("all variants are right")
    if check_only:
        return
    with out.open("w") if out else open(os.devnull, "w") as file:
        for m, variants in ((64, SMALL), (1024, LARGE), (256, LARGE), (4096, LARGE)):
            for n, k in ((8192, 8192), (4096, 4096), (22016, 4096), (8192, 28672)):
                case = tune_gemm.Problem(m, n, k, share=4)
                base = case.time_cublas()
                for tiles in (choose_tiles(m, n, len(case.bits)), *variants):
                    us = case.time(tiles)
                    print(f"m={m} {n}x{k}: {tune_gemm.short(tiles):36s} {us:9.2f} us  {base / us:5.2f}x", flush=True)
                    line = {"m": m, "n": n, "k": k, "us": us, "cublas_us": base, "tiles": dataclasses.asdict(tiles)}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                del case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="time nothing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    quads(args.out, args.check)


if __name__ == "__main__":
    main()
