"""Time of a call on a device, and the state of its memory before one: what every serving measurement shares."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def milliseconds(device: torch.device, call: Callable[[], Any], repeats: int = 1) -> float:
    """Median time of `repeats` calls."""
    times: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            before = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - before))
    return float(statistics.median(times))


def fill_randomly(tensors: Sequence[torch.Tensor], seed: int) -> None:
    """Random cache contents: memory full of zeros would draw less power and run at a higher clock."""
    for tensor in tensors:
        generator = torch.Generator(tensor.device).manual_seed(seed)
        if tensor.dtype == torch.uint8:
            tensor.random_(0, 256, generator=generator)
        else:
            tensor.uniform_(-0.1, 0.1, generator=generator)


def free_memory() -> None:
    """Give back what dead tensors and graphs held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
