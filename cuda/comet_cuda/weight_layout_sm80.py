"""Operand layouts of the mma.sync GEMM (sm_80, sm_86, sm_89; the portable path): canonical tensors <-> kernel's bytes.

The kernel computes Y^T = W X^T with `mma.sync`: weights are the A operand (16 rows), activations B (8 tokens).
The order of channels inside a block is free, because the sum over a block is exact; it is chosen so that each of the
four threads t that share a row owns 32 consecutive channels, 32t .. 32t + 31, and every load is 16 bytes.

**Activations** (quantize_act writes them).
- `codes` uint8 [NB, M, 128]. An INT8 block holds M rows of 128 two's complement bytes. An INT4 block holds M rows of
  64 bytes, two's complement nibbles, the even channel low; the second half of its M * 128 bytes is not used. In the
  portable layout every block is bytes.
- `meta` f32 [NB, M, 2]: scale, and the sum of the block's 128 codes, an exact integer.

**Weights** (prepared once, at load). R = ceil(N / 128) row tiles; missing rows have code 0 and scale 0.
- uint8 [R, NB, 8448 or 8576]: 8,192 bytes of nibbles, 128 bf16 scales, and, for asymmetric weights, 128 zero points.
- Nibbles: eight m16 tiles of 1,024 bytes. Byte step * 512 + lane * 16 + 8 * w + 4 * half is word 2 * step + w (word j
  holds channels 32t + 8j .. + 7, for lane = 4g + t) of fragment row g (half 0) or g + 8 (half 1), so that one 16-byte
  read is the four registers of an m16n8k64 operand, in order. Fragment row g is row 2g of the 16, g + 8 is row
  2g + 1, so that a thread stores two neighbouring outputs at once. A thread's 64 codes are two 16-byte reads whatever
  the block's precision: the mixed layout.
- Nibble order in a word: natural in INT4 blocks; interleaved (0 4 1 5 2 6 3 7) where activations are bytes, so that one
  mask and one shift-and-mask give the two registers of channels 0..3 and 4..7 ("location switch, zero extension").
"""

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK
from comet_cuda.errors import CometError
from comet_cuda.int4 import unpack_nibbles

ROW_TILE = 128  # weight rows in one record
NIBBLE_BYTES = ROW_TILE * BLOCK // 2
SCALE_BYTES = 2 * ROW_TILE
INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)  # channel of each nibble of a word, from the low nibble up


def record_bytes_sm80(has_zero: bool) -> int:
    """Bytes of one weight record (128 rows of one block)."""
    return NIBBLE_BYTES + SCALE_BYTES + (ROW_TILE if has_zero else 0)


def tile_activations_sm80(
    codes: Tensor, scale: Tensor, block_bits: Tensor, portable: bool = False
) -> tuple[Tensor, Tensor]:
    """Canonical activations -> what the mma.sync GEMM reads; the reference of the kernel that writes them.

    Args:
        codes: int8 [M, NB, 128], scale: float32 [M, NB]: what `quantize_act` returns.
        block_bits: uint8 [NB], 4 or 8.
        portable: keep INT4 blocks in bytes.

    Returns:
        uint8 [NB, M, 128] (unused bytes are 0) and float32 [NB, M, 2].
    """
    tokens, blocks, _ = codes.shape
    tiled = codes.transpose(0, 1).contiguous().view(torch.uint8)
    if not portable:
        low = tiled & 15
        packed = torch.zeros_like(tiled).view(blocks, tokens * BLOCK)
        packed[:, : tokens * BLOCK // 2] = (low[..., 0::2] | (low[..., 1::2] << 4)).reshape(blocks, -1)
        is_int4 = (block_bits.to(codes.device) == 4)[:, None, None]
        tiled = torch.where(is_int4, packed.view(blocks, tokens, BLOCK), tiled)
    meta = torch.stack((scale.T, codes.float().sum(-1).T), dim=-1)
    return tiled, meta.contiguous()


def untile_activations_sm80(
    tiled: Tensor, meta: Tensor, block_bits: Tensor, portable: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `tile_activations_sm80`: codes int8 [M, NB, 128], scale and sum float32 [M, NB]."""
    blocks, tokens, _ = tiled.shape
    as_bytes = tiled.view(torch.int8)
    if not portable:
        packed = tiled.view(blocks, -1)[:, : tokens * BLOCK // 2].reshape(blocks, tokens, BLOCK // 2)
        signed = ((unpack_nibbles(packed) ^ 8).to(torch.int16) - 8).to(torch.int8)
        is_int4 = (block_bits.to(tiled.device) == 4)[:, None, None]
        as_bytes = torch.where(is_int4, signed, as_bytes)
    return as_bytes.transpose(0, 1).contiguous(), meta[..., 0].T.contiguous(), meta[..., 1].T.contiguous()


def _interleaves(block_bits: Tensor, portable: bool) -> Tensor:
    """bool [NB]: blocks whose words hold their nibbles interleaved."""
    return torch.ones_like(block_bits, dtype=torch.bool) if portable else block_bits == 8


def tile_weight_sm80(
    qweight: Tensor, w_scale: Tensor, w_zero: Tensor | None, block_bits: Tensor, portable: bool = False
) -> Tensor:
    """Canonical 4-bit weights -> records of the mma.sync GEMM.

    Args:
        qweight: uint8 [N, 64 * NB]; w_scale: bfloat16 [N, NB]; w_zero: uint8 [N, NB] or None; block_bits: uint8 [NB].
        portable: every block meets activations in bytes.

    Returns:
        uint8 [R, NB, 8448 (no w_zero) or 8576].
    """
    rows, blocks = w_scale.shape
    if qweight.dtype != torch.uint8 or qweight.shape != (rows, blocks * BLOCK // 2):
        raise CometError(
            f"qweight is {qweight.dtype} {tuple(qweight.shape)} for w_scale {tuple(w_scale.shape)}",
            f"it must be torch.uint8 ({rows}, {blocks * BLOCK // 2}), two 4-bit codes a byte",
        )
    padding = -rows % ROW_TILE

    def tiles(x: Tensor) -> Tensor:  # [N, ...] -> [R, 128, ...], missing rows are zero
        padded = torch.nn.functional.pad(x, (0, 0, 0, padding))
        return padded.reshape(-1, ROW_TILE, *padded.shape[1:])

    codes = unpack_nibbles(tiles(qweight)).unflatten(-1, (blocks, 4, 4, 8))  # R, row, NB, t, word, nibble
    order = torch.tensor(INTERLEAVED, device=codes.device)
    interleave = _interleaves(block_bits.to(codes.device), portable)[None, None, :, None, None, None]
    codes = torch.where(interleave, codes[..., order], codes)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)  # R, row, NB, t, word, byte
    split = packed.unflatten(1, (8, 8, 2)).unflatten(6, (2, 2))  # R, m16 tile, g, half, NB, t, step, w, byte
    nibbles = split.permute(0, 4, 1, 6, 2, 5, 7, 3, 8).reshape(-1, blocks, NIBBLE_BYTES)
    scale = tiles(w_scale).transpose(1, 2).contiguous()
    parts = [nibbles, scale.view(torch.uint8)]
    if w_zero is not None:
        parts.append(tiles(w_zero).transpose(1, 2))
    return torch.cat(parts, dim=-1).contiguous()


def untile_weight_sm80(
    records: Tensor, rows: int, block_bits: Tensor, portable: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inverse of `tile_weight_sm80`: qweight, w_scale, w_zero (None if the records hold none)."""
    _, blocks, size = records.shape
    split = records[..., :NIBBLE_BYTES].reshape(-1, blocks, 8, 2, 8, 4, 2, 2, 4)
    # R, NB, m16 tile, step, g, t, w, half, byte -> rows, NB, t, word, byte
    packed = split.permute(0, 2, 4, 7, 1, 5, 3, 6, 8).reshape(-1, blocks, 4, 4, 4)[:rows]
    codes = unpack_nibbles(packed)
    order = torch.tensor([INTERLEAVED.index(channel) for channel in range(8)], device=codes.device)
    interleave = _interleaves(block_bits.to(codes.device), portable)[None, :, None, None, None]
    codes = torch.where(interleave, codes[..., order], codes)
    qweight = (codes[..., 0::2] | (codes[..., 1::2] << 4)).reshape(rows, blocks * BLOCK // 2)

    def rows_of(part: Tensor) -> Tensor:
        return part.transpose(1, 2).reshape(-1, blocks)[:rows].contiguous()

    w_scale = rows_of(records[..., NIBBLE_BYTES : NIBBLE_BYTES + SCALE_BYTES].contiguous().view(torch.bfloat16))
    if size == record_bytes_sm80(has_zero=False):
        return qweight, w_scale, None
    return qweight, w_scale, rows_of(records[..., NIBBLE_BYTES + SCALE_BYTES :])


def shared_reads_int4(token0: int) -> list[int]:
    """Byte addresses, in a stage's codes, that 32 lanes read (16 bytes each) for 8 tokens of an INT4 block."""
    return [(token0 + lane // 4) * 64 + lane % 4 * 16 for lane in range(32)]


def int8_offset(token: int, chunk: int) -> int:
    """Where the kernel puts 16-byte chunk `chunk` (0..7) of a token's 128 bytes in shared memory."""
    return token * 128 + (((chunk & 1) * 4 + (chunk >> 1)) ^ ((token & 1) * 4)) * 16


def shared_reads_int8(token0: int, half: int) -> list[int]:
    """The same for one half of the reads of an INT8 block."""
    return [int8_offset(token0 + lane // 4, 2 * (lane % 4) + half) for lane in range(32)]


def shared_reads_weights(m16_tile: int, step: int) -> list[int]:
    """Byte addresses, inside the record, of one read of weight codes."""
    return [m16_tile * 1024 + step * 512 + lane * 16 for lane in range(32)]


def bank_conflicts(addresses: list[int]) -> int:
    """Extra passes that 16-byte reads of 32 lanes need: 0 when each quarter warp meets all 32 banks."""
    extra = 0
    for quarter in range(4):
        lanes = addresses[8 * quarter : 8 * quarter + 8]
        words: dict[int, set[int]] = {}
        for address in lanes:
            for word in range(address // 4, address // 4 + 4):
                words.setdefault(word % 32, set()).add(word)
        extra += max(len(found) for found in words.values()) - 1
    return extra
