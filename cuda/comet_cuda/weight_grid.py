"""Which codes weights may take, and the search for the range that they cover.

A grid is a scale and a zero point, one a row or a row and block. Scales are rounded to bfloat16 before any code is
chosen, so a packed weight is exactly what the search saw.

Integer scales. A GEMM that keeps integer sums over all of K needs scales of a row that are whole multiples m of one
base, and |m * (code - zero)| <= 127 for every code, so that the product is an INT8 operand. The base has 4 significant
bits and m at most 15, so bfloat16 holds base * m exactly. Each candidate of the search is rounded to such a scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from comet_cuda.affine import code_max, symmetric_qmax
from comet_cuda.int4 import SYMMETRIC_ZERO

SHRINK_STEPS = 20  # candidates of the clip search: ranges shrunk by 0, 1, ..., 19 steps of SHRINK_STEP
SHRINK_STEP = 0.025
MOST_OPERAND = 127  # of |m * (code - zero)|
MOST_MULTIPLE = 15  # 4 bits, beside 4 of the base: bfloat16 has 8
BASE_DROPPED_BITS = 0xFFFFF  # of float32's 24, so that 4 stay
SMALLEST_BASE = 2.0**-100


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


def code_range(bits: int) -> tuple[int, int]:
    """Smallest and largest weight code of 4 or 8 bits."""
    return (0, code_max(4)) if bits == 4 else (-symmetric_qmax(8), symmetric_qmax(8))


def middle_code(bits: int) -> int:
    """The zero point of symmetric weights."""
    return SYMMETRIC_ZERO if bits == 4 else 0


def _grid(w: Tensor, shrink: float, bits: int, symmetric: bool, base: Tensor | None = None) -> Grid:
    """The grid of w, f32 [..., n], along its last axis, whose range is `shrink` times the weights' own."""
    low, high = code_range(bits)
    if symmetric:
        scale = w.abs().amax(-1) * shrink / symmetric_qmax(bits)
        zero = torch.full_like(scale, middle_code(bits))
        return Grid(_storable(scale) if base is None else snap_scale(scale, base, zero), zero, low, high)
    low_edge, high_edge = w.amin(-1).clamp(max=0) * shrink, w.amax(-1).clamp(min=0) * shrink
    scale = (high_edge - low_edge) / code_max(bits)
    near = _storable(scale) if base is None else (scale / base).round().clamp(1, MOST_MULTIPLE) * base
    zero = torch.round(-low_edge / near).clamp(0, code_max(bits))
    return Grid(near if base is None else snap_scale(near, base, zero), zero, low, high)


def most_multiple(zero: Tensor) -> Tensor:
    """The largest multiple of the base that a scale with this zero point may be: f32 [...] -> f32 [...]."""
    return (MOST_OPERAND / torch.maximum(zero, code_max(4) - zero)).floor().clamp(max=MOST_MULTIPLE)


def snap_scale(scale: Tensor, base: Tensor, zero: Tensor) -> Tensor:
    """The multiple of each row's base nearest to `scale` that its zero point allows, f32 like all of them."""
    return torch.minimum((scale / base).round().clamp(min=1), most_multiple(zero)) * base


def choose_base(w: Tensor, symmetric: bool) -> Tensor:
    """The base of each row's scales, f32 [N]: the least of 4 significant bits whose multiples reach all its ranges.

    Args:
        w: f32 [N, NB, 128], to become 4-bit codes. symmetric: their zero point is the middle code.
    """
    widest = w.new_full((), SMALLEST_BASE).expand(len(w))
    for b in range(w.shape[1]):  # a block at a time stays in a CPU's cache
        low, high = w[:, b].amin(-1).clamp(max=0), w[:, b].amax(-1).clamp(min=0)
        if symmetric:
            scale, zero = torch.maximum(-low, high) / symmetric_qmax(4), torch.full_like(low, middle_code(4))
        else:
            scale = (high - low) / code_max(4)
            zero = torch.round(-low / torch.where(scale > 0, scale, torch.ones_like(scale))).clamp(0, code_max(4))
        widest = torch.maximum(widest, scale / most_multiple(zero))
    return ((widest.view(torch.int32) + BASE_DROPPED_BITS) & ~BASE_DROPPED_BITS).view(torch.float32)


def scale_fault(scale: Tensor, base: Tensor, zero: Tensor | None) -> str | None:
    """What keeps the stored scales of a linear from being such multiples; None if nothing does.

    Args:
        scale: bf16 [N, NB]. base: bf16 [N]. zero: uint8 [N, NB], or None (the middle code).
    """
    if not bool((torch.isfinite(base) & (base >= SMALLEST_BASE)).all()):
        return "a base that is not finite and at least 2^-100"
    if bool((base.float().contiguous().view(torch.int32) & BASE_DROPPED_BITS).any()):
        return "a base of more than 4 significant bits"
    multiple = scale.double() / base.double()[:, None]
    if not bool(((multiple == multiple.round()) & (multiple >= 1)).all()):
        return "a scale that is no multiple of its row's base"
    middle = torch.full_like(scale, middle_code(4), dtype=torch.float32)
    if bool((multiple > most_multiple(middle if zero is None else zero.float())).any()):
        return "a multiple whose products with weight codes exceed 8 bits"
    return None


def _storable(scale: Tensor) -> Tensor:
    """The bfloat16 value of each scale, as f32; 1 where it would be zero (an all-zero block) or not finite."""
    rounded = scale.to(torch.bfloat16).float()
    return torch.where((rounded > 0) & torch.isfinite(rounded), rounded, torch.ones_like(rounded))


def choose_grid(
    w: Tensor, importance: Tensor, bits: int, symmetric: bool, search: bool, base: Tensor | None = None
) -> Grid:
    """The grid with the least weighted squared rounding error, along the last axis of w.

    Args:
        w: f32 [N, n] or [N, NB, 128]. importance: f32 [n] or [NB, 128], weight of each column's squared error.
        bits: 4, or 8 (symmetric only). search: try narrower ranges too.
        base: f32 [N] or [N, 1], of 4-bit rows whose scales are multiples of it (see the module); None: free scales.
    """
    best = _grid(w, 1.0, bits, symmetric, base)
    if not search:
        return best
    best_error = ((best.values(best.codes(w)) - w).square() * importance).sum(-1)
    for step in range(1, SHRINK_STEPS):
        grid = _grid(w, 1.0 - step * SHRINK_STEP, bits, symmetric, base)
        error = ((grid.values(grid.codes(w)) - w).square() * importance).sum(-1)
        better = error < best_error
        best = Grid(
            torch.where(better, grid.scale, best.scale), torch.where(better, grid.zero, best.zero), grid.low, grid.high
        )
        best_error = torch.where(better, error, best_error)
    return best
