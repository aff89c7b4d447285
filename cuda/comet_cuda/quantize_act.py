"""quantize_act: activations -> integer blocks of 128 channels with one scale per token and block.

In: x [M, K] in any float type, the channel permutation, 4 or 8 bits per block. Out: int8 codes and float32 scales.
The order of operations is part of the format, because integers must agree bit for bit between backends:
gather, pad with zeros, convert to float32, rotate INT4 blocks (if asked), absmax, scale, divide, round half to even.

With share = TOKEN all scales of a token are integer multiples of one number: see quantize_token_ref.py.
"""

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK, num_blocks, split_blocks, symmetric_qmax
from comet_cuda.errors import CometError
from comet_cuda.library import define_op

CPU_ROWS = 512  # rows a CPU quantizes at once
TOKEN = 0  # as a share: all scales of a token are integer multiples of one number (quantize_token_ref.py)
HADAMARD_NORM = 128**-0.5  # makes the 128-point Hadamard transform orthonormal, so it is its own inverse


def hadamard_blocks(x: Tensor) -> Tensor:
    """Orthonormal 128-point Hadamard transform of the last axis, float32 [..., 128] -> float32 [..., 128].

    Seven butterfly stages with strides 1, 2, 4, ..., 64 in this order, then one multiply: kernels do the same
    additions in the same order and so get the same float32 values.
    """
    assert x.dtype == torch.float32 and x.shape[-1] == BLOCK
    for stage in range(7):
        pairs = x.reshape(*x.shape[:-1], BLOCK >> (stage + 1), 2, 1 << stage)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        result = torch.empty_like(pairs)
        torch.add(low, high, out=result[..., 0, :])
        torch.sub(low, high, out=result[..., 1, :])
        x = result.view(x.shape)
    return x * HADAMARD_NORM


def int8_group(block: int) -> int:
    """With share TOKEN, INT8 blocks come in groups of 1, 2, 4, ... blocks with one multiple: the group of a block."""
    return (block + 1).bit_length() - 1


def to_blocks(x: Tensor, perm: Tensor | None) -> Tensor:
    """Gather channels by `perm` and pad: [M, K] -> [M, NB, 128] of the same type. None keeps the order."""
    channels = x.shape[-1]
    if perm is not None:
        x = x[:, perm.long()]
    padding = num_blocks(channels) * BLOCK - channels
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
    return split_blocks(x)


def quantize_act_ref(
    x: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    share: int = 1,
) -> tuple[Tensor, Tensor]:
    """Quantize activations per token and block, symmetric and dynamic.

    Args:
        x: float [M, K], K >= 1; magnitudes up to 2^120. Beyond, and where values are not finite, codes are arbitrary.
        perm: int32 [K], stored channel i is x[:, perm[i]]; None is the identity.
        block_bits: uint8 [NB], NB = ceil(K / 128), each 4 or 8.
        clip: float32 [NB] in (0, 1]: the share of the absolute maximum that the largest code stands for.
        hadamard: rotate the INT4 blocks by the orthonormal Hadamard transform before quantizing.
        share: 1, every block has its own scale; TOKEN, those of a token are integer multiples of one number (INT8
            blocks come first then).

    Returns:
        codes: int8 [M, NB, 128] in [-7, 7] or [-127, 127].
        scale: float32 [M, NB]; absmax * (clip / qmax), and 1 where the block is all zero; with TOKEN see
            `token_multiples` of quantize_token_ref.py.
    """
    if share == TOKEN:
        return _by_token(x, perm, block_bits, clip, hadamard)
    if share != 1:
        raise wrong_share(share)
    blocks = to_blocks(x, perm).float()
    if hadamard:
        is_int4 = (block_bits == 4)[None, :, None]
        blocks = torch.where(is_int4, hadamard_blocks(blocks), blocks)
    qmax = torch.where(block_bits == 4, float(symmetric_qmax(4)), float(symmetric_qmax(8)))  # f32 [NB]
    absmax = blocks.abs().amax(-1)
    scale = absmax * (clip / qmax)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = torch.round(blocks / scale[..., None])
    bound = qmax[None, :, None]
    return torch.minimum(torch.maximum(codes, -bound), bound).to(torch.int8), scale


def wrong_share(share: int) -> CometError:
    """The error for a share that there is not."""
    return CometError(
        f"quantize_act: share={share}", f"it must be 1 (a scale a block) or {TOKEN} (all blocks of a token)"
    )


def _by_token(
    x: Tensor, perm: Tensor | None, block_bits: Tensor, clip: Tensor, hadamard: bool
) -> tuple[Tensor, Tensor]:
    from comet_cuda.quantize_token_ref import check_blocks, quantize_by_token  # which builds on this module

    check_blocks(x.shape[1], 0)
    is_int8 = block_bits == 8
    if not is_int8.is_cuda and bool((is_int8.int().diff() > 0).any()):
        raise CometError("quantize_act: one scale a token, but 8-bit blocks do not come first", "order the blocks so")
    codes, scale, multiple = quantize_by_token(x, perm, is_int8, clip, hadamard)
    return codes, scale[:, None] * multiple


def _fake(
    x: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    share: int = 1,
) -> tuple[Tensor, Tensor]:
    rows, blocks = x.shape[0], block_bits.shape[0]
    return x.new_empty(rows, blocks, BLOCK, dtype=torch.int8), x.new_empty(rows, blocks, dtype=torch.float32)


def _in_cache(
    x: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    share: int = 1,
) -> tuple[Tensor, Tensor]:
    """The reference, a few rows at a time on a CPU: the passes over a row then stay in its caches."""
    if x.device.type != "cpu" or x.shape[0] <= CPU_ROWS:
        return quantize_act_ref(x, perm, block_bits, clip, hadamard, share)
    parts = [quantize_act_ref(rows, perm, block_bits, clip, hadamard, share) for rows in x.split(CPU_ROWS)]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scale for _, scale in parts])


define_op(
    "quantize_act(Tensor x, Tensor? perm, Tensor block_bits, Tensor clip, bool hadamard, int share=1)"
    " -> (Tensor, Tensor)",
    _in_cache,
    _fake,
)


def quantize_act(
    x: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    share: int = 1,
) -> tuple[Tensor, Tensor]:
    """The op behind `quantize_act_ref`, same arguments and results, on whatever device x is on."""
    codes, scale = torch.ops.comet.quantize_act(x, perm, block_bits, clip, hadamard, share)
    return codes, scale
