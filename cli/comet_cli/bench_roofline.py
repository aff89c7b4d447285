"""`comet bench --roofline`: where each part of a decode step stands, and memory by context, from shapes alone."""

from collections.abc import Sequence
from pathlib import Path

from comet_cli import console


def show(model: str, gpu: str, batches: Sequence[int], plots: Path | None, *, json: bool) -> None:
    """Print both tables for a model alias on a GPU whose rates are known; of all BATCHES where none is given."""
    from comet_core.roofline import BATCHES, roofline

    found = roofline(model, tuple(batches) or BATCHES, gpu=gpu)
    if json:
        console.data_json({"kind": "roofline", **found})
    else:
        parts = [
            {
                "part": row["part"],
                "batch": row["batch"],
                "scheme": row["scheme"],
                "GOP": f"{row['operations'] / 1e9:,.2f}",
                "MB moved": f"{row['bytes'] / 1e6:,.1f}",
                "OP/byte": f"{row['intensity']:,.1f}",
                "TOP/s at most": f"{row['attainable_tera']:,.1f}",
                "of the peak": f"{100 * row['share_of_peak']:.1f}%",
                "bound by": row["bound"],
                "us at least": f"{row['microseconds']:,.1f}",
            }
            for row in found["parts"]
        ]
        console.table(f"{found['model']} on {found['gpu']}, one layer of a decode step ({found['gpu_rates']})", parts)
        memory = [
            {
                "context": f"{row['context']:,}",
                "scheme": row["scheme"],
                "weights, GiB": f"{row['weights_gib']:.2f}",
                "KV cache, GiB": f"{row['kv_gib']:.2f}",
                "cache's share": f"{100 * row['kv_share']:.0f}%",
            }
            for row in found["memory"]
        ]
        console.table("Memory of one sequence", memory)
    if plots is not None:
        from comet_core.serving_report import draw_memory

        plots.mkdir(parents=True, exist_ok=True)
        console.talk(f"drew {draw_memory(model, plots / 'memory.png')}")
