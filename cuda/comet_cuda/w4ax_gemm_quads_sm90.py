"""The sm_90a GEMM for scales that are shared in quads of blocks: which variants there are.

In: nothing. Out: the variants of w4ax_gemm_quads_sm90.cu that `cuda/tools/tune_quads.py` checks and times. The op
runs one only where tiles_sm90.json has a row with `share` 4; until a run on a GPU has checked and timed them all there
is none, and the general kernel, which reads the same layout, serves scales of both kinds.
"""

from comet_cuda.jit import Configuration
from comet_cuda.tiles_sm90 import OUT_KINDS, Tiles, tile_table


def quads(tokens: int, **others: int) -> Tiles:
    """A variant of w4ax_gemm_quads_sm90.cu."""
    return Tiles(tokens, share=4, zero_product=1, **others)


SMALL = (  # up to 64 tokens
    quads(64, stages=10),
    quads(64, stages=10, cluster=2),
    quads(32, token_tiles=2, stages=10, turns=1),
    quads(64, row_tiles=2, stages=6),
)
LARGE = (  # more
    quads(64, token_tiles=4, stages=4, turns=1, stream=0),
    quads(64, token_tiles=4, stages=4, turns=1, cluster=2, stream=0),
    quads(64, token_tiles=4, stages=4, stream=0),
    quads(64, token_tiles=3, stages=5, turns=1, stream=0),
    quads(64, token_tiles=2, stages=6, turns=1, stream=0),
    quads(64, token_tiles=2, stages=6, turns=1, cluster=2, stream=0),
    quads(64, token_tiles=2, stages=6, turns=1),
    quads(64, token_tiles=2, stages=6, stream=0),
    quads(64, token_tiles=4, stages=4, turns=1),
)
VARIANTS = (quads(16), *SMALL, *LARGE)


def configurations(family: str) -> list[Configuration]:
    """What the op may launch on a GPU family."""
    rows = tile_table() if family == "sm_90" else ()
    tiles = {Tiles(**{name: row[name] for name in Tiles.__dataclass_fields__ if name in row}) for row in rows}
    return [
        Configuration(tile.source, tile.defines(has_zero, out), (), tile.shared_bytes(has_zero))
        for tile in sorted((tile for tile in tiles if tile.share == 4), key=lambda tile: tile.tile_tokens)
        for has_zero in (False, True)
        for out in OUT_KINDS
    ]
