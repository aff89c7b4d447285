"""How quantize_token.cu is launched: one scale a token, for the integer GEMM of sm_90 and for all other layouts.

The decision made here is how a token's blocks are shared out to warps: a block a warp while tokens are few and latency
counts, in a cluster of ctas (the integer GEMM's layout alone) if one is not enough; several blocks a warp (half as many
threads a cta) once the GPU is full; rows too wide for registers are computed twice.
"""

import dataclasses

import torch
from torch import Tensor

from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.errors import CometError
from comet_cuda.jit import Configuration
from comet_cuda.quantize_act import TOKEN
from comet_cuda.quantize_few import RESERVED_SHARED
from comet_cuda.quantize_many import FUSES
from comet_cuda.quantize_token_ref import check_blocks

SOURCE = "quantize_token.cu"
OPTIONS = ("-fmad=false",)  # additions and multiplications stay apart, as in the reference
ELEMENTS = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
WARP = 32
FEW_WARPS, MOST_WARPS = 16, 32  # of a cta
MOST_CLUSTER = 8  # ctas that share a token
ROUNDS = (1, 2, 4, 7)  # blocks of a warp that registers keep
PLAIN_ROUNDS = (1, 2, 4)  # the same for other layouts than the integer GEMM's: seven spill on sm_80
MOST_BATCH = 4  # groups of four channels that a thread loads before it stages the first


@dataclasses.dataclass(frozen=True)
class TokenPlan:
    """How one shape is launched: a cta a token."""

    warps: int  # of a cta
    cluster: int  # ctas that share a token
    rounds: int  # blocks a warp takes; 0: as many as it needs, their values computed twice
    gather: bool  # through a row in shared memory
    vector: bool  # rows are aligned to four channels
    shared_bytes: int

    def defines(self, dtype: torch.dtype, hadamard: bool, fuse: str, out: int = 1) -> dict[str, int | str]:
        """The preprocessor definitions of quantize_token.cu; out: 1 for the integer GEMM, or as in LAYOUTS."""
        wide = self.warps > FEW_WARPS or self.cluster > 1
        return {
            "ELEMENT": ELEMENTS[dtype], "TOKENS": 1, "VECTOR": int(self.vector), "STAGE": 1, "OUT": out,
            "HADAMARD": int(hadamard), "FUSE": FUSES.index(fuse), "GATHER": int(self.gather),
            "ROUNDS": max(1, self.rounds), "CLUSTER": self.cluster, "KEEP": int(self.rounds > 0),
            "BATCH": min(MOST_BATCH, self.cluster * self.rounds or MOST_BATCH),
            "THREADS": WARP * (MOST_WARPS if wide else FEW_WARPS), "MIN_CTAS": 1 if wide else 2,
        }  # fmt: skip


def plan_token(
    rows: int,
    channels: int,
    fuse: str,
    gathered: bool,
    vector: bool,
    sms: int,
    most_cluster: int = MOST_CLUSTER,
    most_rounds: int = ROUNDS[-1],
) -> TokenPlan:
    """The plan for x [rows, channels].

    Args:
        fuse: "none", "rms_norm" or "silu_mul". gathered: there is a permutation.
        vector: rows are aligned to four channels. sms: multiprocessors of the GPU.
        most_cluster: ctas that may share a token. most_rounds: blocks of a warp that registers may keep.
    """
    blocks = num_blocks(channels)
    gather = gathered or fuse == "rms_norm"  # the norm needs the whole row
    cell = 4 if fuse == "rms_norm" else 2  # bytes of a staged channel, its norm's weight included
    shared_bytes = -(-blocks // 4) * 16 + (blocks * BLOCK * cell if gather else 0)
    cluster = 1  # while multiprocessors are free, in ctas of few warps: instructions bound those of many
    while vector and 2 * cluster <= most_cluster and 2 * cluster * rows <= sms and cluster * FEW_WARPS < blocks:
        cluster *= 2
    for warps in (MOST_WARPS,) if rows <= sms else (FEW_WARPS, MOST_WARPS):
        kept = [rounds for rounds in ROUNDS if most_rounds >= rounds >= blocks / (warps * cluster)]
        if kept and vector:
            return TokenPlan(-(-blocks // (cluster * kept[0])), cluster, kept[0], gather, vector, shared_bytes)
    return TokenPlan(min(blocks, MOST_WARPS if vector else FEW_WARPS), 1, 0, gather, vector, shared_bytes)


def plan_plain(
    rows: int, channels: int, fuse: str, gathered: bool, vector: bool, sms: int, shared_limit: int
) -> TokenPlan:
    """`plan_token` for the layouts with a scale a block, on any GPU; shared_limit: bytes that a cta may have.

    Errors:
        CometError where sums of integers could exceed 32 bits, or a row with the norm's weights does not fit.
    """
    check_blocks(channels, 0)
    plan = plan_token(rows, channels, fuse, gathered, vector, sms, 1, PLAIN_ROUNDS[-1])
    if plan.shared_bytes > shared_limit - RESERVED_SHARED:
        raise CometError(
            f"quantize_act by token, fused with {fuse}: a row of {channels} channels does not fit in shared memory",
            "call the norm or activation first, then quantize_act",
        )
    return plan


def has_kernel(x: Tensor, layout: str, share: int) -> bool:
    """Whether a kernel quantizes so. With one scale a token none takes float32 (packing and evaluation, where time is
    elsewhere) or writes for the sm_90 GEMM with a scale a block (quantize_token serves the other).
    """
    return share != TOKEN or (x.dtype is not torch.float32 and layout != "sm_90")


def configurations(family: str) -> list[Configuration]:
    """Every way that quantize_token.cu is compiled on a GPU family (its name is that of its activations' layout)."""
    from comet_cuda.quantize_act_cuda import LAYOUTS

    plain = [(MOST_WARPS, 1, 0, True), (FEW_WARPS, 1, 0, False)]
    plain += [(warps, 1, rounds, True) for warps in (FEW_WARPS, MOST_WARPS) for rounds in PLAIN_ROUNDS]
    ways = plain
    if family == "sm_90":
        ways = plain + [(warps, 1, ROUNDS[-1], True) for warps in (FEW_WARPS, MOST_WARPS)]
        ways += [(MOST_WARPS, ctas, rounds, True) for ctas in (2, 4, 8) for rounds in ROUNDS if rounds * ctas <= 16]
    forms = [(fuse, gather) for fuse in FUSES for gather in (True, False) if gather or fuse != "rms_norm"]
    found = [(way, form, LAYOUTS[family]) for way in ways for form in forms]
    found += [(way, form, LAYOUTS["canonical"]) for way in plain for form in forms if form[0] == "none"]
    return [
        Configuration(
            SOURCE,
            TokenPlan(warps, ctas, rounds, gather, vector, 0).defines(dtype, hadamard, fuse, out),
            OPTIONS,
        )
        for (warps, ctas, rounds, vector), (fuse, gather), out in found
        for dtype in ELEMENTS
        for hadamard in (False, True)
    ]
