"""Engines of vLLM in forks of one process that has imported everything: start-up once, failures and limits apart.

`preload_once_for_all` imports without touching a GPU, `in_a_fork` runs one function in a child with a time limit and
returns what it returned. A child leads a process group of its own, so that the engine and workers which it starts end
with it.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

START = time.perf_counter()
_LOADED: list[str] = []  # vLLM's version, once it is imported
PRELOAD = (  # what an engine imports when it starts
    "vllm.v1.engine.llm_engine", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner", "vllm.v1.attention.backends.flash_attn",
    "vllm.model_executor.models.llama", "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.fp8", "comet_core.integrations.vllm_linear",
    "comet_core.integrations.vllm_kv4", "comet_core.packed",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip


def say(*words: object) -> None:
    """One line with the seconds since the start."""
    print(f"[{time.perf_counter() - START:6.1f}]", *words, flush=True)


def preload() -> None:
    """Import vLLM once for all forks, without touching a GPU, and let it look at models in this process."""
    import vllm
    from vllm.plugins import load_general_plugins

    from comet_core.integrations.vllm import register

    load_general_plugins()
    register()  # also where COMET runs from its sources, so that no entry point names it
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module that another version of vLLM lacks: only slower
            say("not imported beforehand:", name, f"({type(error).__name__}: {error})")
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # else another interpreter imports everything again
    _LOADED.append(vllm.__version__)
    say("vLLM", vllm.__version__, "imported")


def preload_once_for_all() -> None:
    """`preload` in this process, for all forks; in each fork instead where an import touches the GPU (a GPU that was
    touched before a fork cannot be used in it) or BENCH_VLLM_PRELOAD is 0."""
    import torch

    if os.environ.get("BENCH_VLLM_PRELOAD") == "0":
        return
    preload()
    if torch.cuda.is_initialized():
        say("an import has touched the GPU: each fork imports vLLM by itself")
        os.environ["BENCH_VLLM_PRELOAD"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])


def time_left(limit: float) -> float:
    """`limit` seconds, or fewer if BENCH_VLLM_SECONDS end earlier."""
    return min(limit, START + float(os.environ.get("BENCH_VLLM_SECONDS", "inf")) - time.perf_counter())


def in_a_fork(name: str, limit: float, work: Callable[[], Any]) -> Any:
    """What `work` returns, from a process of its own; None if it fails or takes longer than `limit` seconds."""
    begin = time.perf_counter()
    if limit <= 0:
        say(name, "is not started: no time is left")
        return None
    answer = Path(tempfile.mkdtemp()) / "answer.json"
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        status = 1
        try:
            if not _LOADED:
                preload()
            answer.write_text(json.dumps(work()))
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    ended = 0
    while not ended and time.perf_counter() < begin + limit:
        time.sleep(0.05)
        ended = os.waitpid(child, os.WNOHANG)[0]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # engines and workers that it has left behind, or all of it
    if not ended:
        os.waitpid(child, 0)
    seconds = f"{time.perf_counter() - begin:.1f} s"
    say(name, f"ended after {seconds}" if ended else f"stopped at its limit, {seconds}")
    wait_for_memory()
    return json.loads(answer.read_text()) if answer.is_file() and answer.stat().st_size else None


def wait_for_memory(seconds: float = 15) -> None:
    """Until the GPUs that this process sees are empty again (the driver frees a killed process's memory late)."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    query += [f"--id={seen}"] if (seen := os.environ.get("CUDA_VISIBLE_DEVICES")) else []  # others may be in use
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        try:
            used = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split()
        except (OSError, subprocess.SubprocessError):
            return
        if all(number.isdigit() and int(number) < 2000 for number in used):
            return
        time.sleep(0.2)
