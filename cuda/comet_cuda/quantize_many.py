"""Which launches of quantize_act and quantize_token go to quantize_many.cu, and how: many tokens on sm_90.

The decisions made here: from how many tokens on it is the fastest (measured on an H200, results/LOG.md; a gather alone
is not faster there), how many warps a cta has (eight blocks each; the norm needs whole rows, so its ctas take whole
tokens; without it a cta takes few blocks and their channels alone), and how many ctas stay. With one scale a token it
takes the norm alone; the others are quantize_stay.cu's.
"""

import dataclasses

import torch

from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.jit import Configuration
from comet_cuda.quantize_act import TOKEN

SOURCE = "quantize_many.cu"
OPTIONS = ("-fmad=false",)  # additions and multiplications stay apart, as in the reference
ELEMENTS = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
FUSES = ("none", "rms_norm", "silu_mul")
FEWEST_TOKENS = {"none": 512, "rms_norm": 1024, "silu_mul": 256}
BESIDE = {1: 2048, TOKEN: 1024 + 256 + 128}  # bytes of shared memory a cta takes beside those asked for, by share
FEWEST_TOKENS_TOKEN = 1025  # with one scale a token: that quantize_row leaves to it
BLOCKS = 8  # of a warp
MOST_WARPS = 16  # of a cta; it has one more than blocks need
FEWEST_CTAS = 2  # a multiprocessor, for the norm: with fewer the general kernel is about as fast
DIRECT_WARPS = range(4, 9)  # without a gather
STAGES = {"none": 4, "rms_norm": 3, "silu_mul": 3}  # rows in shared memory
REGISTERS = 96  # a thread
MOST_BLOCKS, EIGHTS = 128, (8, 16, 32)  # with one scale a token; INT8 blocks at most, whose scales every thread adds
SM_REGISTERS = 65536
BARRIER_BYTES = 24  # a stage


@dataclasses.dataclass(frozen=True)
class ManyPlan:
    """How one shape is launched."""

    warps: int
    splits: int  # ctas that share a token's blocks
    tokens: int  # that are under way at once
    shared_bytes: int


def many_defines(
    dtype: torch.dtype, hadamard: bool, fuse: str, share: int = 1, int8_blocks: int = 0
) -> dict[str, int | str]:
    """The preprocessor definitions of quantize_many.cu; arguments as for `plan_many`. int8_blocks: of share TOKEN."""
    defines: dict[str, int | str] = {
        "ELEMENT": ELEMENTS[dtype], "TOKENS": 1, "VECTOR": 1, "STAGE": 1, "OUT": 1, "SHARE": share,
        "FUSE": FUSES.index(fuse), "HADAMARD": int(hadamard), "STAGES": STAGES[fuse], "REGISTERS": REGISTERS,
    }  # fmt: skip
    possible = EIGHTS if hadamard else EIGHTS[:-1]  # the last spills where no block is rotated
    eights = next((most for most in possible if int8_blocks <= most), None)
    if share == TOKEN and eights is not None:
        defines |= {"MOST_BLOCKS": MOST_BLOCKS, "MOST_EIGHTS": eights}
    return defines


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
        share: 1, or TOKEN: a token's scales are multiples of one.
    """
    norm, token = fuse == "rms_norm", share == TOKEN
    blocks = num_blocks(channels)
    fewest = FEWEST_TOKENS_TOKEN if token else FEWEST_TOKENS[fuse]
    if dtype not in ELEMENTS or layout != "sm_90" or share not in (1, TOKEN) or channels % 8 or rows < fewest:
        return None
    needed = -(-blocks // BLOCKS)  # warps a token
    if ((gathered or token) and not norm) or (norm and needed >= MOST_WARPS):
        return None
    warps = needed if norm else min(DIRECT_WARPS, key=lambda count: (-needed % count, count))
    splits = -(-needed // warps)
    held = blocks if norm else BLOCKS * warps
    warps += 1
    extra = 2 * BLOCKS * BLOCK * needed if norm else 0  # bytes, of the norm's weights
    # of two tokens' ratios, or which warp has which block, and to align them
    extra += 2 * 16 * -(-max(blocks, 4 * warps, EIGHTS[-1]) // 4) + 8 if token else 0
    shared_bytes = STAGES[fuse] * (held * BLOCK * 2 * (1 if fuse == "none" else 2) + BARRIER_BYTES) + extra
    ctas = min(SM_REGISTERS // REGISTERS // (32 * warps), (shared_limit + 1024) // (shared_bytes + BESIDE[share]))
    if ctas < (FEWEST_CTAS if norm else 1):
        return None
    return ManyPlan(warps, splits, max(1, min(-(-rows // 8) * 8, sms * ctas // splits)), shared_bytes)


def configurations(family: str) -> list[Configuration]:
    """Every way that quantize_many.cu is compiled on a GPU family."""
    if family != "sm_90":
        return []
    forms = [(fuse, 1, 0) for fuse in FUSES] + [("rms_norm", TOKEN, eights) for eights in (*EIGHTS, EIGHTS[-1] + 1)]
    return [
        Configuration(SOURCE, many_defines(dtype, hadamard, fuse, share, eights), OPTIONS)
        for fuse, share, eights in forms
        for dtype in ELEMENTS
        for hadamard in (False, True)
    ]
