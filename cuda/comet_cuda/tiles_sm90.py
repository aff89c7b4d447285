"""Tiles of the sm_90a GEMM: which variant is compiled, what it takes, and how a problem is dealt to clusters.

In: a problem's size. Out: `Tiles` from tiles_sm90.json, a table that cuda/tools/tune_gemm.py's measurements fill, and a
`Plan`, the launch and the schedule that comet/tile_schedule.cuh walks. Nothing is tuned at run time.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from comet_cuda.affine import BLOCK
from comet_cuda.errors import CometError
from comet_cuda.jit import CompiledKernel, compile_kernel
from comet_cuda.weight_layout import ROW_TILE, record_bytes

SOURCE = "w4ax_gemm_sm90.cu"
ARCH = "sm_90a"
TABLE = Path(__file__).with_name("tiles_sm90.json")
SHARED_LIMIT = 232448  # bytes a cta may use: 227 KB
OUT_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@dataclass(frozen=True)
class Tiles:
    """One compiled variant of the kernel and how its tiles are dealt."""

    tokens: int  # n of wgmma: 8, 16, 24 or a multiple of 16 up to 192
    row_wgs: int = 2  # consumer warpgroups
    row_tiles: int = 1  # of 64 rows, a warpgroup: 2 share what they read of the activations
    cluster: int = 1  # ctas that share activations by multicast
    stages: int = 6
    ctas_per_sm: int = 1
    batch: int = 1  # blocks a warpgroup works on between two drains: 1, 2 or 4
    flight: int = 2  # products of a warpgroup under way at once
    zero_product: int = 0  # 1: zero points as one more matrix product, for large tiles
    stream: int = 1  # 1: cut tiles along K so that all SMs work to the end; 0: whole tiles only
    band: int = 8  # row groups walked together

    @property
    def tile_tokens(self) -> int:
        return self.tokens

    @property
    def threads(self) -> int:
        return 128 * (self.row_wgs + 1)

    @property
    def consumer_registers(self) -> int:
        """What the register file leaves each consumer thread, in steps of 8, when producers keep what they need."""
        return min(240, (self._registers_per_lane - 32) // self.row_wgs // 8 * 8)

    @property
    def producer_registers(self) -> int:
        return min(64, self._registers_per_lane - self.row_wgs * self.consumer_registers)

    @property
    def _registers_per_lane(self) -> int:
        """Registers that one thread of every warpgroup takes together, as the kernel is launched."""
        return 65536 // self.ctas_per_sm // self.threads // 8 * 8 * (self.row_wgs + 1)

    def stage_bytes(self, has_zero: bool) -> int:
        size = self.tokens * (BLOCK + 8) + self.row_wgs * self.row_tiles * record_bytes(has_zero)
        return -(-size // 1024) * 1024

    def shared_bytes(self, has_zero: bool) -> int:
        """Dynamic shared memory of a cta: the ring, its barriers, and room to align it to 1,024 bytes."""
        ring = self.stage_bytes(has_zero) * self.stages + 1024 + 16 * (self.stages + 2)
        return ring + 2 * self.tokens * BLOCK * self.zero_product

    def defines(self, has_zero: bool, out_dtype: torch.dtype) -> dict[str, int | str]:
        """Preprocessor definitions of SOURCE."""
        return {
            "TOKENS": self.tokens,
            "ROW_WGS": self.row_wgs,
            "CLUSTER": self.cluster,
            "STAGES": self.stages,
            "CTAS_PER_SM": self.ctas_per_sm,
            "ROW_TILES": self.row_tiles,
            "BATCH": self.batch,
            "FLIGHT": self.flight,
            "ZERO_PRODUCT": self.zero_product,
            "ZERO": int(has_zero),
            "OUT": OUT_KINDS[out_dtype],
            "CONSUMER_REGS": self.consumer_registers,
            "PRODUCER_REGS": self.producer_registers,
        }

    def kernel(self, has_zero: bool, out_dtype: torch.dtype) -> CompiledKernel:
        """Compile this variant, or find it in the cache."""
        return compile_kernel(SOURCE, Path(SOURCE).stem, ARCH, self.defines(has_zero, out_dtype))


@dataclass(frozen=True)
class Plan:
    """How one problem shape is launched."""

    tiles: "Dealt"
    ctas: int
    schedule: tuple[int, ...]  # struct Schedule of comet/tile_schedule.cuh, in its order
    partial_floats: int  # workspace
    flags: int


@functools.cache
def tile_table() -> tuple[dict[str, int], ...]:
    """Rows of tiles_sm90.json in order; the first whose limits hold applies."""
    return tuple(json.loads(TABLE.read_text())["rows"])


def choose_tiles(tokens: int, rows: int, blocks: int) -> Tiles:
    """The table's variant for a problem of `tokens` x `rows` x (128 * `blocks`)."""
    for row in tile_table():
        if fits(row, tokens, rows, blocks):
            return Tiles(**{name: row[name] for name in asdict(Tiles(8)) if name in row})
    raise CometError(f"{TABLE.name} has no row for {tokens} tokens", "its last row must have no limits")


def fits(row: Mapping[str, int], tokens: int, rows: int, blocks: int) -> bool:
    """Do a table row's limits hold for a problem?"""
    size = {"max_tokens": tokens, "max_rows": rows, "max_weights": rows * blocks * BLOCK}
    return all(row.get(name, value) >= value for name, value in size.items())


class Dealt(Protocol):
    """What dealing tiles to clusters needs to know of them."""

    @property
    def row_wgs(self) -> int: ...
    @property
    def row_tiles(self) -> int: ...
    @property
    def cluster(self) -> int: ...
    @property
    def tile_tokens(self) -> int: ...
    @property
    def stream(self) -> int: ...
    @property
    def band(self) -> int: ...


def make_plan(tiles: Dealt, tokens: int, rows: int, blocks: int, sm_count: int) -> Plan:
    """Deal the output tiles to clusters; see comet/tile_schedule.cuh."""
    row_groups = -(-rows // (ROW_TILE * tiles.row_wgs * tiles.row_tiles * tiles.cluster))
    count = row_groups * -(-tokens // tiles.tile_tokens)
    clusters = (sm_count if tiles.cluster < 4 else sm_count // 4 * 4 - 4) // tiles.cluster
    waves, rest = divmod(count, clusters)
    if not tiles.stream or rest == 0:
        clusters, stream_tiles = min(clusters, count), 0
    else:
        stream_tiles = rest if waves == 0 else rest + clusters
        clusters = min(clusters, stream_tiles * blocks)
    ctas = clusters * tiles.cluster
    groups = ctas * tiles.row_wgs
    each, longer = divmod(stream_tiles * blocks, clusters)
    schedule = (stream_tiles, count, row_groups, -(-tokens // tiles.tile_tokens), tiles.band, blocks, each, longer)
    partials = groups * tiles.row_tiles * ROW_TILE * tiles.tile_tokens if stream_tiles else 0
    return Plan(tiles, ctas, schedule, partials, groups)
