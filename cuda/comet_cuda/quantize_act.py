"""quantize_act: activations -> integer blocks of 128 channels with one scale per token and block.

In: x [M, K] in any float type, the channel permutation, 4 or 8 bits per block. Out: int8 codes and float32 scales.
The order of operations is part of the format, because integers must agree bit for bit between backends:
gather, pad with zeros, convert to float32, rotate INT4 blocks (if asked), absmax, scale, divide, round half to even.

Shared scales. With share = 4 the INT4 blocks of a quad (blocks 4g .. 4g + 3) have scales that differ by powers of two
only. An INT4 code times a power of two is still an exact e4m3 number, so a GPU that runs INT4 on its FP8 tensor cores
takes the powers of two into the operand and rescales its float32 sums once a quad instead of once a block.
With share = TOKEN all scales of a token are integer multiples of one number: see quantize_token_ref.py.
"""

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK, num_blocks, split_blocks, symmetric_qmax
from comet_cuda.errors import CometError
from comet_cuda.library import define_op

CPU_ROWS = 512  # rows a CPU quantizes at once
TOKEN = 0  # as a share: all scales of a token are integer multiples of one number (quantize_token_ref.py)
QUAD = 4  # neighbouring blocks that may share a scale up to powers of two
QUAD_ROUNDING = 2**0.4  # which power of two is nearest: a scale up to 2^0.4 too small (clips) to 2^0.6 too large
QUAD_EXPONENTS = (-2, 13)  # of e, so that q * 2^(4 - e) is an e4m3 number for every |q| <= 7
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


def shared_exponents(ratio: Tensor, is_int4: Tensor) -> tuple[Tensor, Tensor]:
    """The quad's unit and each INT4 block's power of two: a block's scale is unit * 2^-e.

    Args:
        ratio: f32 [M, NB], the scale each INT4 block would choose alone, over its static unit. is_int4: bool [NB].

    Returns:
        unit: f32 [M, NB], the mean over the quad's INT4 blocks (1 where it is zero), the same for all of a quad.
        exponent: int32 [M, NB], e; 0 where the block is all zero.
    """
    blocks = ratio.shape[1]
    padding = -blocks % QUAD
    parts = torch.nn.functional.pad(torch.where(is_int4, ratio, 0.0), (0, padding)).view(
        -1, (blocks + padding) // QUAD, QUAD
    )
    count = torch.nn.functional.pad(is_int4.float(), (0, padding)).view(-1, QUAD).sum(-1).clamp(min=1)
    unit = ((parts[..., 0] + parts[..., 1]) + (parts[..., 2] + parts[..., 3])) * (1 / count)
    unit = torch.where(unit > 0, unit, torch.ones_like(unit)).repeat_interleave(QUAD, dim=1)[:, :blocks]
    excess = (unit / ratio) * torch.tensor(QUAD_ROUNDING, dtype=torch.float32, device=ratio.device)
    low, high = QUAD_EXPONENTS
    exponent = torch.frexp(excess.clamp(2.0 ** (low - 1), 2.0 ** (high + 1))).exponent - 1  # floor(log2)
    exponent = torch.where(ratio > 0, exponent.clamp(low, high), torch.zeros_like(exponent))
    return unit, exponent


def quantize_act_ref(
    x: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    share: int = 1,
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize activations per token and block, symmetric and dynamic.

    Args:
        x: float [M, K], K >= 1; magnitudes up to 2^120. Beyond, and where values are not finite, codes are arbitrary.
        perm: int32 [K], stored channel i is x[:, perm[i]]; None is the identity.
        block_bits: uint8 [NB], NB = ceil(K / 128), each 4 or 8.
        clip: float32 [NB] in (0, 1]: the share of the absolute maximum that the largest code stands for.
        hadamard: rotate the INT4 blocks by the orthonormal Hadamard transform before quantizing.
        share: 1, every block has its own scale; 4, the INT4 blocks of a quad share theirs up to powers of two;
            TOKEN, those of a token are integer multiples of one number (INT8 blocks come first then).
        unit: float32 [NB] or None (ones), with share 4: what an INT4 block's scale typically is over its quad's mean.
            Codes stand for multiples of scale * unit; the weights carry the unit, so it is not part of the scale.

    Returns:
        codes: int8 [M, NB, 128] in [-7, 7] or [-127, 127].
        scale: float32 [M, NB]; absmax * (clip / qmax), and 1 where the block is all zero; with share 4 see
            `shared_exponents`, with TOKEN `token_multiples` of quantize_token_ref.py.
    """
    return quantize_quads(x, perm, block_bits, clip, hadamard, share, unit)[:2]


def quantize_quads(
    x: Tensor,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    share: int = 1,
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`quantize_act_ref` with a third result: the quads' scales S, float32 [M, ceil(NB / 4)], with share 4; or None."""
    if share == TOKEN:
        return *_by_token(x, perm, block_bits, clip, hadamard, unit), None
    blocks = to_blocks(x, perm).float()
    if hadamard:
        is_int4 = (block_bits == 4)[None, :, None]
        blocks = torch.where(is_int4, hadamard_blocks(blocks), blocks)
    qmax = torch.where(block_bits == 4, float(symmetric_qmax(4)), float(symmetric_qmax(8)))  # f32 [NB]
    absmax = blocks.abs().amax(-1)
    scale = absmax * (clip / qmax)
    step = scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    quad = None
    if share == QUAD:
        is_int4 = block_bits == 4
        factor = torch.ones_like(clip) if unit is None else unit
        shared, exponent = shared_exponents(absmax * (clip / (qmax * factor)), is_int4)
        scale = torch.where(is_int4, torch.ldexp(shared, -exponent), scale)
        step = torch.where(is_int4, scale * factor, scale)
        quad = shared[:, ::QUAD].contiguous()
    elif share != 1:
        raise CometError(
            f"quantize_act: share={share}",
            f"it must be 1 (a scale a block), {QUAD} (quads of blocks) or {TOKEN} (all blocks of a token)",
        )
    codes = torch.round(blocks / step[..., None])
    bound = qmax[None, :, None]
    return torch.minimum(torch.maximum(codes, -bound), bound).to(torch.int8), scale, quad


def _by_token(
    x: Tensor, perm: Tensor | None, block_bits: Tensor, clip: Tensor, hadamard: bool, unit: Tensor | None
) -> tuple[Tensor, Tensor]:
    from comet_cuda.quantize_token_ref import check_blocks, quantize_by_token  # which builds on this module

    if unit is not None:
        raise CometError("quantize_act: units are given with one scale a token", "they belong to share 4 alone")
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
    unit: Tensor | None = None,
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
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The reference, a few rows at a time on a CPU: the passes over a row then stay in its caches."""
    if x.device.type != "cpu" or x.shape[0] <= CPU_ROWS:
        return quantize_act_ref(x, perm, block_bits, clip, hadamard, share, unit)
    parts = [quantize_act_ref(rows, perm, block_bits, clip, hadamard, share, unit) for rows in x.split(CPU_ROWS)]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scale for _, scale in parts])


define_op(
    "quantize_act(Tensor x, Tensor? perm, Tensor block_bits, Tensor clip, bool hadamard, int share=1,"
    " Tensor? unit=None) -> (Tensor, Tensor)",
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
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The op behind `quantize_act_ref`, same arguments and results, on whatever device x is on."""
    codes, scale = torch.ops.comet.quantize_act(x, perm, block_bits, clip, hadamard, share, unit)
    return codes, scale
