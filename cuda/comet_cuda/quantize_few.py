"""Which launches of quantize_act go to quantize_few.cu, and how: those of few tokens.

The decision made here: up to how many tokens a launch's time is its latency, which quantize_few.cu keeps short, and not
its instructions, of which quantize_act.cu needs fewer. Measured on an H200 (results/LOG.md).
"""

import dataclasses

import torch

from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.jit import Configuration

SOURCE = "quantize_few.cu"
OPTIONS = ("-fmad=false",)  # additions and multiplications stay apart, as in the reference
ELEMENTS = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
MOST_TOKENS = 256
GATHER_THREADS, DIRECT_THREADS = 512, 256  # a cta
WARP = 32
BATCHES = (2, 4)  # groups of four channels that a thread loads at once
MIN_CTAS = {True: 2, False: 6}  # a multiprocessor, that registers must allow; by whether it gathers
RESERVED_SHARED = 1024  # bytes of a cta's shared memory that rows leave: the system's, and partial sums


@dataclasses.dataclass(frozen=True)
class FewPlan:
    """How one shape is launched."""

    gather: bool
    threads: int
    splits: int  # ctas that share a token's blocks
    batch: int
    shared_bytes: int

    def defines(self, dtype: torch.dtype, hadamard: bool, fuse: int, layout: int) -> dict[str, int | str]:
        """The preprocessor definitions of quantize_few.cu; fuse and layout as its numbers."""
        return {
            "ELEMENT": ELEMENTS[dtype], "TOKENS": 1, "VECTOR": 1, "STAGE": 1, "HADAMARD": int(hadamard), "FUSE": fuse,
            "OUT": layout, "GATHER": int(self.gather), "BATCH": self.batch, "THREADS": self.threads,
            "MIN_CTAS": MIN_CTAS[self.gather],
        }  # fmt: skip


def plan_few(
    rows: int, channels: int, dtype: torch.dtype, fuse: str, gathered: bool, sms: int, shared_limit: int
) -> FewPlan | None:
    """The plan for x [rows, channels] whose rows are aligned to four channels, or None: quantize_act.cu takes it.

    Args:
        fuse: "none", "rms_norm" or "silu_mul". gathered: there is a permutation.
    """
    if dtype not in ELEMENTS or rows > MOST_TOKENS:
        return None
    blocks = num_blocks(channels)
    gather = gathered or fuse == "rms_norm"  # the norm needs the whole row
    if not gather:
        warps = DIRECT_THREADS // WARP
        return FewPlan(False, DIRECT_THREADS, -(-blocks // warps), BATCHES[0], 0)
    shared_bytes = blocks * BLOCK * (4 if fuse == "rms_norm" else 2)
    if shared_bytes > shared_limit - RESERVED_SHARED:
        return None
    passes = -(-blocks // (GATHER_THREADS // WARP))
    splits = max(1, min(passes, 2 * sms // max(1, rows)))
    batch = BATCHES[0] if blocks * BLOCK <= 4 * GATHER_THREADS * BATCHES[0] else BATCHES[1]
    return FewPlan(True, GATHER_THREADS, splits, batch, shared_bytes)


def configurations(family: str) -> list[Configuration]:
    """Every way that quantize_few.cu is compiled on a GPU family (its name is that of its activations' layout)."""
    from comet_cuda.quantize_act_cuda import FUSE, LAYOUTS

    plans = [FewPlan(False, DIRECT_THREADS, 1, BATCHES[0], 0)]
    plans += [FewPlan(True, GATHER_THREADS, 1, batch, 0) for batch in BATCHES]
    return [
        Configuration(SOURCE, plan.defines(dtype, hadamard, FUSE[fuse], LAYOUTS[layout]), OPTIONS)
        for plan in plans
        for fuse, layout in (("none", "canonical"), ("none", family), ("rms_norm", family), ("silu_mul", family))
        if plan.gather or fuse != "rms_norm"
        for dtype in ELEMENTS
        for hadamard in (False, True)
    ]
