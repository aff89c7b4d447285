"""A layer + its inputs -> weights clamped to ranges that were trained on the layer's output.

Two numbers for each row and block of 128, in (0, 1), shrink the largest and the smallest weight. They are trained so
that the layer with weights rounded to 4 bits over the clamped ranges gives the output it gave before, with the gradient
passing through the rounding (the weight clipping of Shao et al., OmniQuant, 2023, arXiv:2308.13137; its learned
equivalent transformation is left out). Rounding to nearest over the clamped weights' own range then is the grid
that was trained, so nothing of this needs a place in the packed format.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from comet_core.decoder import Call, layer_linears, run_layer
from comet_cuda.affine import BLOCK, code_max

STEPS = 100
LEARNING_RATE = 0.03  # of Adam, on the numbers before the sigmoid
START = 4.0  # sigmoid(4) = 0.982: almost no clipping


def straight(x: Tensor) -> Tensor:
    """Rounding whose gradient is that of the identity."""
    return x + (x.round() - x).detach()


def block_extremes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest value of each row and block, 0 included: float [N, K] -> f32 [N, NB] twice."""
    low = [block.float().amin(1).clamp(max=0) for block in weight.split(BLOCK, 1)]
    high = [block.float().amax(1).clamp(min=0) for block in weight.split(BLOCK, 1)]
    return torch.stack(low, 1), torch.stack(high, 1)


def widen(per_block: Tensor, channels: int) -> Tensor:
    """[N, NB] -> [N, K]."""
    return per_block.repeat_interleave(BLOCK, 1)[:, :channels]


def rounded(weight: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """float [N, K] rounded to 4 bits over [low, high] of each row and block, asymmetric with an integer zero point."""
    channels = weight.shape[1]
    scale = ((high - low) / code_max(4)).clamp(min=1e-8)
    zero = straight(-low / scale)
    scale, zero = widen(scale, channels), widen(zero, channels)
    codes = (straight(weight / scale) + zero).clamp(0, code_max(4))
    return (codes - zero) * scale


@contextmanager
def _weights(layer: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """While inside, linears of `layer` compute with these tensors, which may carry gradients."""
    linears = layer_linears(layer)
    saved = {name: linears[name].weight for name in weights}
    for name, value in weights.items():
        del linears[name].weight
        linears[name].weight = value
    try:
        yield
    finally:
        for name, value in saved.items():
            del linears[name].weight
            linears[name].weight = value


def learn_ranges(layer: nn.Module, inputs: Sequence[Tensor], call: Call) -> dict[str, tuple[Tensor, Tensor]]:
    """Train the ranges of all linears of a layer.

    Args:
        layer: materialized, unquantized. inputs: hidden states, one batch a step, taken in turn. call: its arguments.

    Returns:
        low and high, f32 [N, NB], by linear.
    """
    weights = {name: linear.weight.detach() for name, linear in layer_linears(layer).items()}
    extremes = {name: block_extremes(weight) for name, weight in weights.items()}
    raw = {name: torch.full((2, *low.shape), START, device=low.device) for name, (low, _) in extremes.items()}
    for value in raw.values():
        value.requires_grad_(True)
    with torch.no_grad():
        targets = [run_layer(layer, hidden, call) for hidden in inputs]
        energy = sum(float((t - h).float().square().mean()) for t, h in zip(targets, inputs, strict=True)) / len(inputs)

    def ranges(name: str) -> tuple[Tensor, Tensor]:
        shrink = raw[name].sigmoid()
        return extremes[name][0] * shrink[0], extremes[name][1] * shrink[1]

    optimizer = torch.optim.Adam(list(raw.values()), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    best, best_loss = {name: ranges(name) for name in raw}, float("inf")
    sums, seen = 0.0, 0
    with torch.enable_grad():
        for step in range(STEPS):
            k = step % len(inputs)
            changed = {name: rounded(weights[name].float(), *ranges(name)).to(weights[name].dtype) for name in raw}
            with _weights(layer, changed):
                out = run_layer(layer, inputs[k], call)
            loss = (out - targets[k]).float().square().mean() / max(energy, 1e-30)
            sums, seen = sums + float(loss.detach()), seen + 1
            if seen == len(inputs):  # the mean over one turn of all inputs belongs to these ranges, nearly
                if sums < best_loss:
                    best, best_loss = {name: ranges(name) for name in raw}, sums
                sums, seen = 0.0, 0
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return {name: (low.detach().clone(), high.detach().clone()) for name, (low, high) in best.items()}


def clamp_to(weight: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """float [N, K] clamped to the ranges of each row and block."""
    channels = weight.shape[1]
    return weight.clamp(widen(low.to(weight.device), channels), widen(high.to(weight.device), channels))
