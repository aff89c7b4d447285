"""Perplexity of a packed folder by comet and by vLLM, window by window, so that their difference has a standard error.

Two programs that compute a 16-bit model alike differ by rounding alone; codes of four bits make more of it, so single
log-probabilities of a packed model lie far apart although its perplexity does not. What is rounding is told from what
is not by `--also`: the same folder in other types, or by comet with another attention. In float32 both should agree
closely, and comet's own two attentions differ in bfloat16 by what rounding is worth.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_engines import CACHES, engine, engine_name, gpus, on_cpu
from vllm_forks import in_a_fork, say, time_left
from vllm_shapes import kernels_of

WAYS = ("comet", "vllm")
KEPT = {"": "16-bit", "kv4": "vLLM's int4_per_token_head", "ownkv4": "COMET's 4-bit pages"}  # what --cache names


def perplexity(args: argparse.Namespace) -> None:
    """Score all windows by comet, by vLLM and by what --also names; print how they differ; record the first two."""
    found: dict[str, list[float]] = {}
    for way in (*WAYS, *args.also):
        scores = in_a_fork(f"perplexity by {way}", time_left(args.limit), scorer(args, way))
        if scores is not None:
            found[way] = scores
    if missing := [way for way in WAYS if way not in found]:
        raise SystemExit(f"no comparison: {missing} gave nothing")
    width = read_tokens(args)[0].shape[1] - 1  # tokens scored in a window
    beside = {way: compare(found["comet"], scores, width) for way, scores in found.items() if way != "comet"}
    say(f"comet {math.exp(statistics.fmean(found['comet'])):.4f}")
    for way, about in beside.items():
        say(
            f"{way} {about['perplexity']:.4f}: {about['difference']:+.3%}, standard error "
            f"{about['standard_error']:.3%}; log-probabilities {about['mean_log_probability_difference']:.4f} apart"
        )
    for way in ("comet:float32", "comet:float16"):  # programs in the same type
        if way in found and (other := way.replace("comet", "vllm")) in found:
            say(f"{other} over {way}:", compare(found[way], found[other], width))

    def record() -> None:
        for way in WAYS:
            record_perplexity(args, way, math.exp(statistics.fmean(found[way])), beside)

    in_a_fork("records", 60, record)  # naming the GPU touches it, which this process must not
    if missing := [way for way in args.also if way not in found]:
        raise SystemExit(f"without a figure: {missing}")


def compare(ours: list[float], theirs: list[float], width: int) -> dict[str, float]:
    """What another score of the same tokens says. ours, theirs: negative log-likelihoods, `width` of them a window."""
    apart = [b - a for a, b in zip(ours, theirs, strict=True)]
    windows = [statistics.fmean(apart[first : first + width]) for first in range(0, len(apart), width)]
    return {
        "perplexity": math.exp(statistics.fmean(theirs)),
        "difference": math.exp(statistics.fmean(apart)) - 1,
        "standard_error": statistics.stdev(windows) / math.sqrt(len(windows)) if len(windows) > 1 else math.nan,
        "mean_log_probability_difference": statistics.fmean(abs(d) for d in apart),
    }


def scorer(args: argparse.Namespace, way: str) -> Callable[[], list[float]]:
    """way: comet or vllm, then perhaps : and a type (else the one of --dtype), or `comet:eager`."""
    program, _, how = way.partition(":")
    dtype = how if how and how != "eager" else args.dtype
    return (lambda: by_comet(args, dtype, how == "eager")) if program == "comet" else (lambda: by_vllm(args, dtype))


def dtype_name(asked: str) -> str:
    """What models compute in."""
    return asked if asked != "auto" else "float32" if on_cpu() else "bfloat16"


def read_tokens(args: argparse.Namespace) -> tuple[Any, dict[str, str]]:
    """Tokens, int64 [windows, length], and what is known of them: of a file, or of a text as `comet eval` cuts it."""
    from safetensors import safe_open

    if args.tokens.endswith(".safetensors"):
        with safe_open(args.tokens, "pt") as opened:
            return opened.get_tensor("tokens"), opened.metadata() or {}
    from transformers import AutoTokenizer

    from comet_core.corpus import load_corpus, perplexity_windows

    corpus = load_corpus(args.tokens, role="perplexity")
    tokens = perplexity_windows(
        corpus, AutoTokenizer.from_pretrained(args.packed), seq_len=args.seq_len, windows=args.windows
    )
    return tokens, {"data": f"{corpus.name} {corpus.split}", "data_sha256": corpus.sha256}


def by_comet(args: argparse.Namespace, dtype: str, eager: bool) -> list[float]:
    """Negative log-likelihood of each token but a window's first, as `comet eval` does (without `ownkv4`: --kv16).

    Args:
        eager: attention by torch's single operations, in another order than sdpa's kernels.
    """
    import torch

    from comet_core.packed import load_packed
    from comet_core.scores import final_hidden, log_probabilities

    tokens, _ = read_tokens(args)
    device = "cpu" if on_cpu() else "cuda"
    loaded = load_packed(Path(args.packed), device=device, dtype=getattr(torch, dtype_name(dtype)))
    if args.cache != "ownkv4" or eager:
        loaded.model.set_attn_implementation("eager" if eager else "sdpa")  # type: ignore[operator]  # no 4-bit KV cache
    nll: list[float] = []
    with torch.no_grad():
        for window in tokens.to(device):
            log_p = log_probabilities(loaded.model, final_hidden(loaded.model, window[None]))
            nll += (-log_p.gather(1, window[1:, None])[:, 0]).tolist()
    return nll


def by_vllm(args: argparse.Namespace, dtype: str) -> list[float]:
    """The same by vLLM."""
    from vllm import SamplingParams

    tokens, _ = read_tokens(args)
    options: dict[str, Any] = {} if on_cpu() else {"gpu_memory_utilization": args.memory}
    options |= CACHES[args.cache]
    length = tokens.shape[1] + 8
    llm = engine(Path(args.packed), args, eager=True, max_model_len=length, dtype=dtype_name(dtype), **options)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": row.tolist()} for row in tokens], sampling, use_tqdm=False)
    say("kernels:", llm.apply_model(kernels_of))
    return [
        -place[int(token)].logprob
        for row, output in zip(tokens, outputs, strict=True)
        for token, place in zip(row[1:], output.prompt_logprobs[1:], strict=True)
    ]


def record_perplexity(args: argparse.Namespace, way: str, value: float, beside: dict[str, dict[str, float]]) -> None:
    """Append an eval record. beside: `compare` of comet with every other way."""
    from comet_core.packed import read_manifest
    from comet_core.provenance import provenance
    from comet_core.results import append

    (tokens, about), manifest = read_tokens(args), read_manifest(Path(args.packed))
    cache = args.cache if way == "vllm" or args.cache == "ownkv4" else ""
    protocol = {
        **about,
        "windows": f"first {len(tokens)} of {tokens.shape[1]} tokens, not overlapping",
        "kv": KEPT[cache],
        "dtype": dtype_name(args.dtype),
        "engine": engine_name(args) + ", its own 4-bit cache" * (cache == "kv4") if way == "vllm" else "comet",
        "gpus": gpus(args) if way == "vllm" else "1",
        "tokens_scored": tokens[:, 1:].numel(),
        "calibration": "{name}, {samples} x {seq_len} tokens, seed {seed}".format(**manifest.data),
        "base": manifest.model["note"] or "16-bit weights",
        "beside_comet": {
            name: {key: value if math.isfinite(value) else None for key, value in figures.items()}
            for name, figures in beside.items()
        },
    }
    record = {
        "kind": "eval", "model": manifest.model["name"], "recipe": manifest.recipe.name,
        "task": about.get("data", "unknown text").split()[0],
        "metric": "perplexity", "value": value, "windows": len(tokens), "seq_len": tokens.shape[1],
        "kv_quantized": bool(cache), "int4_mac_fraction": manifest.int4_mac_fraction, "protocol": protocol,
        "provenance": provenance(recipe_digest=manifest.recipe_digest, device="cpu" if on_cpu() else "cuda"),
    }  # fmt: skip
    append(Path(args.record), record)
