"""Tiles of the integer GEMM that a cluster of ctas shares along K: who takes which blocks, and how many fit at once.

In: a problem's size and `split`, the ctas of a cluster. Out: cuts of K, so balanced that all ctas end together, and a
`Plan` with one cluster a tile. Sums meet in the ctas' shared memory (comet/gemm_integer_split.cuh), not in the L2.
"""

from typing import Protocol

from comet_cuda.tiles_sm90 import Dealt, Plan
from comet_cuda.weight_layout import ROW_TILE

ATOM_BYTES = 128 * 16  # sums of a warpgroup and 8 tokens
INT8_COST = 6  # of an INT8 block, in quarters of an INT4 block's: sums are shifted between groups of them
# Clusters of so many ctas, one a multiprocessor, that find room on an H200 at once (cuOccupancyMaxActiveClusters): a
# cluster lies in one group of multiprocessors, of which an H200 has eight, up to 18 each.
AT_ONCE = {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}


class Split(Dealt, Protocol):
    """What sharing tiles needs to know of them."""

    @property
    def split(self) -> int: ...


def cuts_of(split: int, blocks: int, int8_blocks: int, int8_cost: int) -> tuple[int, ...]:
    """First blocks of each cta's part, and `blocks`: parts cost about the same, INT8 blocks, the first ones, more."""
    total = 4 * (blocks - int8_blocks) + int8_cost * int8_blocks

    def block_at(cost: int) -> int:
        if cost <= int8_cost * int8_blocks:
            return (2 * cost + int8_cost) // (2 * int8_cost)  # to the nearest
        return int8_blocks + (cost - int8_cost * int8_blocks + 2) // 4

    return tuple(block_at(total * part // split) for part in range(split + 1))


def make_split_plan(tiles: Split, tokens: int, rows: int, blocks: int, int8_blocks: int) -> Plan:
    """A cluster for each tile; those that find no room at first begin when others have ended."""
    row_groups = -(-rows // (ROW_TILE * tiles.row_wgs))
    token_tiles = -(-tokens // tiles.tile_tokens)
    count = row_groups * token_tiles
    cuts = cuts_of(tiles.split, blocks, int8_blocks, INT8_COST)
    schedule = (0, count, row_groups, token_tiles, tiles.band, blocks, 0, 0, *cuts)
    return Plan(tiles, count * tiles.split, schedule, 0, 0)


def waves_of(tiles: Split, tokens: int, rows: int, sms: int) -> int:
    """How often clusters fill the GPU."""
    count = -(-rows // (ROW_TILE * tiles.row_wgs)) * -(-tokens // tiles.tile_tokens)
    return -(-count // max(AT_ONCE[tiles.split] * sms // 132, 1))


def barrier_and_sum_bytes(split: int, row_wgs: int, tile_tokens: int, ring: int, limit: int) -> int:
    """Shared memory behind a ring of `ring` bytes: barriers, and sums where there is room for them."""
    barriers = 8 * (row_wgs + split)
    sums = (split - 1) * row_wgs * -(-tile_tokens // 8 // split) * ATOM_BYTES
    apart = -(-(ring + barriers) // 128) * 128 + sums
    return (apart if apart + 1024 <= limit else ring + barriers) - ring
