"""Perplexity records -> one table and one plot for all schemes and models: what is lost against how many bits multiply.

The bits of a scheme are the mean, over the decoder linears' multiply-adds, of (weight bits + activation bits) / 2:
16 for 16-bit, 10 for W4A16, 8 for W8A8, 6 for W4A8, 4.32 for W4A4 with 16% of the multiply-adds at W4A8. Scales and
the KV cache are not in it; the cache stands beside it.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from comet_core.recipe import Recipe, load_recipe, recipe_names
from comet_core.results import latest, markdown
from comet_core.whole_files import whole_file

IDENTITY = ("model", "task", "seq_len", "windows", "recipe", "kv_quantized")


def operand_bits(recipe: Recipe, int4_mac_fraction: float) -> float:
    """Mean bits of the two operands of a multiply-add; overrides and skips are seen through the fraction alone."""
    weight, activation = recipe.weights.bits, float(recipe.activations.bits)
    if recipe.activations.bits == 4:
        activation = 4 * int4_mac_fraction + 8 * (1 - int4_mac_fraction)
    return (weight + activation) / 2


def rows(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per perplexity of a shipped recipe whose 16-bit perplexity is known under equal protocol."""
    known = set(recipe_names())
    chosen = [r for r in records if r["kind"] == "eval" and r["metric"] == "perplexity" and r["value"] is not None]
    found = latest(chosen, IDENTITY)
    base = {_place(r): float(r["value"]) for r in found if r["recipe"] == "fp16"}
    made = []
    for record in found:
        if record["recipe"] in known and _place(record) in base:
            loss = math.log(record["value"] / base[_place(record)])
            bits = operand_bits(load_recipe(record["recipe"]), record["int4_mac_fraction"] or 0.0)
            made.append(record | {"bits": bits, "loss": loss})
    return sorted(made, key=lambda r: (_place(r), -r["bits"], r["loss"]))


def _place(record: dict[str, Any]) -> tuple[str, str, int, str]:
    return record["model"], record["task"], record["seq_len"], str(record["windows"])


def bits_table(records: Iterable[dict[str, Any]]) -> str:
    """Markdown: model, text, recipe, bits, KV, perplexity and its rise over 16-bit."""
    header = ["model, text", "recipe", "bits", "KV", "perplexity", "over 16-bit"]
    body = []
    for r in rows(records):
        text = f"{r['model']}, {r['task']}, {r['windows']} x {r['seq_len']:,}"
        kv = "4-bit" if r["kv_quantized"] else "16-bit"
        rise = f"{100 * math.expm1(r['loss']):+.1f}%"
        body.append([text, r["recipe"], f"{r['bits']:.2f}", kv, f"{r['value']:,.2f}", rise])
    return markdown(header, body)


def bits_plot(records: Iterable[dict[str, Any]], path: Path) -> bool:
    """Draw it as PNG; filled marks have a 4-bit KV cache. False, and no file, where there is nothing to draw."""
    found = [r for r in rows(records) if r["recipe"] != "fp16"]
    if not found:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    places = list(dict.fromkeys(_place(r) for r in found))
    for index, place in enumerate(places):
        model, task, seq_len, windows = place
        for quantized in (True, False):
            own = [r for r in found if _place(r) == place and r["kv_quantized"] == quantized]
            if own:
                label = f"{model}, {task}, {windows} x {seq_len:,}, KV{4 if quantized else 16}"
                face = f"C{index % 10}" if quantized else "none"
                x, y = [r["bits"] for r in own], [max(math.expm1(r["loss"]), 1e-4) for r in own]
                axes.scatter(x, y, s=30, edgecolors=f"C{index % 10}", facecolors=face, label=label)
    for record in found:
        point = record["bits"], max(math.expm1(record["loss"]), 1e-4)
        axes.annotate(record["recipe"], point, fontsize=6, xytext=(4, 2), textcoords="offset points")
    axes.set_yscale("log")
    axes.set_xlabel("mean bits of a multiply-add's operands")
    axes.set_ylabel("rise of perplexity over 16-bit, as a share")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=130, metadata={"Software": None})
    pyplot.close(figure)
    return True
