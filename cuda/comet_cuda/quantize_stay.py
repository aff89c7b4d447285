"""How quantize_stay.cu is launched: quantize_token on sm_90 without the norm, of all that quantize_row.cu leaves.

The decisions made here are how many ctas share a token, so that several ctas with different tokens fit a multiprocessor
(while one loads or stores, another gathers or rotates), and how many it has: the fewest that need no more rounds, so
that the last round is nearly as full as the first. Measured on an H200 (results/LOG.md).
"""

import dataclasses

import torch

from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.jit import Configuration
from comet_cuda.quantize_many import FUSES
from comet_cuda.quantize_row import is_few
from comet_cuda.quantize_token_plan import ELEMENTS, OPTIONS, WARP

SOURCE = "quantize_stay.cu"
BLOCKS = 8  # of a warp
REGISTERS = 64  # a thread
MOST_WARPS = 32  # of a cta
SM_REGISTERS, SM_WARPS = 65536, 64
VALUES = 32  # of a lane
RESERVED = 1024  # bytes of shared memory that a cta takes beside those asked for
BARRIERS = 5
CLUSTERS = (1, 2, 4)
WORTH = 0.75  # the largest part of the work that two ctas a token may leave the fullest multiprocessor
SPREAD, SPREAD_BLOCKS = 16, 64  # multiprocessors a token, blocks: quantize_token.cu's ctas win without a gather
NEAR = 1 << 15  # channels whose bytes 16 bits count
GROUPS = 8  # of multiprocessors at most, each an even number of them, that clusters do not cross


@dataclasses.dataclass(frozen=True)
class StayPlan:
    """How one shape is launched."""

    warps: int  # of a cta, that of the scale included
    cluster: int  # ctas that share a token
    ctas: int  # on a multiprocessor
    room: int  # for so many ctas
    tokens: int  # under way at once
    rounds: int
    used: int  # bytes of shared memory
    shared_bytes: int  # that are asked for
    far: bool = False  # rows to gather from have more than NEAR channels

    def defines(self, dtype: torch.dtype, hadamard: bool, fuse: str, gather: bool) -> dict[str, int | str]:
        """The preprocessor definitions of quantize_stay.cu."""
        return {
            "ELEMENT": ELEMENTS[dtype], "TOKENS": 1, "VECTOR": 1, "STAGE": 1, "OUT": 1, "HADAMARD": int(hadamard),
            "FUSE": FUSES.index(fuse), "GATHER": int(gather), "CLUSTER": self.cluster, "FAR": int(self.far),
            "REGISTERS": REGISTERS,
        }  # fmt: skip

    @property
    def most(self) -> float:
        """Tokens that the fullest multiprocessor takes, if all rounds are full."""
        return self.rounds * self.ctas / self.cluster


def plan_stay(rows: int, channels: int, fuse: str, gathered: bool, sms: int, shared_limit: int) -> StayPlan | None:
    """The plan for x [rows, channels] whose rows are aligned to 16 bytes, or None: quantize_token.cu takes it.

    Args:
        fuse: "none", "rms_norm" or "silu_mul". gathered: there is a permutation.
        sms: multiprocessors of the GPU. shared_limit: bytes that a cta may have.
    """
    blocks = num_blocks(channels)
    spread = not gathered and blocks > SPREAD_BLOCKS and SPREAD * rows <= sms  # over clusters of eight
    if fuse == "rms_norm" or channels % 8 or is_few(rows, blocks, sms) or spread:
        return None
    one, two, four = (fit(rows, channels, fuse, gathered, cluster, sms, shared_limit) for cluster in CLUSTERS)
    if four is not None and (two is None or (four.ctas == 1 and rows <= four.tokens)):
        return four
    if one is None or one.room == 1 or (two is not None and two.most <= WORTH * one.most):
        return two
    return one


def fit(
    rows: int, channels: int, fuse: str, gathered: bool, cluster: int, sms: int, shared_limit: int
) -> StayPlan | None:
    """The plan with so many ctas a token, or None where a cta does not fit a multiprocessor; see `plan_stay`."""
    blocks = num_blocks(channels)
    each = -(-blocks // cluster)
    warps = -(-each // BLOCKS) + 2  # INT4 blocks begin with a new one, and one has none
    rows_bytes = (2 if fuse == "silu_mul" else 1) * (blocks if gathered else each) * BLOCK * 2
    places = (warps - 1) * WARP * VALUES * 2 if gathered else 0
    words = 2 * (WARP * cluster + -(-blocks // 4) * 4) + 36 + WARP * warps // 4
    used = rows_bytes + places + 4 * words + 8 * BARRIERS
    room = min(
        SM_REGISTERS // (REGISTERS * WARP * warps), SM_WARPS // warps, (shared_limit + RESERVED) // (used + RESERVED)
    )
    if warps > MOST_WARPS or room == 0 or (cluster - 1) * each >= blocks:
        return None

    def at_once(ctas: int) -> int:
        left_over = 2 * GROUPS if cluster == 4 and ctas % 2 else 0
        return max(1, (sms * ctas - left_over) // cluster)

    rounds = -(-rows // at_once(room))
    ctas = next(ctas for ctas in range(1, room + 1) if rounds * at_once(ctas) >= rows)
    asked = max(used, (shared_limit + RESERVED) // (ctas + 1))  # of so many, one more does not fit
    tokens = min(rows, at_once(ctas))
    return StayPlan(warps, cluster, ctas, room, tokens, rounds, used, asked, gathered and channels > NEAR)


def configurations(family: str) -> list[Configuration]:
    """Every way that quantize_stay.cu is compiled on a GPU family."""
    if family != "sm_90":
        return []
    return [
        Configuration(
            SOURCE, StayPlan(0, cluster, 0, 0, 0, 0, 0, 0, far).defines(dtype, hadamard, fuse, gather), OPTIONS
        )
        for cluster in CLUSTERS
        for fuse in ("none", "silu_mul")
        for gather, far in ((False, False), (True, False), *(((True, True),) if cluster > 1 else ()))
        for dtype in ELEMENTS
        for hadamard in (False, True)
    ]
