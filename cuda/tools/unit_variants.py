"""The variants of the sm_90a GEMMs that tuning tries, and what must hold before one with units is used."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from integer_variants import integer_candidates

from comet_cuda.quantize_act import TOKEN
from comet_cuda.tiles_sm90 import Tiles

UNIT_TILES = [  # of w4ax_gemm_units_sm90.cu, tried for many tokens
    Tiles(tokens, token_tiles=number, zero_product=1, share=share, stages=stages, stream=stream)
    for share in (1, 4)
    for tokens, number, stages in ((64, 2, 6), (64, 4, 4), (32, 2, 10))
    for stream in (0, 1)
]


def candidates(m: int, share: int = 1) -> list[Any]:
    """What tune tries for a batch, when no variants are given."""
    if share == TOKEN:
        return integer_candidates(m)
    if m > 64:
        return [Tiles(128, cluster=2), *(tiles for tiles in UNIT_TILES if tiles.share <= share)]
    if m > 32:
        return [Tiles(64, stages=12, batch=batch) for batch in (2, 4)] + [Tiles(64, row_tiles=2, stages=8, batch=2)]
    n, few = (8 if m <= 8 else 16 if m <= 16 else 32), m > 16
    return [
        Tiles(n, stages=7 if few else 10, ctas_per_sm=2, batch=2),
        Tiles(n, stages=7 if few else 10, ctas_per_sm=2, batch=4),
        Tiles(n, row_wgs=3, stages=10 if few else 13, batch=2),
        Tiles(n, row_tiles=2, stages=8 if few else 10, batch=2, flight=4),
    ]


def unit_problems(tiles: Tiles) -> Iterable[str]:
    """What is wrong with a variant, as it is found: edges, block mixes, types, repeated runs."""
    import tune_gemm

    mixed = (torch.rand(39, generator=torch.Generator().manual_seed(1)) < 0.4).to(torch.uint8) * 4 + 4
    all4, all8, usual = (
        tune_gemm.block_bits_for(16, 1.0),
        tune_gemm.block_bits_for(9, 0.0),
        tune_gemm.block_bits_for(70),
    )
    cases = [(m, 1023, bits, True) for bits in (all4, all8, usual, mixed) for m in (1, 65, 300)]
    cases += [(1024, 4096, usual, True), (513, 2056, mixed, False), (9, 8, mixed, True)]
    for share in (1, 4)[tiles.share > 1 :]:
        for m, rows, bits, has_zero in cases:
            if wrong := tune_gemm.verify(m, rows, bits, tiles, share=share, bias=True, has_zero=has_zero):
                yield f"m={m} rows={rows} {len(bits)} blocks, zero={has_zero}, share {share}: {wrong}"
        for dtype in (torch.float16, torch.float32):
            if wrong := tune_gemm.verify(70, 1023, mixed, tiles, share=share, dtype=dtype):
                yield f"{dtype}, share {share}: {wrong}"
        if wrong := tune_gemm.verify(300, 4096, tune_gemm.block_bits_for(32), tiles, share=share, runs=200):
            yield f"200 runs, share {share}: {wrong}"
