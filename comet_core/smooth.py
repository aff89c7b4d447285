"""Inputs of a layer's linears + Folds -> one scale per channel that makes the linears easier to quantize.

`smoothquant` evens out activations and weights: s = absmax(x)^alpha / absmax(w)^(1 - alpha), in front of norms only
(Xiao et al., 2022, arXiv:2211.10438). `awq` protects the weights of channels that carry large activations: the power of
mean |x| that leaves the smallest output error after rounding to 4 bits (Lin et al., 2023, arXiv:2306.00978).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from comet_core.folding import Fold
from comet_cuda.affine import BLOCK, choose_minmax_qparams, dequantize_minmax, quantize_minmax

SMALLEST = 1e-5  # of a scale, and of the statistics it is made from
AWQ_STEPS = 20  # powers 0, 1/20, ..., 19/20
AWQ_ROWS = 512  # sampled inputs that judge them


@dataclass
class InputStats:
    """What smoothing needs to know of one group's input, K channels: f32 [K], f32 [K], f32 [S, K]."""

    absmax: Tensor
    mean_abs: Tensor
    sample: Tensor


class InputSums:
    """Accumulates InputStats over batches of rows."""

    def __init__(self, keep: int) -> None:
        self._keep, self._tokens = keep, 0
        self._absmax: Tensor | None = None
        self._sum: Tensor | None = None
        self._rows: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """x: float [T, K]."""
        size = x.float().abs()
        self._tokens += len(size)
        self._absmax = size.amax(0) if self._absmax is None else torch.maximum(self._absmax, size.amax(0))
        self._sum = size.sum(0) if self._sum is None else self._sum + size.sum(0)
        rows = torch.linspace(0, len(x) - 1, min(self._keep, len(x)), device=x.device).round().long()
        self._rows.append(x[rows].float())

    def stats(self) -> InputStats:
        """The statistics so far."""
        assert self._absmax is not None and self._sum is not None
        return InputStats(self._absmax, self._sum / self._tokens, torch.cat(self._rows))


def smoothquant_scale(fold: Fold, stats: InputStats, weight: Tensor, alpha: float) -> Tensor | None:
    """f32 [P], by which the producer's channels are divided; None where this method does not smooth.

    Args:
        weight: f32 [N, K], rows of all consumers.
    """
    if not fold.is_norm:
        return None
    x = fold.gather(stats.absmax).clamp(min=SMALLEST)
    w = fold.gather(weight.abs().amax(0)).clamp(min=SMALLEST)
    return (x.pow(alpha) / w.pow(1 - alpha)).clamp(min=SMALLEST)


def awq_scale(fold: Fold, stats: InputStats, weight: Tensor, _: float) -> Tensor | None:
    """f32 [P], the same; None if no scale is better than none."""
    x = fold.gather(stats.mean_abs).clamp(min=SMALLEST)
    best, best_error = None, output_error(weight, rounded(weight), stats.sample)
    for step in range(1, AWQ_STEPS):
        scale = x.pow(step / AWQ_STEPS).clamp(min=1e-4)
        scale = scale / (scale.max() * scale.min()).sqrt()
        wide = fold.spread(scale)
        error = output_error(weight, rounded(weight * wide) / wide, stats.sample)
        if error < best_error:
            best, best_error = scale, error
    return best


METHODS: dict[str, Callable[[Fold, InputStats, Tensor, float], Tensor | None]] = {
    "smoothquant": smoothquant_scale,
    "awq": awq_scale,
}


def rounded(weight: Tensor) -> Tensor:
    """f32 [N, K] rounded to 4 bits, asymmetric, per row and block of 128 (the last block may be shorter)."""
    parts = []
    for block in weight.split(BLOCK, 1):
        scale, minimum = choose_minmax_qparams(block.amin(1), block.amax(1), 4, torch.float32)
        codes = quantize_minmax(block, scale[:, None], minimum[:, None], 4)
        parts.append(dequantize_minmax(codes, scale[:, None], minimum[:, None]))
    return torch.cat(parts, 1)


def output_error(weight: Tensor, other: Tensor, x: Tensor) -> float:
    """Energy of the difference that another weight makes to the outputs of rows x."""
    return float((x @ (weight - other).T).square().sum())
