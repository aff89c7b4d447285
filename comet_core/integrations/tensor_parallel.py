"""Which ranks may share a packed linear, and what each of them holds. No vLLM in here: rules and arithmetic.

Column-parallel linears (q, k, v, gate, up) split their rows, which no block crosses: always possible. Row-parallel ones
(o, down) split their input: every rank needs whole blocks of 128 channels, and a permutation that stays inside the
rank's channels. It does if the packing kept it so (blocks.tp_granularity), or if the producer's rows carry it, because
those are split at the same places. Where a token has one scale (share TOKEN), each rank takes it from its own channels:
another rounding than on one GPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from comet_core.packed import LinearEntry
from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import TOKEN


def common_entry(prefix: str, members: Sequence[str], linears: dict[str, LinearEntry]) -> LinearEntry | None:
    """What the linears that a server fuses into `prefix` have in common; None if none of them is packed.

    Errors:
        CometError if only some of them are packed, or they are packed in different ways.
    """
    entries = [linears.get(name) for name in members]
    if not any(entries):
        return None
    kinds = {
        (entry.in_features, entry.weight_bits, entry.symmetric, entry.hadamard, entry.folded, entry.share)
        for entry in entries
        if entry is not None
    }
    if None in entries or len(kinds) > 1:
        raise CometError(
            f"{prefix}: {', '.join(members)} run as one linear, but are not packed alike",
            "pack with a recipe whose `skip` and `overrides` treat linears that share an input alike",
        )
    return entries[0]


def check_row_parallel(name: str, entry: LinearEntry, ranks: int, granularity: int) -> None:
    """Raise CometError unless the input of a row-parallel linear splits over `ranks`.

    Args:
        name: of the linear. entry: what the manifest says of it. granularity: the recipe's blocks.tp_granularity.
    """
    if ranks == 1:
        return
    if entry.in_features % (BLOCK * ranks):
        allowed = [n for n in range(1, 65) if entry.in_features % (BLOCK * n) == 0]
        raise CometError(
            f"{name}: {entry.in_features} channels do not split into {ranks} parts of whole 128-channel blocks",
            f"tensor_parallel_size may be {', '.join(map(str, allowed)) or '1 only'} for this linear",
        )
    if not entry.folded and granularity % ranks:
        raise CometError(
            f"{name}: its permutation crosses the channels of {ranks} ranks (packed with tp_granularity={granularity})",
            f"pack with blocks.tp_granularity: {ranks} (or a multiple), or serve with a divisor of {granularity}",
        )


def local_permutation(name: str, perm: Tensor, rank: int) -> Tensor:
    """The rank's slice of a global permutation, int32 [K / ranks] -> counted from the rank's first channel.

    Errors:
        CometError if a channel of another rank is in it.
    """
    width = perm.shape[0]
    local = perm - rank * width
    if not torch.equal(local.sort().values.cpu(), torch.arange(width, dtype=perm.dtype)):
        raise CometError(f"{name}.perm: leaves the channels of rank {rank}", "the folder is damaged; pack it again")
    return local.contiguous()


def local_shapes(
    entry: LinearEntry, rows: int, width: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...], int | None, int | None]]:
    """Tensors that one rank holds of a (fused) linear: dtype, shape, and which axis counts rows and which the input.

    Args:
        rows, width: of this rank.
    """
    blocks = num_blocks(width)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...], int | None, int | None]] = {
        "qweight": (torch.uint8, (rows, BLOCK // 2 * blocks), 0, 1),
        "w_scale": (torch.bfloat16, (rows, blocks), 0, 1),
        "block_bits": (torch.uint8, (blocks,), None, 0),
        "act_clip": (torch.float32, (blocks,), None, 0),
    }
    if not entry.symmetric:
        shapes["w_zero"] = (torch.uint8, (rows, blocks), 0, 1)
    if not entry.folded:
        shapes["perm"] = (torch.int32, (width,), None, 0)
    if entry.share == TOKEN:
        shapes["weight_base"] = (torch.bfloat16, (rows,), 0, None)
    return shapes
