"""vLLM with COMET's plugin: perplexity of a packed folder beside comet's own, and throughput of schemes side by side.

usage: bench_vllm.py perplexity PACKED TEXT [options]     TEXT: wikitext2, ...; vllm_perplexity.py
       bench_vllm.py serve PACKED [options]               vllm_serve.py
       bench_vllm.py throughput ALIAS [options]           random weights; several jobs follow each other after --

TEXT may be a safetensors file of int64 `tokens` [windows, length]. A scheme is weights and activations, then perhaps
a KV cache: bf16, fp8, w4a16 (the format of `comet export`, by the kernel that vLLM prefers), w4a16-marlin,
comet, comet-free (scales that are any numbers); +kv4 and +kv8 are vLLM's own 4-bit and 8-bit caches, the same for
every scheme; +ownkv4 is COMET's.

vLLM's imports take longer than measuring, so they are done once, before the GPU is touched. Each scheme then runs in a
fork: it has a time limit, its failure ends nothing else, its memory is free afterwards, and its record is written when
it is made. By default no torch.compile: decode runs in full CUDA graphs, prefill eagerly, for every scheme alike;
--compile takes vLLM's defaults instead, which cost about a minute of start-up. Records: eval and e2e (results.py).
Nothing is started BENCH_VLLM_SECONDS after the start, and what runs by then is stopped.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_engines import CACHES, engine, engine_name, gpus, on_cpu
from vllm_forks import in_a_fork, preload_once_for_all, say, time_left
from vllm_perplexity import perplexity
from vllm_serve import serve
from vllm_shapes import kernels_of, shape_only, weight_bytes

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking whether there is a GPU must not touch it
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # `kernels_of` is sent to the process of the model
TOKENS_A_STEP = 8192


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


# --- throughput


def throughput(args: argparse.Namespace) -> None:
    """Output tokens a second of each scheme, one line and one record a load."""
    found: dict[str, list[Any]] = {}
    for scheme in args.schemes:
        made = in_a_fork(scheme, time_left(args.limit), lambda scheme=scheme: measure(args, scheme))  # type: ignore[misc]
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
    one.add_argument("tokens", help="a file of windows, or a text by the name that `comet eval --ppl` takes")
    one.add_argument("--windows", type=int, help="of a text; all if not given")
    one.add_argument("--seq-len", type=int, default=2048, help="tokens a window of a text")
    one.add_argument("--cache", choices=["", "kv4", "ownkv4"], default="", help="16 bit, vLLM's 4-bit kind, COMET's")
    one.add_argument("--dtype", default="auto", help="what both compute in: bfloat16 on a GPU, else float32")
    one.add_argument("--also", type=lambda text: text.split(","), default=[], help="vllm:float16, comet:eager, ...")
    one.add_argument("--memory", type=float, default=0.3, help="share of the GPU's memory that vLLM may take")
    one.set_defaults(run=perplexity)
    three = jobs.add_parser("serve", parents=[shared])
    three.add_argument("packed")
    three.add_argument("--cache", choices=["", "ownkv4"], default="", help="16-bit KV cache, or COMET's")
    three.add_argument("--prompt", default="The capital of France is")
    three.set_defaults(run=serve)
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
