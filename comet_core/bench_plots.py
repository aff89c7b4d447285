"""Pictures of kernel records: speed-up over batch size for each shape, and the kernels on the roofline."""

import math
from collections.abc import Sequence
from pathlib import Path

from comet_core.results import Record
from comet_core.whole_files import whole_file


def _axes(title: str):  # type: ignore[no-untyped-def]
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 5.5))
    axis.set_title(title, fontsize=10)
    axis.set_xscale("log", base=2)
    axis.grid(True, which="both", alpha=0.25)
    return figure, axis


def _ours(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r["path"].startswith("w4ax_gemm") and r["ablation"] is None]


def draw_speed_up(records: Sequence[Record], png: Path) -> Path:
    """Speed-up over the baseline against M: a thin line per shape of our GEMM, a thick one per kernel's mean."""
    gpu = records[0]["provenance"]["gpu"]
    figure, axis = _axes(f"W4Ax GEMM over {records[0]['baseline']}, {gpu}, cold weights")
    alone = [r for r in _ours(records) if not r["includes_quantize"]]
    for shape in dict.fromkeys((r["n"], r["k"]) for r in alone):
        line = sorted((r["m"], r["speedup"]) for r in alone if (r["n"], r["k"]) == shape)
        axis.plot(*zip(*line, strict=True), color="tab:blue", linewidth=0.6, alpha=0.5)
    for key in dict.fromkeys((r["path"], r["includes_quantize"]) for r in records if r["ablation"] is None):
        found = [r for r in records if (r["path"], r["includes_quantize"]) == key and r["ablation"] is None]
        means = []
        for m in sorted({r["m"] for r in found}):
            logs = [math.log(r["speedup"]) for r in found if r["m"] == m]
            means.append((m, math.exp(sum(logs) / len(logs))))
        axis.plot(*zip(*means, strict=True), marker="o", label=key[0] + (" + quantize_act" if key[1] else ""))
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xlabel("M, tokens")
    axis.set_ylabel("speed-up, geometric mean over shapes (thin: single shapes)")
    axis.legend(fontsize=8)
    figure.tight_layout()
    with whole_file(png) as partial:
        figure.savefig(partial, format="png", dpi=120)
    return png


def draw_roofline(records: Sequence[Record], png: Path) -> Path:
    """Rate against arithmetic intensity; the roof is what each record's own bound implies."""
    gpu = records[0]["provenance"]["gpu"]
    figure, axis = _axes(f"W4Ax GEMM on the roofline, {gpu}")
    alone = [r for r in _ours(records) if not r["includes_quantize"]]
    for m in sorted({r["m"] for r in alone}):
        points = []
        for r in (r for r in alone if r["m"] == m):
            operations = 2.0 * r["m"] * r["n"] * r["k"]
            moved = r["n"] * r["k"] * 0.516 + r["m"] * r["k"] + 2 * r["m"] * r["n"]
            points.append((operations / moved, operations / r["median_us"] / 1e6, r["bound_fraction"]))
        axis.scatter([p[0] for p in points], [p[1] for p in points], s=14, label=f"M = {m:,}")
        roof = [(p[0], p[1] / p[2]) for p in points if p[2]]
        if roof:
            axis.scatter(*zip(*roof, strict=True), s=14, marker="_", color="black")
    axis.set_yscale("log")
    axis.set_xlabel("operations a byte")
    axis.set_ylabel("TOP/s (dash: the bound)")
    axis.legend(fontsize=8)
    figure.tight_layout()
    with whole_file(png) as partial:
        figure.savefig(partial, format="png", dpi=120)
    return png
