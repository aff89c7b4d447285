"""Manifest -> README.md of a packed folder: what it is, how it was made, how to measure it."""

from comet_core.packed import Manifest


def model_card(manifest: Manifest) -> str:
    """The card as markdown; it states the base model's licence question rather than answering it."""
    recipe, data = manifest.recipe, manifest.data
    kv = recipe.kv_cache
    cache = (
        "16 bit"
        if kv.bits == 16
        else f"{kv.bits} bit, keys per {kv.key_granularity}, pages of {kv.page}, first {kv.sinks} tokens in 16 bit"
    )
    note = f"\n\nThe base model is {manifest.model['note']}." if manifest.model.get("note") else ""
    symmetry = "symmetric" if recipe.weights.symmetric else "asymmetric"
    has_outlier_blocks = recipe.activations.bits == 4 and recipe.blocks.rule != "none"
    outliers = ", outlier blocks in 8 bit" if has_outlier_blocks else ""
    return f"""---
base_model: {manifest.model["name"]}
library_name: comet
tags: [comet, quantized, {recipe.name}]
---

# {manifest.model["name"]}, {recipe.name}

{recipe.description}{note}

| | |
|---|---|
| weights | {recipe.weights.bits} bit, groups of 128, {symmetry}, {recipe.weights.method} |
| activations | {recipe.activations.bits} bit per token and block of 128 channels{outliers} |
| KV cache | {cache} |
| multiply-adds at W4A4 | {manifest.int4_mac_fraction:.1%} |
| calibration | {data["name"]}, {data["samples"]} x {data["seq_len"]} tokens, seed {data["seed"]} |
| recipe digest | {manifest.recipe_digest} |

Measure it: `comet eval . --ppl wikitext2`. The licence is the base model's.
"""
