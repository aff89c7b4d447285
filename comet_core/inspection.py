"""A packed folder -> what is in it, without loading the model: layers, bits, bytes, plans, hashes, and what runs where.

Reads the manifest, the shards' headers and the few bytes of every linear's block_bits. With `verify` it reads all
tensors and recomputes their hashes, as `load_packed(verify=True)` does.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from comet_core.packed import FORMAT_VERSION, MANIFEST, PACK_TENSORS, LinearEntry, Manifest, read_manifest
from comet_core.recipe import Recipe, recipe_to_dict
from comet_core.shards import DAMAGED, read_shard, shard_files, tensor_sha256
from comet_cuda import dispatch
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import TOKEN

GPUS = {  # an example of each family and shared-memory size that dispatch.py knows
    (8, 0): "A100",
    (8, 6): "RTX 30, A10",
    (8, 9): "RTX 40, L4, L40S",
    (9, 0): "H100, H200",
    (10, 0): "B200",
    (12, 0): "RTX 50",
}


def inspect_packed(folder: Path, *, verify: bool = False) -> dict[str, Any]:
    """Everything that `comet inspect` prints.

    Args:
        folder: what `comet pack` wrote. verify: recompute every tensor's sha256.

    Returns:
        facts of the whole folder; `linears`, one row per packed linear; `layers`, one row per decoder layer;
        `paths`, one row per op and kind of GPU.

    Errors:
        CometError if the folder is damaged, or with `verify` if a tensor is not the one that was packed.
    """
    manifest = read_manifest(folder)
    sizes, block_bits = read_headers(folder, manifest, verify)
    notes = {note["linear"]: note for note in manifest.layers}
    linears = [
        _linear(name, entry, sizes, block_bits.get(name), notes.get(name, {}))
        for name, entry in manifest.linears.items()
    ]
    recipe = manifest.recipe
    sixteen = sum(2 * entry.in_features * entry.out_features for entry in manifest.linears.values())
    packed_bytes = sum(row["bytes"] for row in linears)
    config = _config(folder)
    listing = "".join(f"{name} {digest}\n" for name, digest in sorted(manifest.sha256.items()))
    return {
        "kind": "inspect",
        "folder": str(folder),
        "model": manifest.model["name"],
        "model_type": config.get("model_type"),
        "base": manifest.model["spec"],
        "note": manifest.model["note"],
        "format_version": json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["format_version"],
        "newest_format": FORMAT_VERSION,
        "recipe": recipe.name,
        "recipe_digest": manifest.recipe_digest,
        "settings": recipe_to_dict(recipe),
        "calibration": dict(manifest.data),
        "int4_mac_fraction": manifest.int4_mac_fraction,
        "embedding_bits": manifest.embedding_bits,
        "tp_granularity": recipe.blocks.tp_granularity,
        "kv_cache": _kv(recipe),
        "bytes": sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        "linear_bytes": packed_bytes,
        "linear_bytes_16bit": sixteen,
        "other_bytes": sum(sizes.values()) - packed_bytes,
        "tensors": len(sizes),
        "sha256": hashlib.sha256(listing.encode()).hexdigest(),
        "verified": verify,
        "layers": _layers(linears, sizes, {check["layer"]: check for check in manifest.checks}),
        "linears": linears,
        "paths": _paths(manifest, block_bits),
    }


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise CometError(f"{folder / 'config.json'}: cannot be understood ({error})", DAMAGED) from error
    return config


def read_headers(folder: Path, manifest: Manifest, verify: bool = False) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Bytes of every tensor, and every linear's bits by block."""
    from safetensors import SafetensorError, safe_open

    sizes: dict[str, int] = {}
    block_bits: dict[str, list[int]] = {}
    for shard in shard_files(folder):
        try:
            with safe_open(shard, "pt") as file:
                names = list(file.keys())
                for name in names:
                    part = file.get_slice(name)
                    elements = 1
                    for extent in part.get_shape():
                        elements *= extent
                    sizes[name] = elements * WIDTH[part.get_dtype()]
                    if name.endswith(".block_bits"):
                        block_bits[name.removesuffix(".block_bits")] = file.get_tensor(name).tolist()
        except (OSError, SafetensorError, KeyError) as error:
            raise CometError(f"{shard}: cannot be read ({error})", DAMAGED) from error
        if verify:
            tensors, _ = read_shard(shard)
            for name, tensor in tensors.items():
                if tensor_sha256(tensor) != manifest.sha256.get(name):
                    raise CometError(f"{shard}: {name} does not have the sha256 that the manifest states", DAMAGED)
    wrong = sorted(set(sizes) ^ set(manifest.sha256))
    if wrong:
        raise CometError(f"{folder}: {wrong[0]} is not in both the files and the manifest", DAMAGED)
    return sizes, block_bits


WIDTH = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}  # bytes an element


def _linear(
    name: str, entry: LinearEntry, sizes: dict[str, int], bits: list[int] | None, note: dict[str, Any]
) -> dict[str, Any]:
    bits = bits or [16]  # a head that shares an 8-bit embedding stores none of its own
    errors = note.get("relative_output_error", {})
    perm = "in the producer's rows" if entry.folded else "gathered" if f"{name}.perm" in sizes else "none"
    return {
        "linear": name,
        "in": entry.in_features,
        "out": entry.out_features,
        "weight_bits": entry.weight_bits,
        "symmetric": entry.symmetric,
        "int4_blocks": bits.count(4),
        "int8_blocks": bits.count(8),
        "block_bits": "".join({4: "4", 8: "8", 16: "x"}[bit] for bit in bits),
        "hadamard": entry.hadamard,
        "share": entry.share or "token",
        "permutation": perm,
        "method": note.get("method", "rtn"),
        "relative_output_error": errors.get(note.get("method", "rtn")),
        "bytes": sum(sizes.get(f"{name}.{leaf}", 0) for leaf in (*PACK_TENSORS, "bias")),
    }


def _layers(
    linears: list[dict[str, Any]], sizes: dict[str, int], checks: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """One row per decoder layer: the linears whose names share a number, and what packing found of the layer."""
    rows: dict[str, dict[str, Any]] = {}
    for one in linears:
        found = re.match(r"(.*?\.\d+)\.", one["linear"])
        if not found:
            continue
        empty = {"linears": 0, "int4_blocks": 0, "int8_blocks": 0, "rtn": 0, "worst_error": 0.0, "worst": ""}
        row = rows.setdefault(found[1], {"layer": found[1]} | empty)
        row["linears"] += 1
        row["int4_blocks"] += one["int4_blocks"]
        row["int8_blocks"] += one["int8_blocks"]
        row["rtn"] += one["method"] == "rtn"
        if (one["relative_output_error"] or 0.0) > row["worst_error"]:
            row["worst_error"] = one["relative_output_error"]
            row["worst"] = one["linear"].removeprefix(f"{found[1]}.")
    for name, row in rows.items():
        row["bytes"] = sum(size for tensor, size in sizes.items() if tensor.startswith(f"{name}."))
        row |= {key: checks.get(name, {}).get(key) for key in ("cosine", "error")}
    return sorted(rows.values(), key=lambda row: int(row["layer"].rpartition(".")[2]))


def _kv(recipe: Recipe) -> str:
    kv = recipe.kv_cache
    if kv.bits == 16:
        return "16 bit"
    return f"{kv.bits} bit, keys per {kv.key_granularity}, pages of {kv.page}, first {kv.sinks} tokens in 16 bit"


def _paths(manifest: Manifest, block_bits: dict[str, list[int]]) -> list[dict[str, str]]:
    """What each op of this model runs on each kind of GPU, by dispatch.py; only ops that the model needs."""
    integer = any(entry.share == TOKEN for entry in manifest.linears.values())
    kinds = {(entry.weight_bits, 16 in block_bits.get(name, [16])) for name, entry in manifest.linears.items()}
    needed = {"quantize_act", "w4ax_gemm"} if (4, False) in kinds else set()
    needed |= {"kv4_append", "kv4_decode", "kv4_prefill"} if manifest.recipe.kv_cache.bits == 4 else set()
    rows = []
    for capability, example in GPUS.items():
        gpu = f"sm_{capability[0]}{capability[1]} ({example})"
        rows += [
            {"gpu": gpu, "op": op, "path": path, "why": why}
            for op, path, why in dispatch.paths(capability, integer)
            if op in needed
        ]
    if (8, False) in kinds:
        rows.append({"gpu": "any", "op": "W8Ax linears", "path": "reference", "why": "8-bit weights have no kernel"})
    if any(weight_only for _, weight_only in kinds):
        why = "weights are decoded and multiplied in 16 bit"
        rows.append({"gpu": "any", "op": "weight-only linears", "path": "torch", "why": why})
    why = "PyTorch, exact but not fast"
    return [*rows, {"gpu": "none (CPU)", "op": "all", "path": "reference", "why": why}]
