"""Which codes weights may take, and the search for the range that they cover.

A grid is a scale and a zero point, one a row or a row and block. Scales are rounded to bfloat16 before any code is
chosen, so a packed weight is exactly what the search saw.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from comet_cuda.affine import code_max, symmetric_qmax
from comet_cuda.int4 import SYMMETRIC_ZERO

SHRINK_STEPS = 20  # candidates of the clip search: ranges shrunk by 0, 1, ..., 19 steps of SHRINK_STEP
SHRINK_STEP = 0.025


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


def _grid(w: Tensor, shrink: float, bits: int, symmetric: bool) -> Grid:
    """The grid of w, f32 [..., n], along its last axis, whose range is `shrink` times the weights' own."""
    low, high = code_range(bits)
    if symmetric:
        scale = _storable(w.abs().amax(-1) * shrink / symmetric_qmax(bits))
        return Grid(scale, torch.full_like(scale, middle_code(bits)), low, high)
    low_edge, high_edge = w.amin(-1).clamp(max=0) * shrink, w.amax(-1).clamp(min=0) * shrink
    scale = _storable((high_edge - low_edge) / code_max(bits))
    return Grid(scale, torch.round(-low_edge / scale).clamp(0, code_max(bits)), low, high)


def _storable(scale: Tensor) -> Tensor:
    """The bfloat16 value of each scale, as f32; 1 where it would be zero (an all-zero block) or not finite."""
    rounded = scale.to(torch.bfloat16).float()
    return torch.where((rounded > 0) & torch.isfinite(rounded), rounded, torch.ones_like(rounded))


def choose_grid(w: Tensor, importance: Tensor, bits: int, symmetric: bool, search: bool) -> Grid:
    """The grid with the least weighted squared rounding error, along the last axis of w.

    Args:
        w: f32 [N, n] or [N, NB, 128]. importance: f32 [n] or [NB, 128], weight of each column's squared error.
        bits: 4, or 8 (symmetric only). search: try narrower ranges too.
    """
    best = _grid(w, 1.0, bits, symmetric)
    if not search:
        return best
    best_error = ((best.values(best.codes(w)) - w).square() * importance).sum(-1)
    for step in range(1, SHRINK_STEPS):
        grid = _grid(w, 1.0 - step * SHRINK_STEP, bits, symmetric)
        error = ((grid.values(grid.codes(w)) - w).square() * importance).sum(-1)
        better = error < best_error
        best = Grid(
            torch.where(better, grid.scale, best.scale), torch.where(better, grid.zero, best.zero), grid.low, grid.high
        )
        best_error = torch.where(better, error, best_error)
    return best
