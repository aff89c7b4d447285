"""What a 4-bit KV cache costs a model when keys are rounded per token and head, as vLLM's int4_per_token_head does.

usage: kv_per_token.py MODEL [--windows 8] [--record FILE.jsonl]

Weights and activations stay in 16 bit. Three caches: 16 bit; vLLM's (keys and values times random signs, rotated by a
Hadamard matrix, then 4 bit with one scale and one zero point for each token and head; the token's own key included);
COMET's (keys per channel and page). Prints perplexities on WikiText-2; `comet_core.integrations.vllm` warns with them.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comet_core.corpus import load_corpus, perplexity_windows
from comet_core.decoder import load_sixteen
from comet_core.evaluate import Scores, score_windows
from comet_core.kv_cache import attend, attention_name
from comet_core.model_source import resolve_model
from comet_core.provenance import provenance
from comet_core.recipe import load_recipe
from comet_core.results import append

VLLM = "vllm-int4-per-token-head"
BY_TOKEN = "4-bit per token and head, rotated, as in vLLM"
LEVELS = 15


def rotated(x: Tensor) -> Tensor:
    """x [..., D] times fixed random signs and an orthonormal Hadamard matrix; D is a power of two."""
    width = x.shape[-1]
    signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (x.float() * signs) @ (matrix / width**0.5)


def rounded(x: Tensor) -> Tensor:
    """x [..., D] in 4 bit with one scale and one whole zero point for all of D."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / LEVELS).clamp(min=1e-6)
    zero = (-low / scale).round().clamp(0, LEVELS)
    return ((x / scale + zero).round().clamp(0, LEVELS) - zero) * scale


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attention over keys and values that have been through that cache. Rotated queries meet rotated keys."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len).expand(len(query), 1, q_len, kv_len)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(rotated(query), rounded(rotated(key)), rounded(rotated(value)), mask, scale, 0.0)
    width = query.shape[-1]
    back = rotated(torch.eye(width)).T  # the rotation is orthogonal
    return (out @ back).to(query.dtype).transpose(1, 2).contiguous(), None


def main() -> None:
    """Measure the model named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(VLLM, attention)
    AttentionMaskInterface.register(VLLM, sdpa_mask)
    source, recipe, corpus = (
        resolve_model(args.model),
        load_recipe("w4a4kv4"),
        load_corpus("wikitext2", role="perplexity"),
    )
    model: Any = load_sixteen(source, "cpu", torch.float32)
    windows = perplexity_windows(corpus, source.tokenizer(), seq_len=args.seq_len, windows=args.windows)
    caches = {"16-bit": "sdpa", BY_TOKEN: VLLM, "4-bit": attention_name(recipe.kv_cache)}
    recipes = {"16-bit": "fp16", BY_TOKEN: "kv4-by-token", "4-bit": "kv4"}
    for cache, name in caches.items():
        model.set_attn_implementation(name)
        scores = Scores()
        for window in windows:
            score_windows(model, None, window[None], scores)
        value = math.exp(scores.nll / scores.tokens)
        print(f"{args.model}, {cache} cache: {value:.3f}", flush=True)
        protocol = {
            "data": f"{corpus.name} {corpus.split} ({corpus.origin})", "sha256": corpus.sha256, "joined": corpus.joined,
            "windows": f"first {len(windows)} of {args.seq_len} tokens, not overlapping", "kv": cache,
            "tokens_scored": scores.tokens, "dtype": "float32", "base": source.note,
        }  # fmt: skip
        record = {
            "kind": "eval", "model": source.name, "recipe": recipes[cache],
            "task": "wikitext2", "metric": "perplexity", "value": value, "windows": len(windows),
            "seq_len": args.seq_len, "kv_quantized": name != "sdpa", "int4_mac_fraction": 0.0, "protocol": protocol,
            "provenance": provenance(),
        }  # fmt: skip
        if args.record:
            append(args.record, record)


if __name__ == "__main__":
    main()
