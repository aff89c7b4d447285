"""A quantized weight -> a better one: coordinate descent on scales and codes, block by block, after GPTQ.

GPTQ chooses every code once, before it knows the later ones. Here each scale, then each code of a block is set to the
value that lowers the whole output error tr(D H D^T) most while all others stay: scales by their least-squares value,
codes by rounding the best real value of their column. Nothing ever rises, so passes can be repeated.

Source of the idea: Behdin et al., "QuantEase", 2023 (arXiv:2309.01885), which descends on codes alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from comet_core.quantize import QuantizedWeight, assemble
from comet_core.recipe import WeightSpec
from comet_core.replay import replay
from comet_cuda.affine import BLOCK, code_max, split_blocks, symmetric_qmax
from comet_cuda.int4 import SYMMETRIC_ZERO, unpack_nibbles
from comet_cuda.weight_grid import Grid, snap_scale


def descend(w: Tensor, start: QuantizedWeight, hessian: Tensor, spec: WeightSpec) -> QuantizedWeight:
    """`spec.passes` rounds over all blocks.

    Args:
        w: f32 [N, NB, 128], what is approximated, in storage order. start: its quantized form.
        hessian: f32 [NB * 128, NB * 128], damped as GPTQ's.
    """
    codes, scale, zero, limits = _unpacked(start)
    base = None if start.base is None else start.base.float()
    blocks = w.shape[1]
    delta = (w - start.dequantize()).flatten(1)
    for _ in range(spec.passes):
        for b in range(blocks):
            columns = slice(b * BLOCK, (b + 1) * BLOCK)
            own = hessian[columns, columns].contiguous()
            slope = delta @ hessian[:, columns]  # [N, 128]
            if spec.group == "block":
                integers = codes[:, b] - zero[:, b, None]
                scale[:, b], slope = _best_scale(integers, scale[:, b], slope, own, _storable(base, zero[:, b]))
            (found,) = replay(
                _descend_block, codes[:, b].T.contiguous(), slope.T.contiguous(), own, scale[:, b], zero[:, b], limits
            )
            codes[:, b] = found.T
            delta[:, columns] = w[:, b] - (codes[:, b] - zero[:, b, None]) * scale[:, b, None]
    low, high = (int(limit) for limit in limits.tolist())
    return assemble(codes, Grid(scale, zero, low, high), spec, base)


def _unpacked(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes f32 [N, NB, 128], scale f32 [N, NB], zero f32 [N, NB], smallest and largest code f32 [2]."""
    scale = weight.scale.float()
    if weight.qweight.dtype == torch.int8:
        codes, zero, limits = split_blocks(weight.qweight.float()), torch.zeros_like(scale), (-symmetric_qmax(8), 127)
    else:
        codes, limits = split_blocks(unpack_nibbles(weight.qweight).float()), (0, code_max(4))
        zero = torch.full_like(scale, SYMMETRIC_ZERO) if weight.zero is None else weight.zero.float()
    return codes, scale, zero, torch.tensor(limits, dtype=torch.float32, device=scale.device)


def _storable(base: Tensor | None, zero: Tensor) -> Callable[[Tensor], Tensor]:
    """What rounds the scales of one block, f32 [N], to those that can be stored. base, zero: f32 [N]."""
    if base is None:
        return lambda scale: scale.to(torch.bfloat16).float()
    return lambda scale: snap_scale(scale, base, zero)


def _best_scale(
    integers: Tensor, scale: Tensor, slope: Tensor, own: Tensor, storable: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The least-squares scale of one block where its stored form still lowers the error; the slope that follows.

    Args:
        integers: f32 [N, 128], codes less zero points. scale: f32 [N]. slope: f32 [N, 128], D H of these columns.
        own: f32 [128, 128], the block of H. storable: rounds scales to those that can be stored.
    """
    image = integers @ own
    rise, curve = (integers * slope).sum(1), (integers * image).sum(1)
    best = storable(scale + rise / curve.clamp(min=1e-30))
    step = best - scale
    lowers = (best > 0) & torch.isfinite(best) & (2 * step * rise - step.square() * curve > 0)
    step = torch.where(lowers, step, torch.zeros_like(step))
    return torch.where(lowers, best, scale), slope - step[:, None] * image


def _descend_block(
    codes: Tensor, slope: Tensor, own: Tensor, scale: Tensor, zero: Tensor, limits: Tensor
) -> tuple[Tensor]:
    """One pass over the columns of a block. codes, slope: f32 [128, N], overwritten; own: f32 [128, 128]."""
    for i in range(BLOCK):
        code = codes[i]
        curve = own[i, i].clamp(min=1e-30)
        value = (code - zero) * scale + slope[i] / curve
        new = (value / scale).round_().add_(zero).clamp_(limits[0], limits[1])
        step = (new - code).mul_(scale)
        slope.addr_(own[i], step, alpha=-1)
        code.copy_(new)
    return (codes,)
