"""`comet doctor`: what this machine has, and what COMET will do with it."""

import os
import platform
import re
from pathlib import Path
from typing import Annotated

import typer

from comet_cli import console, options
from comet_cuda.errors import CometError
from comet_cuda.folders import cache_dir

PACKAGES = ("comet-w4a4kv4", "torch", "transformers", "safetensors", "datasets", "gguf", "cuda-core", "cuda-bindings",
            "nvidia-cuda-nvrtc", "lm-eval", "vllm")  # fmt: skip


def doctor(
    build: Annotated[bool, typer.Option("--build", help="Compile every kernel now instead of at first use.")] = False,
    arch: Annotated[
        str | None, typer.Option(help="With --build: for another GPU than this one's.", metavar="8.0|8.6|8.9|9.0|...")
    ] = None,
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="Remove the compiled kernels.")] = False,
    json: options.Json = False,
) -> None:
    """Print what this machine has, and what COMET does with it.

    Versions, GPUs, folders and which path each op takes; or compile kernels ahead of time, or remove them.

    Example: comet doctor --build --arch 9.0
    """
    if clear_cache:
        from comet_cuda.kernels import clear_cache as clear

        count, size = clear()
        console.talk(f"removed {count} compiled kernels, {console.human_bytes(size)}")
    if build or arch is not None:
        build_kernels(arch)
    if clear_cache or build or arch is not None:
        return
    facts = {**versions(), **devices(), **folders()}
    paths = op_paths()
    if json:
        console.data_json({"kind": "doctor", **facts, "paths": paths})
        return
    console.table("This machine", [{"what": key, "value": value} for key, value in facts.items()])
    console.table("Paths", paths)


def build_kernels(wanted: str | None) -> None:
    """Compile what a GPU of compute capability `wanted` (this machine's first GPU if None) may launch; NVRTC alone is
    needed, no GPU."""
    if wanted is None:
        import torch

        if not torch.cuda.is_available():
            raise CometError("no GPU is here to build kernels for", "Name one: comet doctor --build --arch 9.0")
        capability = torch.cuda.get_device_capability()
    elif (found := re.fullmatch(r"(\d+)\.(\d)", wanted)) is None:
        raise CometError(
            f"--arch {wanted} is no compute capability", "For example --arch 9.0 (H100, H200) or --arch 8.0 (A100)."
        )
    else:
        capability = int(found[1]), int(found[2])
    from comet_cuda.dispatch import arch_of
    from comet_cuda.kernels import all_configurations, build

    arch = arch_of(capability)
    work = all_configurations(capability)
    with console.progress().task(f"compile for {arch}", len(work)) as task:
        for _ in build(arch, work):
            task.advance()
    console.talk(f"{len(work)} kernels for {arch} are in {cache_dir() / 'kernels'}")


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

    from comet_core.host_memory import total_memory

    memory = console.human_bytes(total_memory())
    found = {"cpu": f"{os.cpu_count()} cores, {memory}, {torch.get_num_threads()} torch threads"}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        size = console.human_bytes(about.total_memory)
        found[f"gpu {index}"] = f"{about.name}, sm_{about.major}{about.minor}, {size}"
    if not torch.cuda.device_count():
        found["gpu"] = "none: everything but speed works"
    return found


def folders() -> dict[str, str]:
    """Where models, kernels and data lie."""
    cache = cache_dir()
    data = os.environ.get("COMET_DATA")
    return {
        "cache": f"{cache}" + ("" if cache.is_dir() else ", not there yet"),
        "COMET_DATA": f"{data}" + ("" if Path(data).is_dir() else ", not there") if data else "not set",
    }


def op_paths(integer: bool | None = None) -> list[dict[str, str]]:
    """For each GPU and op: which path runs it here, and why. Without a GPU every op runs its reference.

    Args:
        integer: of linears with integer scales (activations.share: token), or with others; None for both.
    """
    import torch

    from comet_cuda import dispatch

    rows = []
    for index in range(torch.cuda.device_count()):
        try:
            capability = torch.cuda.get_device_capability(index)
            taken = dispatch.paths(capability, integer=bool(integer))
            if integer is None:
                others = [row for row in dispatch.paths(capability, integer=True) if row not in taken]
                taken += [(f"{op}, integer scales", path, why) for op, path, why in others]
        except CometError as error:  # one GPU that is too old does not hide the others
            taken = [("all", "none", error.message)]
        rows += [{"gpu": str(index), "op": op, "path": path, "why": why} for op, path, why in taken]
    return rows or [{"gpu": "none", "op": "all", "path": "reference", "why": "PyTorch on the CPU, exact but not fast"}]
