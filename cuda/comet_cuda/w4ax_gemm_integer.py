"""w4ax_gemm on Hopper for integer scales: tiled operands -> one launch of w4ax_gemm_integer.cu.

Where every scale of a token and every scale of a weight row is a small integer times one float (quantize_act with share
TOKEN; `weight_base`), the multiples go into INT8 operands and the tensor cores add up all of K in int32. The same codes
and scales run on every other kernel; this one is faster. `prepare_weight_integer` checks the weights' side once, at
load; activations come tiled from quantize_token.
"""

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK
from comet_cuda.driver import BoundLaunch, EmptyTensors, gpu_of, guard, nothing_alike
from comet_cuda.errors import CometError
from comet_cuda.integer_tiles import RECORD as RECORD
from comet_cuda.integer_tiles import SOURCE as SOURCE
from comet_cuda.integer_tiles import IntegerTiles as IntegerTiles
from comet_cuda.integer_tiles import choose_integer_tiles as choose_integer_tiles
from comet_cuda.integer_tiles import integer_table as integer_table
from comet_cuda.integer_tiles import tiles_of as tiles_of
from comet_cuda.jit import Configuration
from comet_cuda.library import LIBRARY, define_op, is_plain_cuda
from comet_cuda.quantize_token_ref import check_blocks, token_shapes
from comet_cuda.tiles_sm90 import OUT_KINDS
from comet_cuda.w4ax_gemm_sm90 import sm_count, workspace
from comet_cuda.weight_layout import (
    ROW_TILE,
    row_bases,
    tile_weight_integer_sm90,
    token_atoms,
    untile_activations_integer_sm90,
    untile_weight_integer_sm90,
)


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


@dataclass
class Call:
    """All of a launch that its shapes decide."""

    bound: BoundLaunch
    y: EmptyTensors
    alike: Callable[..., bool] = nothing_alike  # the guard of the tensors that passed the checks last


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
    if not 0 <= int8_blocks <= blocks:
        raise CometError(f"int8_blocks is {int8_blocks}", f"there are {blocks} blocks")
    chosen = tiles or choose_integer_tiles(tokens, rows, blocks, sm_count(device))
    plan = chosen.plan(tokens, rows, blocks, int8_blocks, sm_count(device))
    memory = workspace(device)
    if plan.partial_floats > memory.FLOATS or plan.flags > memory.FLAGS:
        raise CometError(f"{plan} needs more workspace than there is", "use smaller tiles")
    numbers = [tokens, rows, token_atoms(tokens), -(-rows // ROW_TILE), *plan.schedule, int8_blocks]
    numbers += [0] * (len(numbers) % 2)  # the struct ends on 8 bytes
    return Call(
        chosen.kernel(out_dtype)
        .load(device)
        .bind(
            plan.ctas, chosen.threads, _POINTERS, chosen.shared_bytes, pdl, struct.pack(f"<{len(numbers)}i", *numbers)
        ),
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
    operands = (
        ("x_codes", x_codes, torch.uint8),
        ("multiples", multiples, torch.int32),
        ("token_scale", token_scale, torch.float32),
    )
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
) -> Tensor:
    """The CUDA implementation of `w4ax_gemm_integer`; `tiles` overrides the table (tuning)."""
    device = weight.get_device()
    if device != torch._C._cuda_getDevice():
        with gpu_of(weight, "w4ax_gemm_integer: weight"):
            return launch(
                x_codes, multiples, token_scale, weight, base, bias, tokens, rows, int8_blocks, out_dtype, tiles, pdl
            )
    if tokens == 0 or rows == 0:
        check_weight(weight, base, rows, int8_blocks)
        check_activations(x_codes, multiples, token_scale, weight, tokens, int8_blocks)
        return weight.new_empty(tokens, rows, dtype=out_dtype)
    call = _call(tokens, rows, weight.shape[1], int8_blocks, out_dtype, device, tiles, pdl)
    if not call.alike(x_codes, multiples, token_scale, weight, base):
        check_weight(weight, base, rows, int8_blocks)
        check_activations(x_codes, multiples, token_scale, weight, tokens, int8_blocks)
        call.alike = guard(x_codes, multiples, token_scale, weight, base)
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
        return launch(*arguments)
    y: Tensor = torch.ops.comet.w4ax_gemm_integer(*arguments)
    return y
