"""The order of channels inside rotated blocks in which a GPU's gather hardly meets a bank of shared memory twice.

Quantizing gathers channels from a row in shared memory, whose 32 banks of four bytes (two channels) each give a warp
one word at a time: of 32 channels in an order of importance alone 3.4 meet in a bank, and one is read after the other.
Neighbours in that order are of nearly the same importance, so it matters little which of them share an INT4 block, and
inside a block the Hadamard rotation mixes all. So both are free, and are decided here once, at calibration.
"""

import functools

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK

BANKS = 32
CHANNELS_A_WORD = 2
CHANNELS_A_BANK = BLOCK // BANKS  # of a block, if they are evenly spread
WARP_BLOCKS = 8  # consecutive blocks that at most read at once

# The bank that position p of block b is for, as a linear function over GF(2) of the bits of p, lowest first, and of b.
# For each slot the kernels read positions that differ in the lane's bits: quantize_stay and quantize_many in bits 4 and
# 5 and in 3 and 6, of eight blocks; quantize_row, quantize_token and quantize_act in 2 and 4, in 3 and 5, and in 6, of
# four. With so many blocks either reaches all 32 banks.
OF_POSITION = (1, 2, 8, 8, 0, 24, 4)
OF_BLOCK = (1, 2, 4)


def spread_over_banks(perm: Tensor, block_bits: Tensor) -> Tensor:
    """A permutation [K] like `perm`, but for the order of channels in each run of INT4 blocks, which are rotated.

    Args:
        perm: int32 [K], channels in storage order, most important first. block_bits: uint8 [NB], on any device.

    Channels stay in their run, near the place where they were. INT8 blocks, and a last block that padding fills up,
    stay as they are. Only for inputs that are rotated: in others the order decides what shares a scale.
    """
    found = perm.clone()
    is_int4 = (block_bits == 4)[: perm.shape[0] // BLOCK].tolist()
    start = 0
    for end in range(1, len(is_int4) + 1):
        if end < len(is_int4) and is_int4[end] == is_int4[start]:
            continue
        if is_int4[start]:
            channels = slice(start * BLOCK, end * BLOCK)
            blocks = _evenly(perm[channels].long()).view(-1, BLOCK)
            found[channels] = _inside_blocks(blocks, start).flatten().to(perm.dtype)
        start = end
    return found


def bank_of(channels: Tensor) -> Tensor:
    """The bank of shared memory that holds each channel of a row of 16-bit values."""
    return channels // CHANNELS_A_WORD % BANKS


def _evenly(channels: Tensor) -> Tensor:
    """Channels [n], most important first, so that each bank's, which keep their order, are spread evenly."""
    bank = bank_of(channels)
    order = bank.argsort(stable=True)
    count = bank.bincount(minlength=BANKS)
    rank = torch.empty_like(bank)
    rank[order] = torch.arange(len(bank), device=bank.device) - (count.cumsum(0) - count)[bank[order]]
    quantile = (rank.double() + 0.5) / count[bank]
    return channels[quantile.argsort(stable=True)]


def _inside_blocks(channels: Tensor, first: int) -> Tensor:
    """Channels of consecutive blocks [J, 128], the first of number `first`: each at a position for its bank, if one is
    left."""
    device = channels.device
    number = torch.arange(first, first + len(channels), device=device) % WARP_BLOCKS
    meant = positions_by_bank().to(device)[number]  # [J, 32, 4]
    bank = bank_of(channels)
    order = bank.argsort(dim=1, stable=True)
    sorted_bank = bank.gather(1, order)
    before = (bank[:, None, :] < torch.arange(BANKS, device=device)[:, None]).sum(2)  # [J, 32], of lower banks
    rank = torch.arange(BLOCK, device=device) - before.gather(1, sorted_bank)
    fits = rank < CHANNELS_A_BANK
    position = meant.flatten(1).gather(1, sorted_bank * CHANNELS_A_BANK + rank.clamp(max=CHANNELS_A_BANK - 1))
    free = torch.ones_like(fits)
    row = torch.arange(len(channels), device=device)[:, None].expand_as(position)
    free[row[fits], position[fits]] = False
    position[~fits] = free.nonzero()[:, 1]  # as many in each block, block by block
    return torch.empty_like(channels).scatter_(1, position, channels.gather(1, order))


@functools.cache
def positions_by_bank() -> Tensor:
    """int64 [8, 32, 4]: the positions in a block of number b modulo 8 that are for a bank."""
    of_block = _linear(torch.arange(WARP_BLOCKS), OF_BLOCK)
    banks = _linear(torch.arange(BLOCK), OF_POSITION) ^ of_block[:, None]  # [8, 128]
    return banks.argsort(dim=1, stable=True).view(WARP_BLOCKS, BANKS, CHANNELS_A_BANK)


def _linear(bits: Tensor, columns: tuple[int, ...]) -> Tensor:
    total = torch.zeros_like(bits)
    for i, column in enumerate(columns):
        total ^= (bits >> i & 1) * column
    return total
