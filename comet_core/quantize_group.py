"""A group's linears -> QuantizedWeights: run the windows up to the group's input, fit GPTQ, keep what is better.

GPTQ fits the moments of most windows (moments.py); the others are held out and judge it: a linear keeps rounding to
nearest where its output error on them is not lower with GPTQ. Where the recipe aims at the 16-bit model's outputs, a
second run of the windows goes through the same layer unquantized.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.decoder import Call, StopForward, layer_linears, run_layer
from comet_core.descent import descend
from comet_core.hidden import HiddenStates
from comet_core.linear import W4AxLinear
from comet_core.moments import Moments, exact_rows, quantized_rows, rotated_rows
from comet_core.plan import BlockPlan
from comet_core.quantize import QuantizedWeight, quantize_gptq, quantize_rtn, to_storage
from comet_core.recipe import WeightSpec

MEMO_BYTES = 1 << 30  # of outputs remembered inside one layer, on a CPU
WINDOWS_A_SUM = {"cuda": 8}  # whose rows are added at once; on a CPU one: its rows stay in the caches
MEMO_SHARE = 5  # on a GPU a fifth of what is free when the layer begins


@dataclass(frozen=True)
class Windows:
    """The calibration windows on their way through the layers: what enters this layer, and with which arguments."""

    hidden: HiddenStates
    calls: dict[int, Call]  # by number of windows a step
    count: int
    outputs: "OutputMemo"
    sixteen: "Sixteen | None" = None

    def run(self, layer: nn.Module, start: int, stop: int) -> Tensor:
        """Windows [start, stop) through the layer; linears that are packed already do not compute again."""
        with self.outputs.reading(layer, start):
            return run_layer(layer, self.hidden.read(start, stop), self.calls[stop - start])


@dataclass(frozen=True)
class Sixteen:
    """The same windows in the unquantized model: what enters this layer there, and the layer as it was."""

    hidden: HiddenStates
    layer: nn.Module
    outputs: "OutputMemo"

    def run(self, call: Call, start: int, stop: int) -> Tensor:
        """Windows [start, stop) through the unquantized layer."""
        with self.outputs.reading(self.layer, start, nn.Linear):
            return run_layer(self.layer, self.hidden.read(start, stop), call)


def sixteen_layer(layer: nn.Module) -> nn.Module:
    """A copy of the layer's modules on the same parameters, with plain 16-bit attention: what packing replaces in
    `layer` stays as it was in the copy."""
    shared = {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())}
    twin = copy.deepcopy(layer, shared)
    for module in twin.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = "sdpa"
    return twin


def memo_bytes(device: torch.device) -> int:
    """How much of a layer's outputs to remember."""
    return torch.cuda.mem_get_info(device)[0] // MEMO_SHARE if device.type == "cuda" else MEMO_BYTES


class OutputMemo:
    """Outputs of a layer's linears by window range, up to `limit` bytes.

    The windows run through a layer once per group, and linears packed for an earlier group give the same output every
    time. On a CPU, where the reference computes them, remembering is much cheaper than computing.
    """

    def __init__(self, limit: int = MEMO_BYTES) -> None:
        self._room = limit
        self._kept: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def reading(self, layer: nn.Module, start: int, kind: type[nn.Module] = W4AxLinear) -> Iterator[None]:
        """While inside, linears of this kind in `layer` return what they returned before for the range from `start`."""
        packed = {name: module for name, module in layer.named_modules() if isinstance(module, kind)}
        for name, module in packed.items():
            module.forward = partial(self._output, (name, start), module.forward)
        try:
            yield
        finally:
            for module in packed.values():
                del module.forward

    def _output(self, key: tuple[str, int], compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if key in self._kept:
            return self._kept[key]
        y = compute(x)
        if y.nbytes <= self._room:
            self._room -= y.nbytes
            self._kept[key] = y
        return y


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
        train, held_out = _moments(layer, names[0], plan, spec, windows)
    else:
        train, held_out = Moments(plan, "none", with_gap=False), None
        train.hessian.fill_diagonal_(1.0)  # all columns matter alike: what rounding without data works with
    stored = {name: to_storage(linears[name].weight, plan) for name in names}
    result = {name: quantize_rtn(stored[name], train.hessian.diagonal(), spec) for name in names}
    judge = train if held_out is None else held_out
    energy = {name: judge.energy(stored[name]) for name in names}
    errors = {name: {"rtn": judge.error(stored[name], result[name])} for name in names}
    parts: list[QuantizedWeight | None] = [None] * len(names)
    damping = 0.0
    if spec.method == "gptq":
        together = torch.cat([stored[name] for name in names])
        fitted = _fit(together, train, spec, free_gap=held_out is not None)
        if fitted is not None:
            weight, damping = fitted
            parts = list(_split_rows(weight, [stored[name].shape[0] for name in names]))
    notes = []
    for name, part in zip(names, parts, strict=True):
        note: dict[str, Any] = {"linear": name, "method": "rtn"}
        if part is not None:
            errors[name]["gptq"] = judge.error(stored[name], part)
            if held_out is None or errors[name]["gptq"] < errors[name]["rtn"]:
                result[name] = part
                note |= {"method": "gptq", "damping": damping}
        elif spec.method == "gptq":
            note["warning"] = "the Hessian stayed indefinite through all dampings; rounded to nearest"
        note["relative_output_error"] = {method: error / energy[name] for method, error in errors[name].items()}
        notes.append(note)
    return result, notes


def _fit(w: Tensor, train: Moments, spec: WeightSpec, *, free_gap: bool) -> tuple[QuantizedWeight, float] | None:
    """GPTQ and the descent after it, on the weights that are best for the target. `free_gap`: nobody else reads it."""
    best = train.best_weights(w, spec.compensation, spec.damping)
    if free_gap:
        train.gap = None
    fitted = quantize_gptq(best, train.hessian, spec, overwrite=not spec.passes)
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


def _moments(
    layer: nn.Module, name: str, plan: BlockPlan, spec: WeightSpec, windows: Windows
) -> tuple[Moments, Moments | None]:
    """Moments of a group's input: of the windows to fit, and of those held out to judge."""
    every = round(1 / spec.holdout) if spec.holdout and spec.method == "gptq" else 0
    every = every if 0 < every <= windows.count else 0
    coded = spec.inputs == "quantized" and bool((plan.block_bits < 16).all())
    sixteen = windows.sixteen if needs_sixteen(spec) else None
    with_gap = sixteen is not None or (coded and spec.method == "gptq" and spec.target != "weights")
    seen_rows = quantized_rows if coded else exact_rows  # exact rows are rotated at the end, all at once
    wanted_rows = rotated_rows if coded else exact_rows
    train = Moments(plan, spec.token_weighting, with_gap=with_gap)
    held_out = Moments(plan, spec.token_weighting, with_gap=with_gap) if every else None
    for start, stop in windows.hidden.ranges():
        own = _input_of(layer, name, partial(windows.run, layer, start, stop))
        other = own
        if sixteen is not None:
            other = _input_of(sixteen.layer, name, partial(sixteen.run, windows.calls[stop - start], start, stop))
        judging = torch.arange(start, stop) % every == every - 1 if every else torch.zeros(stop - start).bool()
        for moments, chosen in ((train, ~judging), (held_out, judging)):
            for part in chosen.nonzero().flatten().split(WINDOWS_A_SUM.get(own.device.type, 1)):
                if moments is not None:
                    x, goal = own[part].flatten(0, -2), other[part].flatten(0, -2)
                    times = torch.ones(own[part].shape[:2], device=own.device)
                    times[:, 0] = spec.first_token
                    moments.add(seen_rows(x, plan), wanted_rows(goal, plan) if with_gap else None, times.flatten())
    for moments in (train, held_out):
        if moments is not None and not coded:
            moments.rotate(plan)
    return train, held_out


def _input_of(layer: nn.Module, name: str, run: Callable[[], Tensor]) -> Tensor:
    """What enters the linear `name` of `layer`, [windows, length, K], while `run` runs it."""
    seen: list[Tensor] = []

    def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])
        raise StopForward

    handle = layer.get_submodule(name).register_forward_pre_hook(see)
    try:
        run()
    except StopForward:
        pass
    finally:
        handle.remove()
    return seen[0]


def _split_rows(weight: QuantizedWeight, rows: Sequence[int]) -> list[QuantizedWeight]:
    """A weight that was quantized as several linears' rows on top of each other, taken apart again."""
    codes, scales = weight.qweight.split(list(rows)), weight.scale.split(list(rows))
    zeros: Sequence[Tensor | None] = weight.zero.split(list(rows)) if weight.zero is not None else [None] * len(rows)
    return [QuantizedWeight(*parts) for parts in zip(codes, scales, zeros, strict=True)]
