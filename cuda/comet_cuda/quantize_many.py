"""Which launches of quantize_act and quantize_token go to quantize_many.cu, and how: many tokens on sm_90.

The decisions made here: from how many tokens on it is the fastest (measured on an H200, results/LOG.md; a gather alone
is not faster there), how many warps a cta has (eight blocks each; the norm needs whole rows, so its ctas take whole
tokens; without a gather a cta takes few blocks and their channels alone), and how many ctas stay.
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
FEWEST_TOKENS_TOKEN = {"none": 512, "rms_norm": 1025, "silu_mul": 133}  # that quantize_row leaves to it
FEWEST_OF_WIDE, WIDE_BLOCKS = 133, 69  # the same of rows of so many blocks that one cta fills a multiprocessor there
BLOCKS = 8  # of a warp
MOST_WARPS = 16  # of a cta; it has one more than blocks need
FEWEST_CTAS = 2  # a multiprocessor, for the norm: with fewer the general kernel is about as fast
DIRECT_WARPS = range(4, 9)  # without a gather
STAGES = {"none": 4, "rms_norm": 3, "silu_mul": 3}  # rows in shared memory
REGISTERS = 96  # a thread
WIDE_WARPS, WIDE_STAGES, WIDE_REGISTERS = 32, 2, 64  # quantize_token's rows of more than MOST_WARPS warps
MOST_BLOCKS, EIGHTS = 128, (8, 16, 32)  # of other rows: INT8 blocks at most, whose scales every thread adds
SM_REGISTERS = 65536
BARRIER_BYTES = 24  # a stage


@dataclasses.dataclass(frozen=True)
class ManyPlan:
    """How one shape is launched."""

    warps: int
    splits: int  # ctas that share a token's blocks
    tokens: int  # that are under way at once
    shared_bytes: int
    wide: bool = False  # few registers a thread


def many_defines(
    dtype: torch.dtype,
    hadamard: bool,
    fuse: str,
    share: int = 1,
    gathered: bool = False,
    int8_blocks: int = 0,
    wide: bool = False,
) -> dict[str, int | str]:
    """The preprocessor definitions of quantize_many.cu; arguments as for `plan_many`.

    Args:
        int8_blocks: of share TOKEN. wide: as in `ManyPlan`.
    """
    defines: dict[str, int | str] = {
        "ELEMENT": ELEMENTS[dtype], "TOKENS": 1, "VECTOR": 1, "STAGE": 1, "OUT": 1, "SHARE": share,
        "GATHER": int(gathered or fuse == "rms_norm"), "FUSE": FUSES.index(fuse), "HADAMARD": int(hadamard),
        "STAGES": WIDE_STAGES if wide else STAGES[fuse], "REGISTERS": WIDE_REGISTERS if wide else REGISTERS,
    }  # fmt: skip
    possible = EIGHTS if hadamard else EIGHTS[:-1]  # the last spills where no block is rotated
    eights = next((most for most in possible if int8_blocks <= most), None)
    if share == TOKEN and not wide and eights is not None:
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
    hadamard: bool = True,
) -> ManyPlan | None:
    """The plan for x [rows, channels] whose rows are aligned to 16 bytes, or None: another kernel takes it.

    Args:
        fuse: "none", "rms_norm" or "silu_mul". gathered: there is a permutation.
        share: 1, or TOKEN: a token's scales are multiples of one, for which a cta takes whole tokens.
        hadamard: INT4 blocks are rotated.
    """
    norm, token = fuse == "rms_norm", share == TOKEN
    whole = norm or token
    blocks = num_blocks(channels)
    fewest = (FEWEST_TOKENS_TOKEN if token else FEWEST_TOKENS)[fuse]
    if token and not norm and blocks >= WIDE_BLOCKS:
        fewest = FEWEST_OF_WIDE
    if dtype not in ELEMENTS or layout != "sm_90" or share not in (1, TOKEN) or channels % 8 or rows < fewest:
        return None
    needed = -(-blocks // BLOCKS)  # warps a token
    wide = token and needed >= MOST_WARPS
    if wide and (norm or spills_where_wide(dtype, hadamard, fuse, gathered)):
        return None
    if (gathered and not whole) or (whole and needed >= (WIDE_WARPS if wide else MOST_WARPS)):
        return None
    warps = needed if whole else min(DIRECT_WARPS, key=lambda count: (-needed % count, count))
    splits = -(-needed // warps)
    held = blocks if norm or gathered else BLOCKS * warps
    warps += 1
    extra = 2 * BLOCKS * BLOCK * needed if norm else 0  # bytes, of the norm's weights
    extra += 2 * 32 * 32 * warps if wide and gathered else 0  # of where each thread's 32 channels lie
    # of two tokens' ratios, or which warp has which block, and to align them
    extra += 2 * 16 * -(-max(blocks, 4 * warps, EIGHTS[-1]) // 4) + 8 if token else 0
    stages, registers = (WIDE_STAGES, WIDE_REGISTERS) if wide else (STAGES[fuse], REGISTERS)
    shared_bytes = stages * (held * BLOCK * 2 * (1 if fuse == "none" else 2) + BARRIER_BYTES) + extra
    ctas = min(SM_REGISTERS // registers // (32 * warps), (shared_limit + 1024) // (shared_bytes + BESIDE[share]))
    if ctas < (FEWEST_CTAS if norm else 1):
        return None
    return ManyPlan(warps, splits, max(1, min(-(-rows // 8) * 8, sms * ctas // splits)), shared_bytes, wide)


def spills_where_wide(dtype: torch.dtype, hadamard: bool, fuse: str, gathered: bool) -> bool:
    """Whether WIDE_REGISTERS do not hold what a thread keeps, as the compiler of CUDA 13.0 says."""
    return not hadamard or (dtype is torch.float16 and fuse == "none" and not gathered)


def configurations(family: str) -> list[Configuration]:
    """Every way that quantize_many.cu is compiled on a GPU family."""
    if family != "sm_90":
        return []
    more = EIGHTS[-1] + 1
    shares = [(1, False, 0, False)]  # share, gathered, INT8 blocks, wide
    shares += [(TOKEN, gathered, eights, False) for gathered in (False, True) for eights in (*EIGHTS, more)]
    shares += [(TOKEN, gathered, more, True) for gathered in (False, True)]
    return [
        Configuration(SOURCE, many_defines(dtype, hadamard, fuse, share, gathered, eights, wide), OPTIONS)
        for fuse in FUSES
        for share, gathered, eights, wide in shares
        if fuse != "rms_norm" or not (gathered or wide)
        for dtype in ELEMENTS
        for hadamard in (False, True)
        if not (wide and spills_where_wide(dtype, hadamard, fuse, gathered))
    ]
