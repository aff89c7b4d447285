"""Records of tests/big/measure.py -> a table: time and memory that a layer takes, and how both grow with its width."""

from collections.abc import Sequence
from statistics import median_low
from typing import Any

from comet_core.results import Record, latest, markdown

IDENTITY = ("model", "layers", "hidden_size", "intermediate_size", "samples", "seq_len", "device", "gpus")
MIB, GIB = 1 << 20, 1 << 30


def layer_table(records: Sequence[Record]) -> str:
    """One row per shape and machine, widest last. The seconds are those of the median layer, of two the faster one: the
    first layer warms things up."""
    chosen = latest([r for r in records if r["kind"] == "big"], IDENTITY)
    order = lambda r: (r["device"].startswith("cuda"), r["samples"] * r["seq_len"], r["hidden_size"], r.get("gpus", 0))  # noqa: E731
    rows = []
    for r in sorted(chosen, key=order):
        bound = sum(r["bound"].values())
        gpu = max(r["gpu_peaks"].values(), default=0)
        rows.append(
            [
                f"{r['hidden_size']:,} / {r['intermediate_size']:,}",
                str(r["layers"]),
                f"{r['samples']} x {r['seq_len']:,}",
                _place(r),
                _seconds(r["calibrate_s_a_layer"], r.get("calibrate_cpu_s_a_layer")),
                _seconds(median_low(r["pack_s_by_layer"]), median_low(r.get("pack_cpu_s_by_layer") or [None])),
                f"{max(r['ram_above_imports'].values()) / MIB:,.0f} of {bound / MIB:,.0f}",
                f"{gpu / GIB:.1f}" if gpu else "",
            ]
        )
    head = ["channels, inside", "layers", "windows", "on", "calibrate, s a layer", "pack, s a layer",
            "RAM above imports, of the bound, MiB", "GPU GiB"]  # fmt: skip
    return markdown(head, rows)


def _place(r: Record) -> str:
    provenance: dict[str, Any] = r["provenance"]
    if not r["device"].startswith("cuda"):
        return f"CPU, {provenance.get('threads')} thread" + ("s" if provenance.get("threads") != 1 else "")
    several = f"{r['gpus']} x " if r.get("gpus", 1) > 1 else ""
    return f"{several}{provenance.get('gpu')}"


def _seconds(wall: float, cpu: float | None) -> str:
    """Wall time; where a shared machine made that longer, also what the process computed."""
    return f"{wall:.2f}" if cpu is None or wall < 1.1 * cpu else f"{wall:.2f} ({cpu:.2f} of computing)"
