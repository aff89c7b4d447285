"""Which path each op takes on which GPU, and why: one table, read by the launchers and by `comet doctor`.

In: a compute capability such as (9, 0). Out: the architecture that kernels are compiled for, and one row per op.
The decision: a path is chosen by what the tensor cores of that generation really do, not by what its PTX accepts
(INT4 `mma.sync` assembles from sm_75 to sm_120, but is native on sm_80, sm_86 and sm_89 only).
"""

import dataclasses
import functools

from comet_cuda.errors import CometError

OLDEST = (8, 0)


@dataclasses.dataclass(frozen=True)
class Family:
    """GPUs that take the same paths."""

    name: str  # of the GEMM path
    capabilities: tuple[tuple[int, int], ...]
    suffix: str  # of the architecture's name: "a" for features of this one chip only
    gemm_reason: str
    shared_kilobytes: dict[tuple[int, int], int]  # most shared memory of a cta


FAMILIES = (
    Family(
        name="sm_80",
        capabilities=((8, 0), (8, 6), (8, 9)),
        suffix="",
        gemm_reason="INT4 tensor cores (mma.sync m16n8k64, twice the INT8 rate) run INT4 blocks, m16n8k32 INT8 blocks",
        shared_kilobytes={(8, 0): 163, (8, 6): 99, (8, 9): 99},
    ),
    Family(
        name="sm_90",
        capabilities=((9, 0),),
        suffix="a",
        gemm_reason="no INT4 tensor cores: INT4 blocks run exactly on e4m3 wgmma, INT8 blocks on s8 wgmma",
        shared_kilobytes={(9, 0): 227},
    ),
    Family(
        name="portable",
        capabilities=((10, 0), (12, 0)),
        suffix="",
        gemm_reason="no INT4 tensor cores, no kernel of its own yet: all blocks on INT8 mma.sync; correct, untuned",
        shared_kilobytes={(10, 0): 227, (12, 0): 99},
    ),
)
QUANTIZE_REASON = "one pass: gather, rotate, quantize, sum, and the layout that this GPU's GEMM reads"
TOKEN_REASON = "one pass: gather, rotate, scales that are multiples of one a token, and the layout of this GPU's GEMM"
INTEGER_REASON = "integer scales: all blocks on s8 wgmma, sums stay in int32 over all of K"
APPEND_REASON = "one pass: rotate, quantize values by token and whole pages of keys by channel, tile"
ATTENTION_REASON = "f16 mma.sync m16n8k16 reads the 4-bit codes as f16 numbers, without a conversion"


def family_of(capability: tuple[int, int]) -> Family:
    """The family of a compute capability. Raises CometError for a GPU older than sm_80.

    A GPU that is not in the table takes the newest older one of its major version, or the portable path.
    """
    if capability < OLDEST:
        raise CometError(
            f"this GPU has compute capability {capability[0]}.{capability[1]}; COMET's kernels need 8.0 or later",
            "use a GPU from the A100 or RTX 30 series on, or run on the CPU (--device cpu)",
        )
    for family in FAMILIES:
        if capability[0] in {major for major, _ in family.capabilities}:
            return family
    return FAMILIES[-1]


def nearest(capability: tuple[int, int]) -> tuple[int, int]:
    """The tabled capability whose kernels run on this GPU (cubins run on the same major, equal or later minor)."""
    family = family_of(capability)
    same = [known for known in family.capabilities if known[0] == capability[0] and known <= capability]
    return max(same) if same else capability


def arch_of(capability: tuple[int, int]) -> str:
    """The exact architecture to compile for: "sm_80", "sm_90a"."""
    major, minor = nearest(capability)
    return f"sm_{major}{minor}{family_of(capability).suffix}"


@functools.cache
def device_capability(device: int) -> tuple[int, int]:
    """Compute capability of GPU `device`."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


@functools.cache
def device_arch(device: int) -> str:
    """What kernels for GPU `device` are compiled for. Raises CometError for one that is too old."""
    return arch_of(device_capability(device))


def paths(capability: tuple[int, int], integer: bool = False) -> list[tuple[str, str, str]]:
    """Each op's path on a GPU of this capability, and why: (op, path, reason). Raises CometError below 8.0.

    Args:
        integer: of linears with integer scales (share TOKEN).
    """
    family = family_of(capability)
    arch = arch_of(capability)
    return [
        ("quantize_act", arch, TOKEN_REASON if integer else QUANTIZE_REASON),
        ("w4ax_gemm", family.name, INTEGER_REASON if integer and family.name == "sm_90" else family.gemm_reason),
        ("kv4_append", arch, APPEND_REASON),
        ("kv4_decode", arch, ATTENTION_REASON),
        ("kv4_prefill", arch, ATTENTION_REASON),
    ]
