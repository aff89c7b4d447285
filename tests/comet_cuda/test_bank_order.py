"""The order of channels in rotated blocks (bank_order.py): what it may not change, and how gathers fare with it."""

import itertools

import pytest
import torch
from torch import Tensor

from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.bank_order import BANKS, OF_BLOCK, OF_POSITION, bank_of, positions_by_bank, spread_over_banks


def four_lanes(blocks: range) -> list[list[int]]:
    """Positions that a warp of quantize_stay.cu and quantize_many.cu reads at once: `Place::piece`, eight blocks."""
    return [
        [
            BLOCK * b + 32 * lane + 8 * (q ^ (2 * (lane & 1) + (lane >> 1))) + i
            for b in blocks[first : first + 8]
            for lane in range(4)
        ]
        for first in range(0, len(blocks), 8)
        for q, i in itertools.product(range(4), range(8))
    ]


def eight_lanes(blocks: range) -> list[list[int]]:
    """The same of quantize_row.cu: `Place::channel`, four blocks. Others with eight lanes a block have its order."""
    return [
        [BLOCK * b + 16 * lane + 4 * (q ^ (lane & 3)) + i for b in blocks[first : first + 4] for lane in range(8)]
        for first in range(0, len(blocks), 4)
        for q, i in itertools.product(range(4), range(4))
    ]


READS = (four_lanes, eight_lanes)


def wait(perm: Tensor, reads: list[list[int]]) -> float:
    """Mean number of different words in the fullest bank."""
    most = [int(bank_of(2 * (perm[at] // 2).unique()).bincount().max()) for at in reads]
    return sum(most) / len(most)


def problem(channels: int, eights: int) -> tuple[Tensor, Tensor]:
    """A random order of importance, and blocks of which the first are INT8."""
    bits = torch.full((num_blocks(channels),), 4, dtype=torch.uint8)
    bits[:eights] = 8
    return torch.randperm(channels, generator=torch.Generator().manual_seed(channels)).int(), bits


@pytest.mark.parametrize("first", range(8))
@pytest.mark.parametrize("reads", READS)
def test_positions_that_are_read_at_once_are_for_all_banks(reads, first) -> None:
    """Wherever a warp's blocks begin."""
    meant = torch.empty(8, BLOCK, dtype=torch.long).scatter_(
        1, positions_by_bank().flatten(1), torch.arange(BANKS).repeat_interleave(4).expand(8, -1)
    )
    for at in reads(range(first, first + 8)):
        assert sorted(meant[p // BLOCK % 8, p % BLOCK] for p in at) == list(range(32))
    assert len(OF_POSITION) == 7 and len(OF_BLOCK) == 3  # of 128 positions, of eight blocks


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("channels", [576, 1536, 4096, 8192, 14336])
def test_a_gather_waits_for_few_banks(channels, reads) -> None:
    """It is 3.4 reads of a bank without the order."""
    eights = num_blocks(channels) * 16 // 100
    perm, bits = problem(channels, eights)
    blocks = range(eights, channels // BLOCK)
    before, after = (wait(order.long(), reads(blocks)) for order in (perm, spread_over_banks(perm, bits)))
    assert before > 2.2 and after < (1.5 if channels >= 4096 else 2.0), (before, after)


@pytest.mark.parametrize(
    ("channels", "eights"), [(128, 0), (128, 1), (300, 1), (576, 0), (4100, 5), (8192, 64), (1536, 11)]
)
def test_what_stays(channels, eights) -> None:
    """INT8 blocks, the last block that is not full, and the set of channels; importance, but for near neighbours."""
    perm, bits = problem(channels, eights)
    found = spread_over_banks(perm, bits)
    assert found.dtype == torch.int32 and torch.equal(found.sort().values, torch.arange(channels).int())
    eight, full = eights * BLOCK, channels // BLOCK * BLOCK
    assert torch.equal(found[:eight], perm[:eight]) and torch.equal(found[full:], perm[full:])
    place = torch.empty(channels, dtype=torch.long).scatter_(0, perm.long(), torch.arange(channels))
    moved = (place[found.long()] // BLOCK - torch.arange(channels) // BLOCK)[eight:full].float()
    assert not moved.numel() or moved.abs().mean() < 1.5  # blocks
    assert full - eight <= BLOCK or not torch.equal(found, perm)


def test_a_bank_with_all_channels_of_a_run_is_no_trouble() -> None:
    """Banks cannot be spread then: it is an order all the same."""
    perm = torch.cat([torch.arange(i, 8192, 64) for i in range(64)]).int()  # bank by bank
    found = spread_over_banks(perm, torch.full((64,), 4, dtype=torch.uint8))
    assert torch.equal(found.sort().values, torch.arange(8192).int())
    few = torch.cat([perm[:128], perm[128:].sort().values])
    bits = torch.cat([torch.full((1,), 4), torch.full((62,), 8), torch.full((1,), 4)]).to(torch.uint8)
    assert torch.equal(spread_over_banks(few, bits)[128:-128], few[128:-128])
