"""weight + BlockPlan -> QuantizedWeight: rounding to nearest, or GPTQ, with a search for the clipping range.

Everything happens in storage order: columns are permuted, padded to whole blocks with zeros, and rotated where the
activations are. GPTQ walks the columns in that order, most important first. Scales are rounded to bfloat16 before any
code is chosen, so a packed weight is exactly what the search saw.

Source of GPTQ: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
2022 (arXiv:2210.17323); the token weighting is ours (results/LOG.md).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from comet_core.decoder import all_finite
from comet_core.plan import BlockPlan
from comet_core.recipe import WeightSpec
from comet_cuda.affine import BLOCK
from comet_cuda.gptq_block import gptq_block
from comet_cuda.int4 import pack_nibbles
from comet_cuda.quantize_act import hadamard_blocks, to_blocks
from comet_cuda.w4ax_gemm import weight_integers
from comet_cuda.weight_grid import Grid, choose_base, choose_grid, code_range

DAMPING_RETRIES = 4  # each time ten times the damping


@dataclass(frozen=True)
class QuantizedWeight:
    """A linear's weight in the canonical, un-tiled form.

    Attributes:
        qweight: uint8 [N, 64 * NB] two 4-bit codes a byte, or int8 [N, 128 * NB] for 8-bit weights.
        scale: bf16 [N, NB].
        zero: uint8 [N, NB] (asymmetric) or None.
        base: bf16 [N], of which a row's scales are integer multiples (weight_grid.py), or None: scales are free.
    """

    qweight: Tensor
    scale: Tensor
    zero: Tensor | None
    base: Tensor | None = None

    def dequantize(self) -> Tensor:
        """f32 [N, NB, 128] in storage order (permuted, padded, rotated)."""
        return weight_integers(self.qweight, self.zero) * self.scale.float()[..., None]


def to_storage(weight: Tensor, plan: BlockPlan) -> Tensor:
    """float [N, K] -> f32 [N, NB, 128]: permuted, padded, INT4 blocks rotated like the activations they will meet."""
    blocks = to_blocks(weight, plan.perm).float()
    return rotate_int4(blocks, plan.block_bits) if plan.hadamard else blocks


def rotate_int4(blocks: Tensor, block_bits: Tensor) -> Tensor:
    """f32 [N, NB, 128] -> the same with INT4 blocks rotated by the orthonormal Hadamard transform."""
    return torch.where((block_bits == 4)[None, :, None], hadamard_blocks(blocks), blocks)


def assemble(codes: Tensor, grid: Grid, spec: WeightSpec, base: Tensor | None = None) -> QuantizedWeight:
    """Codes f32 [N, NB, 128] and their grid, one a row and block, in their stored form. base: f32 [N] or None."""
    scale = grid.scale.to(torch.bfloat16)
    if spec.bits == 8:
        return QuantizedWeight(codes.to(torch.int8).flatten(1), scale, None)
    zero = None if spec.symmetric else grid.zero.to(torch.uint8)
    stored_base = None if base is None else base.to(torch.bfloat16)
    return QuantizedWeight(pack_nibbles(codes.to(torch.uint8).flatten(1)), scale, zero, stored_base)


def _stacked(grids: list[Grid]) -> Grid:
    """Grids of blocks, each [N], as one [N, NB]."""
    scale, zero = torch.stack([grid.scale for grid in grids], 1), torch.stack([grid.zero for grid in grids], 1)
    return Grid(scale, zero, grids[0].low, grids[0].high)


def _search(spec: WeightSpec) -> tuple[int, bool, bool]:
    """The recipe's part of the search for a grid: bits, symmetric, whether narrower ranges are tried."""
    return spec.bits, spec.symmetric, spec.clip_search


def quantize_rtn(w: Tensor, importance: Tensor, spec: WeightSpec, *, integer: bool = False) -> QuantizedWeight:
    """Round to nearest.

    Args:
        w: f32 [N, NB, 128] in storage order. importance: f32 [NB * 128], used by the clip search only.
        integer: a row's scales are integer multiples of one base (4 bits, a scale a block).
    """
    columns = importance.view(-1, BLOCK)
    base = choose_base(w, spec.symmetric) if integer else None
    if spec.group == "row":
        grid = _stacked([choose_grid(w.flatten(1), importance, *_search(spec))] * w.shape[1])
    elif w.is_cuda:
        grid = choose_grid(w, columns, *_search(spec), None if base is None else base[:, None])
    else:  # a block at a time stays in a CPU's cache
        grid = _stacked([choose_grid(w[:, b], columns[b], *_search(spec), base) for b in range(w.shape[1])])
    return assemble(grid.codes(w), grid, spec, base)


def quantize_gptq(
    w: Tensor, hessian: Tensor, spec: WeightSpec, *, overwrite: bool = False, integer: bool = False
) -> tuple[QuantizedWeight, float] | None:
    """GPTQ: round column by column, moving each column's error into the columns still to come.

    Args:
        w: f32 [N, NB, 128] in storage order. hessian: f32 [NB * 128, NB * 128], sum of weighted x x^T.
        spec: bits, symmetry, clip search, damping. overwrite: w may be worked in; it is as large as the linears.
        integer: as in `quantize_rtn`; the base is chosen before any error moves.

    Returns:
        the weight and the damping that was used, or None if the Hessian stayed indefinite through all retries.
    """
    factored = _inverse_factor(hessian, spec.damping)
    if factored is None:
        return None
    upper, damping = factored
    base = choose_base(w, spec.symmetric) if integer else None
    rest = w.flatten(1) if overwrite else w.flatten(1).clone()
    importance = upper.diagonal().square().reciprocal()  # what an error costs once later columns have made up for it
    row_grid = choose_grid(rest, importance, *_search(spec)) if spec.group == "row" else None
    given = (row_grid.scale, row_grid.zero, None) if row_grid is not None else (None, None, base)
    codes: list[Tensor] = []
    grids: list[Grid] = []
    for start in range(0, rest.shape[1], BLOCK):
        stop = start + BLOCK
        own, later = slice(start, stop), slice(stop, None)
        found = gptq_block(rest[:, own], upper[own, own], importance[own], *_search(spec), *given)
        chosen, errors, scale, zero = found
        rest[:, later].addmm_(errors, upper[own, later], alpha=-1)
        codes.append(chosen)
        grids.append(Grid(scale, zero, *code_range(spec.bits)))
    del factored, upper  # as large as the Hessian
    return assemble(torch.stack(codes, 1), _stacked(grids), spec, base), damping


def cholesky(hessian: Tensor, damping: float) -> tuple[Tensor | None, float]:
    """Lower Cholesky factor of the damped Hessian, and the damping that it took; None if it stayed indefinite."""
    diagonal = hessian.diagonal()
    mean = diagonal[diagonal > 0].mean() if bool((diagonal > 0).any()) else diagonal.new_tensor(1.0)
    dead = diagonal <= 0  # zero padding and channels that never fired: no error to move, none to receive
    for _ in range(DAMPING_RETRIES):
        damped = hessian.mT.contiguous().mT  # a copy, column by column, as the library wants it
        damped.diagonal().add_(mean * damping)
        damped.diagonal()[dead] = mean
        lower, failed = torch.linalg.cholesky_ex(damped, **_in_place(damped))
        if not int(failed):
            return lower, damping
        del damped, lower
        damping *= 10
    return None, damping


def _in_place(matrix: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Arguments that make a CPU write a factor over its matrix [K, K], whose columns are contiguous."""
    return {} if matrix.is_cuda else {"out": (matrix, torch.empty((), dtype=torch.int32))}


def _inverse_factor(hessian: Tensor, damping: float) -> tuple[Tensor, float] | None:
    """Upper Cholesky factor of the inverse of the damped Hessian, and the damping; None if it never succeeds.

    On a CPU one matrix of the Hessian's size is held beside it: of a wide linear each is as large as a layer.
    """
    for _ in range(DAMPING_RETRIES):
        lower, damping = cholesky(hessian, damping)
        if lower is None:
            return None
        inverse = torch.cholesky_inverse(lower, out=None if lower.is_cuda else lower)
        del lower
        upper, failed = torch.linalg.cholesky_ex(inverse, upper=True, **_in_place(inverse))
        del inverse
        if not int(failed) and all_finite(upper):
            return upper, damping
        damping *= 10
    return None
