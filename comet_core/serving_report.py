"""e2e and step records -> two tables (serving, parts of a step) and three pictures (throughput over batch, memory over
context, parts of a step)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comet_core.llama_shape import shape_of_alias
from comet_core.results import Record, latest, markdown, shared_scales
from comet_core.roofline import CONTEXTS, memory_rows
from comet_core.serving_scheme import SCHEMES
from comet_core.whole_files import whole_file

IDENTITY = (
    "model", "layers", "scheme", "engine", "activation_share", "batch", "batch_is_largest", "prompt_tokens",
    "output_tokens",
)  # fmt: skip
BASELINE = "16-bit"
BASELINES = (BASELINE, "bf16")  # ours, and what vLLM calls it
ORDER = ("GEMM", "attention", "lm_head", "norm and quantize", "rotate and append", "sample", "other")
MEMORY_SCHEMES = (BASELINE, "W4A16KV16", "W4A4KV4")  # in the picture of memory


def _place(record: Record) -> tuple[Any, ...]:
    order = list(SCHEMES).index(record["scheme"]) if record["scheme"] in SCHEMES else len(SCHEMES)
    return record["model"], -record["prompt_tokens"], record["batch"], order, record["engine"]


def serving_records(records: Sequence[Record]) -> list[Record]:
    """The latest e2e record of each model, scheme, engine, batch and load, in the table's order."""
    return sorted(latest([r for r in records if r["kind"] == "e2e"], IDENTITY), key=_place)


def scheme_of(record: Record) -> str:
    """The scheme, and whether its activation scales are shared."""
    share = record.get("activation_share")
    return str(record["scheme"]) + ("" if share is None else shared_scales(share, " with "))


def serving_table(records: Sequence[Record]) -> str:
    """Rates, times and memory, a row a record, and the ratio to the same engine in 16 bit under the same load."""
    found = serving_records(records)
    base = {
        tuple(r[key] for key in ("model", "engine", "batch", "prompt_tokens", "output_tokens")): r
        for r in found
        if r["scheme"] in BASELINES
    }
    rows = []
    for r in found:
        same = base.get(tuple(r[key] for key in ("model", "engine", "batch", "prompt_tokens", "output_tokens")))
        ratio, decode_ratio = "", ""
        if same is not None and same is not r:
            ratio = f"{r['tokens_per_s'] / same['tokens_per_s']:.2f}"
            decode_ratio = f"{same['tpot_ms'] / r['tpot_ms']:.2f}" if same["tpot_ms"] and r["tpot_ms"] else ""
        rows.append(
            [
                r["model"],
                f"{scheme_of(r)}, {r['engine']}",
                f"{r['prompt_tokens']:,}/{r['output_tokens']:,}",
                f"{r['batch']}" + (" (most that fit)" if r.get("batch_is_largest") else ""),
                f"{r['tokens_per_s']:,.0f}",
                ratio,
                decode_ratio,
                "" if r["ttft_ms"] is None else f"{r['ttft_ms']:,.0f}",
                "" if r["tpot_ms"] is None else f"{r['tpot_ms']:.2f}",
                "" if r["memory_gib"] is None else f"{r['memory_gib']:.1f}",
            ]
        )
    header = [
        "model", "scheme, engine", "prompt/output", "batch", "output tokens/s", "over 16-bit", "decode over 16-bit",
        "TTFT ms", "TPOT ms", "memory GiB",
    ]  # fmt: skip
    return markdown(header, rows)


def _axes(title: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    axis.set_title(title, fontsize=10)
    axis.grid(True, alpha=0.25)
    return figure, axis


def _save(figure: Any, png: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    with whole_file(png) as partial:
        figure.savefig(partial, format="png", dpi=120)
    pyplot.close(figure)
    return png


def draw_throughput(records: Sequence[Record], model: str, load: tuple[int, int], png: Path) -> Path:
    """Output tokens a second over the batch, a line a scheme and engine."""
    found = [
        r for r in serving_records(records) if r["model"] == model and (r["prompt_tokens"], r["output_tokens"]) == load
    ]
    gpu = next((r["provenance"].get("gpu") for r in found), None)
    figure, axis = _axes(f"{model}, {load[0]:,}/{load[1]:,} tokens, {gpu}")
    for scheme, engine in dict.fromkeys((r["scheme"], r["engine"]) for r in found):
        line = sorted((r["batch"], r["tokens_per_s"]) for r in found if (r["scheme"], r["engine"]) == (scheme, engine))
        axis.plot(*zip(*line, strict=True), marker="o", label=f"{scheme}, {engine}")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("batch, sequences")
    axis.set_ylabel("output tokens/s, prefill included")
    axis.legend(fontsize=8)
    return _save(figure, png)


def draw_memory(model: str, png: Path) -> Path:
    """Weights and KV cache of one sequence over the context, from shapes alone."""
    shape = shape_of_alias(model)
    rows = memory_rows(shape)
    figure, axis = _axes(f"{model}: weights and KV cache of one sequence")
    for scheme in MEMORY_SCHEMES:
        line = [r["weights_gib"] + r["kv_gib"] for r in rows if r["scheme"] == scheme]
        axis.plot(CONTEXTS, line, marker="o", label=scheme)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("context, tokens")
    axis.set_ylabel("GiB")
    axis.legend(fontsize=8)
    return _save(figure, png)


def step_records(records: Sequence[Record]) -> list[Record]:
    """Traced decode steps: the latest of each model, scheme, batch and context, out of step and e2e records."""
    found = [r for r in records if r["kind"] == "step"]
    for r in records:
        if r["kind"] == "e2e" and "step_parts" in r:
            found.append(r | {"context": r["step_parts"]["context"], "kind": "step"})
    return latest(found, ("model", "layers", "scheme", "engine", "activation_share", "batch", "context"))


def step_table(records: Sequence[Record]) -> str:
    """Where a decode step's microseconds go, a row a traced step."""
    rows = []
    for r in step_records(records):
        parts = r["step_parts"]
        kinds = [parts["kinds"].get(kind, 0.0) for kind in ORDER]
        layers = f"{r['model']}, {r['layers']} layers" if "layers" in r else r["model"]
        rows.append(
            [layers, f"{scheme_of(r)}, batch {r['batch']}, context {r['context']:,}", f"{parts['span_us']:,.0f}"]
            + [f"{time:,.0f}" for time in kinds]
            + [f"{parts['gaps']['sum_us']:,.0f}", f"{parts['gaps']['largest_us']:.1f}"]
        )
    return markdown(["model", "step", "us", *ORDER, "gaps", "largest gap"], rows)


def draw_step_parts(records: Sequence[Record], png: Path) -> Path:
    """The parts of a decode step, a bar a traced step."""
    found = step_records(records)
    figure, axis = _axes("parts of a decode step")
    names = [f"{r['model']}\n{scheme_of(r)}, batch {r['batch']}" for r in found]
    bottom = [0.0] * len(found)
    for kind in (*ORDER, "gaps"):
        parts = [r["step_parts"] for r in found]
        heights = [(p["gaps"]["sum_us"] if kind == "gaps" else p["kinds"].get(kind, 0.0)) / 1000 for p in parts]
        axis.bar(names, heights, bottom=bottom, label=kind, width=0.6)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axis.set_ylabel("ms")
    axis.tick_params(axis="x", labelsize=7)
    axis.legend(fontsize=8)
    return _save(figure, png)
