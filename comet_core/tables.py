"""Records -> the tables of a markdown file, written between markers: `python -m comet_core.tables README.md`.

    <!-- table: eval -->
    ...
    <!-- end: eval -->

Records come from results/measured beside the file, or measured/ where it lies in results. A test fails where the tables
of README.md and results/README.md are not the generated ones.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from comet_core import headline
from comet_core.layer_times import layer_table
from comet_core.results import (
    COUNTERS,
    Record,
    attention_table,
    counters_table,
    eval_table,
    gemm_table,
    latest,
    markdown,
    peer_runs,
    read,
    windows_of,
    without_peers,
)
from comet_core.serving_report import serving_table, step_table
from comet_core.whole_files import write_text
from comet_core.zero_shot_table import zero_shot_table
from comet_cuda.errors import CometError


def is_variant(record: Record) -> bool:
    """Whether a record is of a recipe that was only tried: `base+change`, as comet_core/screen.py calls it."""
    return "+" in record.get("recipe", "")


def is_of_runner(record: Record) -> bool:
    """Whether a record is of comet_core/real_text.py, whose KL is to a reference of its own."""
    return "kv_bits" in record.get("protocol", {})


def is_beside_vllm(record: Record) -> bool:
    """Whether a record is of the comparison with vLLM, which has a table of its own."""
    return "engine" in record.get("protocol", {})


def accuracy_table(records: list[Record]) -> str:
    """Recipes by perplexity, of each model, text and window length only the most windows that were measured."""
    chosen = [
        r for r in records
        if r["kind"] == "eval" and not (is_variant(r) or is_of_runner(r) or is_beside_vllm(r))
    ]  # fmt: skip
    most: dict[tuple[str, str, int], float] = {}
    for r in chosen:
        key = (r["model"], r["task"], r["seq_len"])
        most[key] = max(most.get(key, 0), windows_of(r))
    return eval_table(r for r in chosen if windows_of(r) == most[r["model"], r["task"], r["seq_len"]])


def vllm_table(records: list[Record]) -> str:
    """Perplexities of one packed folder by vLLM and by COMET, the same windows in the same 16-bit type."""
    chosen = [r for r in records if r["kind"] == "eval" and is_beside_vllm(r) and r["metric"] == "perplexity"]
    key = ("model", "recipe", "task", "windows", "seq_len", "kv_quantized")
    own = {tuple(r[name] for name in key): r["value"] for r in chosen if r["protocol"]["engine"] == "comet"}
    theirs = [r | {"engine": r["protocol"]["engine"]} for r in chosen if r["protocol"]["engine"] != "comet"]
    rows = []
    for r in latest(theirs, (*key, "engine")):
        comet, error = own[tuple(r[name] for name in key)], r["protocol"].get("beside_comet", {}).get("vllm", {})
        spread = f" ± {100 * error['standard_error']:.2f}%" if error else ""
        rows.append(
            [f"{r['model']}, {r['recipe']}", r["engine"], f"{r['windows']} x {r['seq_len']:,}",
             "4-bit" if r["kv_quantized"] else "16-bit", f"{comet:.2f}", f"{r['value']:.2f}",
             f"{100 * (r['value'] / comet - 1):+.2f}%{spread}"]
        )  # fmt: skip
    return markdown(["model", "engine", "windows", "KV", "comet eval", "vLLM", "difference"], rows)


def _kl(nats: float) -> str:
    return f"{nats:.3f}" if nats >= 0.001 else f"{nats:.1g}"


def real_text_table(records: list[Record]) -> str:
    """A packed model by two computations of it: what the first says against the second, one row a pair."""
    chosen = [r for r in records if r["kind"] == "eval" and is_of_runner(r) and " against " in r["task"]]
    key = ("model", "recipe", "task", "windows", "seq_len")
    groups: dict[tuple[str, ...], dict[str, float]] = {}
    for r in latest(chosen, (*key, "metric")):
        groups.setdefault(tuple(str(r[name]) for name in key), {})[r["metric"]] = r["value"]
    rows = [
        [f"{model}, {recipe}", task, f"{windows} x {int(length):,}", f"{found['perplexity']:.2f}",
         f"{found['reference_perplexity']:.2f}", _kl(found["kl"]), f"{100 * found['top1']:.1f}%"]
        for (model, recipe, task, windows, length), found in groups.items()
    ]  # fmt: skip
    header = ["model", "what against what", "windows", "perplexity", "its reference's", "KL", "top-1 alike"]
    return markdown(header, rows)


def layer_errors_table(records: list[Record]) -> str:
    """Both halves of a layer by two computations of them on the same inputs (comet_core/layer_text.py); without
    records nothing."""
    chosen = [r for r in records if r["kind"] == "eval" and r["metric"].startswith("layer_error_")]
    key = ("model", "recipe", "task", "windows", "seq_len")
    groups: dict[tuple[str, ...], dict[str, float | None]] = {}
    for r in latest(chosen, (*key, "metric")):
        groups.setdefault(tuple(str(r[name]) for name in key), {})[r["metric"]] = r["value"]
    if not groups:
        return ""

    def cell(found: dict[str, float | None], part: str) -> str:
        values = [found.get(f"layer_error_{of}_{part}") for of in ("median", "max")]
        return " / ".join("not a number" if value is None else f"{100 * value:.2f}%" for value in values)

    parts = ("attention_prefill", "attention_decode", "mlp_prefill", "mlp_decode")
    rows = [
        [f"{model}, {recipe}", task.removeprefix("layers of "), f"{windows} x {int(length):,}"]
        + [cell(found, part) for part in parts]
        for (model, recipe, task, windows, length), found in groups.items()
    ]
    header = ["model", "what beside what", "windows", "attention, prefill", "decode", "MLP, prefill", "decode"]
    return LAYERS + "\n\n" + markdown(header, rows)


def long_table(records: list[Record]) -> str:
    """What the 4-bit cache costs at long context: perplexity and passkeys found, with a 16-bit and a 4-bit cache."""
    chosen = [r for r in records if r["kind"] == "eval" and r["task"] in ("long context", "passkey")]
    key = ("model", "recipe", "task", "seq_len", "windows")
    groups: dict[tuple[Any, ...], dict[int, float]] = {}
    for r in latest([r | {"kv_bits": r["protocol"]["kv_bits"]} for r in chosen], (*key, "kv_bits")):
        groups.setdefault(tuple(r[name] for name in key), {})[r["kv_bits"]] = r["value"]
    rows = [
        [f"{model}, {recipe}", f"{task}, {windows} x {length:,}"]
        + [f"{found[bits]:.3f}" if task == "long context" else f"{100 * found[bits]:.0f}%" for bits in (16, 4)]
        for (model, recipe, task, length, windows), found in sorted(groups.items())
        if found.keys() == {16, 4}
    ]
    return markdown(["model", "what", "16-bit cache", "4-bit cache"], rows)


def ablation_table(records: list[Record]) -> str:
    """The GEMM with one mechanism off, M by M, means over the shapes: how much slower, and what ncu counts then.

    An ablated launch is compared with the shipped one of the same commit.
    """
    place, shape = ("m", "ablation"), ("n", "k")
    own = [r | {"git": r["provenance"].get("git")} for r in records if r["kind"] == "bench" and r["path"] == INTEGER]
    timed = [r for r in own if r["op"] == "w4ax_gemm" and not r["includes_quantize"]]
    us = {tuple(r[x] for x in ("git", *shape, *place)): r["median_us"] for r in timed}
    counted = [r for r in own if all(key in r for key in COUNTERS)]
    groups: dict[tuple[int, str | None], list[Record]] = {}
    for r in latest(counted, (*shape, *place)):
        groups.setdefault((r["m"], r["ablation"]), []).append(r)
    rows = []
    for (m, ablation), found in sorted(groups.items(), key=lambda group: (group[0][0], group[0][1] is not None)):
        slower = [
            us[r["git"], r["n"], r["k"], m, ablation] / us[r["git"], r["n"], r["k"], m, None]
            for r in latest(timed, (*shape, *place))
            if (r["m"], r["ablation"]) == (m, ablation) and (r["git"], r["n"], r["k"], m, None) in us
        ]
        rows.append(
            [f"{INTEGER}, {found[0]['provenance'].get('gpu')}", f"{ablation} off" if ablation else "shipped", f"{m:,}",
             f"{len(found)}", f"{geometric_mean(slower):.2f}" if ablation and slower else ""]
            + [f"{100 * sum(r[key] for r in found) / len(found):.0f}%"
               for key in ("sm_active", "sm_throughput", "tensor_pipe", "imbalance")]
        )  # fmt: skip
    header = ["path, GPU", "variant", "M", "shapes", "times as long", "multiprocessors busy", "busiest unit"]
    return markdown([*header, "tensor pipe", "imbalance"], rows)


def peer_table(records: list[Record]) -> str:
    """Kernels beside COMET's in one run: speed-up over bf16 cuBLAS, M by M, geometric means over the run's shapes."""
    groups: dict[tuple[str, str, bool], dict[int, list[Record]]] = {}
    timed = [r for r in peer_runs(records) if (r["speedup"] or 0) > 0]
    for r in latest(timed, ("path", "weight_symmetry", "includes_quantize", "n", "k", "m")):
        kind = (r["path"], r["weight_symmetry"], r["includes_quantize"])
        groups.setdefault(kind, {}).setdefault(r["m"], []).append(r)
    batches = sorted({m for found in groups.values() for m in found})
    rows = [
        [path + (" with quantize_act" if quantized else ""), weights, str(max(map(len, found.values())))]
        + [f"{geometric_mean([r['speedup'] for r in found[m]]):.2f}" if m in found else "" for m in batches]
        for (path, weights, quantized), found in groups.items()
    ]
    return markdown(["kernel", "weights", "shapes", *(f"M = {m:,}" for m in batches)], rows)


LAYERS = """\
Layer by layer, the error of what both halves of a layer add to the CPU reference's hidden states: |difference| over
|added|, a mean over tokens, of all layers the median / the largest. The prompt comes in chunks, the last tokens one by
one. How much the 16-bit type does alone, flipped codes included, is said by the row of the CPU beside its own float32;
where the runner's row beside float32 says the same, its kernels add nothing to that:"""

INTEGER = "w4ax_gemm_integer"  # the default recipe's GEMM
ENOUGH = 100  # documents of a task: fewer say nothing

# marker name -> what stands between the markers
TABLES: dict[str, Callable[[list[Record]], str]] = {
    "accuracy-short": headline.accuracy,
    "gemm-short": headline.gemm,
    "served-short": headline.served,
    "eval": accuracy_table,
    "vllm": vllm_table,
    "zero-shot": lambda records: zero_shot_table(
        [r for r in records if not is_variant(r) and (r.get("limit") is None or r["limit"] >= ENOUGH)]
    ),
    "real-text": real_text_table,
    "layer-errors": layer_errors_table,
    "long": long_table,
    "gemm": lambda records: gemm_table(without_peers([r for r in records if not r.get("ablation")])),
    "peers": peer_table,
    "ablations": ablation_table,
    "counters": counters_table,
    "attention": attention_table,
    "steps": step_table,
    "serving": serving_table,
    "layers": layer_table,
}


def fill(text: str, records: list[Record]) -> str:
    """`text` with the lines between each pair of markers replaced by the table of that name."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", f"<!-- end: {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        text = pattern.sub(lambda _, b=begin, t=table, e=end: f"{b}\n{t(records)}\n\n{e}", text)  # type: ignore[misc]
    unknown = set(re.findall(r"<!-- table: ([\w-]+) -->", text)) - set(TABLES)
    if unknown:
        raise CometError(f"no table named {', '.join(sorted(unknown))}", f"tables are {', '.join(TABLES)}")
    return text


def main(arguments: list[str]) -> int:
    """Write the tables of the named files anew; records come from measured/ or results/measured/ beside each."""
    if not arguments:
        print("usage: python -m comet_core.tables README.md ...", file=sys.stderr)
        return 2
    try:
        for name in arguments:
            path = Path(name)
            near = path.parent / "measured"
            records = read(near if near.is_dir() else path.parent / "results" / "measured")
            write_text(path, fill(path.read_text(encoding="utf-8"), records))
    except CometError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
