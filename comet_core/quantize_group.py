"""A group's linears -> QuantizedWeights: run the windows up to the group's input, fit GPTQ, keep what is better.

GPTQ fits the moments of most windows (moments.py); the others are held out and judge it: a linear keeps rounding to
nearest where its output error on them is not lower with GPTQ. Where the recipe aims at the 16-bit model's outputs, a
second run of the windows goes through the same layer unquantized. An expert that no token reached is rounded to nearest
by its weights alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.decoder import layer_linears
from comet_core.descent import descend
from comet_core.moments import Moments, exact_rows, quantized_rows, rotated_rows
from comet_core.plan import BlockPlan
from comet_core.quantize import QuantizedWeight, quantize_gptq, quantize_rtn, to_storage
from comet_core.recipe import WeightSpec
from comet_core.windows import Windows
from comet_cuda.quantize_act import TOKEN

UNREACHED = "calibration sent no token there; rounded to nearest by the weights alone"


def quantize_group(
    layer: nn.Module, names: Sequence[str], plan: BlockPlan, spec: WeightSpec, windows: Windows
) -> tuple[dict[str, QuantizedWeight], list[dict[str, Any]]]:
    """Quantize linears that share an input and a WeightSpec.

    Args:
        layer: materialized; groups that run before this one are already packed. names: the linears, inside the layer.
        plan: of their input, on the layer's device. spec: bits, method, target, damping, held-out share.
        windows: the layer's input.

    Returns:
        the weights by name, and one note per linear: method, relative output errors, damping, warning.
    """
    linears = layer_linears(layer)
    if needs_windows(spec):
        train, held_out = _moments(names[0], plan, spec, windows)
    else:
        train, held_out = Moments(plan, "none", with_gap=False), None
    if not train.tokens:
        train.hessian.fill_diagonal_(1.0)  # all columns matter alike: what rounding without data works with
    integer = plan.share == TOKEN
    stored = {name: to_storage(linears[name].weight, plan) for name in names}
    result = {name: quantize_rtn(stored[name], train.hessian.diagonal(), spec, integer=integer) for name in names}
    judge = held_out if held_out is not None and held_out.tokens else train
    energy = {name: judge.energy(stored[name]) for name in names}
    errors = {name: {"rtn": judge.error(stored[name], result[name])} for name in names}
    parts: list[QuantizedWeight | None] = [None] * len(names)
    damping = 0.0
    if spec.method == "gptq" and train.tokens:
        together = torch.cat([stored[name] for name in names])
        fitted = _fit(together, train, spec, integer=integer, free_gap=judge is not train)
        if fitted is not None:
            weight, damping = fitted
            parts = list(_split_rows(weight, [stored[name].shape[0] for name in names]))
    notes = []
    for name, part in zip(names, parts, strict=True):
        note: dict[str, Any] = {"linear": name, "method": "rtn"}
        if part is not None:
            errors[name]["gptq"] = judge.error(stored[name], part)
            if held_out is None or (judge is held_out and errors[name]["gptq"] < errors[name]["rtn"]):
                result[name] = part
                note |= {"method": "gptq", "damping": damping}
        elif needs_windows(spec) and not train.tokens:
            note["warning"] = UNREACHED
        elif spec.method == "gptq":
            note["warning"] = "the Hessian stayed indefinite through all dampings; rounded to nearest"
        seen = errors[name].items() if train.tokens or not needs_windows(spec) else ()
        note["relative_output_error"] = {method: error / energy[name] for method, error in seen}
        notes.append(note)
    return result, notes


def _fit(
    w: Tensor, train: Moments, spec: WeightSpec, *, integer: bool, free_gap: bool
) -> tuple[QuantizedWeight, float] | None:
    """GPTQ and the descent after it, on the weights that are best for the target. `free_gap`: nobody else reads it."""
    best = train.best_weights(w, spec.compensation, spec.damping)
    if free_gap:
        train.gap = None
    fitted = quantize_gptq(best, train.hessian, spec, overwrite=not spec.passes, integer=integer)
    if fitted is None or not spec.passes:
        return fitted
    weight, damping = fitted
    diagonal = train.hessian.diagonal()
    alive = diagonal > 0
    damped = train.hessian.clone()
    damped.diagonal().add_(damping * diagonal[alive].mean() if bool(alive.any()) else 0.0)
    return descend(best, weight, damped, spec), damping


def needs_windows(spec: WeightSpec) -> bool:
    """Whether quantizing by `spec` looks at the inputs at all; plain rounding does not."""
    return spec.method == "gptq" or spec.clip_search


def needs_sixteen(spec: WeightSpec) -> bool:
    """Whether quantizing by `spec` follows the windows through the unquantized model."""
    return spec.method == "gptq" and spec.target == "sixteen" and spec.compensation > 0


def _moments(name: str, plan: BlockPlan, spec: WeightSpec, windows: Windows) -> tuple[Moments, Moments | None]:
    """Moments of a group's input: of the windows to fit, and of those held out to judge."""
    every = round(1 / spec.holdout) if spec.holdout and spec.method == "gptq" else 0
    every = every if 0 < every <= windows.count else 0
    coded = spec.inputs == "quantized" and bool((plan.block_bits < 16).all())
    follow = windows.sixteen is not None and needs_sixteen(spec)
    with_gap = follow or (coded and spec.method == "gptq" and spec.target != "weights")
    seen_rows = quantized_rows if coded else exact_rows  # exact rows are rotated at the end, all at once
    wanted_rows = rotated_rows if coded else exact_rows
    plans = [plan, *(plan.to(device) for device in windows.lanes.devices[1:])]
    kinds = (False, True) if every else (False,)  # held out or not
    sums = {held: [Moments(p, spec.token_weighting, with_gap=with_gap) for p in plans] for held in kinds}
    for rows in windows.rows(name, every, follow=follow):
        here = plans[rows.lane]
        times = torch.ones_like(rows.own[:, 0], dtype=torch.float32)
        times[rows.first] = spec.first_token
        with windows.lanes.on(rows.lane):
            seen, wanted = seen_rows(rows.own, here), wanted_rows(rows.wanted, here) if with_gap else None
            sums[rows.held_out][rows.lane].add(seen, wanted, times)
    for first, *others in sums.values():
        for other in others:  # in the order of the lanes
            first.merge(other)
    train, held_out = sums[False][0], sums[True][0] if every else None
    for moments in (train, held_out):
        if moments is not None and not coded:
            moments.rotate(plan)
    return train, held_out


def _split_rows(weight: QuantizedWeight, rows: Sequence[int]) -> list[QuantizedWeight]:
    """A weight that was quantized as several linears' rows on top of each other, taken apart again."""

    def split(tensor: Tensor | None) -> Sequence[Tensor | None]:
        return [None] * len(rows) if tensor is None else tensor.split(list(rows))

    codes, scales = weight.qweight.split(list(rows)), weight.scale.split(list(rows))
    parts = zip(codes, scales, split(weight.zero), split(weight.base), strict=True)
    return [QuantizedWeight(*part) for part in parts]
