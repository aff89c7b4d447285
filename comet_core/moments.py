"""Rows of a group's input -> Moments: what quantizing weights needs to know of them.

Two kinds of row belong to one token: `seen`, what the packed linear will multiply (exact values or dequantized codes),
and `wanted`, what the linear's outputs should be computed from (the same input exact, or the 16-bit model's). With a
the token's weight, H = sum a seen seen^T and G = sum a (wanted - seen) seen^T. The output error of weights V in place
of W is then, with D = W - V,

    sum a |W wanted - V seen|^2 = tr(D H D^T) + 2 tr(W G D^T) + a constant,

least at V = W + W G H^-1: what GPTQ should round in place of W.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from comet_core.plan import BlockPlan
from comet_core.quantize import QuantizedWeight, cholesky, rotate_int4
from comet_cuda.affine import BLOCK, split_blocks
from comet_cuda.quantize_act import hadamard_blocks, quantize_act, to_blocks


class Moments:
    """H and, if `wanted` differs from `seen`, G, summed over tokens; in storage order.

    Args:
        plan: of the group's input, on its device. token_weighting: recipe key. with_gap: whether G is kept.
    """

    def __init__(self, plan: BlockPlan, token_weighting: str, *, with_gap: bool) -> None:
        columns, device = BLOCK * len(plan.block_bits), plan.block_bits.device
        self.hessian = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self.gap = torch.zeros_like(self.hessian) if with_gap else None
        self.tokens = 0
        self._weighting = TOKEN_WEIGHTS[token_weighting]

    def add(self, seen: Tensor, wanted: Tensor | None = None, times: Tensor | None = None) -> None:
        """Rows f32 [T, NB * 128], of which each counts `times` [T] its weight."""
        self.tokens += len(seen)
        root = self._weighting(seen)[:, None]
        if times is not None:
            root = root * times.sqrt()[:, None]
        scaled = seen * root
        with tensor_float():
            self.hessian.addmm_(scaled.T, scaled)
            if self.gap is not None and wanted is not None:
                self.gap.addmm_(((wanted - seen) * root).T, scaled)

    def merge(self, other: "Moments") -> None:
        """Add the sums of other tokens, from any device."""
        self.tokens += other.tokens
        self.hessian += other.hessian.to(self.hessian.device)
        if self.gap is not None and other.gap is not None:
            self.gap += other.gap.to(self.gap.device)

    def rotate(self, plan: BlockPlan) -> None:
        """R H R^T with the plan's rotation R, for rows that were added unrotated: cheaper once on the sum than on every
        row. In place, on a CPU block by block."""
        if not plan.hadamard:
            return
        for matrix in (self.hessian, self.gap):
            if matrix is None:
                continue
            if matrix.is_cuda:  # few large operations
                for _ in range(2):  # M R^T, transposed: twice that is R M R^T
                    matrix.copy_(rotate_int4(split_blocks(matrix), plan.block_bits).flatten(1).T)
                continue
            for rows in matrix.split(BLOCK):
                rows.copy_(rotate_int4(split_blocks(rows), plan.block_bits).flatten(1))
            for rows, bits in zip(matrix.split(BLOCK), plan.block_bits.tolist(), strict=True):
                if bits == 4:
                    rows.copy_(hadamard_blocks(rows.T.contiguous()).T)

    def error(self, w: Tensor, quantized: QuantizedWeight) -> float:
        """Output error, up to a constant, of `quantized` in place of w, f32 [N, NB, 128]."""
        flat = w.flatten(1)
        delta = flat - quantized.dequantize().flatten(1)
        error = ((delta @ self.hessian) * delta).sum()
        if self.gap is not None:
            error += 2 * ((flat @ self.gap) * delta).sum()
        return float(error)

    def energy(self, w: Tensor) -> float:
        """Energy of the outputs of w, f32 [N, NB, 128], on the rows seen."""
        flat = w.flatten(1)
        return max(float(((flat @ self.hessian) * flat).sum()), 1e-30)

    def best_weights(self, w: Tensor, share: float, damping: float) -> Tensor:
        """f32 [N, NB, 128] -> w moved by `share` of the way to the least output error, before rounding."""
        if self.gap is None or share == 0:
            return w
        factor, _ = cholesky(self.hessian, damping)
        if factor is None:
            return w
        step = torch.cholesky_solve((w.flatten(1) @ self.gap).T.contiguous(), factor).T
        return w + share * step.view_as(w)


def exact_rows(x: Tensor, plan: BlockPlan) -> Tensor:
    """float [T, K] -> f32 [T, NB * 128]: permuted, padded, not rotated."""
    return to_blocks(x, plan.perm).float().flatten(1)


def rotated_rows(x: Tensor, plan: BlockPlan) -> Tensor:
    """`exact_rows`, rotated like the weights."""
    rows = exact_rows(x, plan)
    return rotate_int4(split_blocks(rows), plan.block_bits).flatten(1) if plan.hadamard else rows


def quantized_rows(x: Tensor, plan: BlockPlan) -> Tensor:
    """float [T, K] -> f32 [T, NB * 128]: what the codes of x stand for, rotated like the weights."""
    codes, scale = quantize_act(x, plan.perm, plan.block_bits, plan.clip, plan.hadamard, plan.share)
    return (codes.float() * scale[..., None]).flatten(1)


@contextmanager
def tensor_float() -> Iterator[None]:
    """Products inside round their operands to TF32 on a GPU: sums over tokens need no more."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _inverse_norm(x: Tensor) -> Tensor:
    norm = x.norm(dim=1)
    return torch.where(norm > 0, 1 / norm, torch.zeros_like(norm))


def _one(x: Tensor) -> Tensor:
    return torch.ones_like(x[:, 0])


# square root of each token's weight: by "inverse_norm" every token counts the same, however large its activations
TOKEN_WEIGHTS = {"inverse_norm": _inverse_norm, "none": _one}
