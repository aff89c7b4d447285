"""Time of one launch on a GPU: cold L2, one CUDA graph, the median of its replays.

A launch is timed as it runs in a decoder: captured in a graph, one after the other, with operands that are not in the
L2 cache. `variants` are closures over different operand sets; together they should hold several times the L2, and the
graph walks them in turn, so that each finds its operands cold.
"""

from collections.abc import Callable, Sequence
from typing import Any

COLD_BYTES = 256 << 20  # operands that one pass over all variants should touch: over four times the H200's 60 MB L2


def copies_for_cold_l2(bytes_per_launch: int) -> int:
    """How many operand sets make every launch read cold memory."""
    return max(2, -(-COLD_BYTES // max(bytes_per_launch, 1)))


def median_microseconds(variants: Sequence[Callable[[], Any]], launches: int = 0, replays: int = 7) -> float:
    """Median over `replays` of the mean time of one launch in a graph of `launches` (default: two passes)."""
    import torch

    launches = launches or 2 * len(variants)
    for variant in variants[:2]:
        variant()  # compile and load outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [variants[i % len(variants)]() for i in range(launches)]
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    del kept
    times: list[float] = sorted(start.elapsed_time(end) for start, end in events)
    return 1000.0 * times[len(times) // 2] / launches
