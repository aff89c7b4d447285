"""Perplexity records -> one table and one plot for all schemes and models: what is lost against how many bits multiply.

The bits of a scheme are the mean, over the decoder linears' multiply-adds, of (weight bits + activation bits) / 2:
16 for 16-bit, 10 for W4A16, 8 for W8A8, 6 for W4A8, 4.32 for W4A4 with 16% of the multiply-adds at W4A8. Scales and
the KV cache are not in it; the cache stands beside it.
"""

import math
from collections.abc import Iterable
from itertools import zip_longest
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
    found = latest([r for r in chosen if r.get("protocol", {}).get("engine", "comet") == "comet"], IDENTITY)
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
    """Draw it as PNG, a panel a model; filled marks have a 4-bit KV cache. False, and no file, if there is nothing.

    Recipes are named along the text and windows that have the most of them.
    """
    found = [r for r in rows(records) if r["recipe"] != "fp16"]
    if not found:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(r["model"] for r in found))
    columns = min(2, len(models))
    lines = -(-len(models) // columns)
    figure, panels = pyplot.subplots(lines, columns, figsize=(5.5 * columns, 4.5 * lines), squeeze=False)
    for axes, model in zip_longest(panels.flat, models):
        if model is None:
            axes.set_axis_off()
        else:
            _draw_model(axes, model, [r for r in found if r["model"] == model])
    figure.tight_layout()
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return True


def _draw_model(axes: Any, model: str, found: list[dict[str, Any]]) -> None:
    """One panel; `found` are the rows of one model."""
    places = list(dict.fromkeys(_place(r) for r in found))
    for index, place in enumerate(places):
        _, task, seq_len, windows = place
        for quantized in (True, False):
            own = [r for r in found if _place(r) == place and r["kv_quantized"] == quantized]
            if own:
                label = f"{task}, {windows} x {seq_len:,}, KV{4 if quantized else 16}"
                edge, face = f"C{index % 10}", f"C{index % 10}" if quantized else "none"
                axes.scatter(*zip(*map(_point, own), strict=True), s=30, edgecolors=edge, facecolors=face, label=label)
    axes.set(title=model, yscale="log", xlim=(3.5, 11.5))
    axes.set_xlabel("mean bits of a multiply-add's operands")
    axes.set_ylabel("rise of perplexity over 16-bit")
    axes.yaxis.set_major_formatter(_percent)
    axes.yaxis.set_minor_formatter(_percent)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper right")
    main = max(places, key=lambda place: len({r["recipe"] for r in found if _place(r) == place}))
    named = {r["recipe"]: r for r in sorted(found, key=lambda r: bool(r["kv_quantized"])) if _place(r) == main}
    top = -math.inf  # of the label before, in points; labels go up the panel and never over each other
    for record in sorted(named.values(), key=lambda r: float(r["loss"])):
        height = axes.transData.transform(_point(record))[1] * 72 / axes.figure.dpi
        top = max(height - 3, top + 8)
        shift = (8, top - height)
        axes.annotate(record["recipe"], _point(record), fontsize=7, xytext=shift, textcoords="offset points")


def _percent(share: float, _: int) -> str:
    """A tick's label: those of 1, 2, 3 and 5 times a power of ten have one."""
    return f"{100 * share:g}%" if f"{share:e}"[0] in "1235" else ""


def _point(record: dict[str, Any]) -> tuple[float, float]:
    return record["bits"], max(math.expm1(record["loss"]), 1e-4)
