"""Which launches of quantize_act go to quantize_many.cu, and how: those of many tokens on sm_90.

The decisions made here: how many warps a cta has (eight blocks each; a gather needs whole rows, so a cta takes as many
blocks of a token as its warps can; without one it takes few and their channels alone), and how many ctas stay.
"""

import dataclasses

import torch

from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.jit import Configuration

SOURCE = "quantize_many.cu"
OPTIONS = ("-fmad=false",)  # additions and multiplications stay apart, as in the reference
ELEMENTS = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
FUSES = ("none", "rms_norm", "silu_mul")
FEWEST_TOKENS = 1 << 30  # to be measured
BLOCKS = 8  # of a warp
MOST_WARPS = 16  # of a cta
MOST_GATHERED = 32768  # channels: their places are kept as bytes in 16 bits
DIRECT_WARPS = range(4, 9)  # without a gather
STAGES = {"none": 4, "rms_norm": 3, "silu_mul": 3}  # rows in shared memory
REGISTERS = 96  # a thread
SM_REGISTERS = 65536
BARRIER_BYTES = 24  # a stage


@dataclasses.dataclass(frozen=True)
class ManyPlan:
    """How one shape is launched."""

    gather: bool
    warps: int
    splits: int  # ctas that share a token's blocks
    tokens: int  # that are under way at once
    shared_bytes: int

    def defines(self, dtype: torch.dtype, hadamard: bool, fuse: str, share: int) -> dict[str, int | str]:
        """The preprocessor definitions of quantize_many.cu."""
        return {
            "ELEMENT": ELEMENTS[dtype], "TOKENS": 1, "VECTOR": 1, "STAGE": 1, "OUT": 1, "HADAMARD": int(hadamard),
            "FUSE": FUSES.index(fuse), "SHARE": share, "GATHER": int(self.gather), "STAGES": STAGES[fuse],
            "REGISTERS": REGISTERS,
        }  # fmt: skip


def plan_many(
    rows: int,
    channels: int,
    dtype: torch.dtype,
    fuse: str,
    layout: str,
    share: int,
    gathered: bool,
    sms: int,
    shared_limit: int,
) -> ManyPlan | None:
    """The plan for x [rows, channels] whose rows are aligned to 16 bytes, or None: another kernel takes it.

    Args:
        fuse: "none", "rms_norm" or "silu_mul". gathered: there is a permutation.
    """
    if dtype not in ELEMENTS or layout != "sm_90" or rows < FEWEST_TOKENS or channels % 8:
        return None
    gather = gathered or fuse == "rms_norm"  # the norm needs the whole row
    if gather and (fuse == "silu_mul" or channels > MOST_GATHERED):
        return None
    blocks, spare = num_blocks(channels), int(share == 1)  # each precision begins with a new warp
    needed = -(-blocks // BLOCKS)  # warps a token
    if gather:
        splits = -(-needed // (MOST_WARPS - spare))
        warps = -(-needed // splits)
    else:
        warps = min(DIRECT_WARPS, key=lambda count: (-needed % count, count))
        splits = -(-needed // warps)
    held = blocks if gather else BLOCKS * warps
    shared_bytes = STAGES[fuse] * (held * BLOCK * 2 * (1 if fuse == "none" else 2) + BARRIER_BYTES)
    warps += spare
    shared_bytes += 2 * BLOCKS * BLOCK * warps if fuse == "rms_norm" else 0  # the weights
    if shared_bytes > shared_limit - 1024:
        return None
    by_registers = SM_REGISTERS // REGISTERS // (32 * warps)
    ctas = min(by_registers, (shared_limit + 1024) // (shared_bytes + 2048))  # a multiprocessor
    tiles = -(-rows // 8) * 8
    return ManyPlan(gather, warps, splits, max(1, min(tiles, sms * ctas // splits)), shared_bytes)


def configurations(family: str) -> list[Configuration]:
    """Every way that quantize_many.cu is compiled on a GPU family."""
    if family != "sm_90":
        return []
    return [
        Configuration(SOURCE, ManyPlan(gather, 4, 1, 1, 0).defines(dtype, hadamard, fuse, share), OPTIONS)
        for gather, fuse in ((True, "none"), (True, "rms_norm"), (False, "none"), (False, "silu_mul"))
        for dtype in ELEMENTS
        for hadamard in (False, True)
        for share in (1, 4)
    ]
