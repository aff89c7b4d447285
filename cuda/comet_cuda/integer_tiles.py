"""Tiles of the integer GEMM: which variant is compiled, what it takes, and which one a problem gets.

In: a problem's size. Out: `IntegerTiles`, chosen by `integer_rows` of tiles_sm90.json, a table that measurements of
cuda/tools/tune_gemm.py fill, and the `Plan` by which tiles are dealt to ctas. Nothing is tuned at run time.
"""

import functools
import json
from dataclasses import dataclass, fields
from math import ceil
from typing import ClassVar

import torch

from comet_cuda.affine import BLOCK
from comet_cuda.errors import CometError
from comet_cuda.jit import CompiledKernel, compile_kernel
from comet_cuda.split_tiles import barrier_and_sum_bytes, make_split_plan, waves_of
from comet_cuda.tiles_sm90 import ARCH, OUT_KINDS, SHARED_LIMIT, TABLE, Plan, fits, make_plan
from comet_cuda.weight_layout import ROW_TILE, record_bytes

SOURCE = "w4ax_gemm_integer.cu"
RECORD = record_bytes(False)
PRODUCER_REGISTERS = 40  # of a producer thread,
FEW_REGISTERS = 32  # and where blocks come in batches or three warpgroups share what there is


@dataclass(frozen=True)
class IntegerTiles:
    """One compiled variant of the kernel and how its tiles are dealt.

    A cta takes all registers of a multiprocessor. Where two had room, those of a launch that began early lay two by two
    on multiprocessors that were free first, and left others empty (measured behind quantize_token, results/LOG.md).
    """

    tokens: int  # n of wgmma: 8, 16, 24, 32 or a multiple of 16 up to 256
    token_tiles: int = 1  # of `tokens`, a warpgroup
    row_wgs: int = 2  # consumer warpgroups, 64 rows each
    stages: int = 6
    stream: int = 1  # 1: cut tiles along K so that all SMs work to the end; 0: whole tiles only
    band: int = 8  # row groups walked together
    batch: int = 1  # INT4 blocks between two waits; 1: the next block's nibbles are expanded meanwhile
    quick: int = 0  # 1: partial sums are announced by a warp that is free, and more of them loaded at once
    split: int = 1  # ctas of a cluster, which share a tile along K; above 1 with neither stream nor quick
    one_by_one: int = 0  # 1: nibbles are expanded one by one, not four at once: only to measure what that saves
    row_tiles: ClassVar[int] = 1  # a warpgroup; both as make_plan asks
    cluster: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.split > 1 and (self.stream or self.quick):
            raise CometError(f"{self} shares tiles in two ways", "with split, stream and quick are 0")

    @property
    def tile_tokens(self) -> int:
        return self.tokens * self.token_tiles

    @property
    def threads(self) -> int:
        return 128 * (self.row_wgs + 1)

    @property
    def consumer_registers(self) -> int:
        lane = 65536 // self.threads // 8 * 8 * (self.row_wgs + 1)
        return min(240, (lane - self.producer_registers) // self.row_wgs // 8 * 8)

    @property
    def producer_registers(self) -> int:
        return FEW_REGISTERS if self.batch > 1 or self.row_wgs > 2 else PRODUCER_REGISTERS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a cta: the ring, its barriers, and room to align it to 1,024 bytes."""
        stage = self.tile_tokens * (BLOCK + 4) + self.row_wgs * RECORD
        ring = (-(-stage // 1024) * 1024 + 16) * self.stages
        if self.split > 1:
            ring += barrier_and_sum_bytes(self.split, self.row_wgs, self.tile_tokens, ring, SHARED_LIMIT)
        return ring + 1024

    def defines(self, out_dtype: torch.dtype) -> dict[str, int | str]:
        """Preprocessor definitions of SOURCE."""
        return {
            "TOKENS": self.tokens,
            "TOKEN_TILES": self.token_tiles,
            "ROW_WGS": self.row_wgs,
            "BATCH": self.batch,
            "QUICK": self.quick,
            "STAGES": self.stages,
            "OUT": OUT_KINDS[out_dtype],
            "CONSUMER_REGS": self.consumer_registers,
            "PRODUCER_REGS": self.producer_registers,
            **({"ONE_BY_ONE": 1} if self.one_by_one else {}),
            **({"SPLIT": self.split} if self.split > 1 else {}),
        }

    def plan(self, tokens: int, rows: int, blocks: int, int8_blocks: int, sms: int) -> Plan:
        """How a problem is dealt to ctas."""
        if self.split > 1:
            return make_split_plan(self, tokens, rows, blocks, int8_blocks)
        return make_plan(self, tokens, rows, blocks, sms)

    def kernel(self, out_dtype: torch.dtype) -> CompiledKernel:
        """Compile this variant, or find it in the cache."""
        return compile_kernel(SOURCE, "w4ax_gemm_integer", ARCH, self.defines(out_dtype))


@functools.cache
def integer_table() -> tuple[dict[str, int], ...]:
    """`integer_rows` of tiles_sm90.json: a variant each, what a launch of it takes (`start_ns`; a cluster that shares a
    tile takes it each time), what a block takes (`step_ns`), and for which numbers of tokens that was measured."""
    return tuple(json.loads(TABLE.read_text())["integer_rows"])


def tiles_of(row: dict[str, int]) -> IntegerTiles:
    """The variant that a row of the table names."""
    return IntegerTiles(**{f.name: row[f.name] for f in fields(IntegerTiles) if f.name in row})


def starts_and_steps(tiles: IntegerTiles, tokens: int, rows: int, blocks: int, sms: int) -> tuple[int, float]:
    """Of a problem, what takes `start_ns` and what takes `step_ns`, one after the other."""
    if tiles.split > 1:
        times = waves_of(tiles, tokens, rows, sms)
        return times, times * ceil(blocks / tiles.split)
    waves = ceil(rows / (ROW_TILE * tiles.row_wgs)) * ceil(tokens / tiles.tile_tokens) / sms
    return 1, (waves if tiles.stream else ceil(waves)) * blocks


def choose_integer_tiles(tokens: int, rows: int, blocks: int, sms: int = 132) -> IntegerTiles:
    """The table's variant for a problem of `tokens` x `rows` x (128 * `blocks`): the least estimate wins."""

    def estimate(row: dict[str, int]) -> float:
        starts, steps = starts_and_steps(tiles_of(row), tokens, rows, blocks, sms)
        return starts * row["start_ns"] + steps * row["step_ns"]

    fitting = [row for row in integer_table() if row.get("min_tokens", 1) <= tokens and fits(row, tokens, rows, blocks)]
    if not fitting:
        raise CometError(f"{TABLE.name} has no row for {tokens} tokens", "its last row must have no upper limit")
    return tiles_of(min(fitting, key=estimate))
