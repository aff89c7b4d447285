"""Measurements in, JSON lines out, tables from those lines. A table is never written by hand.

A record is one flat dictionary with a `kind`; each kind has a fixed set of keys (`KEYS`), more may follow them. Records
are appended to a .jsonl file and never edited: a later record with the same identity (model, recipe, task, metric,
windows, ...) replaces an earlier one in the tables, and both stay in the file. A value that is not finite is stored as
null, since JSON has no word for it.

`tables.py` writes the tables between a file's markers anew.
"""

import fcntl
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from comet_core.whole_files import CannotWrite
from comet_cuda.errors import CometError

Record = dict[str, Any]

KEYS: dict[str, tuple[str, ...]] = {
    "eval": (
        "model", "recipe", "task", "metric", "value", "windows", "seq_len", "kv_quantized", "int4_mac_fraction",
        "protocol", "provenance",
    ),
    "bench": (
        "op", "arch", "path", "m", "n", "k", "int4_fraction", "weight_symmetry", "ablation", "includes_quantize",
        "median_us", "baseline", "baseline_us", "speedup", "bound_fraction", "provenance",
    ),
    "host": ("op", "m", "n", "k", "host_us", "of_torch_add", "provenance"),  # cuda/tools/host_time.py
    "fuzz": ("inputs", "seed", "refused", "loaded", "failures", "provenance"),  # tests/fuzz/campaign.py
    "big": (  # tests/big/measure.py
        "model", "recipe", "layers", "samples", "device", "pack_s_by_layer", "ram_above_imports", "bound", "provenance",
    ),
    "kills": ("commands", "seed", "runs", "outcomes", "failures", "provenance"),  # tests/kill/campaign.py
    "dry-run-check": ("case", "model", "device", "provenance"),  # what a dry run said beside what the run took
    "e2e": (
        "model", "scheme", "engine", "batch", "prompt_tokens", "output_tokens", "tokens_per_s", "ttft_ms", "tpot_ms",
        "memory_gib", "provenance",
    ),
    "step": (  # one decode step, traced: step_parts is what step_breakdown.summarize returns
        "model", "scheme", "engine", "batch", "context", "layers", "step_parts", "provenance",
    ),
}  # fmt: skip

COUNTERS = {  # further keys of a bench record whose op is "w4ax_gemm counters" (cuda/tools/profile_gemm.py)
    "sm_active": "share of the launch's cycles in which a multiprocessor has work, mean over all of them",
    "sm_throughput": "share of its peak that the busiest unit of the multiprocessors reaches",
    "tensor_pipe": "share of its peak that the tensor pipe reaches",
    "imbalance": "busy cycles of the busiest multiprocessor over the mean of all, less 1",
    "dram_bytes": "bytes that device memory moved, read and written",
    "tiles": "an object: the kernel's variant",
    "counters": "an object: names of the counters behind each",
}

TEXT, NO_TEXT, FLAG, OBJECT = "text", "text or null", "true or false", "an object"
WHOLE, NUMBER, NO_NUMBER = "a whole number", "a number", "a number or null"
KINDS = {  # key -> what its value must be
    **dict.fromkeys(("model", "recipe", "task", "metric", "op", "arch", "path"), TEXT),
    **dict.fromkeys(("scheme", "engine"), TEXT),
    **dict.fromkeys(("weight_symmetry", "baseline", "ablation"), NO_TEXT),
    **dict.fromkeys(("kv_quantized", "includes_quantize"), FLAG),
    **dict.fromkeys(("n", "k"), NO_NUMBER),
    **dict.fromkeys(("seq_len", "m", "batch", "prompt_tokens", "output_tokens", "context", "layers"), WHOLE),
    **dict.fromkeys(("value", "int4_mac_fraction", "median_us", "baseline_us", "speedup", "bound_fraction"), NO_NUMBER),
    **dict.fromkeys(("tokens_per_s", "ttft_ms", "tpot_ms", "memory_gib"), NO_NUMBER),
    **dict.fromkeys(("int4_fraction", "host_us", "of_torch_add"), NUMBER),
    **dict.fromkeys(("protocol", "provenance", "step_parts"), OBJECT),
}
TYPES: dict[str, tuple[type, ...]] = {
    TEXT: (str,), NO_TEXT: (str, type(None)), FLAG: (bool,), OBJECT: (dict,),
    WHOLE: (int,), NUMBER: (int, float), NO_NUMBER: (int, float, type(None)),
}  # fmt: skip


def check(record: Record) -> None:
    """Raise CometError if `record` lacks its kind or a key that its kind demands."""
    kind = record.get("kind")
    if kind not in tuple(KEYS):  # a tuple also takes what has no hash
        raise CometError(f"record of kind {kind!r}", f"kinds are {', '.join(KEYS)}")
    missing = [key for key in KEYS[kind] if key not in record]
    for key, wanted in KINDS.items():
        if key in KEYS[kind] and key in record and not _fits(record[key], wanted):
            raise CometError(f"{kind} record whose {key} is {str(record[key])[:60]!r}", f"{key} is {wanted}")
    if missing:
        raise CometError(f"{kind} record without {', '.join(missing)}", f"an {kind} record has {', '.join(KEYS[kind])}")


def _fits(value: Any, wanted: str) -> bool:
    return isinstance(value, TYPES[wanted]) and (wanted == FLAG or not isinstance(value, bool))


def append(path: Path, record: Record) -> None:
    """Add one record to a .jsonl file (made if absent). Safe when several processes write to one file."""
    check(record)
    line = json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as sink:
            fcntl.flock(sink, fcntl.LOCK_EX)
            size = sink.seek(0, os.SEEK_END)
            if size:  # a line cut short by a crash must not swallow this one
                sink.seek(size - 1)
                if sink.read(1) != b"\n":
                    line = "\n" + line
            sink.write(line.encode())
    except OSError as error:
        raise CannotWrite(
            f"{path}: a record cannot be written ({error.strerror})",
            f"Name another file. The record is: {line.strip()}",
        ) from None


def read(path: Path) -> list[Record]:
    """All records of a .jsonl file, or of all .jsonl files in a folder (by name). A broken line is an error."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    records = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise CometError(f"{file}: cannot be read as records ({error})", "give a .jsonl file of records") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise CometError(f"{where}: not JSON", "remove that line; it was cut short") from None
            if not isinstance(record, dict):
                raise CometError(f"{where}: not an object", "each line is one record in braces")
            try:
                check(record)
            except CometError as error:
                raise CometError(f"{where}: {error.message}", error.hint) from None
            records.append(record)
    return records


def finite(value: Any) -> Any:
    """`value` with each number that is not finite replaced by None, in dictionaries and lists too."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


# --- tables


def latest(records: Iterable[Record], identity: tuple[str, ...]) -> list[Record]:
    """Of all records with equal `identity` values the last one, in the order of first appearance."""
    kept: dict[str, Record] = {}
    for record in records:
        kept[json.dumps([record.get(key) for key in identity])] = record
    return list(kept.values())


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A GitHub table; the first two columns are left-aligned words, the rest right-aligned figures."""
    if not rows:
        return "*No records yet.*"
    rule = ["---" if column < 2 else "---:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def eval_table(records: Iterable[Record]) -> str:
    """Perplexity beside KL divergence and top-1 agreement: one row per model, recipe, text and windows.

    Where the cache was left in 16 bit (`comet eval --kv16`) beside one in 4 bit, that perplexity stands in a column of
    its own. 16-bit comes first within a model, then by rising perplexity; below stands what each base model is.
    """
    evals = [record for record in records if record["kind"] == "eval"]
    row_key = ("model", "task", "seq_len", "windows", "recipe")
    groups: dict[str, dict[bool, dict[str, Record]]] = {}
    for record in latest(evals, (*row_key, "kv_quantized", "metric")):
        caches = groups.setdefault(json.dumps([record[key] for key in row_key]), {})
        caches.setdefault(record["kv_quantized"], {})[record["metric"]] = record
    found: list[tuple[dict[str, Record], Record | None]] = []  # a row, and its perplexity with the cache in 16 bit
    for caches in groups.values():
        quantized, whole = caches.get(True, {}), caches.get(False, {})
        if "perplexity" in quantized:
            found.append((quantized, whole.get("perplexity")))
        elif "perplexity" in whole:
            found.append((whole, None))

    def place(row: tuple[dict[str, Record], Record | None]) -> tuple[Any, ...]:
        head = row[0]["perplexity"]
        value = math.inf if head["value"] is None else head["value"]
        return head["model"], head["task"], head["seq_len"], str(head["windows"]), head["recipe"] != "fp16", value

    rows, notes = [], []
    for metrics, kv16 in sorted(found, key=place):
        head = metrics["perplexity"]
        base = str(head["protocol"].get("base", SIXTEEN_BIT))  # what the 16-bit model itself is
        if base != SIXTEEN_BIT and f"{head['model']}: {base}." not in notes:
            notes.append(f"{head['model']}: {base}.")
        rows.append(
            [
                head["model"],
                head["recipe"],
                f"{head['task']}, {head['windows']} x {head['seq_len']:,}",
                _figure(head["value"]),
                _figure(metrics["kl"]["value"], 4) if "kl" in metrics else "",
                _percent(metrics["top1"]["value"]) if "top1" in metrics else "",
                _percent(head["int4_mac_fraction"]),
                "4-bit" if head["kv_quantized"] else "16-bit",
                "" if kv16 is None else _figure(kv16["value"]),
            ]
        )
    header = ["model", "recipe", "text, windows", "perplexity", "KL to 16-bit", "top-1 as 16-bit", "4-bit share", "KV"]
    return "\n\n".join([markdown([*header, "with KV in 16 bit"], rows), *notes])


def _figure(value: float | None, digits: int = 2) -> str:
    return "not finite" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f}%"


def _known(records: Iterable[Record], key: str) -> list[float]:
    return [record[key] for record in records if record[key] is not None]


SIXTEEN_BIT = "16-bit weights"  # protocol["base"] of a model that was not made from a quantized file


def shared_scales(share: int, before: str) -> str:
    """How activation scales belong together, for a table: nothing for the default, integer multiples of one number."""
    words = {0: "", 1: "free scales"}.get(share, f"scales shared by {share}")
    return before + words if words else ""


def gemm_table(records: Iterable[Record]) -> str:
    """Geometric mean, over all measured shapes, of the GEMM's speed-up over bf16 cuBLAS: one row per path and M.

    A figure below 1 is a loss and stands there as one. COMET's kernels count as one path: the op chooses among them.
    """
    row = ("arch", "kernel", "weight_symmetry", "ablation", "includes_quantize", "share", "m", "baseline")
    chosen = [
        {"share": 1} | r | {"kernel": re.sub("^w4ax_gemm[a-z_]*_sm", "w4ax_gemm_sm", r["path"])}
        for r in records
        if r["kind"] == "bench" and r["op"] == "w4ax_gemm" and (r["speedup"] or 0) > 0
    ]
    groups: dict[str, list[Record]] = {}
    for record in latest(chosen, (*row, "int4_fraction", "n", "k")):
        groups.setdefault(json.dumps([record[name] for name in row]), []).append(record)
    rows = []
    for found in sorted(groups.values(), key=lambda found: (found[0]["kernel"], found[0]["m"])):
        first, ratios = found[0], [record["speedup"] for record in found]
        rows.append(
            [
                f"{first['path']}, {first['provenance'].get('gpu')}",
                f"{first['weight_symmetry']}, {first['int4_fraction']:.0%} INT4"
                + shared_scales(first["share"], ", ")
                + (f", {first['ablation']}" if first["ablation"] else ""),
                "with quantize_act" if first["includes_quantize"] else "GEMM alone",
                f"{first['m']:,}",
                f"{len(found)}",
                f"{geometric_mean(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                _percent(sum(shares) / len(shares), 0) if (shares := _known(found, "bound_fraction")) else "",
                first["baseline"],
            ]
        )
    header = [
        "path, GPU",
        "weights",
        "what",
        "M",
        "shapes",
        "speed-up, geometric mean",
        "range",
        "share of the bound",
        "over",
    ]
    return markdown(header, rows)


def peer_runs(records: Sequence[Record]) -> list[Record]:
    """Timings of GEMMs from runs in which other people's kernels ran beside COMET's."""

    def run(record: Record) -> tuple[str, str]:
        return record["provenance"].get("git"), record["provenance"].get("command")

    timed = [r for r in records if r["kind"] == "bench" and r["op"] == "w4ax_gemm"]
    foreign = {run(r) for r in timed if not r["path"].startswith("w4ax_gemm")}
    return [r for r in timed if run(r) in foreign]


def without_peers(records: Sequence[Record]) -> list[Record]:
    """All records but `peer_runs`."""
    left_out = set(map(id, peer_runs(records)))
    return [r for r in records if id(r) not in left_out]


def windows_of(record: Record) -> float:
    """How many windows a record scored; all of a text are more than any number."""
    return math.inf if record["windows"] == "all" else float(record["windows"])


def counters_table(records: Iterable[Record]) -> str:
    """What a launch of the GEMM keeps busy, as shipped and with one mechanism off: one row per shape, M and variant."""
    chosen = [r for r in records if r["kind"] == "bench" and all(key in r for key in COUNTERS)]
    rows = [
        [
            f"{r['path']}, {r['provenance'].get('gpu')}",
            f"{r['ablation']} off" if r["ablation"] else "shipped",
            f"{r['n']:,} x {r['k']:,}",
            f"{r['m']:,}",
            _figure(r["median_us"], 1),
            *(_percent(r[key], 0) for key in ("sm_active", "sm_throughput", "tensor_pipe")),
            _percent(r["imbalance"]),
            _figure(r["dram_bytes"] / 1e6, 1),
        ]
        for r in latest(chosen, ("arch", "path", "n", "k", "m", "ablation"))
    ]
    header = ["path, GPU", "variant", "N x K", "M", "us", "multiprocessors busy", "busiest unit", "tensor pipe"]
    return markdown([*header, "imbalance", "MB moved"], rows)


def attention_table(records: Iterable[Record]) -> str:
    """Decode attention over the 4-bit cache, one row per heads, batch and context; `over` a baseline where one ran."""
    key = ("arch", "op", "batch", "context", "q_heads", "kv_heads", "head_dim")
    chosen = [r for r in records if r["kind"] == "bench" and "kv4_decode" in r["op"] and all(k in r for k in key)]
    rows = [
        [
            f"{r['op']}, {r['provenance'].get('gpu')}",
            f"{r['q_heads']}/{r['kv_heads']} of {r['head_dim']}",
            str(r["batch"]),
            f"{r['context']:,}",
            _figure(r["median_us"], 1),
            _percent(r["bound_fraction"], 0),
            f"{r['speedup']:.2f} x {r['baseline']}" if r["speedup"] else "no baseline in this run",
        ]
        for r in latest(chosen, key)
    ]
    return markdown(["op, GPU", "heads", "batch", "context", "us", "share of the bound", "over"], rows)
