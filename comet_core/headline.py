"""Records -> three short tables for README: what quantization costs, how fast the GEMM is, how fast a model is served.

Every figure stands in a table of results/README.md too, with its protocol; these choose. The decision: one row a model,
or a batch, COMET beside the best of its kind that was measured, so that a reader sees a loss as quickly as a gain.
"""

from collections.abc import Sequence
from statistics import geometric_mean

from comet_core.results import Record, latest, markdown, windows_of, without_peers
from comet_core.serving_report import scheme_of, serving_records

OURS = {"w4a4kv4-tuned": "W4A4KV4, tuned", "w4a4kv4": "W4A4KV4"}
OTHER_W4A4 = ("fmpq-paper", "atom", "quarot", "quarot-local", "w4a4-naive")
W4A8 = "qoq-g128"
OTHER_SCHEMES = ("W8A8", "W4A16KV16", "W4A8KV4")
SERVED, LOAD, BATCHES = "llama-3-8b", (1024, 512), (1, 16, 64, 256)
INTEGER = "w4ax_gemm_integer"


def accuracy(records: Sequence[Record]) -> str:
    """WikiText-2 perplexity in windows of 2,048, KV cache in 4 bit but for 16 bit's: a row a model."""
    kept = [
        r for r in records
        if r["kind"] == "eval" and (r["task"], r["seq_len"], r["metric"]) == ("wikitext2", 2048, "perplexity")
        and r["recipe"] in (*OURS, *OTHER_W4A4, W4A8, "fp16") and not {"engine", "kv_bits"} & r["protocol"].keys()
        and (r["kv_quantized"] or r["recipe"] == "fp16")
    ]  # fmt: skip
    most: dict[str, float] = {}
    for r in kept:
        most[r["model"]] = max(most.get(r["model"], 0), windows_of(r))
    found: dict[str, dict[str, float]] = {}
    for r in latest([r for r in kept if windows_of(r) == most[r["model"]]], ("model", "recipe")):
        found.setdefault(r["model"], {})[r["recipe"]] = r["value"]
    rows = []
    for model, of in sorted(found.items()):
        others = sorted((of[name], name) for name in OTHER_W4A4 if name in of)
        best = f"{others[0][0]:.2f} ({others[0][1]})" if others else ""
        rows.append([model, *(_figure(of.get(name)) for name in ("fp16", *OURS)), best, _figure(of.get(W4A8))])
    return markdown(["model", "16-bit", *OURS.values(), "best other W4A4KV4", "W4A8KV4 (QoQ)"], rows)


def gemm(records: Sequence[Record]) -> str:
    """The default format's GEMM over bf16 cuBLAS, geometric means over all shapes, alone and with quantization."""
    timed = [r for r in without_peers(records) if r["kind"] == "bench" and r["op"] == "w4ax_gemm"]
    key = ("includes_quantize", "m", "n", "k")
    found: dict[bool, dict[int, list[float]]] = {False: {}, True: {}}
    for r in latest([r for r in timed if r["path"] == INTEGER and not r["ablation"]], key):
        found[r["includes_quantize"]].setdefault(r["m"], []).append(r["speedup"])
    batches = sorted(found[False])
    rows = [
        [what] + [_figure(geometric_mean(found[quantized][m])) if m in found[quantized] else "" for m in batches]
        for quantized, what in ((False, "GEMM alone"), (True, "with quantize_act"))
    ]
    return markdown(["over bf16 cuBLAS", *(f"M = {m:,}" for m in batches)], rows)


def served(records: Sequence[Record]) -> str:
    """One model's output tokens/s by batch, and 256 requests at once in vLLM: 16 bit, W4A4KV4, the best of the rest; of
    the first two also the time of an output token and, where all of it was counted, GPU memory."""
    all_of = [
        r for r in serving_records(records)
        if r["model"] == SERVED and (r["prompt_tokens"], r["output_tokens"]) == LOAD and r["batch"] in BATCHES
    ]  # fmt: skip
    rows = []
    for batch in BATCHES:
        here = [r for r in all_of if r["engine"] == "comet" and r["batch"] == batch]
        rest = [r for r in here if r["scheme"] in OTHER_SCHEMES]
        rows.append([f"COMET, {batch} at once", *_compared(here, "16-bit", "W4A4KV4", rest)])
    theirs = [r for r in all_of if r["engine"].startswith("vLLM") and "GPU" not in r["engine"]]
    rest = [r for r in theirs if r["scheme"] != "bf16" and "comet" not in r["scheme"]]
    rows.append(["vLLM, 256 at once", *_compared(theirs, "bf16", "comet+ownkv4", rest)])
    head = ["output tokens/s", "16-bit", "W4A4KV4", "over 16-bit", "best other scheme", "ms a token", "GPU memory, GiB"]
    return markdown(head, rows)


def _compared(rows: Sequence[Record], sixteen: str, ours: str, rest: Sequence[Record]) -> list[str]:
    of = {scheme_of(r): r for r in rows}
    rate = {name: r["tokens_per_s"] for name, r in of.items()}
    best = max(rest, key=lambda r: r["tokens_per_s"], default=None)
    both = [of[sixteen], of[ours]] if sixteen in of and ours in of else []

    def change(key: str, digits: int) -> str:
        """16 bit's figure, then ours."""
        return " to ".join("?" if r[key] is None else f"{r[key]:.{digits}f}" for r in both)

    return [
        *(f"{rate[name]:,.0f}" if name in rate else "" for name in (sixteen, ours)),
        f"{rate[ours] / rate[sixteen]:.2f}" if both else "",
        "" if best is None else f"{best['tokens_per_s']:,.0f} ({best['scheme']})",
        change("tpot_ms", 1),
        change("memory_gib", 1) if both and both[0]["engine"] == "comet" else "",  # vLLM's is of the weights alone
    ]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
