"""`comet inspect PACKED`: what is in a packed folder, and which path each of its ops takes on which GPU."""

from pathlib import Path
from typing import Annotated, Any

import typer

from comet_cli import console, options
from comet_cli.dry_run import degrees
from comet_cli.runs import last_packed


def inspect(
    packed: Annotated[
        Path | None, typer.Argument(help="A packed folder; the last one packed here if not given.", metavar="PACKED")
    ] = None,
    linears: Annotated[bool, typer.Option("--linears", help="One row per linear instead of one per layer.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Recompute the sha256 of every tensor.")] = False,
    json: options.Json = False,
) -> None:
    """Print what is in a packed folder.

    Layers, bits, bytes, plans, hashes, and which path each op takes on which GPU.

    Example: comet inspect runs/smollm2-135m-w4a4kv4/packed
    """
    from comet_core.inspection import inspect_packed

    found = inspect_packed(packed or last_packed(), verify=verify)
    if json:
        console.data_json(found)
        return
    console.table("Packed model", [{"what": what, "value": value} for what, value in facts(found).items()])
    console.table("Linears", linear_rows(found)) if linears else console.table("Layers", layer_rows(found))
    console.table("Paths", found["paths"])


def facts(found: dict[str, Any]) -> dict[str, str]:
    """The folder as a whole, in words."""
    weights, data = found["settings"]["weights"], found["calibration"]
    ratio = found["linear_bytes"] / max(found["linear_bytes_16bit"], 1)
    hashes = "all recomputed, all as stated" if found["verified"] else "not recomputed (--verify does)"
    return {
        "model": found["model"] + (f", {found['note']}" if found["note"] else ""),
        "recipe": f"{found['recipe']} (digest {found['recipe_digest']})",
        "format": f"version {found['format_version']}",
        "weights": f"{weights['bits']} bit, {'symmetric' if weights['symmetric'] else 'asymmetric'}",
        "4-bit share": f"{found['int4_mac_fraction']:.1%} of multiply-adds",
        "KV cache": found["kv_cache"],
        "embedding": f"{found['embedding_bits']} bit",
        "tensor parallel": degrees(found["tp_granularity"]),
        "calibration": f"{data['name']}, {data['samples']} x {data['seq_len']} tokens, seed {data['seed']}",
        "linears": f"{console.human_bytes(found['linear_bytes'])}, {ratio:.3f} of 16 bit",
        "other tensors": console.human_bytes(found["other_bytes"]),
        "folder": f"{found['folder']}, {console.human_bytes(found['bytes'])}",
        "sha256": f"{found['sha256'][:16]} over {found['tensors']} tensors, {hashes}",
    }


def layer_rows(found: dict[str, Any]) -> list[dict[str, str]]:
    """One row per layer."""
    return [
        {
            "layer": row["layer"],
            "linears": str(row["linears"]),
            "INT4 blocks": str(row["int4_blocks"]),
            "INT8 blocks": str(row["int8_blocks"]),
            "rounded to nearest": str(row["rtn"]),
            "largest weight error": f"{row['worst_error']:.2e} {row['worst']}",
            "cosine to 16 bit": "" if row["cosine"] is None else f"{row['cosine']:.4f}",
            "size": console.human_bytes(row["bytes"]),
        }
        for row in found["layers"]
    ]


def linear_rows(found: dict[str, Any]) -> list[dict[str, str]]:
    """One row per linear; `blocks` spells the bits of each block of 128 channels in stored order, x for 16."""
    return [
        {
            "linear": row["linear"],
            "in": str(row["in"]),
            "out": str(row["out"]),
            "weights": f"{row['weight_bits']} bit",
            "blocks": row["block_bits"],
            "permutation": row["permutation"],
            "method": row["method"],
            "size": console.human_bytes(row["bytes"]),
        }
        for row in found["linears"]
    ]
