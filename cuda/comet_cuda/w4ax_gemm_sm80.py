"""w4ax_gemm on GPUs with INT4 mma.sync, and the portable INT8 path: operands -> launches of w4ax_gemm_sm80.cu.

`prepare_weight_sm80` turns canonical weights into records once, at load; `w4ax_gemm_sm80` multiplies tiled activations
(quantize_act's "sm_80" or "portable" layout) by them. The decision made here is the schedule: tiles of 128 rows times a
few tokens are dealt to ctas, whole while they divide evenly, the rest cut along K so that every cta carries the same
cost, where an INT8 block costs as much as two INT4 blocks. A second kernel adds cut tiles up, in ascending order of K.
"""

import dataclasses
import functools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK
from comet_cuda.dispatch import device_arch
from comet_cuda.errors import CometError
from comet_cuda.jit import CompiledKernel, Configuration, compile_kernel
from comet_cuda.library import LIBRARY, define_op
from comet_cuda.w4ax_gemm import w4ax_gemm_ref
from comet_cuda.weight_layout_sm80 import (
    ROW_TILE,
    record_bytes_sm80,
    tile_weight_sm80,
    untile_activations_sm80,
    untile_weight_sm80,
)

SOURCE = "w4ax_gemm_sm80.cu"
THREADS = 256
OUT_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
STAGES = {8: 4, 16: 4, 32: 4, 64: 4, 128: 3}  # tokens a tile -> blocks in flight
MIN_CTAS = {8: 2, 16: 2, 32: 2, 64: 2, 128: 1}  # tokens a tile -> ctas a multiprocessor
INT8_COST = 2  # of an INT8 block, in INT4 blocks: half the tensor-core rate
MIN_PART = 4  # INT4 blocks' worth of work below which a tile is not cut
_PARAMS = struct.Struct("<9Q3i4x")  # Params of w4ax_gemm_sm80.cu


@dataclasses.dataclass(frozen=True)
class Sm80Weight:
    """A linear layer's weights in the kernel's layout."""

    records: Tensor  # uint8 [R, NB, 8448 or 8576]
    block_bits: Tensor  # uint8 [NB], on the same device
    bits: tuple[int, ...]  # the same, for the schedule
    rows: int  # N
    portable: bool  # every block as INT8


@dataclasses.dataclass(frozen=True)
class Segment:
    """Blocks [first_block, end_block) of one tile, for one cta; `slot` is its place in the workspace, -1 if whole."""

    row_tile: int
    token_tile: int
    first_block: int
    end_block: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who computes what."""

    work: tuple[tuple[Segment, ...], ...]  # of each cta
    splits: tuple[tuple[int, int, int, int], ...]  # row tile, token tile, first slot, slots, of each tile that is cut
    slots: int


def prepare_weight_sm80(
    qweight: Tensor, w_scale: Tensor, w_zero: Tensor | None, block_bits: Tensor, portable: bool = False
) -> Sm80Weight:
    """Tile canonical weights (see `w4ax_gemm`) for this kernel, on the device they are on."""
    if w_scale.shape[0] % 8:
        raise CometError(f"a linear has {w_scale.shape[0]} output rows", "the kernel needs a multiple of 8")
    block_bits = block_bits.to(qweight.device)
    records = tile_weight_sm80(qweight, w_scale, w_zero, block_bits, portable)
    return Sm80Weight(records, block_bits, tuple(block_bits.tolist()), w_scale.shape[0], portable)


def tile_tokens(tokens: int) -> int:
    """Tokens of a tile: the smallest compiled size that holds them all, at most 128."""
    return next((size for size in sorted(STAGES) if tokens <= size), max(STAGES))


def min_ctas(tokens: int, portable: bool) -> int:
    """Ctas a multiprocessor that registers allow: widened INT4 blocks take some more."""
    return 1 if portable and tokens == 64 else MIN_CTAS[tokens]


def shared_bytes(tokens: int, has_zero: bool) -> int:
    """Dynamic shared memory of a cta: records, codes and meta of the blocks in flight."""
    return STAGES[tokens] * (record_bytes_sm80(has_zero) + tokens * (BLOCK + 8))


def kernel_defines(tokens: int, has_zero: bool, out_dtype: torch.dtype, portable: bool) -> dict[str, int | str]:
    """The preprocessor definitions of one configuration."""
    return {
        "TOKENS": tokens,
        "STAGES": STAGES[tokens],
        "ZERO": int(has_zero),
        "OUT": OUT_KINDS[out_dtype],
        "PORTABLE": int(portable),
        "MIN_CTAS": min_ctas(tokens, portable),
    }


def configurations(portable: bool) -> list[Configuration]:
    """Every way the GEMM can be launched."""
    return [
        Configuration(SOURCE, kernel_defines(tokens, has_zero, out, portable), (), shared_bytes(tokens, has_zero))
        for tokens in STAGES
        for has_zero in (False, True)
        for out in OUT_KINDS
    ]


@functools.lru_cache(maxsize=1024)
def make_schedule(row_tiles: int, token_tiles: int, bits: tuple[int, ...], portable: bool, ctas: int) -> Schedule:
    """Deal row_tiles x token_tiles tiles of len(bits) blocks to `ctas` ctas.

    Whole tiles go round as long as at least one full round is left over; the remaining tiles (fewer than two rounds)
    lie end to end and are cut into equal costs. Neighbouring ctas share a row tile: its weights come from L2.
    """
    tiles = [(row, token) for row in range(row_tiles) for token in range(token_tiles)]
    costs = [1 if portable or bit == 4 else INT8_COST for bit in bits]
    starts = [sum(costs[:block]) for block in range(len(costs) + 1)]  # cost before each block
    whole = len(tiles) if len(tiles) % ctas == 0 else max(0, (len(tiles) // ctas - 1) * ctas)
    work: list[list[Segment]] = [[] for _ in range(ctas)]
    for index, (row, token) in enumerate(tiles[:whole]):
        work[index % ctas].append(Segment(row, token, 0, len(bits), -1))
    rest = tiles[whole:]
    total = starts[-1] * len(rest)
    workers = max(1, min(ctas, total // MIN_PART)) if rest else 0
    cuts = [total * worker // workers for worker in range(workers + 1)] if rest else []
    splits: list[tuple[int, int, int, int]] = []
    slots, worker = 0, 0
    for index, (row, token) in enumerate(rest):
        base, block = starts[-1] * index, 0
        parts: list[tuple[int, int, int]] = []  # worker, first block, end block
        while block < len(bits):
            while cuts[worker + 1] <= base + starts[block]:
                worker += 1
            end = block + 1
            while end < len(bits) and base + starts[end] < cuts[worker + 1]:
                end += 1
            parts.append((worker, block, end))
            block = end
        cut = len(parts) > 1
        if cut:
            splits.append((row, token, slots, len(parts)))
        for owner, first, end in parts:
            work[owner].append(Segment(row, token, first, end, slots if cut else -1))
            slots += cut
    return Schedule(tuple(map(tuple, work)), tuple(splits), slots)


@dataclasses.dataclass(frozen=True)
class _Launch:
    kernel: CompiledKernel
    reduce: CompiledKernel
    ctas: int
    tokens: int  # of a tile
    starts: Tensor  # int32 [ctas + 1]
    segments: Tensor  # int32 [S, 5]
    splits: Tensor | None  # int32 [T, 4]
    slots: int
    shared: int


@functools.lru_cache(maxsize=1024)
def _prepare_launch(
    device: int, tokens: int, row_tiles: int, bits: tuple[int, ...], has_zero: bool, portable: bool, out: torch.dtype
) -> _Launch:
    tile = tile_tokens(tokens)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    ctas = sms * min_ctas(tile, portable)
    schedule = make_schedule(row_tiles, -(-tokens // tile), bits, portable, ctas)
    defines = kernel_defines(tile, has_zero, out, portable)
    arch = device_arch(device)
    flat = [segment for segments in schedule.work for segment in segments]
    starts = [0]
    for segments in schedule.work:
        starts.append(starts[-1] + len(segments))

    def on_device(rows: list[list[int]] | list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=torch.device("cuda", device))

    return _Launch(
        kernel=compile_kernel(SOURCE, "w4ax_gemm_sm80", arch, defines),
        reduce=compile_kernel(SOURCE, "reduce_parts", arch, defines),
        ctas=ctas,
        tokens=tile,
        starts=on_device(starts),
        segments=on_device([list(dataclasses.astuple(segment)) for segment in flat]),
        splits=on_device([list(split) for split in schedule.splits]) if schedule.splits else None,
        slots=schedule.slots,
        shared=shared_bytes(tile, has_zero),
    )


def _check(codes: Tensor, meta: Tensor, records: Tensor, block_bits: Tensor, rows: int, bias: Tensor | None) -> None:
    """Raise CometError, naming the operand, where a shape or type is not what the kernel reads."""
    blocks, tokens = block_bits.shape[0], codes.shape[1]
    expected = {
        "codes": (codes, torch.uint8, (blocks, tokens, BLOCK)),
        "meta": (meta, torch.float32, (blocks, tokens, 2)),
        "records": (records, torch.uint8, (-(-rows // ROW_TILE), blocks, records.shape[2])),
        "block_bits": (block_bits, torch.uint8, (blocks,)),
    }
    if bias is not None:
        expected["bias"] = (bias, bias.dtype, (rows,))
    for name, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise CometError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, contiguous: {tensor.is_contiguous()}",
                f"{tokens} tokens, {rows} rows and {blocks} blocks need contiguous {dtype} {shape}",
            )
    if records.shape[2] not in (record_bytes_sm80(False), record_bytes_sm80(True)):
        raise CometError(f"weight records have {records.shape[2]} bytes", "make them with prepare_weight_sm80")


def launch(
    codes: Tensor,
    meta: Tensor,
    records: Tensor,
    block_bits: Tensor,
    bits: Sequence[int],
    rows: int,
    portable: bool,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The CUDA implementation of `w4ax_gemm_mma_sync`."""
    _check(codes, meta, records, block_bits, rows, bias)
    if out_dtype not in OUT_KINDS:
        raise CometError(f"out_dtype {out_dtype} is not supported", "use bfloat16, float16 or float32")
    blocks, tokens = codes.shape[0], codes.shape[1]
    y = codes.new_empty((tokens, rows), dtype=out_dtype)
    if tokens == 0 or rows == 0:
        return y
    has_zero = records.shape[2] == record_bytes_sm80(has_zero=True)
    device = codes.get_device()
    plan = _prepare_launch(device, tokens, -(-rows // ROW_TILE), tuple(bits), has_zero, portable, out_dtype)
    parts = meta.new_empty(plan.slots * ROW_TILE * plan.tokens)
    bias = None if bias is None else bias.float()
    params = _PARAMS.pack(
        codes.data_ptr(),
        meta.data_ptr(),
        records.data_ptr(),
        block_bits.data_ptr(),
        plan.starts.data_ptr(),
        plan.segments.data_ptr(),
        parts.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        tokens,
        rows,
        blocks,
    )
    plan.kernel.launch_on(device, plan.ctas, THREADS, (params,), plan.shared)
    if plan.splits is not None:
        tiles = ROW_TILE * plan.tokens // (4 * THREADS)  # m16n8 tiles of a thread
        plan.reduce.launch_on(device, (plan.splits.shape[0], tiles), THREADS, (params, plan.splits))
    return y


def w4ax_gemm_mma_sync_ref(
    codes: Tensor,
    meta: Tensor,
    records: Tensor,
    block_bits: Tensor,
    bits: Sequence[int],
    rows: int,
    portable: bool,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """y = w4ax_gemm of tiled operands.

    Args:
        codes: uint8 [NB, M, 128], meta: float32 [NB, M, 2]: `quantize_act_tiled` with layout "sm_80" or "portable".
        records: uint8 [R, NB, 8448 or 8576], block_bits: uint8 [NB], bits: the same as integers, rows: N, portable:
            fields of `Sm80Weight`.
        bias: float [N] or None.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        out_dtype [M, N]; on a GPU the same bits every time.
    """
    _check(codes, meta, records, block_bits, rows, bias)
    qx, sx, _ = untile_activations_sm80(codes, meta, block_bits, portable)
    qweight, w_scale, w_zero = untile_weight_sm80(records, rows, block_bits, portable)
    return w4ax_gemm_ref(qx, sx, qweight, w_scale, w_zero, block_bits, bias, out_dtype)


def _fake(
    codes: Tensor,
    meta: Tensor,
    records: Tensor,
    block_bits: Tensor,
    bits: Sequence[int],
    rows: int,
    portable: bool,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty(codes.shape[1], rows, dtype=out_dtype)


define_op(
    "w4ax_gemm_mma_sync(Tensor codes, Tensor meta, Tensor records, Tensor block_bits, int[] bits, SymInt rows,"
    " bool portable, Tensor? bias, ScalarType out_dtype) -> Tensor",
    w4ax_gemm_mma_sync_ref,
    _fake,
)
LIBRARY.impl("w4ax_gemm_mma_sync", launch, "CUDA")


def w4ax_gemm_sm80(
    codes: Tensor, meta: Tensor, weight: Sm80Weight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """The op behind `w4ax_gemm_mma_sync_ref`, with the weight's fields in one argument."""
    y: Tensor = torch.ops.comet.w4ax_gemm_mma_sync(
        codes,
        meta,
        weight.records,
        weight.block_bits,
        weight.bits,
        weight.rows,
        weight.portable,
        bias,
        out_dtype,
    )
    return y
