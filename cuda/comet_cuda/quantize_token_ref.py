"""Activations for the integer GEMM of sm_90: what they are, on any device; quantize_token.py has the kernel.

A token's scales are integer multiples m of one float32 number S, so INT4 codes can carry their multiple (|code * m| is
at most 126) and INT8 blocks keep theirs beside them. The GEMM sums integers over all of K and multiplies once by S.

Layout: A = ceil(M / 8) atoms of 8 tokens, swizzled as in weight_layout.py. `codes` uint8 [NB, A, 1024]: code * m of
INT4 blocks, the code of INT8 blocks. `multiples` int32 [NB, A, 8]: m of INT8 blocks; of INT4 blocks anything.
`token_scale` float32 [8 A]: S. Tokens that pad the last atom have any codes and multiples and a finite scale.
"""

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK, symmetric_qmax
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import hadamard_blocks, to_blocks
from comet_cuda.weight_layout import ATOM, ATOM_BYTES, token_atoms

MOST_CHANNELS = 49152  # sums of products with weights of up to 127 stay below 2^31
MOST_INT4, MOST_INT8 = 18, 1000  # multiples
INT8_SUM = 500  # of the INT8 blocks' multiples, before each is rounded up
PARTIALS = 32  # interleaved sums
DROPPED_BITS = 0xFFF  # a scale keeps 12 significant bits, so that its products with multiples are exact
SMALLEST_SCALE = 2.0**-100
TokenOperand = tuple[Tensor, Tensor, Tensor]  # codes, multiples, token_scale


def check_channels(channels: int) -> None:
    """Raises CometError where sums of integers could leave 32 bits."""
    if channels > MOST_CHANNELS:
        raise CometError(
            f"one scale a token: {channels} channels, whose sums of products could exceed 32 bits",
            f"it takes up to {MOST_CHANNELS} channels; quantize this model with activations.share 1 or 4",
        )


def token_shapes(rows: int, blocks: int) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int]]:
    """Shapes of codes, multiples and token_scale."""
    atoms = token_atoms(rows)
    return (blocks, atoms, ATOM_BYTES), (blocks, atoms, ATOM), (atoms * ATOM,)


def token_multiples(ratio: Tensor, is_int4: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of each token, and its blocks' multiples of it.

    Args:
        ratio: float32 [M, NB], the scale that each block would choose alone (of INT4 blocks, over its unit).
        is_int4: bool [NB].

    Returns:
        S: float32 [M], and m: float32 [M, NB], whole numbers.
    """
    top = torch.where(is_int4, ratio, 0.0).amax(-1)
    eights = torch.nn.functional.pad(torch.where(is_int4, 0.0, ratio), (0, -ratio.shape[1] % PARTIALS))
    parts = torch.zeros_like(eights[:, :PARTIALS])
    for strip in eights.split(PARTIALS, dim=1):
        parts = parts + strip
    while parts.shape[1] > 1:
        low, high = parts.chunk(2, dim=1)
        parts = low + high
    constants = torch.tensor([1 / MOST_INT4, 1 / INT8_SUM], dtype=torch.float32, device=ratio.device)
    least = torch.maximum(top * constants[0], parts[:, 0] * constants[1])
    rounded_up = ((least.view(torch.int32) + DROPPED_BITS) & ~DROPPED_BITS).view(torch.float32)
    scale = torch.where(least > 0, rounded_up.clamp(min=SMALLEST_SCALE), torch.ones_like(least))
    q = ratio / scale[:, None]
    return scale, torch.where(is_int4, q.round().clamp(1, MOST_INT4), q.ceil().clamp(1, MOST_INT8))


def quantize_by_token(
    x: Tensor, perm: Tensor | None, block_bits: Tensor, clip: Tensor, hadamard: bool, unit: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """codes int8 [M, NB, 128], S float32 [M] and m float32 [M, NB]; arguments as in `quantize_token_ref`."""
    is_int4 = block_bits == 4
    blocks = to_blocks(x, perm).float()
    if hadamard:
        blocks = torch.where(is_int4[None, :, None], hadamard_blocks(blocks), blocks)
    bound = torch.where(is_int4, float(symmetric_qmax(4)), float(symmetric_qmax(8)))
    factor = torch.ones_like(clip) if unit is None else torch.where(is_int4, unit, 1.0)
    scale, multiple = token_multiples(blocks.abs().amax(-1) * (clip / (bound * factor)), is_int4)
    step = scale[:, None] * multiple * factor
    codes = torch.round(blocks / step[..., None])
    bound = bound[:, None]
    return torch.minimum(torch.maximum(codes, -bound), bound).to(torch.int8), scale, multiple


def tile_tokens(codes: Tensor, scale: Tensor, multiple: Tensor, block_bits: Tensor) -> TokenOperand:
    """Canonical codes [M, NB, 128], S [M] and m [M, NB] -> the tiled operand; padding tokens are zeros of scale 1."""
    tokens, blocks, _ = codes.shape
    atoms = token_atoms(tokens)
    carried = torch.where((block_bits == 4)[:, None], codes * multiple[..., None].to(torch.int8), codes)
    padded = codes.new_zeros(atoms * ATOM, blocks, BLOCK)
    padded[:tokens] = carried
    at = torch.arange(ATOM_BYTES, device=codes.device)
    natural = padded.view(torch.uint8).unflatten(0, (atoms, ATOM)).permute(2, 0, 1, 3).reshape(blocks, atoms, -1)
    multiples = torch.ones(atoms * ATOM, blocks, dtype=torch.int32, device=codes.device)
    multiples[:tokens] = multiple.to(torch.int32)
    token_scale = torch.ones(atoms * ATOM, device=codes.device)
    token_scale[:tokens] = scale
    swizzled = natural[:, :, at ^ (at // BLOCK * 16)].contiguous()
    return swizzled, multiples.T.reshape(blocks, atoms, ATOM).contiguous(), token_scale


def quantize_token_ref(
    x: Tensor, perm: Tensor | None, block_bits: Tensor, clip: Tensor, hadamard: bool, unit: Tensor | None = None
) -> TokenOperand:
    """Quantize activations with one scale a token and integer multiples of it, and tile them.

    Args:
        x: float [M, K], K up to 49,152 (bfloat16 or float16 on a GPU); magnitudes up to 2^120.
        perm: int32 [K] or None, block_bits: uint8 [NB], clip: float32 [NB], hadamard: as in `quantize_act`.
        unit: float32 [NB] or None (ones), what the scale of an INT4 block typically is over the mean of the token's.
            Codes stand for multiples of scale * unit; the weights carry the unit.

    Returns:
        codes, multiples and token_scale (see the module).
    """
    check_channels(x.shape[1])
    return tile_tokens(*quantize_by_token(x, perm, block_bits, clip, hadamard, unit), block_bits)


def rms_norm_quantize_token_ref(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    perm: Tensor | None,
    block_bits: Tensor,
    clip: Tensor,
    hadamard: bool,
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """RMSNorm after an optional residual add, rounded as in quantize_fused.py, then `quantize_token_ref`.

    Returns:
        codes, multiples, token_scale, and x + residual (empty [0] without a residual).
    """
    summed = x if residual is None else x + residual
    wide = summed.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    found = quantize_token_ref(normed.to(x.dtype), perm, block_bits, clip, hadamard, unit)
    return *found, x.new_empty(0) if residual is None else summed


def silu_mul_quantize_token_ref(
    gate_up: Tensor, perm: Tensor | None, block_bits: Tensor, clip: Tensor, hadamard: bool, unit: Tensor | None = None
) -> TokenOperand:
    """SiLU(gate) * up of x = [gate | up], float [M, 2K], then `quantize_token_ref` of the [M, K] product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return quantize_token_ref(torch.nn.functional.silu(gate) * up, perm, block_bits, clip, hadamard, unit)
