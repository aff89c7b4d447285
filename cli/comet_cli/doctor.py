"""`comet doctor`: what this machine has, and what COMET will do with it."""

import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

from comet_cli import console, options

PACKAGES = ("comet-w4a4kv4", "torch", "transformers", "safetensors", "datasets", "gguf", "cuda-core", "cuda-bindings",
            "nvidia-cuda-nvrtc", "lm-eval", "vllm")  # fmt: skip


def doctor(json: options.Json = False) -> None:
    """Print versions, GPU, folders and which path each op takes here."""
    facts = {**versions(), **devices(), **folders()}
    paths = op_paths()
    if json:
        console.data_json({"kind": "doctor", **facts, "paths": paths})
        return
    console.table("This machine", [{"what": key, "value": value} for key, value in facts.items()])
    if paths:
        console.table("Ops", [{"op": op, "path": str(path)} for op, path in paths.items()])


def versions() -> dict[str, str]:
    """Versions of Python and of each package that matters, "not installed" where it is not."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def devices() -> dict[str, str]:
    """CPU threads and memory, and each GPU that torch sees."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {"cpu": f"{os.cpu_count()} cores, {console.human_bytes(memory)}, {torch.get_num_threads()} torch threads"}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        size = console.human_bytes(about.total_memory)
        found[f"gpu {index}"] = f"{about.name}, sm_{about.major}{about.minor}, {size}"
    if not torch.cuda.device_count():
        found["gpu"] = "none: everything but speed works"
    return found


def folders() -> dict[str, str]:
    """Where models, kernels and data lie."""
    cache = Path(os.environ.get("COMET_CACHE_DIR") or Path.home() / ".cache" / "comet")
    data = os.environ.get("COMET_DATA")
    return {
        "cache": f"{cache}" + ("" if cache.is_dir() else ", not there yet"),
        "COMET_DATA": f"{data}" + ("" if Path(data).is_dir() else ", not there") if data else "not set",
    }


def op_paths() -> dict[str, Any]:
    """Op -> what runs it on this machine and why; empty if comet_cuda has no dispatch."""
    if importlib.util.find_spec("comet_cuda.dispatch") is None:
        return {}
    from comet_cuda import dispatch

    return dict(dispatch.paths())
