"""Affine quantization: the parameter choices that ops and algorithms share.

Symmetric: x ~ scale * q, q in [-qmax, qmax] (activations) or [-qmax - 1, qmax] (weights).
Asymmetric: x ~ scale * (code - zero), code in 0 .. 2^bits - 1, zero an integer code (weights), or
x ~ scale * code + minimum with a real-valued minimum (the KV cache, whose keys may lie far from zero).
Scales are rounded to the type they are stored in *before* codes are chosen, so that storing loses nothing more.
"""

import torch
from torch import Tensor

BLOCK = 128  # input channels that share one activation scale, one weight scale per row, one precision


def symmetric_qmax(bits: int) -> int:
    """Largest magnitude of a symmetric signed code: 7 for 4 bits, 127 for 8 bits."""
    return (1 << (bits - 1)) - 1


def code_max(bits: int) -> int:
    """Largest unsigned code: 15 for 4 bits, 255 for 8 bits."""
    return (1 << bits) - 1


def num_blocks(channels: int) -> int:
    """Blocks of 128 that hold `channels` input channels; the last one may be padded with zeros."""
    return -(-channels // BLOCK)


def split_blocks(x: Tensor) -> Tensor:
    """[..., NB * 128] -> [..., NB, 128]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def choose_minmax_qparams(low: Tensor, high: Tensor, num_bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Range [low, high] -> (scale, minimum), both rounded to `dtype`, for x ~ scale * code + minimum.

    A degenerate range (low == high) gets scale 1, so that every code is 0 and decodes to the minimum.
    Both are clamped to the finite range of `dtype`.
    """
    limit = torch.finfo(dtype).max
    minimum = low.float().clamp(-limit, limit).to(dtype)
    span = high.float() - minimum.float()
    codes = torch.full((), code_max(num_bits), dtype=span.dtype, device=span.device)
    scale = (span / codes).clamp(max=limit).to(dtype)  # by a number of the host, a GPU multiplies with its reciprocal
    usable = (scale.float() > 0) & (span > 0)
    return torch.where(usable, scale, torch.ones_like(scale)), minimum


def quantize_minmax(x: Tensor, scale: Tensor, minimum: Tensor, num_bits: int) -> Tensor:
    """Nearest code, uint8, of x under x ~ scale * code + minimum (parameters broadcast against x)."""
    codes = torch.round((x.float() - minimum.float()) / scale.float())
    return codes.clamp(0, code_max(num_bits)).to(torch.uint8)


def dequantize_minmax(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """float32 scale * code + minimum."""
    return codes.float() * scale.float() + minimum.float()
