"""gptq_block: GPTQ inside one block of 128 columns, its grid search included. One kernel a block on a GPU.

The reference takes ten torch operations a column; started one by one on a GPU they leave it idle, and hundreds in a
graph still take milliseconds. `COMET_GPTQ=reference` runs the reference on a GPU all the same, to tell the two apart.
"""

import os
import struct

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK, code_max, symmetric_qmax
from comet_cuda.dispatch import device_arch
from comet_cuda.jit import Configuration, compile_kernel
from comet_cuda.library import LIBRARY, define_op
from comet_cuda.weight_grid import SHRINK_STEP, SHRINK_STEPS, Grid, choose_grid, code_range, middle_code

SOURCE = "gptq_block.cu"
ROWS = 16  # a cta, a warp each
SHARED_BYTES = BLOCK * BLOCK * 4
_PARAMS = struct.Struct("<8Q2qd8i")  # struct Params of the kernel


def configurations(_: str) -> list[Configuration]:
    """Every way that the source is compiled."""
    return [Configuration(SOURCE, {}, (), SHARED_BYTES)]


def gptq_block_ref(
    block: Tensor,
    factor: Tensor,
    importance: Tensor,
    bits: int,
    symmetric: bool,
    search: bool,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    base: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round column by column, moving each column's error into those after it.

    Args:
        block: f32 [N, 128]. factor: f32 [128, 128], these columns of the upper factor of the inverse Hessian.
        importance: f32 [128], weight of each column's squared error in the search. bits: 4, or 8 (symmetric only).
        search: try narrower ranges. scale, zero: f32 [N], a grid that is given; else it is chosen here.
        base: f32 [N], of which the scales chosen here must be multiples (weight_grid.py; 4 bits), or None.

    Returns:
        codes int8 [N, 128], errors over the factor's diagonal f32 [N, 128] (what later blocks take their share of),
        scale f32 [N], zero f32 [N].
    """
    if scale is None or zero is None:
        grid = choose_grid(block, importance, bits, symmetric, search, base)
    else:
        grid = Grid(scale.clone(), zero.clone(), *code_range(bits))
    columns = block.T.clone(memory_format=torch.contiguous_format)  # a column of weights is contiguous
    codes, errors = torch.empty_like(columns), torch.empty_like(columns)
    for i in range(BLOCK):
        column, code, error = columns[i], codes[i], errors[i]
        torch.div(column, grid.scale, out=code)
        code.round_().add_(grid.zero).clamp_(grid.low, grid.high)
        torch.sub(code, grid.zero, out=error)
        error.mul_(grid.scale)
        torch.sub(column, error, out=error)
        error.div_(factor[i, i])
        columns[i + 1 :].addr_(factor[i, i + 1 :], error, alpha=-1)
    return codes.T.to(torch.int8), errors.T, grid.scale, grid.zero  # all codes fit: 0 to 15, or -127 to 127


def gptq_block_gpu(
    block: Tensor,
    factor: Tensor,
    importance: Tensor,
    bits: int,
    symmetric: bool,
    search: bool,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    base: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gptq_block_ref` on CUDA tensors."""
    if os.environ.get("COMET_GPTQ") == "reference":
        return gptq_block_ref(block, factor, importance, bits, symmetric, search, scale, zero, base)
    block, factor = (x if x.stride(-1) == 1 else x.contiguous() for x in (block, factor))
    importance, device, rows = importance.contiguous(), block.get_device(), len(block)
    base = None if base is None else base.contiguous()
    given = scale is not None and zero is not None
    codes = block.new_empty(rows, BLOCK, dtype=torch.int8)
    errors = block.new_empty(rows, BLOCK)
    scale = scale.clone() if scale is not None and given else block.new_empty(rows)
    zero = zero.clone() if zero is not None and given else block.new_empty(rows)
    qmax = symmetric_qmax(bits) if symmetric else code_max(bits)
    params = _PARAMS.pack(
        *(tensor.data_ptr() for tensor in (block, factor, importance, codes, errors, scale, zero)),
        0 if base is None else base.data_ptr(),
        block.stride(0), factor.stride(0), SHRINK_STEP, SHRINK_STEPS if search else 1, rows, *code_range(bits), qmax,
        middle_code(bits), symmetric, given,
    )  # fmt: skip
    if rows:
        kernel = compile_kernel(SOURCE, "gptq_block", device_arch(device), {})
        kernel.launch_on(device, -(-rows // ROWS), 32 * ROWS, (params,), SHARED_BYTES)
    return codes, errors, scale, zero


def _fake(
    block: Tensor, factor: Tensor, importance: Tensor, bits: int, symmetric: bool, search: bool, *_: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = block.shape[0]
    codes = block.new_empty(rows, BLOCK, dtype=torch.int8)
    return codes, block.new_empty(rows, BLOCK), block.new_empty(rows), block.new_empty(rows)


define_op(
    "gptq_block(Tensor block, Tensor factor, Tensor importance, int bits, bool symmetric, bool search, "
    "Tensor? scale=None, Tensor? zero=None, Tensor? base=None) -> (Tensor, Tensor, Tensor, Tensor)",
    gptq_block_ref,
    _fake,
)
LIBRARY.impl("gptq_block", gptq_block_gpu, "CUDA")


def gptq_block(
    block: Tensor,
    factor: Tensor,
    importance: Tensor,
    bits: int,
    symmetric: bool,
    search: bool,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    base: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op behind `gptq_block_ref`."""
    found: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.comet.gptq_block(
        block, factor, importance, bits, symmetric, search, scale, zero, base
    )
    return found
