"""One layer on several devices: its calibration windows go through on all of them at once.

A lane is one device with a copy of the layer in work. Range i of the windows belongs to lane i modulo the number of
lanes, for the whole run, and its hidden states live there, so between the layers nothing moves. Each lane has a thread,
because a forward waits for its GPU here and there, and keeps it: cuDNN's attention remembers by thread what it has
compiled. A range's outcomes are handed back in order, to one thread, which alone adds them up. So what is merged range
by range (the statistics of calibration) has the same bits with any number of devices, and what every lane sums for
itself first (the moments of GPTQ) differs by the rounding of a float32 sum.

Several devices are taken only where they are named. What a second one costs moves between the two: for every layer its
weights, twice while packing (as they were, and as they are packed), and the moments of every group, up to four matrices
of its channels squared in float32; all else that a layer takes (reading it, its plan, GPTQ) is done on the first alone.
For layers of LLaMA-3-8B two H200 calibrate faster than one and pack as fast (results/LOG.md).
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from comet_core.decoder import Call

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Lanes:
    """The devices that share the windows; the first one holds the model and decides."""

    devices: tuple[torch.device, ...]

    @classmethod
    def of(cls, device: str) -> "Lanes":
        """A torch name, or several: `cuda:0,cuda:1`."""
        return cls(tuple(torch.device(name.strip()) for name in device.split(",")))

    def __len__(self) -> int:
        return len(self.devices)

    def on(self, lane: int) -> Any:
        """A context in which kernels start on the lane's GPU."""
        device = self.devices[lane]
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    @cached_property
    def _threads(self) -> list[ThreadPoolExecutor]:
        """One thread a lane, for as long as the lanes are there."""
        return [ThreadPoolExecutor(1, thread_name_prefix=f"lane-{device}") for device in self.devices]

    def map(self, work: Callable[[Item], Outcome], items: Sequence[Item]) -> Iterator[Outcome]:
        """work(item) of every item in order; item i runs on lane i modulo their number, one on each at a time."""
        if len(self) == 1:
            yield from map(work, items)
            return

        def run(lane: int, item: Item) -> Outcome:
            with torch.no_grad(), self.on(lane):  # both are a thread's own
                return work(item)

        for start in range(0, len(items), len(self)):
            some = items[start : start + len(self)]
            running = [self._threads[lane].submit(run, lane, item) for lane, item in enumerate(some)]
            wait(running)
            yield from [one.result() for one in running]


class Copies:
    """A layer on its own device and a copy of it on each other one; a linear that was replaced is copied anew."""

    def __init__(self, lanes: Lanes, layer: nn.Module) -> None:
        self._lanes, self._layer = lanes, layer
        self._others: list[nn.Module] = []

    def refresh(self) -> None:
        """Let the copies be what the layer is now. While lanes are at work, call `on` only."""
        if not self._others:
            self._others = [copied(self._layer, device) for device in self._lanes.devices[1:]]
        for device, other in zip(self._lanes.devices[1:], self._others, strict=True):
            for name, module in self._layer.named_modules():
                if name and type(module) is not type(other.get_submodule(name)):
                    owner, _, leaf = name.rpartition(".")
                    setattr(other.get_submodule(owner), leaf, copied(module, device))

    def on(self, lane: int) -> nn.Module:
        """The layer on that lane."""
        return self._others[lane - 1] if lane else self._layer


def copied(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a module whose parameters and buffers are on `device`."""
    there: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        moved = tensor.detach().to(device, copy=True)
        there[id(tensor)] = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
    return copy.deepcopy(module, there)


def calls_by_lane(lanes: Lanes, calls: dict[int, list[Call]]) -> list[dict[int, list[Call]]]:
    """What the layers are called with, by number of windows a step, on every lane."""
    return [calls, *(_moved(calls, device) for device in lanes.devices[1:])]


def _moved(calls: dict[int, list[Call]], device: torch.device) -> dict[int, list[Call]]:
    there: dict[int, Tensor] = {}  # layers share masks and rotary tables

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in there:
            there[id(value)] = value.to(device)
            there[id(value)].__dict__.update(value.__dict__)  # a mask may carry where its sequences start
        return there[id(value)]

    return {
        size: [Call(*_pytree.tree_map(move, (call.args, call.kwargs))) for call in of_size]
        for size, of_size in calls.items()
    }
