"""w4ax_gemm on Hopper, host side: tiled operands -> one launch of w4ax_gemm_sm90.cu.

`prepare_weight_sm90` turns canonical weights into a `TiledWeight` once, at load. The op `comet::w4ax_gemm_tiled` takes
it and tiled activations (quantize_act writes them). Which kernel runs, with which tiles, is read from tiles_sm90.json,
a table that tools/tune_gemm.py measured; nothing is tuned at run time. On other devices the op is the reference.
"""

import functools
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK
from comet_cuda.errors import CometError
from comet_cuda.jit import CompiledKernel, compile_kernel
from comet_cuda.library import LIBRARY, define_op
from comet_cuda.w4ax_gemm import w4ax_gemm_ref
from comet_cuda.weight_layout import (
    ATOM_BYTES,
    META_FLOATS,
    ROW_TILE,
    TERM_BLOCKS,
    record_bytes,
    tile_weight_sm90,
    token_atoms,
    untile_activations_sm90,
    untile_weight_sm90,
    zero_terms_sm90,
)

SOURCE = "w4ax_gemm_sm90.cu"
ENTRY = "w4ax_gemm_sm90"
ARCH = "sm_90a"
TABLE = Path(__file__).with_name("tiles_sm90.json")
MASK_WORDS = 16  # 32-bit words of the INT8 mask: 512 blocks, 65,536 input channels
SHARED_LIMIT = 232448  # bytes a cta may use: 227 KB
OUT_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
SM_COUNT = 132  # of H100 and H200 SXM; fewer or more are read from the device


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
    def threads(self) -> int:
        return 128 * (self.row_wgs + 1)

    @property
    def consumer_registers(self) -> int:
        """What the register file leaves each consumer thread, in steps of 8, when producers keep at least 32."""
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
        terms = 2 * self.tokens * BLOCK * self.zero_product
        return self.stage_bytes(has_zero) * self.stages + terms + 1024 + 16 * (self.stages + 2)

    def defines(self, has_zero: bool, out_dtype: torch.dtype) -> dict[str, int | str]:
        """Preprocessor definitions of w4ax_gemm_sm90.cu."""
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
        return compile_kernel(SOURCE, ENTRY, ARCH, self.defines(has_zero, out_dtype))


@dataclass(frozen=True)
class Plan:
    """How one problem shape is launched."""

    tiles: Tiles
    ctas: int
    schedule: tuple[int, ...]  # struct Schedule of comet/tile_schedule.cuh, in its order
    partial_floats: int  # workspace
    flags: int


@dataclass(frozen=True)
class TiledWeight:
    """A linear layer's weights in the kernel's layout."""

    records: Tensor  # uint8 [R, NB, 4224 or 4288]
    zero_terms: Tensor  # bf16 [R, ceil(NB / 32), 4, 128, 8]
    rows: int  # N
    int8_mask: tuple[int, ...]  # 32-bit words, bit b % 32 of word b // 32: block b holds INT8 activations


def int8_mask_words(block_bits: Tensor) -> tuple[int, ...]:
    """uint8 [NB] of 4 and 8 -> 32-bit words with a bit set for each 8-bit block."""
    words = [0] * (-(-block_bits.numel() // 32))
    for block, bits in enumerate(block_bits.tolist()):
        if bits not in (4, 8):
            raise CometError(f"block_bits[{block}] is {bits}", "blocks of activations have 4 or 8 bits")
        if bits == 8:
            words[block // 32] |= 1 << (block % 32)
    return tuple(words)


def prepare_weight_sm90(qweight: Tensor, w_scale: Tensor, w_zero: Tensor | None, block_bits: Tensor) -> TiledWeight:
    """Canonical 4-bit weights (see w4ax_gemm.py) -> the kernel's layout, on the same device.

    Args:
        qweight: uint8 [N, 64 * NB]; w_scale: bfloat16 [N, NB]; w_zero: uint8 [N, NB] or None; block_bits: uint8 [NB].
    """
    records = tile_weight_sm90(qweight, w_scale, w_zero, block_bits)
    if records.is_cuda:
        _workspace(records.device.index, for_graphs=True)  # allocated before any graph is captured
    return TiledWeight(records, zero_terms_sm90(w_scale, w_zero), w_scale.shape[0], int8_mask_words(block_bits))


@functools.cache
def tile_table() -> tuple[dict[str, int], ...]:
    """Rows of tiles_sm90.json in order; the first whose limits hold applies."""
    return tuple(json.loads(TABLE.read_text())["rows"])


def choose_tiles(tokens: int, rows: int, blocks: int) -> Tiles:
    """The table's variant for a problem of `tokens` x `rows` x (128 * `blocks`)."""
    for row in tile_table():
        if tokens <= row.get("max_tokens", tokens) and rows * blocks * BLOCK <= row.get("max_weights", 1 << 62):
            return Tiles(**{name: row[name] for name in asdict(Tiles(8)) if name in row})
    raise CometError(f"{TABLE.name} has no row for {tokens} tokens", "its last row must have no limits")


def make_plan(tiles: Tiles, tokens: int, rows: int, blocks: int, sm_count: int) -> Plan:
    """Deal the output tiles to clusters; see comet/tile_schedule.cuh."""
    row_groups = -(-rows // (ROW_TILE * tiles.row_wgs * tiles.row_tiles * tiles.cluster))
    count = row_groups * -(-tokens // tiles.tokens)
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
    schedule = (stream_tiles, count, row_groups, -(-tokens // tiles.tokens), tiles.band, blocks, each, longer)
    partials = groups * tiles.row_tiles * ROW_TILE * tiles.tokens if stream_tiles else 0
    return Plan(tiles, ctas, schedule, partials, groups)


class Workspace:
    """Partial sums and flags of tiles that several ctas share. The flags are zero whenever no kernel runs."""

    FLOATS = 4 << 20
    FLAGS = 4096

    def __init__(self, device: int) -> None:
        self.partials = torch.empty(self.FLOATS, dtype=torch.float32, device=f"cuda:{device}")
        self.flags = torch.zeros(self.FLAGS, dtype=torch.int32, device=f"cuda:{device}")
        self.addresses = (self.partials.data_ptr(), self.flags.data_ptr())


_WORKSPACES: dict[tuple[int, int], Workspace] = {}
_FOR_GRAPHS = -1  # key of the workspace that captured launches use; graphs of one device must not run at the same time


def _workspace(device: int, for_graphs: bool = False) -> Workspace:
    """The workspace of the current stream; launches of one stream follow each other and share it."""
    stream = torch._C._cuda_getCurrentRawStream(device)  # type: ignore[attr-defined,unused-ignore]
    if for_graphs or torch.cuda.is_current_stream_capturing():
        stream = _FOR_GRAPHS
    found = _WORKSPACES.get((device, stream))
    if found is None:
        found = _WORKSPACES[device, stream] = Workspace(device)
    return found


@functools.cache
def _sm_count(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_POINTERS = struct.Struct("<8Q")  # struct Operands of w4ax_gemm_sm90.cu: its pointers,
_NUMBERS = struct.Struct(f"<4i8i{MASK_WORDS}I")  # and the rest


@dataclass(frozen=True)
class Call:
    """All of a launch that its shapes decide."""

    shapes: tuple[tuple[int, ...], ...]  # of x_codes, x_meta, weight, zero_terms
    kernel: CompiledKernel
    ctas: int
    threads: int
    shared_bytes: int
    numbers: bytes


@functools.lru_cache(maxsize=4096)
def _call(
    tokens: int,
    rows: int,
    blocks: int,
    record: int,
    int8_mask: tuple[int, ...],
    out_dtype: torch.dtype,
    device: int,
    tiles: Tiles | None,
) -> Call:
    if out_dtype not in OUT_KINDS:
        raise CometError(f"out_dtype {out_dtype} is not supported", "use bfloat16, float16 or float32")
    chosen, has_zero = tiles or choose_tiles(tokens, rows, blocks), record == record_bytes(True)
    plan = make_plan(chosen, tokens, rows, blocks, _sm_count(device))
    if plan.partial_floats > Workspace.FLOATS or plan.flags > Workspace.FLAGS:
        raise CometError(f"{plan} needs more workspace than there is", "use smaller tiles")
    padded = int8_mask + (0,) * (MASK_WORDS - len(int8_mask))
    return Call(
        operand_shapes(tokens, rows, blocks, record),
        chosen.kernel(has_zero, out_dtype),
        plan.ctas,
        chosen.threads,
        chosen.shared_bytes(has_zero),
        _NUMBERS.pack(tokens, rows, token_atoms(tokens), -(-rows // ROW_TILE), *plan.schedule, *padded),
    )


def operand_shapes(tokens: int, rows: int, blocks: int, record: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of x_codes, x_meta, weight and zero_terms."""
    atoms, row_tiles = token_atoms(tokens), -(-rows // ROW_TILE)
    return (
        (blocks, atoms, ATOM_BYTES),
        (blocks, atoms, META_FLOATS),
        (row_tiles, blocks, record),
        (row_tiles, -(-blocks // TERM_BLOCKS), 4, 128, 8),
    )


def check_operands(
    x_codes: Tensor,
    x_meta: Tensor,
    weight: Tensor,
    zero_terms: Tensor,
    bias: Tensor | None,
    tokens: int,
    rows: int,
    mask: Sequence[int],
) -> None:
    """Raise CometError, naming the operand, where a shape or type is not what the kernel reads."""
    blocks, record = weight.shape[1:]
    names = ("x_codes", "x_meta", "weight", "zero_terms")
    kinds = (torch.uint8, torch.float32, torch.uint8, torch.bfloat16)
    tensors = (x_codes, x_meta, weight, zero_terms)
    expected = [*zip(names, tensors, kinds, operand_shapes(tokens, rows, blocks, record), strict=True)]
    if bias is not None:
        expected.append(("bias", bias, bias.dtype, (rows,)))
    for name, tensor, dtype, shape in expected:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise CometError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, contiguous: {tensor.is_contiguous()}",
                f"{tokens} tokens, {rows} rows and {blocks} blocks need contiguous {dtype} {shape}",
            )
        if tensor.device != weight.device:
            raise CometError(f"{name} is on {tensor.device}, the weight on {weight.device}", "move one of them")
    if weight.shape[2] not in (record_bytes(False), record_bytes(True)):
        raise CometError(f"weight records have {weight.shape[2]} bytes", "make them with prepare_weight_sm90")
    if len(mask) != -(-blocks // 32) or len(mask) > MASK_WORDS:
        raise CometError(f"int8_mask has {len(mask)} words for {blocks} blocks", f"at most {MASK_WORDS * 32} blocks")


def launch(
    x_codes: Tensor,
    x_meta: Tensor,
    weight: Tensor,
    zero_terms: Tensor,
    bias: Tensor | None,
    tokens: int,
    rows: int,
    int8_mask: Sequence[int],
    out_dtype: torch.dtype,
    tiles: Tiles | None = None,
    pdl: bool = True,
) -> Tensor:
    """The CUDA implementation of `w4ax_gemm_tiled`; `tiles` overrides the table (tuning)."""
    device, mask = weight.get_device(), tuple(int8_mask)
    blocks, record = weight.shape[1:]
    if tokens == 0 or rows == 0 or len(mask) != -(-blocks // 32) or blocks > 32 * MASK_WORDS:
        check_operands(x_codes, x_meta, weight, zero_terms, bias, tokens, rows, mask)
        return weight.new_empty(tokens, rows, dtype=out_dtype)
    call = _call(tokens, rows, blocks, record, mask, out_dtype, device, tiles)
    # The quick form of check_operands, which names the culprit.
    if not (
        (x_codes.shape, x_meta.shape, weight.shape, zero_terms.shape) == call.shapes
        and x_codes.dtype == weight.dtype == torch.uint8
        and x_meta.dtype == torch.float32
        and zero_terms.dtype == torch.bfloat16
        and x_codes.is_contiguous()
        and x_meta.is_contiguous()
        and weight.is_contiguous()
        and zero_terms.is_contiguous()
        and device == x_codes.get_device() == x_meta.get_device() == zero_terms.get_device()
        and bias is None
    ):
        check_operands(x_codes, x_meta, weight, zero_terms, bias, tokens, rows, mask)
    if bias is not None and bias.dtype != torch.float32:
        bias = bias.float()
    y = torch.empty((tokens, rows), dtype=out_dtype, device=weight.device)
    pointers = _POINTERS.pack(
        weight.data_ptr(),
        zero_terms.data_ptr(),
        x_codes.data_ptr(),
        x_meta.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        *_workspace(device).addresses,
    )
    call.kernel.launch(call.ctas, call.threads, (pointers + call.numbers,), shared_bytes=call.shared_bytes, pdl=pdl)
    return y


def w4ax_gemm_tiled_ref(
    x_codes: Tensor,
    x_meta: Tensor,
    weight: Tensor,
    zero_terms: Tensor,
    bias: Tensor | None,
    tokens: int,
    rows: int,
    int8_mask: Sequence[int],
    out_dtype: torch.dtype,
) -> Tensor:
    """y = w4ax_gemm of tiled operands.

    Args:
        x_codes: uint8 [NB, A, 1024], x_meta: float32 [NB, A, 16]: tiled activations (weight_layout.py).
        weight: uint8 [R, NB, 4224 or 4288]: `TiledWeight.records`; zero_terms: `TiledWeight.zero_terms`.
        bias: float [N] or None.
        tokens: M; rows: N; int8_mask: `TiledWeight.int8_mask`.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        out_dtype [M, N].
    """
    check_operands(x_codes, x_meta, weight, zero_terms, bias, tokens, rows, int8_mask)
    bits = torch.tensor([8 if int8_mask[b // 32] >> (b % 32) & 1 else 4 for b in range(weight.shape[1])])
    codes, scale, _ = untile_activations_sm90(x_codes, x_meta, tokens, bits)
    qweight, w_scale, w_zero = untile_weight_sm90(weight, rows, bits)
    return w4ax_gemm_ref(codes, scale, qweight, w_scale, w_zero, bits, bias, out_dtype)


def _fake(
    x_codes: Tensor,
    x_meta: Tensor,
    weight: Tensor,
    zero_terms: Tensor,
    bias: Tensor | None,
    tokens: int,
    rows: int,
    int8_mask: Sequence[int],
    out_dtype: torch.dtype,
) -> Tensor:
    return weight.new_empty(tokens, rows, dtype=out_dtype)


define_op(
    "w4ax_gemm_tiled(Tensor x_codes, Tensor x_meta, Tensor weight, Tensor zero_terms, Tensor? bias,"
    " SymInt tokens, SymInt rows, int[] int8_mask, ScalarType out_dtype) -> Tensor",
    w4ax_gemm_tiled_ref,
    _fake,
)
LIBRARY.impl("w4ax_gemm_tiled", launch, "CUDA")


def w4ax_gemm_tiled(
    x_codes: Tensor,
    x_meta: Tensor,
    weight: TiledWeight,
    tokens: int,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The op behind `w4ax_gemm_tiled_ref`, with the weight as one object.

    Outside tracing, plain CUDA tensors skip the dispatcher, which costs as much as all the rest of a launch.
    """
    operands = (x_codes, x_meta, weight.records, weight.zero_terms, bias)
    rest = (tokens, weight.rows, weight.int8_mask, out_dtype)
    if type(x_codes) is Tensor and x_codes.is_cuda and not torch.compiler.is_compiling():
        return launch(*operands, *rest)
    y: Tensor = torch.ops.comet.w4ax_gemm_tiled(*operands, *rest)
    return y
