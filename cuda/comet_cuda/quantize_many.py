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
FEWEST_TOKENS = 1 << 30  # to be measured
BLOCKS = 8  # of a warp
MOST_WARPS = 16  # of a cta
MOST_GATHERED = 32768  # channels: their places are kept as bytes in 16 bits
DIRECT_WARPS = range(4, 9)  # without a gather
STAGES = 4  # rows in shared memory
REGISTERS = 96  # a thread
SM_REGISTERS = 65536
ALIGNMENT = 16  # bytes, of rows


@dataclasses.dataclass(frozen=True)
class ManyPlan:
    """How one shape is launched."""

    gather: bool
    warps: int
    splits: int  # ctas that share a token's blocks
    tokens: int  # that are under way at once
    shared_bytes: int

    def defines(self, dtype: torch.dtype, hadamard: bool, fuse: int, share: int) -> dict[str, int | str]:
        """The preprocessor definitions of quantize_many.cu; fuse as its number."""
        return {
            "ELEMENT": ELEMENTS[dtype], "TOKENS": 1, "VECTOR": 1, "STAGE": 1, "OUT": 1, "HADAMARD": int(hadamard),
            "FUSE": fuse, "SHARE": share, "GATHER": int(self.gather), "STAGES": STAGES,
            "REGISTERS": REGISTERS,
        }  # fmt: skip


def plan_many(
    rows: int, channels: int, dtype: torch.dtype, fuse: str, layout: str, gathered: bool, sms: int, shared_limit: int
) -> ManyPlan | None:
    """The plan for x [rows, channels] whose rows are aligned to 16 bytes, or None: another kernel takes it.

    Args:
        fuse: "none", "rms_norm" or "silu_mul". gathered: there is a permutation.
    """
    if dtype not in ELEMENTS or layout != "sm_90" or rows < FEWEST_TOKENS or channels % 8:
        return None
    if fuse == "rms_norm" or (gathered and (fuse != "none" or channels > MOST_GATHERED)):
        return None
    blocks = num_blocks(channels)
    needed = -(-blocks // BLOCKS)  # warps a token
    if gathered:
        splits = -(-needed // MOST_WARPS)
        warps = -(-needed // splits)
    else:
        warps = min(DIRECT_WARPS, key=lambda count: (-needed % count, count))
        splits = -(-needed // warps)
    held = blocks if gathered else BLOCKS * warps
    shared_bytes = STAGES * (held * BLOCK * 2 * (2 if fuse == "silu_mul" else 1) + 16)
    if shared_bytes > shared_limit - 1024:
        return None
    ctas = min(
        SM_REGISTERS // REGISTERS // (32 * warps), (shared_limit + 1024) // (shared_bytes + 1024)
    )  # a multiprocessor
    tiles = -(-rows // 8) * 8
    return ManyPlan(gathered, warps, splits, max(1, min(tiles, sms * ctas // splits)), shared_bytes)


def configurations(family: str) -> list[Configuration]:
    """Every way that quantize_many.cu is compiled on a GPU family."""
    if family != "sm_90":
        return []
    return [
        Configuration(SOURCE, ManyPlan(gather, 4, 1, 1, 0).defines(dtype, hadamard, fuse, share), OPTIONS)
        for gather, fuse in ((True, 0), (False, 0), (False, 2))
        for dtype in ELEMENTS
        for hadamard in (False, True)
        for share in (1, 4)
    ]
