"""Activations that try one scale a token (quantize_token.*), and the way back from its tiled operand."""

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.quantize_token_ref import TokenOperand

MIXES = {"int4": 0.0, "mixed": 0.2, "half": 0.5, "int8": 1.0}  # share of INT8 blocks
Arguments = tuple[Tensor | None, int, Tensor, bool]  # perm, int8_blocks, clip, hadamard


def problem(
    rows: int, channels: int, dtype: torch.dtype, mix: str, *, gathered: bool, hadamard: bool
) -> tuple[Tensor, Arguments]:
    """x with outlier channels, blocks of very different size, and rows that are zero, tiny, huge or part zero."""
    generator = torch.Generator().manual_seed(rows + channels)
    blocks = num_blocks(channels)
    sizes = torch.exp2(torch.randint(-5, 6, (blocks,), generator=generator).float())
    x = torch.randn(rows, channels, generator=generator) * sizes.repeat_interleave(BLOCK)[:channels]
    x[:, :: max(1, channels // 5)] *= 30
    tiny, huge = (2.0**-125, 2.0**105) if dtype == torch.bfloat16 else (2.0**-20, 4.0)
    for row, factor in ((1, tiny), (3, 0.0), (4, huge), (6, 2.0**-12)):
        if row < rows:
            x[row] *= factor
    if rows > 5:
        x[5, : channels // 2] = 0
        x[5, -1] = 0.01
    x = x.clamp(-(2.0**120), 2.0**120) if dtype == torch.bfloat16 else x.clamp(-6e4, 6e4)
    clip = torch.where(torch.arange(blocks) % 3 == 0, 1.0, 0.4 + 0.6 * torch.rand(blocks, generator=generator))
    clip[-1] = 0.02 if mix == "half" else clip[-1]
    perm = torch.randperm(channels, generator=generator).to(torch.int32) if gathered else None
    return x.to(dtype), (perm, round(MIXES[mix] * blocks), clip, hadamard)


def exact_norm(rows: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual and weight whose RMSNorm is exact in any order: their sums are +-2, so that weights decide."""
    generator = torch.Generator().manual_seed(rows * channels)
    summed = 4.0 * torch.randint(0, 2, (rows, channels), generator=generator) - 2
    residual = 0.5 * torch.randint(-3, 4, (rows, channels), generator=generator)
    weight = torch.randn(channels, generator=generator)
    return (summed - residual).to(dtype), residual.to(dtype), weight.to(dtype)


def exact_silu(x: Tensor) -> Tensor:
    """[gate | up] of which SiLU(gate) * up is x: a gate of 64 lets everything pass."""
    return torch.cat((torch.full_like(x, 64), x / 64), dim=1)


def on_gpu(arguments: Arguments) -> Arguments:
    perm, int8_blocks, clip, hadamard = arguments
    return None if perm is None else perm.cuda(), int8_blocks, clip.cuda(), hadamard


def untile(operand: TokenOperand, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes as int8 [M, NB, 128], words int32 [M, INT8 blocks or 1], S float32 [M]."""
    codes, multiples, scale = operand
    blocks, atoms, _ = codes.shape
    token, channel = torch.meshgrid(torch.arange(8), torch.arange(BLOCK), indexing="ij")
    at = (token * BLOCK + ((channel // 16) ^ token) * 16 + channel % 16).flatten().to(codes.device)
    natural = codes[:, :, at].view(blocks, atoms * 8, BLOCK)[:, :rows].transpose(0, 1).contiguous()
    return natural.view(torch.int8), multiples.view(-1, atoms * 8)[:, :rows].T.contiguous(), scale[:rows]


def equal(got: TokenOperand, wanted: TokenOperand, rows: int, int8_blocks: int) -> bool:
    """Whether all that the layout promises is the same."""
    (bytes_, words, scale), (wanted_bytes, wanted_words, wanted_scale) = untile(got, rows), untile(wanted, rows)
    padding = got[1].flatten(1)[:int8_blocks, rows:]
    return (
        torch.equal(scale, wanted_scale)
        and torch.equal(words[:, :int8_blocks], wanted_words[:, :int8_blocks])
        and torch.equal(bytes_, wanted_bytes)
        and bool((padding == 0).all() and got[2].isfinite().all())
    )
