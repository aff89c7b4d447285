"""vLLM with COMET's plugin: perplexity of a packed folder beside comet's own, and throughput of schemes side by side.

usage: bench_vllm.py perplexity PACKED TOKENS.safetensors [options]
       bench_vllm.py throughput ALIAS [options]          random weights; several jobs follow each other after --

TOKENS holds int64 `tokens` [windows, length]; its metadata says of what text. A scheme is weights and activations, then
perhaps a KV cache: bf16, fp8, w4a16 (the format of `comet export`, by the kernel that vLLM prefers), w4a16-marlin,
comet, comet-free (scales that are any numbers); +kv4 and +kv8 are vLLM's own 4-bit and 8-bit caches, the same for
every scheme; +ownkv4 is COMET's.

vLLM's imports take longer than measuring, so they are done once, before the GPU is touched. Each scheme then runs in a
fork: it has a time limit, its failure ends nothing else, its memory is free afterwards, and its record is written when
it is made. By default no torch.compile: decode runs in full CUDA graphs, prefill eagerly, for every scheme alike;
--compile takes vLLM's defaults instead, which cost about a minute of start-up. Records: eval and e2e (results.py).
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_forks import in_a_fork, preload_once_for_all, say
from vllm_shapes import kernels_of, shape_only, weight_bytes

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking whether there is a GPU must not touch it
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # `kernels_of` is sent to the process of the model
GRAPH_SIZES = [1, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]  # decode batches that are captured
TOKENS_A_STEP = 8192
STARTED: list[Any] = []  # engines of this fork: their orderly end takes seconds that nobody needs
CACHES: dict[str, dict[str, Any]] = {  # options of an engine
    "": {}, "kv4": {"kv_cache_dtype": "int4_per_token_head"}, "kv8": {"kv_cache_dtype": "fp8"},
    "ownkv4": {"attention_backend": "CUSTOM", "block_size": 512},
}  # fmt: skip


def on_cpu() -> bool:
    """Whether vLLM runs on a CPU here."""
    return bool(sys.modules["vllm.platforms"].current_platform.is_cpu())


def dtype_name() -> str:
    """What models compute in."""
    return "float32" if on_cpu() else "bfloat16"


def engine_name(args: argparse.Namespace) -> str:
    """vLLM, its version, and what makes its figures another kind: torch.compile, several GPUs."""
    kinds = ["torch.compile"] * args.compile + [f"GPUs: {gpus(args)}"] * (gpus(args) != "1")
    return ", ".join([f"vLLM {sys.modules['vllm'].__version__}", *kinds])


def gpus(args: argparse.Namespace) -> str:
    """How many GPUs share the model, and how."""
    ways = {"tensor parallel": args.tensor_parallel, "pipeline parallel": args.pipeline_parallel}
    return " x ".join(f"{count} ({way})" for way, count in ways.items() if count > 1) or "1"


def engine(model: Path, args: argparse.Namespace, **options: Any) -> Any:
    """A vLLM engine."""
    import torch
    from vllm import LLM

    shared: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    shared |= {"tensor_parallel_size": args.tensor_parallel, "pipeline_parallel_size": args.pipeline_parallel}
    shared |= {"disable_log_stats": False}  # times of each request
    if on_cpu():
        shared |= {"enforce_eager": not args.compile}
    else:
        graphs: dict[str, Any] = {"cudagraph_capture_sizes": GRAPH_SIZES}
        graphs |= {} if args.compile else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        shared |= {"compilation_config": graphs}
    begin = time.perf_counter()
    llm = LLM(model=str(model), **(shared | options))
    say("engine started in", f"{time.perf_counter() - begin:.1f} s, torch {torch.__version__}")
    STARTED.append(llm)
    return llm


def random_integers() -> None:
    """Let vLLM's dummy weights be random where they are packed integers too (it leaves them as they are, often 0)."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    original = DummyModelLoader.load_weights

    def load_weights(loader: Any, model: Any, *rest: Any) -> None:
        original(loader, model, *rest)
        for name, tensor in model.named_parameters():
            if name.endswith(".weight_packed"):
                tensor.random_()

    DummyModelLoader.load_weights = load_weights


# --- perplexity


def perplexity(args: argparse.Namespace) -> None:
    """Windows scored by comet's own evaluation and by vLLM's prompt_logprobs, both with the same kind of KV cache."""
    found = {}
    for name, measure in (("comet", by_comet), ("vllm", by_vllm)):
        found[name] = in_a_fork(f"perplexity by {name}", args.limit, lambda measure=measure: measure(args))  # type: ignore[misc]
    if None in found.values():
        raise SystemExit(f"no comparison: {[name for name, scores in found.items() if scores is None]} gave nothing")
    pairs = list(zip(found["comet"], found["vllm"], strict=True))
    mean_apart = sum(abs(ours - theirs) for ours, theirs in pairs) / len(pairs)
    values = {name: math.exp(sum(scores) / len(scores)) for name, scores in found.items()}
    windows, length = read_tokens(args.tokens)[0].shape
    of_window = [
        sum(theirs - ours for ours, theirs in pairs[first : first + length - 1]) / (length - 1)
        for first in range(0, len(pairs), length - 1)
    ]
    error = statistics.stdev(of_window) / math.sqrt(windows) if windows > 1 else math.nan
    say(
        f"comet {values['comet']:.4f}, vLLM {values['vllm']:.4f}: {values['vllm'] / values['comet'] - 1:+.3%}, "
        f"standard error {error:.3%}; log-probabilities {mean_apart:.4f} apart in the mean"
    )

    def record() -> None:
        for name, value in values.items():
            record_perplexity(args, name, value, mean_apart, error)

    in_a_fork("records", 60, record)  # naming the GPU touches it, which this process must not


def read_tokens(file: str) -> tuple[Any, dict[str, str]]:
    """Tokens, int64 [windows, length], and what the file says of them."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return opened.get_tensor("tokens"), opened.metadata() or {}


def by_comet(args: argparse.Namespace) -> list[float]:
    """Negative log-likelihood of each token but a window's first, by load_packed."""
    import torch

    from comet_core.packed import load_packed
    from comet_core.scores import final_hidden, log_probabilities

    tokens, _ = read_tokens(args.tokens)
    device = "cpu" if on_cpu() else "cuda"
    loaded = load_packed(Path(args.packed), device=device, dtype=getattr(torch, dtype_name()))
    if not args.cache:
        loaded.model.set_attn_implementation("sdpa")  # type: ignore[operator]  # no 4-bit KV cache
    nll: list[float] = []
    with torch.no_grad():
        for window in tokens.to(device):
            log_p = log_probabilities(loaded.model, final_hidden(loaded.model, window[None]))
            nll += (-log_p.gather(1, window[1:, None])[:, 0]).tolist()
    return nll


def by_vllm(args: argparse.Namespace) -> list[float]:
    """The same by vLLM."""
    from vllm import SamplingParams

    tokens, _ = read_tokens(args.tokens)
    options: dict[str, Any] = {} if on_cpu() else {"gpu_memory_utilization": 0.3}
    options |= CACHES[args.cache]
    llm = engine(Path(args.packed), args, max_model_len=tokens.shape[1] + 8, dtype=dtype_name(), **options)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": row.tolist()} for row in tokens], sampling, use_tqdm=False)
    say("kernels:", llm.apply_model(kernels_of))
    return [
        -place[int(token)].logprob
        for row, output in zip(tokens, outputs, strict=True)
        for token, place in zip(row[1:], output.prompt_logprobs[1:], strict=True)
    ]


def record_perplexity(args: argparse.Namespace, name: str, value: float, mean_apart: float, error: float) -> None:
    """Append an eval record. error: standard error of the two programs' relative difference, over windows."""
    from comet_core.packed import read_manifest
    from comet_core.provenance import provenance
    from comet_core.results import append

    (tokens, about), manifest = read_tokens(args.tokens), read_manifest(Path(args.packed))
    protocol = {
        **about,
        "windows": f"first {len(tokens)} of {tokens.shape[1]} tokens, not overlapping",
        "kv": "COMET's 4-bit pages" if args.cache else "16-bit",
        "dtype": dtype_name(),
        "engine": f"vLLM {sys.modules['vllm'].__version__}" if name == "vllm" else "comet",
        "gpus": gpus(args) if name == "vllm" else "1",
        "tokens_scored": tokens[:, 1:].numel(),
        "mean_log_probability_difference": mean_apart,
        "standard_error_of_difference": None if math.isnan(error) else error,
    }
    record = {
        "kind": "eval", "model": manifest.model["name"], "recipe": manifest.recipe.name, "task": "wikitext2",
        "metric": "perplexity", "value": value, "windows": len(tokens), "seq_len": tokens.shape[1],
        "kv_quantized": bool(args.cache), "int4_mac_fraction": manifest.int4_mac_fraction, "protocol": protocol,
        "provenance": provenance(recipe_digest=manifest.recipe_digest, device="cpu" if on_cpu() else "cuda"),
    }  # fmt: skip
    append(Path(args.record), record)


# --- throughput


def throughput(args: argparse.Namespace) -> None:
    """Output tokens a second of each scheme, one line and one record a load."""
    found: dict[str, list[Any]] = {}
    for scheme in args.schemes:
        made = in_a_fork(scheme, args.limit, lambda scheme=scheme: measure(args, scheme))  # type: ignore[misc]
        found[scheme] = made or []
        for line in found[scheme]:
            say("result", line)
    if not all(found.values()):
        raise SystemExit(f"without a figure: {[scheme for scheme, made in found.items() if not made]}")


def measure(args: argparse.Namespace, scheme: str) -> list[str]:
    """Start an engine for one scheme and time all loads with it."""
    import torch
    from vllm import SamplingParams

    weights, _, cache = scheme.partition("+")
    if weights == "w4a16-marlin":
        os.environ["VLLM_DISABLED_KERNELS"] = "MacheteLinearKernel,CutlassW4A8LinearKernel"
    random_integers()
    longest = max(prompt + output for prompt, output in args.load) + 8
    folder = shape_only(
        args.alias, weights, Path(tempfile.mkdtemp()) / weights, layers=args.layers, ranks=args.tensor_parallel
    )
    options: dict[str, Any] = {"quantization": "fp8"} if weights == "fp8" else {}
    options |= {} if on_cpu() else {"gpu_memory_utilization": args.memory}
    options |= CACHES[cache]
    llm = engine(
        folder, args, load_format="dummy", dtype="bfloat16", max_model_len=longest, max_num_seqs=args.requests,
        max_num_batched_tokens=max(TOKENS_A_STEP, longest), **options,
    )  # fmt: skip
    about = {"kernels": llm.apply_model(kernels_of)[0], "memory_gib": sum(llm.apply_model(weight_bytes)) / 2**30}
    say(scheme, about)
    generator = torch.Generator().manual_seed(0)
    lines = []
    for prompt_tokens, output_tokens in args.load:
        ids = torch.randint(0, 30000, (args.requests, prompt_tokens), generator=generator)
        prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
        greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        few = prompts[: 2 * TOKENS_A_STEP // prompt_tokens]
        llm.generate(few, SamplingParams(max_tokens=4, **greedy), use_tqdm=False)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, SamplingParams(max_tokens=output_tokens, **greedy), use_tqdm=False)
        seconds = time.perf_counter() - begin
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        record_throughput(args, scheme, about, (prompt_tokens, output_tokens), made / seconds, outputs)
        load = f"{args.requests} x {prompt_tokens}/{output_tokens}"
        lines.append(f"{scheme:16} {load}: {made / seconds:8.0f} tokens/s in {seconds:.2f} s")
        say(lines[-1])
    return lines


def record_throughput(
    args: argparse.Namespace,
    scheme: str,
    about: dict[str, Any],
    load: tuple[int, int],
    tokens_per_s: float,
    outputs: Any,
) -> None:
    """Append an e2e record."""
    from comet_core.provenance import provenance
    from comet_core.results import append

    cache = scheme.partition("+")[2]
    times = [output.metrics for output in outputs if output.metrics is not None]
    first = [1e3 * t.first_token_latency for t in times]
    after = [1e3 * (t.last_token_ts - t.first_token_ts) / (load[1] - 1) for t in times if load[1] > 1]
    mode = "torch.compile and CUDA graphs as vLLM sets them" if args.compile else "no torch.compile, full decode graphs"
    record = {
        "kind": "e2e", "model": args.alias, "scheme": scheme, "engine": engine_name(args),
        "batch": args.requests, "prompt_tokens": load[0], "output_tokens": load[1], "tokens_per_s": tokens_per_s,
        "ttft_ms": statistics.median(first) if first else None,
        "tpot_ms": statistics.median(after) if after else None, "weights": "random", "layers": args.layers,
        "gpus": gpus(args), **about,  # kernels, and memory_gib: of the weights
        "kv_cache": CACHES[cache].get("kv_cache_dtype", "COMET's 4-bit pages" if cache else "auto"),
        "flags": f"{mode}, {TOKENS_A_STEP} batched tokens, all requests at once, greedy, no stop",
        "provenance": provenance(seed=0, device="cpu" if on_cpu() else "cuda"),
    }  # fmt: skip
    append(Path(args.record), record)


# --- the command line


def loads(text: str) -> list[tuple[int, int]]:
    """128/128,1024/512 -> [(128, 128), (1024, 512)]: tokens in, tokens out."""
    return [(int(prompt), int(output)) for prompt, output in (part.split("/") for part in text.split(","))]


def parse(words: list[str]) -> argparse.Namespace:
    """One job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(dest="job", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--record", default="vllm.jsonl", help="file that records are appended to")
    shared.add_argument("--limit", type=float, default=150, help="seconds for each scheme, its start included")
    shared.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share the model")
    shared.add_argument("--pipeline-parallel", type=int, default=1, help="stages of layers, each on GPUs of its own")
    shared.add_argument("--compile", action="store_true", help="vLLM's own torch.compile and CUDA graph settings")
    one = jobs.add_parser("perplexity", parents=[shared])
    one.add_argument("packed")
    one.add_argument("tokens")
    one.add_argument("--cache", choices=["", "ownkv4"], default="", help="16-bit KV cache, or COMET's")
    one.set_defaults(run=perplexity)
    two = jobs.add_parser("throughput", parents=[shared])
    two.add_argument("alias")
    two.add_argument("--schemes", type=lambda text: text.split(","), default=["comet", "bf16", "fp8", "w4a16"])
    two.add_argument("--load", type=loads, default=loads("128/128,1024/512"), help="tokens in/out, one engine for all")
    two.add_argument("--requests", type=int, default=256)
    two.add_argument("--layers", type=int, help="cut the model short")
    two.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory that vLLM may take")
    two.set_defaults(run=throughput)
    return parser.parse_args(words)


def main() -> None:
    """Run the jobs named on the command line; one that fails does not stop the next, but fails the whole."""
    jobs: list[list[str]] = [[]]
    for word in sys.argv[1:]:
        jobs.append([]) if word == "--" else jobs[-1].append(word)
    parsed = [parse(words) for words in jobs]
    preload_once_for_all()
    failed = 0
    for job in parsed:
        try:
            job.run(job)
        except (Exception, SystemExit) as error:
            say("failed:", error)
            failed += 1
    sys.exit(failed)


if __name__ == "__main__":
    main()
