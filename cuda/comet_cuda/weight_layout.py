"""Operand layouts of the sm_90a GEMM: canonical tensors <-> what the kernel copies, byte for byte, to shared memory.

The kernel computes Y^T = W X^T with wgmma: weights are the A operand (from registers), activations the B operand (from
shared memory). Both are tiled in global memory, so that every copy is one contiguous piece and needs no tensor map.

**Activations** (quantize_act writes them). A = ceil(M / 8) atoms of 8 tokens; tokens >= M in the last atom are never
read into a valid output and may hold anything.
- `codes` uint8 [NB, A, 1024]: an atom is 8 tokens x 128 bytes in wgmma's 128-byte swizzle: channel k of token r lies at
  byte r * 128 + ((k // 16) ^ r) * 16 + k % 16. INT4 blocks hold the e4m3 byte of the signed integer (0 is 0x00, sign is
  bit 7), INT8 blocks its two's complement byte.
- `meta` f32 [NB, A, 16]: for t in 0..3 the four floats (scale of token 2t, scale of 2t + 1, sum of 2t, sum of 2t + 1),
  where sum is the sum of the block's 128 codes, an exact integer. One 16-byte load gives a thread all of an atom.
So a tile of n tokens of one block is n * 128 contiguous bytes of codes and n * 8 of meta, whatever n is.

**Weights** (prepared once, at load). R = ceil(N / 64) row tiles; missing rows have code 0 and scale 0.
- uint8 [R, NB, 4224 or 4288]: one record a row tile and block: 4096 bytes of nibbles, 128 of bf16 scales, and, for
  asymmetric weights, 64 of zero points. A row tile's records follow each other along K, so a CTA that walks K reads
  memory in order.
- A thread's nibbles lie in two 16-byte chunks, chunk c of thread i at c * 2048 + i * 16. Each 32-bit word becomes two
  registers of the A fragment by mask and shift: the low nibbles row g, the high nibbles row g + 8.
- Within 16 rows, fragment row g (0..7) is row 4 * (g // 2) + g % 2 and fragment row g + 8 is two rows further, so that
  a thread ends with four consecutive outputs and stores them with one instruction.
- `zero_terms` bf16 [R, ceil(NB / 32), 4, 128, 8]: -zero * scale of 32 blocks as the A fragments of two bf16 wgmma of 16
  blocks each: the high halves of the first 16, their low halves, the same of the next 16 (zero times scale has 12
  significant bits, so two halves are exact). Large token tiles take the zero points' part from this product.
- A zero-extended nibble read as e4m3 is code * 2^-9, so the scales of INT4 blocks are stored times 2^9.
"""

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK
from comet_cuda.errors import CometError
from comet_cuda.int4 import SYMMETRIC_ZERO, unpack_nibbles
from comet_cuda.weight_grid import MOST_MULTIPLE, most_multiple

ATOM = 8  # tokens in one swizzle atom
ATOM_BYTES = ATOM * BLOCK
META_FLOATS = 2 * ATOM  # scale and sum of each token of an atom
ROW_TILE = 64  # weight rows in one record: the m of wgmma
NIBBLE_BYTES = ROW_TILE * BLOCK // 2
SCALE_BYTES = 2 * ROW_TILE
TERM_BLOCKS = 32  # blocks in one zero-point product
E4M3_SCALE = 512.0  # 2^9: a zero-extended nibble, read as e4m3, is code * 2^-9

_E4M3_OF_INT4 = tuple(
    (0x80 if q < 0 else 0) | (0x00, 0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E, 0x50)[abs(q)] for q in range(-8, 8)
)  # byte of the integer q, at index q + 8


def record_bytes(has_zero: bool) -> int:
    """Bytes of one weight record (64 rows of one block)."""
    return NIBBLE_BYTES + SCALE_BYTES + (ROW_TILE if has_zero else 0)


def token_atoms(tokens: int) -> int:
    """Atoms of 8 tokens that hold `tokens` tokens."""
    return -(-tokens // ATOM)


def _swizzle(device: torch.device) -> Tensor:
    """int64 [1024]: byte of the natural (token, channel) order -> byte in the atom; its own inverse."""
    at = torch.arange(ATOM_BYTES, device=device)
    token = at // BLOCK
    return at ^ (token * 16)


def tile_activations_sm90(codes: Tensor, scale: Tensor, block_bits: Tensor) -> tuple[Tensor, Tensor]:
    """Canonical activations -> what the sm_90a GEMM reads; the reference of the kernel that writes them.

    Args:
        codes: int8 [M, NB, 128], scale: float32 [M, NB]: what `quantize_act` returns.
        block_bits: uint8 [NB], 4 or 8.

    Returns:
        uint8 [NB, A, 1024] and float32 [NB, A, 16]; tokens that pad the last atom have code 0, scale 1, sum 0.
    """
    tokens, blocks, _ = codes.shape
    atoms = token_atoms(tokens)
    is_int4 = (block_bits.to(codes.device) == 4)[None, :, None]
    values = codes.float()
    as_e4m3 = values.to(torch.float8_e4m3fn).view(torch.uint8)
    as_e4m3 = torch.where(codes == 0, 0, as_e4m3)  # no negative zero
    data = torch.where(is_int4, as_e4m3, codes.view(torch.uint8))
    padded = data.new_zeros(atoms * ATOM, blocks, BLOCK)
    padded[:tokens] = data
    natural = padded.unflatten(0, (atoms, ATOM)).permute(2, 0, 1, 3).reshape(blocks, atoms, ATOM_BYTES)
    tiled = natural[:, :, _swizzle(codes.device)].contiguous()

    meta = torch.zeros(2, atoms * ATOM, blocks, dtype=torch.float32, device=codes.device)
    meta[0] = 1.0
    meta[0, :tokens], meta[1, :tokens] = scale, values.sum(-1)
    meta = meta.permute(2, 1, 0).reshape(blocks, atoms, ATOM // 2, 2, 2)  # [NB, A, pair, token of pair, kind]
    return tiled, meta.transpose(3, 4).reshape(blocks, atoms, META_FLOATS).contiguous()


def untile_activations_sm90(
    tiled: Tensor, meta: Tensor, tokens: int, block_bits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `tile_activations_sm90`.

    Returns:
        codes int8 [M, NB, 128], scale float32 [M, NB], sum float32 [M, NB].
    """
    blocks, atoms, _ = tiled.shape
    natural = tiled[:, :, _swizzle(tiled.device)].view(blocks, atoms, ATOM, BLOCK)
    data = natural.permute(1, 2, 0, 3).reshape(atoms * ATOM, blocks, BLOCK)[:tokens].contiguous()
    is_int4 = (block_bits.to(tiled.device) == 4)[None, :, None]
    table = torch.full((256,), -128, dtype=torch.int8, device=tiled.device)  # no INT4 code: a wrong byte shows
    integers = torch.arange(-8, 8, dtype=torch.int8, device=tiled.device)
    table[torch.tensor(_E4M3_OF_INT4, device=tiled.device)] = integers
    codes = torch.where(is_int4, table[data.long()], data.view(torch.int8))
    pairs = meta.view(blocks, atoms, ATOM // 2, 2, 2).transpose(3, 4).reshape(blocks, atoms * ATOM, 2)[:, :tokens]
    return codes, pairs[..., 0].T.contiguous(), pairs[..., 1].T.contiguous()


def _row_order(rows: Tensor) -> Tensor:
    """[R * 64, ...] -> [R, warp 4, g 8, half 2, ...]: rows in fragment order."""
    split: Tensor = rows.unflatten(0, (-1, 4, 4, 2, 2))  # R, warp, g // 2, half, g % 2
    return split.transpose(3, 4).flatten(2, 3)


def _row_order_inverse(ordered: Tensor) -> Tensor:
    """[R, 4, 8, 2, ...] -> [R * 64, ...]."""
    split: Tensor = ordered.unflatten(2, (4, 2))
    return split.transpose(3, 4).flatten(0, 4)


def tile_weight_sm90(qweight: Tensor, w_scale: Tensor, w_zero: Tensor | None, block_bits: Tensor) -> Tensor:
    """Canonical 4-bit weights -> records of the sm_90a GEMM.

    Args:
        qweight: uint8 [N, 64 * NB]; w_scale: bfloat16 [N, NB]; w_zero: uint8 [N, NB] or None; block_bits: uint8 [NB].

    Returns:
        uint8 [R, NB, 4224 (no w_zero) or 4288].
    """
    rows, blocks = w_scale.shape
    if qweight.dtype != torch.uint8 or qweight.shape != (rows, blocks * BLOCK // 2):
        raise CometError(
            f"qweight is {qweight.dtype} {tuple(qweight.shape)} for w_scale {tuple(w_scale.shape)}",
            f"it must be torch.uint8 ({rows}, {blocks * BLOCK // 2}), two 4-bit codes a byte",
        )
    padding = -rows % ROW_TILE

    def pad(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, padding)) if padding else x

    codes = _row_order(unpack_nibbles(pad(qweight))).unflatten(-1, (blocks, 2, 2, 2, 4, 4))
    # codes: R, warp, g, half, NB, chunk, step in chunk, k half, t, byte
    words = codes[:, :, :, 0] | (codes[:, :, :, 1] << 4)
    nibbles = words.permute(0, 3, 4, 1, 2, 7, 5, 6, 8).reshape(-1, blocks, NIBBLE_BYTES)
    factor = torch.where(block_bits.to(w_scale.device) == 4, E4M3_SCALE, 1.0)
    scale = _row_order(pad((w_scale.float() * factor).to(torch.bfloat16))).flatten(1, 3).transpose(1, 2).contiguous()
    parts = [nibbles, scale.view(torch.uint8)]
    if w_zero is not None:
        parts.append(_row_order(pad(w_zero)).flatten(1, 3).transpose(1, 2))
    return torch.cat(parts, dim=-1).contiguous()


def row_bases(w_scale: Tensor, w_zero: Tensor | None) -> Tensor:
    """Of each row the largest number of which all its scales are integer multiples: float32 [N]. Where packing stored
    a `weight_base`, this is it or a multiple of it; the scales, and so the products, are the same.

    Args:
        w_scale: bfloat16 [N, NB], positive; w_zero: uint8 [N, NB] or None (8); it bounds m (`most_multiple`).

    Raises CometError, naming the row, where there is no such number.
    """
    scale, least = w_scale.float(), w_scale.float().amin(1)
    most = most_multiple(torch.full_like(scale, SYMMETRIC_ZERO) if w_zero is None else w_zero.float())
    base = torch.zeros_like(least)
    for divisor in range(MOST_MULTIPLE, 0, -1):  # so that the largest one stays
        candidate = (least / divisor).to(torch.bfloat16).float()
        multiple = (scale / candidate[:, None]).round()
        good = (multiple * candidate[:, None] == scale) & (multiple <= most)
        base = torch.where(good.all(1), candidate, base)
    if not bool((base > 0).all()):
        row = int((base <= 0).nonzero()[0])
        raise CometError(
            f"row {row}: its {scale.shape[1]} scales, {least[row].item():.4g} to {scale[row].max().item():.4g}, are not"
            " integer multiples of one number",
            "pack with activations.share: token, which chooses such scales",
        )
    return base


def tile_weight_integer_sm90(qweight: Tensor, w_scale: Tensor, w_zero: Tensor | None, base: Tensor) -> Tensor:
    """Canonical 4-bit weights with integer scales -> records of the GEMM for them: uint8 [R, NB, 4224].

    A record's last 128 bytes are two a row, in the order of `tile_weight_sm90`'s scales: the multiple m of the row's
    base, and 128 - m * zero. So m * code + (128 - m * zero), its top bit flipped, is the INT8 weight m * (code - zero).

    Args:
        qweight, w_scale, w_zero: as in `tile_weight_sm90`; base: float [N], w_scale[n, g] = base[n] * m.

    Raises CometError where a scale is no such multiple, or a weight would not fit 8 bits.
    """
    multiple = (w_scale.float() / base.float()[:, None]).round()
    zero = torch.full_like(multiple, SYMMETRIC_ZERO) if w_zero is None else w_zero.float()
    wrong = (multiple * base.float()[:, None] != w_scale.float()) | (multiple < 1)
    wrong |= multiple > most_multiple(zero)
    if bool(wrong.any()):
        row, group = wrong.nonzero()[0].tolist()
        raise CometError(
            f"w_scale[{row}, {group}] is {w_scale[row, group].item()} with a base of {base[row].item()}",
            "scales must be a row's base times an integer m, m * max(zero, 15 - zero) at most 127",
        )
    records = tile_weight_sm90(qweight, w_scale, None, torch.full((w_scale.shape[1],), 8, dtype=torch.uint8))
    pairs = torch.stack((multiple, 128 - multiple * zero), dim=-1).to(torch.uint8)  # [N, NB, 2]
    pairs = torch.nn.functional.pad(pairs, (0, 0, 0, 0, 0, -pairs.shape[0] % ROW_TILE))
    pairs[w_scale.shape[0] :, :, 1] = 128
    records[..., NIBBLE_BYTES:] = _row_order(pairs).flatten(1, 3).transpose(1, 2).flatten(2)
    return records


def untile_weight_integer_sm90(records: Tensor, rows: int) -> Tensor:
    """The INT8 weights m * (code - zero) of records of `tile_weight_integer_sm90`: int8 [N, NB, 128]."""
    blocks = records.shape[1]
    qweight, _, _ = untile_weight_sm90(records, rows, torch.full((blocks,), 8, dtype=torch.uint8))
    flat = records[..., NIBBLE_BYTES:].unflatten(2, (ROW_TILE, 2)).transpose(1, 2).unflatten(1, (4, 8, 2))
    pairs = _row_order_inverse(flat)[:rows].int()
    return (unpack_nibbles(qweight).view(rows, blocks, BLOCK) * pairs[..., :1] + pairs[..., 1:] - 128).to(torch.int8)


def tile_activations_integer_sm90(
    codes: Tensor, multiple: Tensor, token_scale: Tensor, int8_blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Canonical activations with integer scales -> what the GEMM for them reads; the reference of quantize_token.

    Args:
        codes: int8 [M, NB, 128]; multiple: int [M, NB] and token_scale: float32 [M], their product is the scale.
        int8_blocks: how many of the first blocks have 8 bits; their multiples are powers of two that do
            not grow, equal within a group (quantize_act.int8_group).

    Returns:
        uint8 [NB, A, 1024], swizzled atoms of bytes code * multiple (INT4 blocks) or code (INT8 blocks);
        int32 [max(int8_blocks, 1), A, 8], of INT8 blocks: bits 0-7 the exponent e of the multiple 2^e, bits 8-15 by how
        much it exceeds the next INT8 block's (e itself in the last one); float32 [A * 8]. Tokens that pad the last atom
        have codes and words 0, scale 1.
    """
    tokens, blocks, _ = codes.shape
    atoms = token_atoms(tokens)
    data = codes.int()
    data[:, int8_blocks:] *= multiple[:, int8_blocks:, None].int()
    padded = torch.zeros(atoms * ATOM, blocks, BLOCK, dtype=torch.uint8, device=codes.device)
    padded[:tokens] = data.to(torch.int8).view(torch.uint8)
    natural = padded.unflatten(0, (atoms, ATOM)).permute(2, 0, 1, 3).reshape(blocks, atoms, ATOM_BYTES)
    exponent = torch.frexp(multiple[:, :int8_blocks].float()).exponent - 1
    words = torch.zeros(atoms * ATOM, max(int8_blocks, 1), dtype=torch.int32, device=codes.device)
    following = torch.nn.functional.pad(exponent[:, 1:], (0, 1))
    words[:tokens, :int8_blocks] = exponent | (exponent - following) << 8
    scale = torch.ones(atoms * ATOM, dtype=torch.float32, device=codes.device)
    scale[:tokens] = token_scale
    tiled = natural[:, :, _swizzle(codes.device)].contiguous()
    return tiled, words.T.contiguous().unflatten(1, (atoms, ATOM)), scale


def untile_activations_integer_sm90(tiled: Tensor, multiples: Tensor, tokens: int, int8_blocks: int) -> Tensor:
    """code * multiple of every channel, int32 [M, NB, 128], of activations tiled by `tile_activations_integer_sm90`."""
    blocks, atoms, _ = tiled.shape
    natural = tiled[:, :, _swizzle(tiled.device)].view(torch.int8).view(blocks, atoms, ATOM, BLOCK)
    data = natural.permute(1, 2, 0, 3).reshape(atoms * ATOM, blocks, BLOCK)[:tokens].int()
    exponent = multiples.flatten(1).T[:tokens, :int8_blocks] & 255
    data[:, :int8_blocks] <<= exponent[..., None]
    return data


def untile_weight_sm90(records: Tensor, rows: int, block_bits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inverse of `tile_weight_sm90`: qweight, w_scale, w_zero (None if the records hold none)."""
    tiles, blocks, size = records.shape
    nibbles = records[..., :NIBBLE_BYTES].reshape(tiles, blocks, 2, 4, 8, 4, 2, 2, 4)
    words = nibbles.permute(0, 3, 4, 1, 2, 6, 7, 5, 8).reshape(tiles, 4, 8, blocks * BLOCK)
    codes = _row_order_inverse(torch.stack((words & 15, words >> 4), dim=3))[:rows]
    qweight = codes[:, 0::2] | (codes[:, 1::2] << 4)

    def rows_of(flat: Tensor) -> Tensor:
        return _row_order_inverse(flat.transpose(1, 2).unflatten(1, (4, 8, 2)))[:rows].contiguous()

    factor = torch.where(block_bits.to(records.device) == 4, E4M3_SCALE, 1.0)
    stored = records[..., NIBBLE_BYTES : NIBBLE_BYTES + SCALE_BYTES].contiguous().view(torch.bfloat16)
    w_scale = (rows_of(stored).float() / factor).to(torch.bfloat16)
    if size == record_bytes(has_zero=False):
        return qweight, w_scale, None
    return qweight, w_scale, rows_of(records[..., NIBBLE_BYTES + SCALE_BYTES :])


def zero_terms_sm90(w_scale: Tensor, w_zero: Tensor | None) -> Tensor:
    """-zero * scale of each row and block, in exact bf16 halves and fragment order: bf16 [R, ceil(NB / 32), 4, 128, 8].

    Args:
        w_scale: bfloat16 [N, NB]; w_zero: uint8 [N, NB], or None for symmetric weights.
    """
    zero = torch.full_like(w_scale, SYMMETRIC_ZERO, dtype=torch.float32) if w_zero is None else w_zero.float()
    product = -zero * w_scale.float()
    rows, blocks = product.shape
    product = torch.nn.functional.pad(product, (0, -blocks % TERM_BLOCKS, 0, -rows % ROW_TILE))
    high = product.to(torch.bfloat16)
    low = (product - high.float()).to(torch.bfloat16)
    halves = torch.stack((high, low), dim=1)  # [R * 64, 2, NB padded]
    split: Tensor = _row_order(halves).unflatten(
        -1, (-1, 2, 2, 4, 2)
    )  # R, warp, g, half of rows, part, group, 16s, k 8s, t, k
    return split.permute(0, 5, 6, 4, 1, 2, 8, 7, 3, 9).reshape(split.shape[0], split.shape[5], 4, 128, 8).contiguous()
