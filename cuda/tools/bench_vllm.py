"""vLLM with COMET's plugin: perplexity of a packed folder beside comet eval's, and throughput of schemes side by side.

usage: bench_vllm.py perplexity PACKED TOKENS.safetensors OUT.jsonl
       bench_vllm.py throughput ALIAS OUT.jsonl [SCHEME ...]       (schemes: bf16 fp8 comet; random weights)

TOKENS holds int64 `tokens` [windows, length]; its metadata says of what text. Parts can follow each other after --.

One process for all, because starting vLLM takes longer than measuring. No torch.compile anywhere: decode runs in full
CUDA graphs, prefill eagerly, the same for every scheme. `perplexity` compares without a 4-bit KV cache on both sides.
Records: eval (perplexity, engine in its protocol) and e2e; see comet_core/results.py.
"""

import gc
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
REQUESTS, PROMPT, OUTPUT = 256, 128, 128
GRAPH_SIZES = [1, 8, 16, 32, 64, 128, 192, 256]


def engine(model: Path, memory: float, **options: Any) -> Any:
    """A vLLM engine in this process; memory: share of the GPU's."""
    import torch
    from vllm import LLM

    on_gpu = torch.cuda.is_available()
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": GRAPH_SIZES}
    shared = {"compilation_config": graphs, "gpu_memory_utilization": memory} if on_gpu else {"enforce_eager": True}
    return LLM(model=str(model), skip_tokenizer_init=True, enable_prefix_caching=False, **(shared | options))


def free(*_: Any) -> None:
    """Give memory back between engines."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def perplexity(packed: str, tokens_file: str, out: str) -> None:
    """Windows scored by comet's own evaluation and by vLLM's prompt_logprobs."""
    import torch
    from safetensors import safe_open
    from vllm import SamplingParams

    from comet_core.evaluate import Scores, score_windows
    from comet_core.packed import load_packed
    from comet_core.provenance import provenance
    from comet_core.results import append

    with safe_open(tokens_file, "pt") as file:
        tokens, about = file.get_tensor("tokens"), file.metadata()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    loaded = load_packed(Path(packed), device=device, dtype=dtype)
    manifest = loaded.manifest
    loaded.model.set_attn_implementation("sdpa")  # type: ignore[operator]  # no 4-bit KV cache
    scores = Scores()
    for batch in tokens.split(8):
        score_windows(loaded.model, None, batch.to(device), scores)
    values = {"comet": math.exp(scores.nll / scores.tokens)}
    print("comet", values["comet"], flush=True)
    del loaded
    free()
    llm = engine(Path(packed), 0.2, dtype=str(dtype).removeprefix("torch."), max_model_len=tokens.shape[1] + 8)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": row.tolist()} for row in tokens], sampling)
    nll = [
        -place[int(token)].logprob
        for row, output in zip(tokens, outputs, strict=True)
        for token, place in zip(row[1:], output.prompt_logprobs[1:], strict=True)
    ]
    values["vllm"] = math.exp(sum(nll) / len(nll))
    print("vllm", values["vllm"], f"difference {values['vllm'] / values['comet'] - 1:+.3%}", flush=True)
    for name, value in values.items():
        protocol = {
            **about,
            "windows": f"first {len(tokens)} of {tokens.shape[1]} tokens, not overlapping",
            "kv": "16-bit",
            "dtype": str(dtype).removeprefix("torch."),
            "engine": "vLLM " + __import__("vllm").__version__ if name == "vllm" else "comet",
            "tokens_scored": len(nll),
        }
        record = {
            "kind": "eval", "model": manifest.model["name"], "recipe": manifest.recipe.name, "task": "wikitext2",
            "metric": "perplexity", "value": value, "windows": len(tokens), "seq_len": tokens.shape[1],
            "kv_quantized": False, "int4_mac_fraction": manifest.int4_mac_fraction, "protocol": protocol,
            "provenance": provenance(recipe_digest=manifest.recipe_digest, device=device),
        }  # fmt: skip
        append(Path(out), record)
    del llm
    free()


def shape_only(alias: str, folder: Path, *, packed: bool) -> Path:
    """config.json of an alias, and for comet a manifest that says how its linears are packed. No weights."""
    from transformers import AutoConfig

    from comet_core.model_source import alias_shapes
    from comet_core.packed import LinearEntry, Manifest, manifest_json
    from comet_core.recipe import digest, load_recipe, recipe_to_dict

    shapes = alias_shapes(alias)
    kind = shapes.pop("model_type")
    shapes.pop("hub")
    architecture = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}[kind]
    config = AutoConfig.for_model(kind, **shapes, architectures=[architecture], max_position_embeddings=4096)
    folder.mkdir(parents=True)
    text = config.to_dict() | {"architectures": [architecture], "dtype": "bfloat16"}
    if packed:
        recipe = load_recipe("w4a4kv4")
        share = getattr(recipe.activations, "share", 1)
        hidden, inner = config.hidden_size, config.intermediate_size
        q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        sizes = {
            "self_attn.q_proj": (hidden, q), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv),
            "self_attn.o_proj": (q, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
            "mlp.down_proj": (inner, hidden),
        }  # fmt: skip
        linears = {
            f"model.layers.{layer}.{name}": LinearEntry(
                *size, 4, recipe.weights.symmetric, recipe.activations.hadamard, name == "mlp.down_proj", share
            )
            for layer in range(config.num_hidden_layers)
            for name, size in sizes.items()
        }
        model = {"name": alias, "note": "random weights", "spec": alias, "origin": "random", "digest": ""}
        manifest = Manifest(recipe, digest(recipe), model, {}, 0.84, linears, 16, [], {})
        (folder / "comet.json").write_text(manifest_json(manifest, recipe_to_dict(recipe)))
        text["quantization_config"] = {"quant_method": "comet"}
    (folder / "config.json").write_text(json.dumps(text, default=str))
    return folder


def throughput(alias: str, out: str, *schemes: str) -> None:
    """Tokens a second of 256 requests at once, 128 tokens in and 128 out, random weights."""
    import torch
    from vllm import SamplingParams

    from comet_core.provenance import provenance
    from comet_core.results import append

    generator = torch.Generator().manual_seed(0)
    on_gpu = torch.cuda.is_available()
    for scheme in schemes or ("bf16", "comet"):
        started = time.perf_counter()
        folder = shape_only(alias, Path(tempfile.mkdtemp()) / scheme, packed=scheme == "comet")
        options: dict[str, Any] = {"quantization": "fp8"} if scheme == "fp8" else {}
        llm = engine(
            folder, 0.4, load_format="dummy", dtype="bfloat16", max_model_len=PROMPT + OUTPUT + 8,
            max_num_seqs=REQUESTS, max_num_batched_tokens=8192, **options,
        )  # fmt: skip
        print(scheme, f"started in {time.perf_counter() - started:.1f} s", flush=True)
        vocabulary = 30000
        requests = REQUESTS if on_gpu else 4
        prompts = [
            {"prompt_token_ids": torch.randint(0, vocabulary, (PROMPT,), generator=generator).tolist()}
            for _ in range(requests)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False))
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling)
        seconds = time.perf_counter() - begin
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(scheme, f"{made / seconds:.0f} output tokens/s, {seconds:.2f} s", flush=True)
        record = {
            "kind": "e2e", "model": alias, "scheme": scheme, "engine": "vLLM " + __import__("vllm").__version__,
            "batch": requests, "prompt_tokens": PROMPT, "output_tokens": OUTPUT, "tokens_per_s": made / seconds,
            "ttft_ms": None, "tpot_ms": None, "memory_gib": None, "weights": "random",
            "flags": "no torch.compile, full CUDA graphs for decode, 8192 batched tokens, 16-bit KV cache",
            "provenance": provenance(seed=0, device="cuda" if on_gpu else "cpu"),
        }  # fmt: skip
        append(Path(out), record)
        del llm
        free()


def main() -> None:
    """Run the parts named on the command line, parts separated by --; one that fails does not stop the next."""
    import traceback

    parts: list[list[str]] = [[]]
    for word in sys.argv[1:]:
        parts.append([]) if word == "--" else parts[-1].append(word)
    for part in parts:
        try:
            {"perplexity": perplexity, "throughput": throughput}[part[0]](*part[1:])
        except Exception:
            traceback.print_exc()
            free()


if __name__ == "__main__":
    main()
