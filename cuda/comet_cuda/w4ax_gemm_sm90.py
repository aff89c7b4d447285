"""w4ax_gemm on Hopper, host side: tiled operands -> one launch of w4ax_gemm_sm90.cu.

`prepare_weight_sm90` turns canonical weights into a `TiledWeight` once, at load. The op `comet::w4ax_gemm_tiled` takes
it and tiled activations (quantize_act writes them). Which variant of the kernel runs is the choice of tiles_sm90.py. On
other devices the op is the reference.
"""

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comet_cuda.errors import CometError
from comet_cuda.jit import CompiledKernel
from comet_cuda.library import LIBRARY, define_op
from comet_cuda.tiles_sm90 import OUT_KINDS as OUT_KINDS
from comet_cuda.tiles_sm90 import SOURCE as SOURCE
from comet_cuda.tiles_sm90 import Tiles as Tiles
from comet_cuda.tiles_sm90 import choose_tiles as choose_tiles
from comet_cuda.tiles_sm90 import make_plan as make_plan
from comet_cuda.tiles_sm90 import tile_table as tile_table
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

MASK_WORDS = 16  # 32-bit words of the INT8 mask: 512 blocks, 65,536 input channels


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
        workspace(records.device.index, for_graphs=True)  # allocated before any graph is captured
    return TiledWeight(records, zero_terms_sm90(w_scale, w_zero), w_scale.shape[0], int8_mask_words(block_bits))


class Workspace:
    """Partial sums, and flags of tiles that several ctas share, which are zero whenever no kernel runs."""

    FLOATS = 6 << 20
    FLAGS = 4096

    def __init__(self, device: int) -> None:
        self.partials = torch.empty(self.FLOATS, dtype=torch.float32, device=f"cuda:{device}")
        self.flags = torch.zeros(self.FLAGS, dtype=torch.int32, device=f"cuda:{device}")
        self.addresses = (self.partials.data_ptr(), self.flags.data_ptr())


_WORKSPACES: dict[tuple[int, int], Workspace] = {}
_FOR_GRAPHS = -1  # key of the workspace that captured launches use; graphs of one device must not run at the same time


def workspace(device: int, for_graphs: bool = False) -> Workspace:
    """The workspace of the current stream; launches of one stream follow each other and share it."""
    stream = torch._C._cuda_getCurrentRawStream(device)  # type: ignore[attr-defined,unused-ignore]
    if for_graphs or torch.cuda.is_current_stream_capturing():
        stream = _FOR_GRAPHS
    found = _WORKSPACES.get((device, stream))
    if found is None:
        found = _WORKSPACES[device, stream] = Workspace(device)
    return found


@functools.cache
def sm_count(device: int) -> int:
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
    chosen, has_zero = (
        tiles or choose_tiles(tokens, rows, blocks),
        record == record_bytes(True),
    )
    plan = make_plan(chosen, tokens, rows, blocks, sm_count(device))
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
        *workspace(device).addresses,
    )
    call.kernel.launch_on(device, call.ctas, call.threads, (pointers + call.numbers,), call.shared_bytes, pdl)
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
