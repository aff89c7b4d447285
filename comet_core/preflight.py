"""What a run will take - time, memory, disk - before it starts, from the model's own first layers.

`rehearse` runs the command's real code three times on one or two layers and a few windows, in a temporary folder, and
extends time and memory linearly in layers and windows; disk follows from the shapes. `require_disk` is the cheap part
of it that every packing does first.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from comet_core.decoder import find_layers
from comet_core.model_source import ModelSource
from comet_core.progress import SilentProgress
from comet_core.recipe import Recipe, with_calibration
from comet_core.weight_reader import parameter_table
from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.errors import CometError

SPARE_DISK = 64 << 20  # tokenizer, manifest, temporary names
GIB = 1 << 30


@dataclass(frozen=True)
class Estimate:
    """What a command will take. Bytes and seconds.

    `memory` is what the run holds. The C library keeps freed memory for later, so that the process was seen to take up
    to twice as much on small models; MALLOC_MMAP_THRESHOLD_=262144 in the environment makes it give back.
    """

    seconds: float
    memory: int  # peak of this process above what it holds now
    gpu_memory: int  # peak of torch's allocator; 0 without a GPU
    disk: int


@dataclass(frozen=True)
class _Run:
    layers: int
    windows: int
    seconds: float
    memory: int
    gpu_memory: int


def packed_bytes(source: ModelSource, recipe: Recipe) -> int:
    """Bytes of the packed folder's tensors, from shapes alone."""
    table = parameter_table(source.config)
    linears = _linear_names(source)
    total = 0
    for name, shape in table.shapes.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in linears and (spec := recipe.for_linear(module)).weights.bits < 16:
            rows, channels = shape
            blocks = num_blocks(channels)
            total += rows * blocks * BLOCK * spec.weights.bits // 8 + 2 * rows * blocks + 5 * blocks + 4 * channels
            total += 0 if spec.weights.symmetric or spec.weights.bits == 8 else rows * blocks
        else:
            total += 2 * torch.Size(shape).numel()
    return total


def packing_disk(source: ModelSource, recipe: Recipe) -> int:
    """Bytes that packing needs on the disk: the packed folder, and beside it the draft that tuning starts from."""
    return packed_bytes(source, recipe) * (2 if recipe.tuning.epochs else 1) + SPARE_DISK


def _linear_names(source: ModelSource) -> set[str]:
    """Full names of the linears inside the decoder layers."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(source.config)  # type: ignore[no-untyped-call]
    prefix, layers = find_layers(model)
    return {f"{prefix}.{name}" for name, part in layers.named_modules() if isinstance(part, torch.nn.Linear)}


def require_disk(folder: Path, wanted: int, what: str) -> None:
    """Raise CometError if the disk of `folder` (or of its nearest parent that exists) has not that many bytes free."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < wanted:
        raise CometError(
            f"{folder}: {what} takes {wanted / GIB:.2f} GiB, the disk has {free / GIB:.2f} GiB free",
            "free disk space, or choose a folder on another disk with --out",
        )


def peak_memory() -> int:
    """The largest size this process had since `forget_peak`, in bytes (0 where Linux's /proc is not there)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def forget_peak() -> int:
    """Start a new peak; returns what the process holds now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return peak_memory()


def rehearse(
    cut: Callable[[int], ModelSource],
    recipe: Recipe,
    command: str,
    *,
    device: str,
    dtype: str,
) -> Estimate:
    """Measure `command` on one and two layers, and extend to the whole model and all windows.

    Args:
        cut: number of layers -> the model cut to them; 0 is the whole model.
        recipe: with the calibration that will be used. command: "calibrate" or "pack" (which includes calibrating).
    """
    whole = cut(0)
    layers, windows = int(whole.config.get_text_config().num_hidden_layers), recipe.calibration.samples
    few = min(windows, max(2, 4096 // recipe.calibration.seq_len))
    more = min(windows, 3 * few)
    plan = [(1, few), (1, few), (1, more), (min(2, layers), few)]  # the first warms caches up and does not count
    held = forget_peak()  # before anything ran: what the C library keeps for later counts too
    runs = [_run_small(cut(n), with_calibration(recipe, samples=w), command, device, dtype, held) for n, w in plan]
    _, base, wide, deep = runs

    def extended(value: Callable[[_Run], float]) -> float:
        a_window = max(0.0, value(wide) - value(base)) / max(1, more - few)
        a_layer = max(0.0, value(deep) - value(base)) if layers > 1 else 0.0
        a_layer += (windows - few) * a_window  # the other layers have all windows too
        return value(base) + (layers - 1) * a_layer + (windows - few) * a_window

    def at_most(value: Callable[[_Run], float]) -> int:
        a_window = max(0.0, value(wide) - value(base)) / max(1, more - few)
        return int(max(value(base), value(deep)) + (windows - few) * a_window)

    return Estimate(
        seconds=extended(lambda run: run.seconds),
        memory=at_most(lambda run: run.memory),
        gpu_memory=at_most(lambda run: run.gpu_memory),
        disk=packing_disk(whole, recipe) if command == "pack" else SPARE_DISK,
    )


def _run_small(source: ModelSource, recipe: Recipe, command: str, device: str, dtype: str, held: int) -> _Run:
    from comet_core.calibrate import calibrate
    from comet_core.pack import pack

    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    forget_peak()
    with tempfile.TemporaryDirectory(prefix="comet-rehearsal-") as name:
        home = Path(name)
        start = time.perf_counter()
        silent = SilentProgress()
        calibrate(source, recipe, home / "calibration", device=device, dtype=dtype, progress=silent)
        if command == "pack":
            pack(source, home / "calibration", None, home / "packed", device=device, dtype=dtype, progress=silent)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return _Run(
        layers=int(source.config.get_text_config().num_hidden_layers),
        windows=recipe.calibration.samples,
        seconds=seconds,
        memory=max(0, peak_memory() - held),
        gpu_memory=torch.cuda.max_memory_allocated() if on_gpu else 0,
    )
