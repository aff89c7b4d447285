"""One decoder layer -> Folds: the places where a scale per channel can move out of activations and into weights.

In front of linears that share an input stands a norm, or another linear whose rows reach that input untouched but for
products with other values (v in front of o, up in front of down). Dividing the producer's output channels by s and
multiplying the consumers' columns by s changes nothing. Which module is such a producer is found by trying: the layer
must give the same output with random powers of two as scales.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.decoder import FOLD_TOLERANCE, Call, LinearGroup, layer_linears, run_layer

PROBE_SCALES = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Fold:
    """A producer's P output channels feed the K = P * repeat input channels of `consumers`.

    Attributes:
        producer: a norm or a linear, by its name in the layer. offset: what a norm adds to its weight (Gemma: 1).
        head: channels of an attention head, where `repeat` query heads read one kv head; else P.
    """

    consumers: tuple[str, ...]
    producer: str
    is_norm: bool
    repeat: int
    head: int
    offset: float

    def spread(self, per_producer: Tensor) -> Tensor:
        """[P] -> [K]: each kv head's values for all query heads that read it."""
        heads = per_producer.view(-1, 1, self.head)
        return heads.expand(-1, self.repeat, -1).reshape(-1)

    def gather(self, per_consumer: Tensor) -> Tensor:
        """[K] -> [P]: the largest of the values that share a producer's channel."""
        return per_consumer.view(-1, self.repeat, self.head).amax(1).reshape(-1)


def float32_probe(layer: nn.Module, hidden: Tensor, call: Call) -> tuple[nn.Module, Tensor, Call]:
    """The layer, its input and its arguments in float32, so that "unchanged" has a sharp meaning on every device."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float() if value.is_floating_point() else value
        return tuple(map(wide, value)) if isinstance(value, tuple) else value

    args, kwargs = tuple(map(wide, call.args)), {key: wide(value) for key, value in call.kwargs.items()}
    return copy.deepcopy(layer).float(), hidden.float(), Call(args, kwargs)


@torch.no_grad()
def find_folds(
    layer: nn.Module, groups: Sequence[LinearGroup], hidden: Tensor, call: Call, head_dim: int
) -> list[Fold]:
    """The folds of a materialized layer, at most one a group.

    Args:
        layer, hidden, call: from `float32_probe`. head_dim: channels of an attention head.
    """
    norms = _norm_of_input(layer, groups, hidden, call)
    linears = layer_linears(layer)
    folds = []
    for position, group in enumerate(groups):
        candidates = []
        if (norm := norms.get(group.names[0])) is not None:
            candidates.append(Fold(group.names, norm, True, 1, group.in_channels, 0.0))
            candidates.append(Fold(group.names, norm, True, 1, group.in_channels, 1.0))
        for name in (name for earlier in groups[:position] for name in earlier.names):
            rows = linears[name].out_features
            if rows == group.in_channels:
                candidates.append(Fold(group.names, name, False, 1, rows, 0.0))
            elif group.in_channels % rows == 0 and rows % head_dim == 0:
                candidates.append(Fold(group.names, name, False, group.in_channels // rows, head_dim, 0.0))
        found = next((fold for fold in candidates if _holds(fold, layer, hidden, call)), None)
        if found is not None:
            folds.append(found)
    return folds


def _norm_of_input(layer: nn.Module, groups: Sequence[LinearGroup], hidden: Tensor, call: Call) -> dict[str, str]:
    """By a group's first linear: the module with one weight a channel whose output is the group's input."""
    made: dict[int, str] = {}
    kept: list[Tensor] = []  # so that ids stay unique
    found: dict[str, str] = {}
    handles = []
    for name, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 1:

            def see_output(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                if isinstance(output, Tensor):
                    kept.append(output)
                    made[id(output)] = name

            handles.append(module.register_forward_hook(see_output))
    for group in groups:

        def see_input(_: nn.Module, args: tuple[Tensor, ...], name: str = group.names[0]) -> None:
            if id(args[0]) in made:
                found[name] = made[id(args[0])]

        handles.append(layer_linears(layer)[group.names[0]].register_forward_pre_hook(see_input))
    try:
        run_layer(layer, hidden, call)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _holds(fold: Fold, layer: nn.Module, hidden: Tensor, call: Call) -> bool:
    """Whether the layer's output stays the same under random scales."""
    rows = layer.get_submodule(fold.producer).get_parameter("weight").shape[0]
    generator = torch.Generator().manual_seed(0)
    choice = torch.randint(len(PROBE_SCALES), (rows,), generator=generator)
    scale = torch.tensor(PROBE_SCALES)[choice].to(hidden.device)
    before = run_layer(layer, hidden, call)
    with scaled(layer, fold, scale):
        after = run_layer(layer, hidden, call)
    return bool((after - before).norm() <= FOLD_TOLERANCE * (before - hidden).norm())


@contextmanager
def scaled(layer: nn.Module, fold: Fold, scale: Tensor) -> Iterator[None]:
    """While inside, `layer` has `scale` f32 [P] moved from the fold's activations into its weights."""
    producer = layer.get_submodule(fold.producer)
    changed = [producer, *(layer.get_submodule(name) for name in fold.consumers)]
    saved = [dict(module.named_parameters(recurse=False)) for module in changed]
    for module, wide in zip(changed, [None] + [fold.spread(scale)] * len(fold.consumers), strict=True):
        for leaf, value in list(module.named_parameters(recurse=False)):
            new = divide_producer(value, scale, fold) if wide is None else multiply_consumer(leaf, value, wide)
            setattr(module, leaf, nn.Parameter(new, requires_grad=False))
    try:
        yield
    finally:
        for module, parameters in zip(changed, saved, strict=True):
            for leaf, value in parameters.items():
                setattr(module, leaf, value)


def divide_producer(value: Tensor, scale: Tensor, fold: Fold) -> Tensor:
    """A producer's weight or bias, [P] or [P, ...], whose output channels are divided by `scale` [P]."""
    if fold.is_norm:
        return (value + fold.offset) / scale - fold.offset
    return value / scale.view(-1, *[1] * (value.dim() - 1))


def multiply_consumer(leaf: str, value: Tensor, scale: Tensor) -> Tensor:
    """A consumer's weight with its columns multiplied by `scale` [K]; its bias stays."""
    return value * scale if leaf == "weight" else value
