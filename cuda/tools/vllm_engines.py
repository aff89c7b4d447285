"""Engines of vLLM for measuring: one set of options for every scheme, and the words that records use of them."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from vllm_forks import say

GRAPH_SIZES = [1, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]  # decode batches that are captured
STARTED: list[Any] = []  # engines of this fork: their orderly end takes seconds that nobody needs
CACHES: dict[str, dict[str, Any]] = {  # options of an engine
    "": {}, "kv4": {"kv_cache_dtype": "int4_per_token_head"}, "kv8": {"kv_cache_dtype": "fp8"},
    "ownkv4": {"attention_backend": "CUSTOM", "block_size": 512},
}  # fmt: skip


def on_cpu() -> bool:
    """Whether vLLM runs on a CPU here."""
    return bool(sys.modules["vllm.platforms"].current_platform.is_cpu())


def engine_name(args: argparse.Namespace) -> str:
    """vLLM, its version, and what makes its figures another kind: torch.compile, several GPUs."""
    kinds = ["torch.compile"] * args.compile + [f"GPUs: {gpus(args)}"] * (gpus(args) != "1")
    return ", ".join([f"vLLM {sys.modules['vllm'].__version__}", *kinds])


def gpus(args: argparse.Namespace) -> str:
    """How many GPUs share the model, and how."""
    ways = {"tensor parallel": args.tensor_parallel, "pipeline parallel": args.pipeline_parallel}
    return " x ".join(f"{count} ({way})" for way, count in ways.items() if count > 1) or "1"


def engine(model: Path, args: argparse.Namespace, *, eager: bool = False, **options: Any) -> Any:
    """A vLLM engine. eager: without CUDA graphs, which start-up takes seconds for and prompts do not use."""
    import torch
    from vllm import LLM

    shared: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    shared |= {"tensor_parallel_size": args.tensor_parallel, "pipeline_parallel_size": args.pipeline_parallel}
    shared |= {"disable_log_stats": False}  # times of each request
    if on_cpu() or eager:
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
