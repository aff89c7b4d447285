"""w4ax_gemm on Hopper for integer scales: tiled operands -> one launch of w4ax_gemm_integer.cu.

Where every scale of a token and every scale of a weight row is a small integer times one float (quantize_act with share
TOKEN; `weight_base`), the multiples go into INT8 operands and the tensor cores add up all of K in int32. The same codes
and scales run on every other kernel; this one is faster. `prepare_weight_integer` checks the weights' side once, at
load; activations come tiled from quantize_token.
"""

import functools
import json
import struct
from dataclasses import dataclass, fields
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK
from comet_cuda.driver import BoundLaunch, EmptyTensors, gpu_of
from comet_cuda.errors import CometError
from comet_cuda.jit import CompiledKernel, Configuration, compile_kernel
from comet_cuda.library import LIBRARY, define_op, is_plain_cuda
from comet_cuda.quantize_token_ref import check_blocks, token_shapes
from comet_cuda.split_tiles import barrier_and_sum_bytes, make_split_plan, waves_of
from comet_cuda.tiles_sm90 import ARCH, OUT_KINDS, SHARED_LIMIT, TABLE, Plan, fits, make_plan
from comet_cuda.w4ax_gemm_sm90 import Workspace, sm_count, workspace
from comet_cuda.weight_layout import (
    ROW_TILE,
    record_bytes,
    row_bases,
    tile_weight_integer_sm90,
    token_atoms,
    untile_activations_integer_sm90,
    untile_weight_integer_sm90,
)

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
    marked: int = 0  # 1: each partial sum carries a mark and is taken as soon as it is there; for up to 64 tokens
    split: int = 1  # ctas of a cluster, which share a tile along K; above 1 with neither stream, quick nor marked
    exchange: int = 0  # of a split tile's sums: 0 st.async, 1 stores and a barrier, 2 bulk copies
    one_by_one: int = 0  # 1: nibbles are expanded one by one, not four at once: only to measure what that saves
    row_tiles: ClassVar[int] = 1  # a warpgroup; both as make_plan asks
    cluster: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.split > 1 and (self.stream or self.quick or self.marked):
            raise CometError(f"{self} shares tiles in two ways", "with split, stream, quick and marked are 0")

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
            "MARKED": Workspace.FLAGS if self.marked else 0,
            "STAGES": self.stages,
            "OUT": OUT_KINDS[out_dtype],
            "CONSUMER_REGS": self.consumer_registers,
            "PRODUCER_REGS": self.producer_registers,
            **({"ONE_BY_ONE": 1} if self.one_by_one else {}),
            **({"SPLIT": self.split, "EXCHANGE": self.exchange} if self.split > 1 else {}),
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
    """`integer_rows` of tiles_sm90.json. For few tokens the first whose limit holds applies; rows with measured times
    (`step_ns` a block and wave, `start_ns` once) compete: the least estimate wins."""
    return tuple(json.loads(TABLE.read_text())["integer_rows"])


def tiles_of(row: dict[str, int]) -> IntegerTiles:
    """The variant that a row of the table names."""
    return IntegerTiles(**{f.name: row[f.name] for f in fields(IntegerTiles) if f.name in row})


def choose_integer_tiles(tokens: int, rows: int, blocks: int, sms: int = 132) -> IntegerTiles:
    """The table's variant for a problem of `tokens` x `rows` x (128 * `blocks`)."""
    timed: list[tuple[float, IntegerTiles]] = []
    for row in integer_table():
        if not fits(row, tokens, rows, blocks):
            continue
        tiles = tiles_of(row)
        if "step_ns" not in row:
            return tiles
        if tiles.split > 1:
            waves = waves_of(tiles, tokens, rows, sms)
            timed.append((waves * (row["start_ns"] + ceil(blocks / tiles.split) * row["step_ns"]), tiles))
            continue
        waves = make_plan(tiles, tokens, rows, blocks, sms).schedule[1] / sms
        timed.append((row["start_ns"] + (waves if tiles.stream else ceil(waves)) * blocks * row["step_ns"], tiles))
    if not timed:
        raise CometError(f"{TABLE.name} has no row for {tokens} tokens", "its last row must have no limits")
    return min(timed, key=lambda found: found[0])[1]


def configurations(family: str) -> list[Configuration]:
    """Every row of the table, for every type, on the family that runs it."""
    if family != "sm_90":
        return []
    found = dict.fromkeys(map(tiles_of, integer_table()))
    return [Configuration(SOURCE, tiles.defines(out), (), tiles.shared_bytes) for tiles in found for out in OUT_KINDS]


@dataclass(frozen=True)
class IntegerWeight:
    """A linear layer's weights in the kernel's layout."""

    records: Tensor  # uint8 [R, NB, 4224]
    base: Tensor  # float32 [R * 64]: of each row, what its groups' scales are multiples of; 0 beyond the last row
    rows: int  # N
    int8_blocks: int  # the first blocks, which hold INT8 activations

    def __post_init__(self) -> None:
        check_weight(self.records, self.base, self.rows, self.int8_blocks)


def count_int8_blocks(block_bits: Tensor) -> int:
    """How many blocks have 8 bits, which must be the first ones; block_bits: uint8 [NB] of 4 and 8."""
    bits = block_bits.tolist()
    count = bits.count(8)
    if bits != [8] * count + [4] * (len(bits) - count):
        raise CometError(f"block_bits is {bits}", "integer scales want the 8-bit blocks first, then those of 4 bits")
    return count


def prepare_weight_integer(
    qweight: Tensor, w_scale: Tensor, w_zero: Tensor | None, block_bits: Tensor
) -> IntegerWeight:
    """Canonical 4-bit weights with integer scales (`row_bases`) -> the kernel's layout, on the same device.

    Args:
        qweight: uint8 [N, 64 * NB]; w_scale: bfloat16 [N, NB]; w_zero: uint8 [N, NB] or None.
        block_bits: uint8 [NB] on any device.
    """
    check_blocks(w_scale.shape[1] * BLOCK, 0)
    base = row_bases(w_scale, w_zero)
    records = tile_weight_integer_sm90(qweight, w_scale, w_zero, base)
    if records.is_cuda:
        workspace(records.device.index, for_graphs=True)  # allocated before any graph is captured
    padded = torch.nn.functional.pad(base.float(), (0, -base.shape[0] % ROW_TILE))
    return IntegerWeight(records, padded.contiguous(), base.shape[0], count_int8_blocks(block_bits))


_POINTERS = 9  # of struct Operands of gemm_integer.cuh; the rest of it are integers
_BYTES, _WORDS, _FLOATS = torch.uint8, torch.int32, torch.float32


@dataclass(frozen=True)
class Call:
    """All of a launch that its shapes decide."""

    x_codes: tuple[int, ...]  # shapes of the activations
    multiples: tuple[int, ...]
    token_scale: tuple[int, ...]
    bound: BoundLaunch
    y: EmptyTensors


@functools.lru_cache(maxsize=4096)
def _call(
    tokens: int,
    rows: int,
    blocks: int,
    int8_blocks: int,
    out_dtype: torch.dtype,
    device: int,
    tiles: IntegerTiles | None,
    pdl: bool,
) -> Call:
    if out_dtype not in OUT_KINDS:
        raise CometError(f"out_dtype {out_dtype} is not supported", "use bfloat16, float16 or float32")
    chosen = tiles or choose_integer_tiles(tokens, rows, blocks, sm_count(device))
    plan = chosen.plan(tokens, rows, blocks, int8_blocks, sm_count(device))
    memory = workspace(device)
    if plan.partial_floats > (memory.MARKED_SUMS if chosen.marked else memory.FLOATS) or plan.flags > memory.FLAGS:
        raise CometError(f"{plan} needs more workspace than there is", "use smaller tiles")
    if not 0 <= int8_blocks <= blocks:
        raise CometError(f"int8_blocks is {int8_blocks}", f"there are {blocks} blocks")
    numbers = [tokens, rows, token_atoms(tokens), -(-rows // ROW_TILE), *plan.schedule, int8_blocks]
    numbers += [0] * (len(numbers) % 2)  # the struct ends on 8 bytes
    return Call(
        *token_shapes(tokens, blocks, int8_blocks),
        chosen.kernel(out_dtype)
        .load(device)
        .bind(plan.ctas, chosen.threads, _POINTERS, chosen.shared_bytes, pdl, struct.pack(f"<{len(numbers)}i", *numbers)),
        EmptyTensors(((tokens, rows), out_dtype)),
    )


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise CometError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, contiguous: {tensor.is_contiguous()}",
            f"it must be contiguous {dtype} {shape}",
        )
    if tensor.device != device:
        raise CometError(f"{name} is on {tensor.device}, the weight on {device}", "move one of them")


def check_weight(weight: Tensor, base: Tensor, rows: int, int8_blocks: int) -> None:
    """Raise CometError, naming the operand, where the weights' side is not what the kernel reads."""
    row_tiles, blocks = -(-rows // ROW_TILE), weight.shape[1]
    if not 0 <= int8_blocks <= blocks:
        raise CometError(f"int8_blocks is {int8_blocks}", f"there are {blocks} blocks")
    _expect("weight", weight, torch.uint8, (row_tiles, blocks, RECORD), weight.device)
    _expect("base", base, torch.float32, (row_tiles * ROW_TILE,), weight.device)


def check_activations(
    x_codes: Tensor, multiples: Tensor, token_scale: Tensor, weight: Tensor, tokens: int, int8_blocks: int
) -> None:
    """Raise CometError, naming the operand, where activations are not what the kernel reads beside `weight`."""
    operands = (("x_codes", x_codes, _BYTES), ("multiples", multiples, _WORDS), ("token_scale", token_scale, _FLOATS))
    for (name, tensor, dtype), shape in zip(operands, token_shapes(tokens, weight.shape[1], int8_blocks), strict=True):
        _expect(name, tensor, dtype, shape, weight.device)


def float_bias(bias: Tensor, rows: int, device: torch.device) -> Tensor:
    """float32 [N], which the kernel adds."""
    _expect("bias", bias, bias.dtype, (rows,), device)
    return bias.float()


def launch(
    x_codes: Tensor,
    multiples: Tensor,
    token_scale: Tensor,
    weight: Tensor,
    base: Tensor,
    bias: Tensor | None,
    tokens: int,
    rows: int,
    int8_blocks: int,
    out_dtype: torch.dtype,
    tiles: IntegerTiles | None = None,
    pdl: bool = True,
    checked: bool = False,
) -> Tensor:
    """The CUDA implementation of `w4ax_gemm_integer`; `tiles` overrides the table (tuning).

    checked: weight and base are those of an `IntegerWeight`.
    """
    device = weight.get_device()
    if device != torch._C._cuda_getDevice():
        with gpu_of(weight, "w4ax_gemm_integer: weight"):
            return launch(
                x_codes, multiples, token_scale, weight, base, bias, tokens, rows, int8_blocks, out_dtype, tiles, pdl
            )
    row_tiles, shape = -(-rows // ROW_TILE), weight.shape
    if not checked and not (  # the quick form of check_weight, which names the culprit
        shape == (row_tiles, shape[1], RECORD)
        and base.shape == (row_tiles * ROW_TILE,)
        and weight.dtype is _BYTES
        and base.dtype is _FLOATS
        and weight.is_contiguous()
        and base.is_contiguous()
        and device == base.get_device()
    ):
        check_weight(weight, base, rows, int8_blocks)
    if tokens == 0 or rows == 0:
        check_activations(x_codes, multiples, token_scale, weight, tokens, int8_blocks)
        return weight.new_empty(tokens, rows, dtype=out_dtype)
    call = _call(tokens, rows, shape[1], int8_blocks, out_dtype, device, tiles, pdl)
    if not (  # the quick form of check_activations, which names the culprit
        x_codes.shape == call.x_codes
        and multiples.shape == call.multiples
        and token_scale.shape == call.token_scale
        and x_codes.dtype is _BYTES
        and multiples.dtype is _WORDS
        and token_scale.dtype is _FLOATS
        and x_codes.is_contiguous()
        and multiples.is_contiguous()
        and token_scale.is_contiguous()
        and device == x_codes.get_device() == multiples.get_device() == token_scale.get_device()
    ):
        check_activations(x_codes, multiples, token_scale, weight, tokens, int8_blocks)
    bias = None if bias is None else float_bias(bias, rows, weight.device)
    bias_at = 0 if bias is None else bias.data_ptr()
    (y,) = call.y.here()
    call.bound(
        weight.data_ptr(), base.data_ptr(), x_codes.data_ptr(), multiples.data_ptr(), token_scale.data_ptr(),
        bias_at, y.data_ptr(), *workspace(device).addresses,
    )  # fmt: skip
    return y


def w4ax_gemm_integer_ref(
    x_codes: Tensor,
    multiples: Tensor,
    token_scale: Tensor,
    weight: Tensor,
    base: Tensor,
    bias: Tensor | None,
    tokens: int,
    rows: int,
    int8_blocks: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """y = float32(sum over K of integers) * (token_scale * base) + bias, the sum exact.

    Args:
        x_codes: uint8 [NB, A, 1024], multiples: int32 [max(int8_blocks, 1), A, 8], token_scale: float32 [A * 8]: tiled
            activations (weight_layout.py).
        weight, base: `IntegerWeight.records` and `.base`; bias: float [N] or None.
        tokens: M; rows: N; int8_blocks: `IntegerWeight.int8_blocks`; out_dtype: bfloat16, float16 or float32.

    Returns:
        out_dtype [M, N].
    """
    check_weight(weight, base, rows, int8_blocks)
    check_activations(x_codes, multiples, token_scale, weight, tokens, int8_blocks)
    x = untile_activations_integer_sm90(x_codes, multiples, tokens, int8_blocks)
    w = untile_weight_integer_sm90(weight, rows)
    total = x.flatten(1).double() @ w.flatten(1).double().T  # below 2^53: exact
    y = total.float() * (token_scale[:tokens, None] * base[None, :rows])
    return (y if bias is None else y + bias.float()).to(out_dtype)


def _fake(
    x_codes: Tensor,
    multiples: Tensor,
    token_scale: Tensor,
    weight: Tensor,
    base: Tensor,
    bias: Tensor | None,
    tokens: int,
    rows: int,
    int8_blocks: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return weight.new_empty(tokens, rows, dtype=out_dtype)


define_op(
    "w4ax_gemm_integer(Tensor x_codes, Tensor multiples, Tensor token_scale, Tensor weight, Tensor base, Tensor? bias,"
    " SymInt tokens, SymInt rows, int int8_blocks, ScalarType out_dtype) -> Tensor",
    w4ax_gemm_integer_ref,
    _fake,
)
LIBRARY.impl("w4ax_gemm_integer", launch, "CUDA")


def w4ax_gemm_integer(
    x_codes: Tensor,
    multiples: Tensor,
    token_scale: Tensor,
    weight: IntegerWeight,
    tokens: int,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The op behind `w4ax_gemm_integer_ref`, with the weight as one object; plain CUDA tensors skip the dispatcher."""
    arguments = (
        x_codes, multiples, token_scale, weight.records, weight.base, bias,
        tokens, weight.rows, weight.int8_blocks, out_dtype,
    )  # fmt: skip
    if is_plain_cuda(x_codes):
        return launch(*arguments, checked=True)
    y: Tensor = torch.ops.comet.w4ax_gemm_integer(*arguments)
    return y
