"""What an evaluation will take - time and memory - before it starts, from its own first step on the first layers.

In: what `plan_perplexity` or `load_tasks` found. Out: an `Estimate`. The decision: the real code scores one real step
on a model cut to two layers, and hooks time each of those layers; every further layer costs what one of them does, so
embedding, final norm and the head, which dominate a cut model, are counted once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from comet_core.decoder import find_layers, load_sixteen
from comet_core.evaluate import Planned, Scores, loaded, score_windows, windows_a_step
from comet_core.host_memory import forget_peak, peak_memory
from comet_core.linear import W4AxLinear, has_kernel
from comet_core.model_source import cut_layers
from comet_core.preflight import Estimate
from comet_core.zero_shot import Scorer, missing_in, requests_of
from comet_core.zero_shot_store import Contestant, Store
from comet_core.zero_shot_tasks import LoadedTask

MEASURED = 2  # layers that are loaded and timed


@dataclass(frozen=True)
class _Step:
    """One measured step of models cut to a few layers; seconds and bytes. `layer_*` of one layer, models together."""

    load: float
    seconds: float
    layer_seconds: float
    layer_bytes: int
    weights: int  # bytes of the cut models
    memory: int  # peak of the process
    gpu_memory: int

    def whole(self, layers: int, steps: float) -> Estimate:
        """The same for all layers and so many steps."""
        more = max(0, layers - MEASURED)
        load = self.load * (self.weights + more * self.layer_bytes) / max(self.weights, 1)
        on_gpu = self.gpu_memory > 0
        return Estimate(
            seconds=load + steps * (self.seconds + more * self.layer_seconds),
            memory=self.memory + (0 if on_gpu else more * self.layer_bytes),
            gpu_memory=self.gpu_memory + (more * self.layer_bytes if on_gpu else 0),
            disk=0,
        )


def rehearse_perplexity(plan: Planned, device: str, dtype: torch.dtype) -> Estimate:
    """Measure one step of a perplexity on two layers, and extend it to all layers and windows."""
    windows = plan.tokens[: windows_a_step(device, plan.tokens.shape[1])].to(device)

    def load() -> list[nn.Module]:
        few = min(MEASURED, plan.subject.layers)
        models = [loaded(plan.subject, device, dtype, few).model]
        return models + ([] if plan.beside is None else [load_sixteen(cut_layers(plan.beside, few), device, dtype)])

    def step(models: list[nn.Module]) -> None:
        score_windows(models[0], models[1] if len(models) > 1 else None, windows, Scores())

    return _measure(load, step, device).whole(plan.subject.layers, len(plan.tokens) / len(windows))


def rehearse_tasks(who: Contestant, layers: int, tasks: Sequence[LoadedTask], limit: int | None) -> Estimate:
    """Measure one batch of a contestant's zero-shot requests on two layers; what is kept already costs nothing.

    Args:
        layers: of the whole model. limit: documents of each task.
    """
    scorer = Scorer(who, layers=min(MEASURED, layers))
    waiting: dict[tuple[str, str], Any] = {}
    for task in tasks:
        found = missing_in(Store(who, task), requests_of(task, limit))
        waiting |= {(task.name, key): request for key, request in found.items()}
    if not waiting:
        return Estimate(0.0, 0, 0, 0)
    lengths: dict[tuple[str, str], int] = {}

    def load() -> list[nn.Module]:
        lengths.update(scorer.lengths(waiting))
        return [scorer.lm.model]

    def step(_: list[nn.Module]) -> None:
        scorer.run([waiting[key] for key in middle()], lengths[middle()[0]] + 1)

    def middle() -> list[tuple[str, str]]:
        order = sorted(waiting, key=lambda key: -lengths[key])
        start = len(order) // 2
        return order[start : start + max(1, scorer.tokens_a_batch // (lengths[order[start]] + 1))]

    return _measure(load, step, who.device).whole(layers, sum(lengths.values()) / sum(lengths[key] for key in middle()))


def together(parts: Sequence[Estimate]) -> Estimate:
    """Of runs one after the other: times add up, the largest memory counts."""
    return Estimate(
        sum(part.seconds for part in parts),
        max((part.memory for part in parts), default=0),
        max((part.gpu_memory for part in parts), default=0),
        sum(part.disk for part in parts),
    )


@torch.no_grad()
def _measure(load: Callable[[], list[nn.Module]], step: Callable[[list[nn.Module]], None], device: str) -> _Step:
    on_gpu = device.startswith("cuda")
    forget_peak()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    models = load()
    _wait(device)
    load_seconds = time.perf_counter() - start
    step(models)  # the first warms up: kernels are compiled, pages are touched
    layers = [layer for model in models for layer in find_layers(model, (nn.Linear, W4AxLinear))[1]]
    spent, handles = [0.0], []
    for layer in layers:
        handles += [layer.register_forward_pre_hook(lambda *_: spent.append(-_clock(device)))]
        handles += [layer.register_forward_hook(lambda *_: spent.append(_clock(device)))]
    start = _clock(device)
    step(models)
    seconds = _clock(device) - start
    for handle in handles:
        handle.remove()
    few = len(layers) // len(models)
    layer_bytes = sum(map(_held, layers)) // few
    return _Step(
        load=load_seconds,
        seconds=seconds,
        layer_seconds=sum(spent) / few,
        layer_bytes=layer_bytes,
        weights=sum(map(_held, models)),
        memory=peak_memory(),
        gpu_memory=torch.cuda.max_memory_allocated(device) if on_gpu else 0,
    )


def _held(module: nn.Module) -> int:
    """Bytes of a module's weights, in the GPU's own layout too where a linear has one."""
    stored = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    linears = [part for part in module.modules() if isinstance(part, W4AxLinear)]
    prepared = [part.prepared() for part in linears if part.qweight.is_cuda and has_kernel(part)]
    return stored + sum(one.weight.records.nbytes for one in prepared)


def _clock(device: str) -> float:
    _wait(device)
    return time.perf_counter()


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
