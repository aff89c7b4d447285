"""Which launches of quantize_token go to quantize_row.cu, and how: up to a few hundred tokens on sm_90.

The decision made here is how many ctas (a token each, eight lanes a block) a multiprocessor has, by the shared memory
that they ask for: as many as the tokens need and no more. Where there is room for another one, ctas of the next launch
lie in wait in it, and those of one launch crowd on few multiprocessors while others idle (measured on an H200,
results/LOG.md). Wide rows without a gather are shared by a cluster of ctas while multiprocessors are free (CLUSTERS).
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
CLUSTER_BLOCKS, CLUSTER_CTAS = 64, 8  # without a gather, more blocks go to clusters in quantize_token.cu
CLUSTERS = ((4, 5.5), (2, 2.0))  # ctas that share a token of over WHOLE_WARPS warps: multiprocessors a token at least
WHOLE_WARPS = 18
MBARRIER = 8  # bytes of shared memory, in a cluster
RESERVED = 1024  # bytes of shared memory that a cta takes beside those asked for
MOST_TOKENS, MOST_NORM_TOKENS = 511, 1024  # beyond, other kernels take them


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """How one shape is launched."""

    warps: int  # of a cta
    size: int  # the same, as in MOST_CTAS
    ctas: int  # on a multiprocessor
    used: int  # bytes of shared memory
    shared_bytes: int  # that are asked for
    eights: int  # INT8 blocks at most
    cluster: int = 1  # ctas that share a token

    def defines(self, dtype: torch.dtype, hadamard: bool, fuse: str, gather: bool) -> dict[str, int | str]:
        """The preprocessor definitions of quantize_row.cu."""
        return {
            "ELEMENT": ELEMENTS[dtype], "TOKENS": 1, "VECTOR": 1, "STAGE": 1, "OUT": 1,
            "HADAMARD": int(hadamard), "FUSE": FUSES.index(fuse), "GATHER": int(gather or fuse == "rms_norm"),
            "MOST_BLOCKS": BLOCKS * self.size * self.cluster, "MOST_EIGHTS": self.eights, "CLUSTER": self.cluster,
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
    blocks, gather = num_blocks(channels), gathered or fuse == "rms_norm"
    warps = -(-blocks // BLOCKS) + 1  # INT4 blocks begin with a new one
    cluster = 1 if gather or warps <= WHOLE_WARPS else cluster_of(rows, sms)
    warps = -(-warps // cluster)
    size = next((size for size in MOST_CTAS if warps <= size), None)
    most = MOST_NORM_TOKENS if fuse == "rms_norm" else MOST_TOKENS
    if size is None or channels % 8 or rows > most or (fuse == "silu_mul" and gather):
        return None
    eights = next((most for most in EIGHTS[size] if int8_blocks <= most), None)
    in_clusters = not gather and blocks > CLUSTER_BLOCKS and CLUSTER_CTAS * rows <= sms
    ctas = min(-(-rows * cluster // sms), MOST_CTAS[size])
    if eights is None or in_clusters or (MOST_CTAS[size] == 1 and rows > sms):  # a second wave of such ctas loses
        return None
    cell = 4 if fuse == "rms_norm" else 2  # bytes of a staged channel, its norm's weight included
    used = 4 * ratios_pitch(blocks) + (blocks * BLOCK * cell if gather else 0) + (MBARRIER if cluster > 1 else 0)
    least = (shared_limit + RESERVED) // (ctas + 1)  # of so many, one more does not fit
    return RowPlan(warps, size, ctas, used, max(used, least), eights, cluster)


def cluster_of(rows: int, sms: int) -> int:
    """Ctas that share a token, if all clusters find room at once.

    One, two and four ctas a token take 6.63, 4.28 and 3.16 us for 17 tokens of 14,336 channels (H200, SiLU), and 6.71,
    4.34 and 5.71 for 32: multiprocessors come in groups, of which fours leave a rest. So four end at 24 of 132; what
    lies between 17 and 32 was not measured.
    """
    return next((ctas for ctas, least in CLUSTERS if least * rows <= sms), 1)


def ratios_pitch(blocks: int) -> int:
    """Floats of a token's ratios in shared memory."""
    return max(blocks + 3, 32) // 4 * 4


def configurations(family: str) -> list[Configuration]:
    """Every way that quantize_row.cu is compiled on a GPU family."""
    if family != "sm_90":
        return []
    plans = [
        RowPlan(size, size, ctas, 0, 0, eights, cluster)
        for size, most in MOST_CTAS.items()
        for ctas, cluster in [*((ctas, 1) for ctas in sorted({1, most})), (1, 2), (1, 4)]
        for eights in EIGHTS[size]
    ]
    forms = [("none", True), ("none", False), ("rms_norm", True), ("silu_mul", False)]
    return [
        Configuration(SOURCE, plan.defines(dtype, hadamard, fuse, gather), OPTIONS)
        for plan in plans
        for fuse, gather in forms
        if plan.cluster == 1 or not gather
        for dtype in ELEMENTS
        for hadamard in (False, True)
    ]
