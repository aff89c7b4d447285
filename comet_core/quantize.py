"""weight + BlockPlan -> QuantizedWeight: rounding to nearest, or GPTQ, with a search for the clipping range.

Everything happens in storage order: columns are permuted, padded to whole blocks with zeros, and rotated where the
activations are. GPTQ walks the columns in that order, most important first. Scales are rounded to bfloat16 before any
code is chosen, so a packed weight is exactly what the search saw.

Source of GPTQ: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
2022 (arXiv:2210.17323); the token weighting is ours (results/LOG.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from comet_core.decoder import all_finite
from comet_core.plan import BlockPlan
from comet_core.recipe import WeightSpec
from comet_core.replay import replay
from comet_cuda.affine import BLOCK, code_max, symmetric_qmax
from comet_cuda.int4 import SYMMETRIC_ZERO, pack_nibbles
from comet_cuda.quantize_act import hadamard_blocks, to_blocks
from comet_cuda.w4ax_gemm import weight_integers

SHRINK_STEPS = 20  # candidates of the clip search: ranges shrunk by 0, 1, ..., 19 steps of SHRINK_STEP
SHRINK_STEP = 0.025
DAMPING_RETRIES = 4  # each time ten times the damping


@dataclass(frozen=True)
class QuantizedWeight:
    """A linear's weight in the canonical, un-tiled form.

    Attributes:
        qweight: uint8 [N, 64 * NB] two 4-bit codes a byte, or int8 [N, 128 * NB] for 8-bit weights.
        scale: bf16 [N, NB].
        zero: uint8 [N, NB] (asymmetric) or None.
    """

    qweight: Tensor
    scale: Tensor
    zero: Tensor | None

    def dequantize(self) -> Tensor:
        """f32 [N, NB, 128] in storage order (permuted, padded, rotated)."""
        return weight_integers(self.qweight, self.zero) * self.scale.float()[..., None]


@dataclass(frozen=True)
class Grid:
    """The codes that weights may take under given parameters: real value = scale * (code - zero)."""

    scale: Tensor  # f32 [...], one a row or a row and block; representable in bfloat16
    zero: Tensor  # f32 [...]
    low: int
    high: int

    def codes(self, w: Tensor) -> Tensor:
        """Nearest codes of w, f32 [..., n] -> f32 [..., n]."""
        return (torch.round(w / self.scale[..., None]) + self.zero[..., None]).clamp(self.low, self.high)

    def values(self, codes: Tensor) -> Tensor:
        """Real values of codes."""
        return (codes - self.zero[..., None]) * self.scale[..., None]


def to_storage(weight: Tensor, plan: BlockPlan) -> Tensor:
    """float [N, K] -> f32 [N, NB, 128]: permuted, padded, INT4 blocks rotated like the activations they will meet."""
    blocks = to_blocks(weight, plan.perm).float()
    if plan.unit is not None:
        blocks = blocks * plan.unit[None, :, None]
    return rotate_int4(blocks, plan.block_bits) if plan.hadamard else blocks


def rotate_int4(blocks: Tensor, block_bits: Tensor) -> Tensor:
    """f32 [N, NB, 128] -> the same with INT4 blocks rotated by the orthonormal Hadamard transform."""
    return torch.where((block_bits == 4)[None, :, None], hadamard_blocks(blocks), blocks)


def _grid(w: Tensor, shrink: float, bits: int, symmetric: bool) -> Grid:
    """The grid of w, f32 [..., n], along its last axis, whose range is `shrink` times the weights' own."""
    if symmetric:
        zero = SYMMETRIC_ZERO if bits == 4 else 0
        low, high = (0, code_max(4)) if bits == 4 else (-symmetric_qmax(8), symmetric_qmax(8))
        span = w.abs().amax(-1) * shrink
        scale = _storable(span / symmetric_qmax(bits))
        return Grid(scale, torch.full_like(scale, zero), low, high)
    low_edge, high_edge = w.amin(-1).clamp(max=0) * shrink, w.amax(-1).clamp(min=0) * shrink
    scale = _storable((high_edge - low_edge) / code_max(bits))
    zero_point = torch.round(-low_edge / scale).clamp(0, code_max(bits))
    return Grid(scale, zero_point, 0, code_max(bits))


def _storable(scale: Tensor) -> Tensor:
    """The bfloat16 value of each scale, as f32; 1 where it would be zero (an all-zero block) or not finite."""
    rounded = scale.to(torch.bfloat16).float()
    return torch.where((rounded > 0) & torch.isfinite(rounded), rounded, torch.ones_like(rounded))


def choose_grid(w: Tensor, importance: Tensor, spec: WeightSpec) -> Grid:
    """The grid with the least weighted squared rounding error, along the last axis of w.

    Args:
        w: f32 [N, n] or [N, NB, 128]. importance: f32 [n] or [NB, 128], weight of each column's squared error.
        spec: bits, symmetry, search.
    """
    best = _grid(w, 1.0, spec.bits, spec.symmetric)
    if not spec.clip_search:
        return best
    best_error = ((best.values(best.codes(w)) - w).square() * importance).sum(-1)
    for step in range(1, SHRINK_STEPS):
        grid = _grid(w, 1.0 - step * SHRINK_STEP, spec.bits, spec.symmetric)
        error = ((grid.values(grid.codes(w)) - w).square() * importance).sum(-1)
        better = error < best_error
        best = Grid(
            torch.where(better, grid.scale, best.scale), torch.where(better, grid.zero, best.zero), grid.low, grid.high
        )
        best_error = torch.where(better, error, best_error)
    return best


def assemble(codes: Tensor, grid: Grid, spec: WeightSpec) -> QuantizedWeight:
    """Codes f32 [N, NB, 128] and their grid, one a row and block, in their stored form."""
    scale = grid.scale.to(torch.bfloat16)
    if spec.bits == 8:
        return QuantizedWeight(codes.to(torch.int8).flatten(1), scale, None)
    zero = None if spec.symmetric else grid.zero.to(torch.uint8)
    return QuantizedWeight(pack_nibbles(codes.to(torch.uint8).flatten(1)), scale, zero)


def _stacked(grids: list[Grid]) -> Grid:
    """Grids of blocks, each [N], as one [N, NB]."""
    scale, zero = torch.stack([grid.scale for grid in grids], 1), torch.stack([grid.zero for grid in grids], 1)
    return Grid(scale, zero, grids[0].low, grids[0].high)


def quantize_rtn(w: Tensor, importance: Tensor, spec: WeightSpec) -> QuantizedWeight:
    """Round to nearest.

    Args:
        w: f32 [N, NB, 128] in storage order. importance: f32 [NB * 128], used by the clip search only.
    """
    columns = importance.view(-1, BLOCK)
    if spec.group == "row":
        grid = _stacked([choose_grid(w.flatten(1), importance, spec)] * w.shape[1])
    elif w.is_cuda:
        grid = choose_grid(w, columns, spec)
    else:  # a block at a time stays in a CPU's cache
        grid = _stacked([choose_grid(w[:, b], columns[b], spec) for b in range(w.shape[1])])
    return assemble(grid.codes(w), grid, spec)


def quantize_gptq(
    w: Tensor, hessian: Tensor, spec: WeightSpec, *, overwrite: bool = False
) -> tuple[QuantizedWeight, float] | None:
    """GPTQ: round column by column, moving each column's error into the columns still to come.

    Args:
        w: f32 [N, NB, 128] in storage order. hessian: f32 [NB * 128, NB * 128], sum of weighted x x^T.
        spec: bits, symmetry, clip search, damping. overwrite: w may be worked in; it is as large as the linears.

    Returns:
        the weight and the damping that was used, or None if the Hessian stayed indefinite through all retries.
    """
    factored = _inverse_factor(hessian, spec.damping)
    if factored is None:
        return None
    upper, damping = factored
    rest = w.flatten(1) if overwrite else w.flatten(1).clone()
    importance = upper.diagonal().square().reciprocal()  # what an error costs once later columns have made up for it
    row_grid = choose_grid(rest, importance, spec) if spec.group == "row" else None
    codes: list[Tensor] = []
    grids: list[Grid] = []
    for start in range(0, rest.shape[1], BLOCK):
        stop = start + BLOCK
        own, later = slice(start, stop), slice(stop, None)
        block, factor = rest[:, own].contiguous(), upper[own, own].contiguous()
        if row_grid is not None:
            grid = row_grid
            chosen, errors = replay(_rounding(spec), block, factor, grid.scale, grid.zero)
        else:
            chosen, errors, scale, zero = replay(_fitting(spec), block, factor, importance[own].contiguous())
            grid = Grid(scale, zero, *_code_range(spec))
        rest[:, later].addmm_(errors.T, upper[own, later], alpha=-1)
        codes.append(chosen.T.to(torch.int8))  # all codes fit: 0 to 15, or -127 to 127
        grids.append(grid)
    del factored, upper  # as large as the Hessian
    return assemble(torch.stack(codes, 1), _stacked(grids), spec), damping


def _code_range(spec: WeightSpec) -> tuple[int, int]:
    return (0, code_max(4)) if spec.bits == 4 else (-symmetric_qmax(8), symmetric_qmax(8))


@lru_cache(maxsize=16)
def _fitting(spec: WeightSpec) -> Callable[..., tuple[Tensor, ...]]:
    """GPTQ inside one block by `spec`, its grid included: (block f32 [N, 128], factor, importance f32 [128]) -> codes,
    errors, scale and zero f32 [N]. One object a spec, so that it is recorded once."""

    def fit(block: Tensor, factor: Tensor, importance: Tensor) -> tuple[Tensor, ...]:
        grid = choose_grid(block, importance, spec)
        return *_round_block(block.T.contiguous(), factor, grid), grid.scale, grid.zero

    return fit


@lru_cache(maxsize=16)
def _rounding(spec: WeightSpec) -> Callable[..., tuple[Tensor, ...]]:
    """The same with a given grid: (block, factor, scale, zero) -> codes and errors."""

    def fit(block: Tensor, factor: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, ...]:
        return _round_block(block.T.contiguous(), factor, Grid(scale, zero, *_code_range(spec)))

    return fit


def _round_block(columns: Tensor, factor: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Round one column after the other, moving each error into those after it.

    Args:
        columns: f32 [128, N], overwritten: a column of weights is contiguous. factor: f32 [128, 128], upper.

    Returns:
        codes and errors over the factor's diagonal, both f32 [128, N].
    """
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
    return codes, errors


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
