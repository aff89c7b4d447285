"""A group's linears -> QuantizedWeights: run the windows up to the group's input, fit GPTQ, keep what is better.

GPTQ fits the Hessian of most windows; the others are held out and judge it: a linear keeps rounding to nearest where
its output error on them is not lower with GPTQ.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.decoder import Call, StopForward, layer_linears, run_layer
from comet_core.hidden import HiddenStates
from comet_core.linear import W4AxLinear
from comet_core.plan import BlockPlan
from comet_core.quantize import Hessian, QuantizedWeight, output_error, quantize_gptq, quantize_rtn, to_storage
from comet_core.recipe import WeightSpec
from comet_cuda.affine import BLOCK
from comet_cuda.quantize_act import to_blocks

MEMO_BYTES = 1 << 30  # of outputs remembered inside one layer


@dataclass(frozen=True)
class Windows:
    """The calibration windows on their way through the layers: what enters this layer, and with which arguments."""

    hidden: HiddenStates
    calls: dict[int, Call]  # by number of windows a step
    count: int
    outputs: "OutputMemo"

    def run(self, layer: nn.Module, start: int, stop: int) -> Tensor:
        """Windows [start, stop) through the layer; linears that are packed already do not compute again."""
        with self.outputs.reading(layer, start):
            return run_layer(layer, self.hidden.read(start, stop), self.calls[stop - start])


class OutputMemo:
    """Outputs of a layer's packed linears by window range, up to `limit` bytes.

    The windows run through a layer once per group, and linears packed for an earlier group give the same output every
    time. On a CPU, where the reference computes them, remembering is much cheaper than computing.
    """

    def __init__(self, limit: int = MEMO_BYTES) -> None:
        self._room = limit
        self._kept: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def reading(self, layer: nn.Module, start: int) -> Iterator[None]:
        """While inside, packed linears of `layer` return what they returned before for the range from `start`."""
        packed = {name: module for name, module in layer.named_modules() if isinstance(module, W4AxLinear)}
        for name, module in packed.items():
            module.forward = partial(self._output, (name, start), module.forward)  # type: ignore[method-assign]
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
        plan: of their input, on the layer's device. spec: bits, method, damping, held-out share.
        windows: the layer's input.

    Returns:
        the weights by name, and one note per linear: method, relative output errors, damping, warning.
    """
    linears = layer_linears(layer)
    if needs_windows(spec):
        train, held_out = _hessians(layer, names[0], plan, spec, windows)
    else:
        train, held_out = Hessian.identity(BLOCK * len(plan.block_bits), plan.block_bits.device), None
    stored = {name: to_storage(linears[name].weight, plan) for name in names}
    result = {name: quantize_rtn(stored[name], train.matrix.diagonal(), spec) for name in names}
    parts: list[QuantizedWeight | None] = [None] * len(names)
    damping = 0.0
    if spec.method == "gptq":
        fitted = quantize_gptq(torch.cat([stored[name] for name in names]), train.matrix, spec)
        if fitted is not None:
            weight, damping = fitted
            parts = list(_split_rows(weight, [stored[name].shape[0] for name in names]))
    judge = train.matrix if held_out is None else held_out.matrix
    notes = []
    for name, part in zip(names, parts, strict=True):
        flat = stored[name].flatten(1)
        energy = max(float(((flat @ judge) * flat).sum()), 1e-30)
        errors = {"rtn": output_error(stored[name], result[name], judge) / energy}
        note: dict[str, Any] = {"linear": name, "method": "rtn", "relative_output_error": errors}
        if part is not None:
            errors["gptq"] = output_error(stored[name], part, judge) / energy
            if held_out is None or errors["gptq"] < errors["rtn"]:
                result[name] = part
                note |= {"method": "gptq", "damping": damping}
        elif spec.method == "gptq":
            note["warning"] = "the Hessian stayed indefinite through all dampings; rounded to nearest"
        notes.append(note)
    return result, notes


def needs_windows(spec: WeightSpec) -> bool:
    """Whether quantizing by `spec` looks at the inputs at all; plain rounding does not."""
    return spec.method == "gptq" or spec.clip_search


def _hessians(
    layer: nn.Module, name: str, plan: BlockPlan, spec: WeightSpec, windows: Windows
) -> tuple[Hessian, Hessian | None]:
    """Hessians of a group's input in storage order: of the windows to fit, and of those held out to judge."""
    columns, device = BLOCK * len(plan.block_bits), plan.block_bits.device
    every = round(1 / spec.holdout) if spec.holdout and spec.method == "gptq" else 0
    every = every if 0 < every <= windows.count else 0
    train = Hessian(columns, spec.token_weighting, device)
    held_out = Hessian(columns, spec.token_weighting, device) if every else None
    first = 0

    def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        for offset, x in enumerate(args[0]):
            rows = to_blocks(x.reshape(-1, x.shape[-1]), plan.perm).float().flatten(1)
            to_judge = held_out is not None and (first + offset) % every == every - 1
            (held_out if to_judge and held_out is not None else train).add(rows)
        raise StopForward

    handle = layer_linears(layer)[name].register_forward_pre_hook(see)
    try:
        for start, stop in windows.hidden.ranges():
            first = start
            try:
                windows.run(layer, start, stop)
            except StopForward:
                continue
    finally:
        handle.remove()
    for hessian in (train, held_out):
        if hessian is not None:
            hessian.rotate(plan)
    return train, held_out


def _split_rows(weight: QuantizedWeight, rows: Sequence[int]) -> list[QuantizedWeight]:
    """A weight that was quantized as several linears' rows on top of each other, taken apart again."""
    codes, scales = weight.qweight.split(list(rows)), weight.scale.split(list(rows))
    zeros: Sequence[Tensor | None] = weight.zero.split(list(rows)) if weight.zero is not None else [None] * len(rows)
    return [QuantizedWeight(*parts) for parts in zip(codes, scales, zeros, strict=True)]
