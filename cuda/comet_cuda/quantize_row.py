"""Which launches of quantize_token go to quantize_row.cu, and how: few tokens on sm_90, more of them with the norm.

The decision made here is how many ctas (a token each, eight lanes a block) a multiprocessor has, by the shared memory
that they ask for: as many as the tokens need and no more. Where there is room for another one, ctas of the next launch
lie in wait in it, and those of one launch crowd on few multiprocessors while others idle (measured on an H200,
results/LOG.md). Without the norm, more tokens or wider rows than FEW has are quantize_stay.cu's.
"""

import dataclasses

import torch

from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.jit import Configuration
from comet_cuda.quantize_many import FUSES
from comet_cuda.quantize_token_plan import ELEMENTS, OPTIONS, WARP

SOURCE = "quantize_row.cu"
BLOCKS = 4  # of a warp
MOST_CTAS = {10: 3, 18: 2, 32: 1}  # warps a cta at most: ctas that a multiprocessor's registers allow
EIGHTS = {10: (8, 32), 18: (16, 32), 32: (32,)}  # by the same: INT8 blocks at most, whose scales every thread adds
RESERVED = 1024  # bytes of shared memory that a cta takes beside those asked for
MOST_TOKENS = 1024  # with the norm; beyond, quantize_many takes them
FEW = ((24, 3), (48, 1))  # without the norm: blocks at most, tokens a multiprocessor at most


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """How one shape is launched."""

    warps: int  # of a cta
    size: int  # the same, as in MOST_CTAS
    ctas: int  # on a multiprocessor
    used: int  # bytes of shared memory
    shared_bytes: int  # that are asked for
    eights: int  # INT8 blocks at most

    def defines(self, dtype: torch.dtype, hadamard: bool, fuse: str, gather: bool) -> dict[str, int | str]:
        """The preprocessor definitions of quantize_row.cu."""
        return {
            "ELEMENT": ELEMENTS[dtype], "TOKENS": 1, "VECTOR": 1, "STAGE": 1, "OUT": 1,
            "HADAMARD": int(hadamard), "FUSE": FUSES.index(fuse), "GATHER": int(gather or fuse == "rms_norm"),
            "MOST_BLOCKS": BLOCKS * self.size, "MOST_EIGHTS": self.eights,
            "THREADS": WARP * self.size, "MIN_CTAS": 1 if self.ctas == 1 else MOST_CTAS[self.size],
        }  # fmt: skip


def plan_row(
    rows: int,
    channels: int,
    fuse: str,
    gathered: bool,
    int8_blocks: int,
    sms: int,
    shared_limit: int,
) -> RowPlan | None:
    """The plan for x [rows, channels] whose rows are aligned to 16 bytes, or None: another kernel takes it.

    Args:
        fuse: "none", "rms_norm" or "silu_mul". gathered: there is a permutation.
        sms: multiprocessors of the GPU. shared_limit: bytes that a cta may have.
    """
    blocks, gather, norm = num_blocks(channels), gathered or fuse == "rms_norm", fuse == "rms_norm"
    warps = -(-blocks // BLOCKS) + 1  # INT4 blocks begin with a new one
    size = next((size for size in MOST_CTAS if warps <= size), None)
    if size is None or channels % 8 or (fuse == "silu_mul" and gather):
        return None
    if not (rows <= MOST_TOKENS if norm else is_few(rows, blocks, sms)):
        return None
    eights = next((most for most in EIGHTS[size] if int8_blocks <= most), None)
    ctas = min(-(-rows // sms), MOST_CTAS[size])
    if eights is None or (MOST_CTAS[size] == 1 and rows > sms):  # a second wave of such ctas loses
        return None
    used = 4 * ratios_pitch(blocks) + (blocks * BLOCK * (4 if norm else 2) if gather else 0)  # 4: its weight included
    least = (shared_limit + RESERVED) // (ctas + 1)  # of so many, one more does not fit
    return RowPlan(warps, size, ctas, used, max(used, least), eights)


def is_few(rows: int, blocks: int, sms: int) -> bool:
    """Whether tokens without the norm are so few, and so narrow, that ctas that stay lose."""
    return any(blocks <= most and rows <= tokens * sms for most, tokens in FEW)


def ratios_pitch(blocks: int) -> int:
    """Floats of a token's ratios in shared memory."""
    return max(blocks + 3, 32) // 4 * 4


def configurations(family: str) -> list[Configuration]:
    """Every way that quantize_row.cu is compiled on a GPU family."""
    if family != "sm_90":
        return []
    sizes = [(size, ctas) for size, most in MOST_CTAS.items() for ctas in sorted({1, most})]
    forms = [(size, ctas, "rms_norm", True) for size, ctas in sizes]
    without = [("none", True), ("none", False), ("silu_mul", False)]
    forms += [(size, ctas, *form) for size, ctas in ((10, 1), (10, 3), (18, 1)) for form in without]  # see FEW
    return [
        Configuration(SOURCE, RowPlan(size, size, ctas, 0, 0, eights).defines(dtype, hadamard, fuse, gather), OPTIONS)
        for size, ctas, fuse, gather in forms
        for eights in EIGHTS[size]
        for dtype in ELEMENTS
        for hadamard in (False, True)
    ]
