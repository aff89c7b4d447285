"""The variants of w4ax_gemm_units_sm90.cu that tuning tries for many tokens, and what must hold before one is used."""

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from comet_cuda.tiles_sm90 import Tiles

UNIT_TILES = [  # of w4ax_gemm_units_sm90.cu, tried for many tokens
    Tiles(tokens, token_tiles=number, zero_product=1, share=share, stages=stages, stream=stream)
    for share in (1, 4)
    for tokens, number, stages in ((64, 2, 6), (64, 4, 4), (32, 2, 10))
    for stream in (0, 1)
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
