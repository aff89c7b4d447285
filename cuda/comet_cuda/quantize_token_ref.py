"""Activations for the integer GEMM of sm_90: what they are, on any device; quantize_token.py has the kernel.

A token's scales are integer multiples m of one float32 number S, so INT4 codes can carry their multiple (|code * m| is
at most 126) and INT8 blocks keep theirs beside them. The GEMM sums integers over all of K and multiplies once by S.

INT8 blocks come first, in groups of 1, 2, 4, 8, ... blocks; their multiples are powers of two, one a group, that do not
grow from group to group: the GEMM adds block after block and shifts its sums between groups. S is so chosen that the
power of the first group, which holds the outliers, wastes nothing of its range.

Layout: A = ceil(M / 8) atoms of 8 tokens, swizzled as in weight_layout.py. `codes` uint8 [NB, A, 1024]: code * m of
INT4 blocks, the code of INT8 blocks. `multiples` int32 [max(INT8 blocks, 1), A, 8]: e of m = 2^e in bits 0-7; in bits
8-15 by how much e of the next INT8 block is less (e itself for the last one). `token_scale` float32 [8 A]: S. Tokens
that pad the last atom have any codes, words 0 and a finite scale.
"""

import torch
from torch import Tensor

from comet_cuda.affine import num_blocks, symmetric_qmax
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import hadamard_blocks, to_blocks
from comet_cuda.weight_layout import ATOM, ATOM_BYTES, tile_activations_integer_sm90, token_atoms

MOST_CHANNELS = 49152  # sums of products with weights of up to 127 stay below 2^31
MOST_INT4 = 18  # multiple of an INT4 block
INT8_SUM = 250  # of the INT8 blocks' multiples, before each is rounded up to a power of two
PARTIALS = 32  # interleaved sums
DROPPED_BITS = 0xFFF  # a scale keeps 12 significant bits, so that its products with multiples are exact
SMALLEST_SCALE = 2.0**-100
TokenOperand = tuple[Tensor, Tensor, Tensor]  # codes, multiples, token_scale


def check_blocks(channels: int, int8_blocks: int) -> None:
    """Raises CometError where sums of integers could leave 32 bits, or there are fewer blocks."""
    if channels > MOST_CHANNELS:
        raise CometError(
            f"one scale a token: {channels} channels, whose sums of products could exceed 32 bits",
            f"it takes up to {MOST_CHANNELS} channels; quantize this model with activations.share 1",
        )
    if not 0 <= int8_blocks <= num_blocks(channels):
        raise CometError(f"int8_blocks is {int8_blocks}", f"{channels} channels have {num_blocks(channels)} blocks")


def token_shapes(
    rows: int, blocks: int, int8_blocks: int
) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int]]:
    """Shapes of codes, multiples and token_scale."""
    atoms = token_atoms(rows)
    return (blocks, atoms, ATOM_BYTES), (max(int8_blocks, 1), atoms, ATOM), (atoms * ATOM,)


def token_multiples(ratio: Tensor, is_int8: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of each token, and its blocks' multiples of it.

    Args:
        ratio: float32 [M, NB], the scale that each block would choose alone.
        is_int8: bool [NB], true for the first blocks: those of 8 bits.

    Returns:
        S: float32 [M], and m: float32 [M, NB], whole numbers.
    """
    blocks = ratio.shape[1]
    top = torch.where(is_int8, 0.0, ratio).amax(-1)
    numbers = torch.arange(1, blocks + 1, dtype=torch.float32, device=ratio.device)
    begin = (1 << (torch.frexp(numbers).exponent - 1)) - 1  # of each block's group
    falling = torch.where(is_int8, ratio, 0.0).flip(-1).cummax(-1).values.flip(-1)
    eights = torch.where(is_int8, falling[:, begin], 0.0)  # each as large as all from its group's first on
    parts = torch.zeros(len(ratio), PARTIALS, dtype=ratio.dtype, device=ratio.device)
    for strip in torch.nn.functional.pad(eights, (0, -blocks % PARTIALS)).split(PARTIALS, dim=1):
        parts = parts + strip
    while parts.shape[1] > 1:
        low, high = parts.chunk(2, dim=1)
        parts = low + high
    constants = torch.tensor([1 / MOST_INT4, 1 / INT8_SUM], dtype=torch.float32, device=ratio.device)
    least = torch.maximum(top * constants[0], parts[:, 0] * constants[1])
    first = eights[:, 0]
    steps = (torch.frexp(first / least).exponent - 1).clamp(min=0)  # 2^steps <= first / least
    least = torch.where(first > least, torch.maximum(least, torch.ldexp(first, -steps)), least)
    rounded_up = ((least.view(torch.int32) + DROPPED_BITS) & ~DROPPED_BITS).view(torch.float32)
    scale = torch.where(least > 0, rounded_up.clamp(min=SMALLEST_SCALE), torch.ones_like(least))
    bits = (eights / scale[:, None]).view(torch.int32)
    exponent = (((bits + 0x7FFFFF) >> 23) - 127).clamp(min=0)  # of the power of two that is not below
    powers = torch.ldexp(torch.ones_like(eights), exponent)
    return scale, torch.where(is_int8, powers, (ratio / scale[:, None]).round().clamp(1, MOST_INT4))


def first_blocks(blocks: int, int8_blocks: int, device: torch.device) -> Tensor:
    """bool [NB], true for the first `int8_blocks`."""
    return torch.arange(blocks, device=device) < int8_blocks


def quantize_by_token(
    x: Tensor, perm: Tensor | None, is_int8: Tensor, clip: Tensor, hadamard: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """codes int8 [M, NB, 128], S float32 [M] and m float32 [M, NB].

    Args:
        x, perm, clip, hadamard: as in `quantize_token_ref`. is_int8: bool [NB], see `first_blocks`.
    """
    blocks = to_blocks(x, perm).float()
    if hadamard:
        blocks = torch.where(is_int8[None, :, None], blocks, hadamard_blocks(blocks))
    bound = torch.where(is_int8, float(symmetric_qmax(8)), float(symmetric_qmax(4)))
    scale, multiple = token_multiples(blocks.abs().amax(-1) * (clip / bound), is_int8)
    step = scale[:, None] * multiple
    codes = torch.round(blocks / step[..., None])
    bound = bound[:, None]
    return torch.minimum(torch.maximum(codes, -bound), bound).to(torch.int8), scale, multiple


def quantize_token_ref(x: Tensor, perm: Tensor | None, int8_blocks: int, clip: Tensor, hadamard: bool) -> TokenOperand:
    """Quantize activations with one scale a token and integer multiples of it, and tile them.

    Args:
        x: float [M, K], K up to 49,152 (bfloat16 or float16 on a GPU); magnitudes up to 2^120.
        perm: int32 [K] or None, clip: float32 [NB], hadamard: as in `quantize_act`.
        int8_blocks: how many of the first blocks have 8 bits; the others have 4.

    Returns:
        codes, multiples and token_scale (see the module).
    """
    check_blocks(x.shape[1], int8_blocks)
    is_int8 = first_blocks(len(clip), int8_blocks, clip.device)
    codes, scale, multiple = quantize_by_token(x, perm, is_int8, clip, hadamard)
    return tile_activations_integer_sm90(codes, multiple, scale, int8_blocks)


def rms_norm_quantize_token_ref(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    perm: Tensor | None,
    int8_blocks: int,
    clip: Tensor,
    hadamard: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """RMSNorm after an optional residual add, rounded as in quantize_fused.py, then `quantize_token_ref`.

    Returns:
        codes, multiples, token_scale, and x + residual (empty [0] without a residual).
    """
    summed = x if residual is None else x + residual
    wide = summed.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    found = quantize_token_ref(normed.to(x.dtype), perm, int8_blocks, clip, hadamard)
    return *found, x.new_empty(0) if residual is None else summed


def silu_mul_quantize_token_ref(
    gate_up: Tensor, perm: Tensor | None, int8_blocks: int, clip: Tensor, hadamard: bool
) -> TokenOperand:
    """SiLU(gate) * up of x = [gate | up], float [M, 2K], then `quantize_token_ref` of the [M, K] product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return quantize_token_ref(torch.nn.functional.silu(gate) * up, perm, int8_blocks, clip, hadamard)
