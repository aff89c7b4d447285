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
FEWEST_TOKENS_TOKEN = {"none": 512, "rms_norm": 512, "silu_mul": 512}  # of quantize_token: a guess
BLOCKS = 8  # of a warp
MOST_WARPS = 16  # of a cta; it has one more than blocks need
FEWEST_CTAS = 2  # a multiprocessor, for the norm: with fewer the general kernel is about as fast
DIRECT_WARPS = range(4, 9)  # without a gather
STAGES = {"none": 4, "rms_norm": 3, "silu_mul": 3}  # rows in shared memory
REGISTERS = 96  # a thread
SHORT = True  # quantize_token with fewer registers a thread: more ctas a multiprocessor, and rows of 32,768 channels
DIRECT = False  # quantize_token: every thread adds the INT8 blocks' scales alone
SHORT_REGISTERS = (80, 72, 64)  # the first that allows two thirds of the ctas that any does
SHORT_WARPS = 32  # of a cta
SHORT_STAGES = 3
SM_REGISTERS = 65536
BARRIER_BYTES = 24  # a stage


@dataclasses.dataclass(frozen=True)
class ManyPlan:
    """How one shape is launched."""

    warps: int
    splits: int  # ctas that share a token's blocks
    tokens: int  # that are under way at once
    shared_bytes: int
    registers: int = REGISTERS  # a thread
    stages: int = 0


def many_defines(
    dtype: torch.dtype,
    hadamard: bool,
    fuse: str,
    share: int = 1,
    gathered: bool = False,
    plan: ManyPlan | None = None,
    eights: int | None = None,
) -> dict[str, int | str]:
    """The preprocessor definitions of quantize_many.cu; arguments as for `plan_many`.

    Args:
        plan: with share TOKEN. eights: INT8 blocks at most, see token_scale.cuh.
    """
    more: dict[str, int | str] = {}
    if plan is not None and plan.registers != REGISTERS:
        more = {"REGISTERS": plan.registers, "PLACES": 1, "STAGES": plan.stages}
    if plan is not None and DIRECT and eights:
        more |= {"DIRECT": 32 * -(-BLOCKS * (plan.warps - 1) // 32), "EIGHTS": eights}
    defines: dict[str, int | str] = {
        "ELEMENT": ELEMENTS[dtype], "TOKENS": 1, "VECTOR": 1, "STAGE": 1, "OUT": 1, "SHARE": share,
        "GATHER": int(gathered or fuse == "rms_norm"),
        "FUSE": FUSES.index(fuse), "HADAMARD": int(hadamard), "STAGES": STAGES[fuse], "REGISTERS": REGISTERS,
    }  # fmt: skip
    return defines | more


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
        share: 1, or TOKEN: a token's scales are multiples of one, for which a cta takes whole tokens.
    """
    norm, token = fuse == "rms_norm", share == TOKEN
    whole = norm or token
    fewest = (FEWEST_TOKENS_TOKEN if token else FEWEST_TOKENS)[fuse]
    if dtype not in ELEMENTS or layout != "sm_90" or share not in (1, TOKEN) or channels % 8 or rows < fewest:
        return None
    blocks = num_blocks(channels)
    needed = -(-blocks // BLOCKS)  # warps a token
    if token and SHORT and not norm:
        return plan_short(rows, channels, fuse, gathered, sms, shared_limit)
    if (gathered and not whole) or (whole and needed >= MOST_WARPS):
        return None
    warps = needed if whole else min(DIRECT_WARPS, key=lambda count: (-needed % count, count))
    splits = -(-needed // warps)
    held = blocks if norm or gathered else BLOCKS * warps
    warps += 1
    extra = 2 * BLOCKS * BLOCK * needed if norm else 0  # bytes, of the norm's weights
    extra += ratio_bytes(blocks, warps) if token else 0
    shared_bytes = STAGES[fuse] * (held * BLOCK * 2 * (1 if fuse == "none" else 2) + BARRIER_BYTES) + extra + 8
    ctas = min(SM_REGISTERS // REGISTERS // (32 * warps), (shared_limit + 1024) // (shared_bytes + BESIDE[share]))
    if ctas < (FEWEST_CTAS if norm else 1):
        return None
    return ManyPlan(warps, splits, max(1, min(-(-rows // 8) * 8, sms * ctas // splits)), shared_bytes)


def ratio_bytes(blocks: int, warps: int) -> int:
    """Shared memory of two tokens' ratios, or which warp has which block."""
    return 2 * 4 * ((max(blocks, 4 * warps, 32) + 3) // 4 * 4)


def plan_short(rows: int, channels: int, fuse: str, gathered: bool, sms: int, shared_limit: int) -> ManyPlan | None:
    """`plan_many` of quantize_token where SHORT is set."""
    blocks = num_blocks(channels)
    warps = -(-blocks // BLOCKS) + 1
    if warps > SHORT_WARPS:
        return None
    inputs = 1 if fuse == "none" else 2
    extra = ratio_bytes(blocks, warps) + 8 + (2 * 32 * 32 * warps if gathered else 0)
    found: list[tuple[int, int, int]] = []  # ctas, registers, stages
    for registers in SHORT_REGISTERS:
        for stages in (SHORT_STAGES, 2):
            shared_bytes = stages * (blocks * BLOCK * 2 * inputs + BARRIER_BYTES) + extra
            ctas = min(
                SM_REGISTERS // (registers * 32 * warps), (shared_limit + 1024) // (shared_bytes + BESIDE[TOKEN])
            )
            found.append((ctas, registers, stages))
    best = next((each for each in found if 3 * each[0] > 2 * max(found)[0]), found[0])
    ctas, registers, stages = best
    if ctas < 1:
        return None
    shared_bytes = stages * (blocks * BLOCK * 2 * inputs + BARRIER_BYTES) + extra
    return ManyPlan(warps, 1, max(1, min(rows, sms * ctas)), shared_bytes, registers, stages)


def configurations(family: str) -> list[Configuration]:
    """Every way that quantize_many.cu is compiled on a GPU family."""
    if family != "sm_90":
        return []
    return [
        Configuration(SOURCE, many_defines(dtype, hadamard, fuse, share, gathered), OPTIONS)
        for fuse in FUSES
        for share, gathered in ((1, False), (TOKEN, False), (TOKEN, True))
        if fuse != "rms_norm" or not gathered
        for dtype in ELEMENTS
        for hadamard in (False, True)
    ]
