"""ChannelStats -> BlockPlan: the order of channels, and which blocks of 128 stay in 8 bit.

Channels stand in descending importance, so outlier channels gather in the first blocks, and INT8 blocks form a prefix
(of each tensor-parallel segment). How many there are is either what a threshold finds in each group, or a budget of
the whole model: at least a given share of multiply-adds in W4A4, the rest spent where it lowers the error of the
layers' outputs most per multiply-add.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from comet_core.recipe import ActivationSpec, BlockSpec, Recipe, recipe_from_dict
from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import TOKEN, hadamard_blocks, quantize_act_ref, to_blocks

SHARES: dict[int | str, int] = {1: 1, "token": TOKEN}  # recipe's word -> `share` of the op
CLIP_GRID = (-0.25, -0.2, -0.15, -0.1, -0.05, 0.0, 0.05, 0.1)  # steps around the recipe's clip


def stored_recipe(given: Any) -> Recipe:
    """`recipe_from_dict` of what an artifact keeps. Raises CometError as that does, and for share 4 of older COMETs."""
    for part in (given, *(given.get("overrides") or ())):
        activations = part.get("activations") or {}
        if activations.get("share") == 4:
            stored_share(4)
        activations.pop("unit", None)  # of share 4
    return recipe_from_dict(given)


def stored_share(given: Any) -> int:
    """The share of an artifact, checked. Raises CometError for 4, which older COMETs wrote, ValueError for others."""
    if type(given) is int and given == 4:
        raise CometError(
            "activations.share 4 is no longer supported", "calibrate and pack again, with share token or 1"
        )
    if type(given) is not int or given not in SHARES.values():
        raise ValueError(f"share is {given!r}")
    return given


@dataclass(frozen=True)
class BlockPlan:
    """How one group's input is laid out and quantized. K channels, NB = ceil(K / 128) blocks.

    Attributes:
        perm: int32 [K]; stored channel i is input channel perm[i].
        block_bits: uint8 [NB], 4 or 8 (16 everywhere: activations are not quantized).
        clip: f32 [NB], share of the absolute maximum that the largest code stands for.
        hadamard: INT4 blocks are rotated (weights too, offline).
        share: 1; TOKEN: a token's scales are integer multiples of one number (quantize_token_ref.py) and a weight row's
            are too (weight_grid.py).
    """

    perm: Tensor
    block_bits: Tensor
    clip: Tensor
    hadamard: bool
    share: int = 1

    def to(self, device: torch.device) -> "BlockPlan":
        """The same on a device."""
        return replace(
            self, perm=self.perm.to(device), block_bits=self.block_bits.to(device), clip=self.clip.to(device)
        )


@dataclass(frozen=True)
class PlanChoice:
    """One group before the budget is spent: what each further INT8 block would gain and cost, in storage order.

    Attributes:
        gain: f64 [NB], relative output error (energy) that falls away when the block is INT8 instead of INT4.
        cost: int64 [NB], multiply-adds of the block (real channels x rows).
        segments: INT8 blocks come in multiples of this (tensor-parallel segments).
    """

    gain: Tensor
    cost: Tensor
    segments: int = 1


def segments_for(names: Sequence[str], channels: int, blocks: BlockSpec) -> int:
    """Tensor-parallel segments that the permutation of this group must stay inside (1 = free).

    Errors:
        CometError if the channels of a row-parallel linear do not split into whole blocks per segment.
    """
    segments = blocks.tp_granularity
    if segments == 1 or not any(fnmatchcase(name, pattern) for name in names for pattern in blocks.row_parallel):
        return 1
    if channels % (BLOCK * segments):
        allowed = [n for n in range(1, 65) if channels % (BLOCK * n) == 0]
        raise CometError(
            f"{names[0]}: in_channels={channels} do not split into {segments} segments of whole 128-channel blocks "
            f"(blocks.tp_granularity={segments})",
            f"allowed here: {', '.join(map(str, allowed)) or '1 only, without row-parallel splitting'}",
        )
    return segments


def choose_permutation(importance: Tensor, segments: int = 1) -> Tensor:
    """importance [K] -> int32 [K], channels in descending importance inside each segment (stable: ties keep order)."""
    width = importance.shape[0] // segments
    parts = [
        importance[start : start + width].argsort(descending=True, stable=True) + start
        for start in range(0, width * segments, width)
    ]
    return torch.cat(parts).to(torch.int32)


def place_int8_blocks(total: int, count: int, segments: int = 1) -> Tensor:
    """uint8 [NB]: the first `count` / segments blocks of each segment are 8 bit, the others 4 bit."""
    bits = torch.full((segments, total // segments), 4, dtype=torch.uint8)
    bits[:, : count // segments] = 8
    return bits.flatten() if segments > 1 else torch.where(torch.arange(total) < count, 8, 4).to(torch.uint8)


def clip_values(block_bits: Tensor, spec: ActivationSpec) -> Tensor:
    """f32 [NB]: the recipe's clip for INT4 blocks, 1 for INT8 blocks (their range has codes to spare)."""
    return torch.where(block_bits == 4, spec.clip, 1.0).to(torch.float32)


def block_grams(weight: Tensor, perm: Tensor, *, rotate: bool) -> Tensor:
    """W_b^T W_b of every block of columns, f32 [NB, 128, 128]: all that an output error asks of the weights.

    Args:
        weight: f32 [N, K], rows of all linears of the group. perm: int32 [K]. rotate: as they meet rotated input.
    """
    blocks = to_blocks(weight, perm)
    blocks = (hadamard_blocks(blocks) if rotate else blocks).transpose(0, 1)  # [NB, N, 128]
    return blocks.mT @ blocks


def block_error(
    x: Tensor, grams: Tensor, perm: Tensor, bits: int, spec: ActivationSpec, clip: float | None = None
) -> Tensor:
    """Energy of the output error that quantizing each block alone causes, f64 [NB], every token weighted alike.

    Args:
        x: f32 [S, K] sampled inputs. grams: `block_grams`, rotated where `bits` is 4 and the recipe rotates.
        perm: int32 [K]. bits: 4 or 8. spec: clip, rotation. clip: of INT4 blocks, in place of the recipe's.

    Blocks that will share one scale a token are judged by scales of their own: which of them are INT8 is not known yet,
    and outlier blocks as INT4 would spoil the others' multiples.
    """
    count = num_blocks(x.shape[1])
    block_bits = torch.full((count,), bits, dtype=torch.uint8, device=x.device)
    clips = clip_values(block_bits, spec) if clip is None else torch.full((count,), clip, device=x.device)
    codes, scale = quantize_act_ref(x, perm, block_bits, clips, spec.hadamard)
    exact = to_blocks(x, perm)
    if spec.hadamard and bits == 4:
        exact = hadamard_blocks(exact)
    delta = (codes.float() * scale[..., None] - exact).transpose(0, 1)  # [NB, S, 128]
    norm = x.square().sum(1)
    token_weight = torch.where(norm > 0, 1 / norm, torch.zeros_like(norm))
    return (((delta @ grams) * delta).sum(2) * token_weight).sum(1).double()


def search_clips(x: Tensor, grams: Tensor, perm: Tensor, spec: ActivationSpec) -> Tensor:
    """The clip of each block, f32 [NB] on the CPU, with the least `block_error` in 4 bit, of CLIP_GRID around the
    recipe's."""
    grid = sorted({min(max(spec.clip + step, 0.05), 1.0) for step in CLIP_GRID})
    errors = torch.stack([block_error(x, grams, perm, 4, spec, clip) for clip in grid])
    return torch.tensor(grid)[errors.argmin(0).cpu()]


def output_energy(x: Tensor, weight: Tensor) -> float:
    """Energy of the exact outputs under the same token weights, to which `block_error` is compared."""
    norm = x.square().sum(1)
    token_weight = torch.where(norm > 0, 1 / norm, torch.zeros_like(norm))
    return float(((x @ weight.T).square().sum(1) * token_weight).sum())


def block_costs(channels: int, rows: int) -> Tensor:
    """int64 [NB]: multiply-adds a token of each block, on real channels."""
    costs = torch.full((num_blocks(channels),), BLOCK * rows, dtype=torch.int64)
    costs[-1] = (channels - BLOCK * (len(costs) - 1)) * rows
    return costs


def spend_budget(choices: Sequence[PlanChoice], kept_cost: int, int4_mac_fraction: float) -> list[int]:
    """INT8 blocks per group, so that at least `int4_mac_fraction` of all multiply-adds run W4A4.

    Args:
        choices: one per group that may hold INT4 blocks.
        kept_cost: multiply-adds of decoder linears that are not W4A4 in any case (16-bit or 8-bit by recipe).
        int4_mac_fraction: the share to reach.

    Returns:
        counts, in the order of `choices`. Steps of prefixes are taken in descending gain per multiply-add, where a
        step is the prefix extension with the best average gain (so a poor block before a good one does not block it).

    Errors:
        CometError if the share cannot be reached even with no INT8 block at all.
    """
    total = sum(int(choice.cost.sum()) for choice in choices) + kept_cost
    allowance = math.floor((1 - int4_mac_fraction) * total) - kept_cost
    if allowance < 0:
        raise CometError(
            f"blocks.int4_mac_fraction={int4_mac_fraction}: at most {1 - kept_cost / total:.3f} of the multiply-adds "
            "can be W4A4, since the other linears are kept in more bits",
            "lower blocks.int4_mac_fraction, or keep fewer linears by `skip` and `overrides`",
        )
    steps = [(gain, group, blocks) for group, c in enumerate(choices) for gain, blocks in _steps(c)]
    counts = [0] * len(choices)
    for _, group, blocks in sorted(steps, key=lambda step: -step[0]):
        choice = choices[group]
        for _ in range(blocks // choice.segments):
            stored = _block_order(choice)[counts[group] : counts[group] + choice.segments]
            price = int(choice.cost[stored].sum())
            if price <= allowance:
                allowance -= price
                counts[group] += choice.segments
            else:
                break
    return counts


def _block_order(choice: PlanChoice) -> Tensor:
    """Block indices in the order in which they become INT8: round robin over the segments."""
    return torch.arange(len(choice.gain)).view(choice.segments, -1).T.flatten()


def _steps(choice: PlanChoice) -> list[tuple[float, int]]:
    """(gain per multiply-add, blocks) of successive prefix extensions, best average first: an upper hull."""
    order = _block_order(choice)
    gain, cost = choice.gain[order].cumsum(0).tolist(), choice.cost[order].double().cumsum(0).tolist()
    ends = list(range(choice.segments - 1, len(gain), choice.segments))
    steps, base_gain, base_cost, done = [], 0.0, 0.0, -1
    while done < ends[-1]:
        best = max((e for e in ends if e > done), key=lambda e: ((gain[e] - base_gain) / (cost[e] - base_cost), -e))
        slope = (gain[best] - base_gain) / (cost[best] - base_cost)
        if slope <= 0:
            break
        steps.append((slope, best - done))
        base_gain, base_cost, done = gain[best], cost[best], best
    return steps


def fold_permutation(perm: Tensor) -> Tensor:
    """The identity that remains of `perm` [K] once the producer's rows carry it."""
    return torch.arange(perm.shape[0], dtype=torch.int32)
