"""Where a decode step's time goes: one replay of its graph, traced kernel by kernel, grouped by what kernels do.

A kernel may start before the one before it ends (programmatic dependent launch), so durations overlap. The decision:
each kernel is charged from the later of its start and its predecessor's end, and what no kernel covers is a gap; so
the parts and the gaps add up to the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from comet_cuda.errors import CometError

GEMM, ATTENTION, APPEND, QUANTIZE, OTHER = "GEMM", "attention", "rotate and append", "norm and quantize", "other"
LM_HEAD, SAMPLE = "lm_head", "sample"
KINDS = (  # the first whose word is in the kernel's name
    (APPEND, ("rope_append", "kv4_append", "quantize_page", "rope_qk")),
    (ATTENTION, ("kv4", "flash", "fmha", "attention", "combine")),
    (
        QUANTIZE,
        ("quantize_act", "quantize_few", "quantize_many", "quantize_row", "quantize_stay", "quantize_token", "row_op"),
    ),
    (SAMPLE, ("argmax",)),
    (GEMM, ("gemm", "nvjet", "cutlass", "xmma", "gemv", "splitkreduce", "reduce_parts", "device_kernel", "cublas")),
)
LONG_GAP = 5.0  # microseconds


@dataclass(frozen=True)
class KernelRun:
    """One kernel of the trace; microseconds."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    """What a kernel does, by its name."""
    lower = name.lower()
    return next((kind for kind, words in KINDS if any(word in lower for word in words)), OTHER)


def trace(replay: Callable[[], Any]) -> list[KernelRun]:
    """The kernels of one call, in order of their start.

    Errors:
        CometError where the driver does not let this user trace kernels.
    """
    import torch
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        replay()
        torch.cuda.synchronize()
    runs = [
        KernelRun(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]
    if not runs:
        raise CometError("the profiler saw no kernel", "tracing needs CUPTI and the right to use it on this machine")
    return sorted(runs, key=lambda run: run.start)


def summarize(runs: Sequence[KernelRun]) -> dict[str, Any]:
    """The break-down of a trace.

    Returns:
        span_us; gaps: their number, sum, largest, and how many are over 5 us; kinds: microseconds by what kernels do
        (the last matrix product is lm_head); kernels: rows of kind, name, count, microseconds, by falling time;
        besides_gemm_and_attention_us.
    """
    last_gemm = max((i for i, run in enumerate(runs) if kind_of(run.name) == GEMM), default=-1)
    covered = runs[0].start
    kinds: dict[str, float] = {}
    kernels: dict[tuple[str, str], list[float]] = {}
    gaps: list[float] = []
    for index, run in enumerate(runs):
        if run.start > covered:
            gaps.append(run.start - covered)
        charged = max(0.0, run.end - max(run.start, covered))
        covered = max(covered, run.end)
        kind = LM_HEAD if index == last_gemm else kind_of(run.name)
        kinds[kind] = kinds.get(kind, 0.0) + charged
        kernels.setdefault((kind, short_name(run.name)), []).append(charged)
    rows = [
        {"kind": kind, "kernel": name, "count": len(times), "microseconds": round(sum(times), 2)}
        for (kind, name), times in kernels.items()
    ]
    aside = sum(time for kind, time in kinds.items() if kind not in (GEMM, ATTENTION, LM_HEAD))
    return {
        "span_us": round(covered - runs[0].start, 2),
        "gaps": {
            "count": len(gaps),
            "sum_us": round(sum(gaps), 2),
            "largest_us": round(max(gaps, default=0.0), 2),
            "over_5_us": sum(gap > LONG_GAP for gap in gaps),
        },
        "kinds": {kind: round(time, 2) for kind, time in sorted(kinds.items(), key=lambda item: -item[1])},
        "kernels": sorted(rows, key=lambda row: -float(str(row["microseconds"]))),
        "besides_gemm_and_attention_us": round(aside, 2),
    }


def short_name(name: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    bare = name.removeprefix("void ").split("(", 1)[0]
    head = bare.split("<", 1)[0]
    return (head.rsplit("::", 1)[-1] or bare)[:60]


def table(summary: dict[str, Any]) -> str:
    """The break-down as a Markdown table, kernels by falling time."""
    lines = ["| part | kernel | launches | us | share |", "| --- | --- | ---: | ---: | ---: |"]
    span = summary["span_us"]
    for row in summary["kernels"]:
        share = row["microseconds"] / span
        lines.append(f"| {row['kind']} | {row['kernel']} | {row['count']} | {row['microseconds']:,.1f} | {share:.1%} |")
    gaps = summary["gaps"]
    lines.append(f"| gaps | | {gaps['count']} | {gaps['sum_us']:,.1f} | {gaps['sum_us'] / span:.1%} |")
    return "\n".join(lines)
