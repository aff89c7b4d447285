"""How quantize_stay.cu is launched: quantize_token of many tokens or wide rows on sm_90, in ctas that stay.

The decision made here is how many ctas share a token and how many rows wait in shared memory, so that several ctas with
different tokens fit a multiprocessor: while one loads or stores, another gathers or rotates.
"""

import dataclasses

import torch

from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.jit import Configuration
from comet_cuda.quantize_many import FUSES
from comet_cuda.quantize_token_plan import ELEMENTS, OPTIONS, WARP

SOURCE = "quantize_stay.cu"
BLOCKS = 8  # of a warp
REGISTERS = 64  # a thread
MOST_WARPS = 32  # of a cta
SM_REGISTERS, SM_WARPS = 65536, 64
VALUES = 32  # of a lane
RESERVED = 1024  # bytes of shared memory that a cta takes beside those asked for
CLUSTERS, STAGES = (1, 2, 4), (1, 2)
NEAR = 1 << 15  # channels whose bytes 16 bits count
GROUPS = 8  # of multiprocessors at most, each an even number of them, that clusters do not cross


@dataclasses.dataclass(frozen=True)
class StayPlan:
    """How one shape is launched."""

    warps: int  # of a cta, that of the scale included
    cluster: int  # ctas that share a token
    stages: int  # rows in shared memory
    ctas: int  # on a multiprocessor
    tokens: int  # under way at once
    used: int  # bytes of shared memory
    shared_bytes: int  # that are asked for
    far: bool = False  # rows to gather from have more than NEAR channels

    def defines(self, dtype: torch.dtype, hadamard: bool, fuse: str, gather: bool) -> dict[str, int | str]:
        """The preprocessor definitions of quantize_stay.cu."""
        return {
            "ELEMENT": ELEMENTS[dtype], "TOKENS": 1, "VECTOR": 1, "STAGE": 1, "OUT": 1, "HADAMARD": int(hadamard),
            "FUSE": FUSES.index(fuse), "GATHER": int(gather), "CLUSTER": self.cluster, "STAGES": self.stages,
            "FAR": int(self.far), "REGISTERS": REGISTERS,
        }  # fmt: skip


def fit(
    rows: int, channels: int, fuse: str, gathered: bool, cluster: int, stages: int, sms: int, shared_limit: int
) -> StayPlan | None:
    """The plan with so many ctas a token and stages, or None where a cta does not fit a multiprocessor.

    Args:
        fuse: "none" or "silu_mul". gathered: there is a permutation.
        sms: multiprocessors of the GPU. shared_limit: bytes that a cta may have.
    """
    blocks = num_blocks(channels)
    each = -(-blocks // cluster)
    warps = -(-each // BLOCKS) + 2  # INT4 blocks begin with a new one, and one has none
    rows_bytes = stages * (2 if fuse == "silu_mul" else 1) * (blocks if gathered else each) * BLOCK * 2
    places = (warps - 1) * WARP * VALUES * 2 if gathered else 0
    words = 2 * (WARP * cluster + -(-blocks // 4) * 4) + 36 + WARP * warps // 4
    used = rows_bytes + places + 4 * words + 8 * (2 * stages + 3)
    room = min(
        SM_REGISTERS // (REGISTERS * WARP * warps), SM_WARPS // warps, (shared_limit + RESERVED) // (used + RESERVED)
    )
    if warps > MOST_WARPS or room == 0 or channels % 8 or fuse == "rms_norm":
        return None
    ctas = min(room, -(-rows * cluster // sms))
    asked = max(used, (shared_limit + RESERVED) // (ctas + 1))  # of so many, one more does not fit
    left_over = 2 * GROUPS if cluster == 4 and ctas % 2 else 0
    tokens = min(rows, max(1, (sms * ctas - left_over) // cluster))
    return StayPlan(warps, cluster, stages, ctas, tokens, used, asked, gathered and channels > NEAR)


def configurations(family: str) -> list[Configuration]:
    """Every way that quantize_stay.cu is compiled on a GPU family."""
    if family != "sm_90":
        return []
    plans = [
        StayPlan(0, cluster, stages, 0, 0, 0, 0, far)
        for cluster in CLUSTERS
        for stages in STAGES
        for far in ((False, True) if cluster > 1 else (False,))
    ]
    return [
        Configuration(SOURCE, plan.defines(dtype, hadamard, fuse, gather), OPTIONS)
        for plan in plans
        for fuse, gather in (("none", True), ("none", False), ("silu_mul", True), ("silu_mul", False))
        if gather or not plan.far
        for dtype in ELEMENTS
        for hadamard in (False, True)
    ]
