"""Real text layer by layer: what each layer of the runner says, beside what the reference's layer says to the same.

In: a packed folder, a runner of it, windows of text. Out: for both halves of each layer, attention and MLP, the mean
over tokens of |difference| / |what the half adds|. The decision: each half gets the CPU reference's hidden states, so
none inherits another's error. A whole W4A4 model does not say the same twice (one flipped code and it takes another
way); a half must, but for the flips that its own rounding makes. How many those are is measured beside it: the runner's
half and the reference's, in one 16-bit type, each beside that half in float32 on the same inputs.

Tokens count alike, since the first one, a thousand times as large in many models, would hide the others. Windows end in
decode steps, whose error stands apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comet_core.packed import load_packed
from comet_core.paged_cache import Chunk, Step
from comet_core.runner import BatchState, Runner
from comet_cuda.errors import CometError

CHUNK = 300  # tokens of a prefill step: the next one starts inside a page
HALVES = ("attention", "mlp")


@dataclass(frozen=True)
class Halves:
    """One window through both halves of each layer, in order: float [2 * layers, L, hidden]."""

    into: Tensor  # hidden states before the half
    added: Tensor  # what it says, still to be added to them


@torch.no_grad()
def reference_halves(model: Any, tokens: Tensor, into: Tensor | None = None) -> Halves:
    """A packed Hugging Face model on one window.

    Args:
        model: of a family that the runner computes. tokens: int64 [L]. into: what each half gets, as in `Halves`, in
            place of what comes before it.
    """
    before: list[Tensor] = []
    said: list[Tensor] = []

    def give(_: Any, args: tuple[Tensor, ...]) -> Tensor:
        states = args[0] if into is None else into[len(before)].to(args[0])[None]
        before.append(states[0])
        return states

    def hear(_: Any, args: Any, out: Tensor | tuple[Tensor, ...]) -> None:
        said.append((out if isinstance(out, Tensor) else out[0])[0])

    handles = []
    try:
        for layer in model.model.layers:
            for norm, half in ((layer.input_layernorm, layer.self_attn), (layer.post_attention_layernorm, layer.mlp)):
                handles += [norm.register_forward_pre_hook(give), half.register_forward_hook(hear)]
        model.model(input_ids=tokens[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return Halves(torch.stack(before), torch.stack(said))


@torch.no_grad()
def runner_halves(runner: Runner, reference: Halves, decoded: int, chunk: int = CHUNK) -> Halves:
    """The runner on what enters the reference's halves, as the sum that a half's norm makes when it serves.

    Args:
        decoded: the last so many tokens come one by one. chunk: most tokens of a prefill step.

    Errors:
        CometError for a window that does not fit.
    """
    model, (halves, length, _) = runner.model, reference.into.shape
    into, added = (states.to(model.device, model.dtype) for states in (reference.into, reference.added))
    found = Halves(torch.empty_like(into), torch.empty_like(added))
    if not runner.cache.reserve(0, length):
        raise CometError(f"a window of {length} tokens for a slot of {runner.context}", "make a larger runner")
    try:
        for rows, work in _work(runner, length, decoded, chunk):
            runner.cache.begin(work)
            for i in range(halves):
                x, residual = (added[i - 1, rows], into[i - 1, rows]) if i else (into[0, rows], None)
                if i % 2:
                    x, residual = model.mlp(i // 2, x, residual)
                else:
                    x, residual = model.attention(i // 2, x, residual, work, runner.cache)
                found.added[i, rows], found.into[i, rows] = x, residual
    finally:
        runner.cache.release(0)
    return Halves(found.into.cpu(), found.added.cpu())


def _work(runner: Runner, length: int, decoded: int, chunk: int) -> Iterator[tuple[slice, Step | Chunk]]:
    """The steps of one window in slot 0: the rows of each, and where they stand."""
    prompt, state = length - decoded, BatchState.empty(1, runner.model.device)
    for start in range(0, prompt, chunk):
        count = min(chunk, prompt - start)
        yield slice(start, start + count), runner.chunk_of([(0, start, count)])
    for place in range(prompt, length):
        state.write([0], (0,), [place])
        yield slice(place, place + 1), Step(state.slot, state.position, state.length, runner.context)


def half_errors(found: Halves, wanted: Halves) -> Tensor:
    """f32 [2 * layers, L]: the norm of what is wrong behind each half over the norm of what the half adds."""
    size = wanted.added.float().norm(dim=-1)
    size = size.maximum(1e-6 * size.mean(1, keepdim=True))  # a token to which the half adds nothing
    wrong = (found.into.float() - wanted.into.float()) + (found.added.float() - wanted.added.float())
    errors: Tensor = wrong.norm(dim=-1) / size
    return errors


def compare_layers(folder: Path, runner: Runner, windows: Tensor, decoded: int) -> Iterator[tuple[str, Tensor]]:
    """Windows int64 [n, L] -> (what beside what, errors [n, 2 * layers, L]): the runner, the reference in its type."""
    device, dtype = runner.model.device, runner.model.dtype
    name = str(dtype).removeprefix("torch.")
    rounded = load_packed(folder, device="cpu", dtype=dtype).model
    exact = load_packed(folder, device="cpu", dtype=torch.float32).model
    errors: dict[str, list[Tensor]] = {}
    for window in windows:
        reference = reference_halves(rounded, window)
        wide = reference_halves(exact, window, reference.into)
        found = runner_halves(runner, reference, decoded)
        pairs = {
            f"layers of runner {device.type} {name} beside cpu {name}": (found, reference),
            f"layers of runner {device.type} {name} beside cpu float32": (found, wide),
            f"layers of cpu {name} beside cpu float32": (reference, wide),
        }
        for task, pair in pairs.items():
            errors.setdefault(task, []).append(half_errors(*pair))
    for task, by_window in errors.items():
        yield task, torch.stack(by_window)


def by_layer(errors: Tensor, decoded: int) -> dict[str, list[float]]:
    """Errors of windows [n, 2 * layers, L] -> attention_prefill, ..., mlp_decode: a mean over tokens for each layer."""
    prompt = errors.shape[-1] - decoded
    parts = {"prefill": errors[..., :prompt], "decode": errors[..., prompt:]}
    return {
        f"{half}_{part}": values[:, first::2].mean((0, 2)).tolist()
        for first, half in enumerate(HALVES)
        for part, values in parts.items()
    }


def layer_metrics(found: dict[str, list[float]]) -> dict[str, float]:
    """What `by_layer` gives -> layer_error_median_attention_prefill, ..., over layers; NaN where any layer's is."""
    metrics = {}
    for part, errors in found.items():
        values = torch.tensor(errors, dtype=torch.float64)
        metrics[f"layer_error_median_{part}"] = float(values.quantile(0.5))
        metrics[f"layer_error_max_{part}"] = float(values.max())
    return metrics
