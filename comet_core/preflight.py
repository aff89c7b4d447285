"""What a run will take - time, memory, disk - before it starts, from the model's own first layers.

`rehearse` runs the command's real code on one and a few layers, in a temporary folder, and extends time, memory and
what lies on the disk linearly in layers; on a CPU in windows too. A GPU gets all of them: they cost little there, and a
part of a step as much as a whole one, so that a few would be extended with their noise. Time is extended step by step:
reading text and drawing take a second that no layer adds to, and by how much that second differs between two runs would
be multiplied by the number of layers. `require_disk` and `require_room`, on bytes that follow from the shapes alone,
are the cheap part of it that every real run does first.
"""

import gc
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from comet_core.calibrate import resolve_compute, resolve_lanes
from comet_core.calibration import heat_map
from comet_core.decoder import find_layers, layer_linears
from comet_core.experts import separate_experts
from comet_core.hidden import DEFAULT_LIMIT, TOKENS_A_STEP
from comet_core.host_memory import forget_peak, peak_memory, total_memory, trim
from comet_core.lanes import Lanes
from comet_core.model_source import ModelSource
from comet_core.progress import Progress, SilentProgress, Task
from comet_core.quantize_group import needs_sixteen
from comet_core.recipe import Recipe, with_calibration
from comet_core.weight_reader import parameter_table
from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.errors import CometError

SPARE_DISK = 64 << 20  # tokenizer, manifest, temporary names
GIB = 1 << 30
WHOLE_MODEL = ("after pack", "tune", "after tune")  # steps of a run that tunes in which it holds all layers (pack.py)
ONCE = ("start", "after calibrate", "packing")  # steps of which another layer takes no more: text, drawing, opening
MOST_EXTENDED = 8  # windows of the real run for each of the larger rehearsal: what noise is multiplied by at most


@dataclass(frozen=True)
class Estimate:
    """What a command will take. Bytes and seconds."""

    seconds: float
    memory: int  # peak of the process, Python and its libraries included (host_memory.give_back_freed is in force)
    gpu_memory: int  # peak of torch's allocator on the fullest GPU; 0 without one
    disk: int  # files that it leaves, and hidden states that it keeps in a file while it runs


@dataclass(frozen=True)
class _Run:
    seconds: dict[str, float]  # by step
    peaks: dict[str, int]  # of the process, by step
    gpu_peaks: dict[str, int]  # of the fullest GPU
    disk: int  # of the files that it left


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
            total += 2 * rows if spec.activations.share == "token" and spec.activations.bits == 4 else 0
        else:
            total += 2 * torch.Size(shape).numel()
    return total


def packing_disk(source: ModelSource, recipe: Recipe) -> int:
    """Bytes that packing needs on the disk: the packed folder, and beside it the draft that tuning starts from."""
    return packed_bytes(source, recipe) * (2 if recipe.tuning.epochs else 1) + SPARE_DISK


def tuning_memory(source: ModelSource) -> int:
    """Bytes of one GPU that tuning takes at most, from shapes alone.

    A parameter: 16 bit in both models, unrounded value, gradient and Adam's two moments in float32, what the products
    of one pass keep for the gradient. A token of a pass and layer: a dozen vectors of the hidden width, eight of the
    MLP's.
    """
    from comet_core.tune import TOKENS_A_PASS

    config = source.config.get_text_config()
    wide = 12 * config.hidden_size + 8 * getattr(config, "intermediate_size", 4 * config.hidden_size)
    return int(24 * _parameters(source) + 2 * TOKENS_A_PASS["cuda"] * config.num_hidden_layers * wide)


def _parameters(source: ModelSource) -> int:
    return sum(torch.Size(shape).numel() for shape in parameter_table(source.config).shapes.values())


def default_recipe(source: ModelSource, device: str) -> tuple[str, str]:
    """The recipe of a model for which none was named, and why it is that one.

    Tuning takes away a third to a half of the loss, in a minute or two where a GPU holds the model several times over.
    """
    if source.random_seed is not None:
        return "w4a4kv4", "random weights have nothing to learn"
    name, _ = resolve_compute(device.partition(",")[0], "auto")  # tuning takes the first alone
    if not name.startswith("cuda"):
        return "w4a4kv4", "w4a4kv4-tuned is more accurate, but takes long without a GPU"
    wanted, there = tuning_memory(source), torch.cuda.mem_get_info(name)[1]
    if wanted > 0.9 * there:
        return "w4a4kv4", f"tuning may take {wanted / GIB:.0f} GiB of GPU memory, and {name} has {there / GIB:.0f}"
    return "w4a4kv4-tuned", "this GPU can tune all of the model; --recipe w4a4kv4 leaves that out"


def weights_bytes(source: ModelSource, dtype: torch.dtype) -> int:
    """Bytes of the whole 16-bit model in memory, from shapes alone."""
    return dtype.itemsize * _parameters(source)


def require_room(wanted: int, what: str, device: str) -> None:
    """Raise CometError if `wanted` bytes are more than this machine's RAM, or the memory of the GPU `device`, can hold
    at all."""
    on_gpu = device.startswith("cuda")
    held = torch.cuda.mem_get_info(device)[1] if on_gpu else total_memory()
    if wanted > held:
        place = f"the GPU {device}" if on_gpu else "this machine"
        raise CometError(
            f"{what} needs at least {wanted / GIB:.1f} GiB of memory, {place} has {held / GIB:.1f} GiB",
            "take a smaller model, a narrower --dtype, or leave out the 16-bit model beside it (--no-compare)"
            + (", or run on the CPU (--device cpu)" if on_gpu else ""),
        )


def _linear_names(source: ModelSource) -> set[str]:
    """Full names of the linears inside the decoder layers."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(source.config)  # type: ignore[no-untyped-call]
        separate_experts(model)
    prefix, layers = find_layers(model)
    return {f"{prefix}.{name}" for name in layer_linears(layers)}


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


def rehearse(
    cut: Callable[[int], ModelSource],
    recipe: Recipe,
    command: str,
    *,
    device: str,
    dtype: str,
    then: Callable[[Path], object] = lambda packed: None,
    progress: Progress = SilentProgress(),
) -> Estimate:
    """Measure `command` on one and two layers, on a GPU three, and extend to the whole model and all windows.

    Args:
        cut: number of layers -> the model cut to them; 0 is the whole model.
        recipe: with the calibration that will be used. command: "calibrate" or "pack" (which includes calibrating).
        then: what is done with the packed folder afterwards; files that it leaves beside that folder count too.
        progress: told of each run on few layers, which takes its time where windows are long.
    """
    whole, lanes = cut(0), resolve_lanes(device, dtype)[0]
    on_gpu = lanes.devices[0].type == "cuda"
    layers, windows = int(whole.config.get_text_config().num_hidden_layers), recipe.calibration.samples
    step = max(2, len(lanes) * (TOKENS_A_STEP[lanes.devices[0].type] // recipe.calibration.seq_len))
    few = more = windows
    if not on_gpu:
        few = min(windows, step)
        more = min(windows, max(3 * few, windows // MOST_EXTENDED))
    deep = min(3 if on_gpu else 2, layers)

    with progress.task("measure", 5 if more > few else 3) as task:

        def run(count: int, some: int) -> _Run:
            done = _run_small(cut(count), recipe, some, command, device, dtype, then)
            task.advance()
            return done

        run(min(2, layers) if on_gpu else 1, windows if on_gpu else few)  # loads all that is used first here
        base = run(1, few)
        first_more = run(1, more) if more > few else base
        both = run(deep, few)
        both_more = run(deep, more) if more > few else both
    share = (windows - few) / max(1, more - few)  # of the difference that more windows made

    def extended(value: Callable[[_Run], float], *, layered: bool = True) -> float:
        """In layers, if they add to it, and in windows. A window costs a later layer more than the first, before which
        the quantized and the 16-bit model are still the same."""
        of_few, of_more = (max(0.0, value(b) - value(a)) for a, b in ((base, both), (first_more, both_more)))
        a_layer = of_few + max(0.0, of_more - of_few) * share
        first = value(base) + max(0.0, value(first_more) - value(base)) * share
        return first + ((layers - 1) * a_layer / max(1, deep - 1) if layered else 0.0)

    def seconds_of(step: str) -> float:
        return extended(lambda run: run.seconds[step], layered=step not in ONCE)

    def at_most(value: Callable[[_Run], dict[str, int]], most_a_layer: float = math.inf) -> int:
        """The largest of the steps' peaks. More windows are held in every step, more layers where the step has all."""
        found = {}
        for name, peak in value(both).items():
            grows = recipe.tuning.epochs and name in WHOLE_MODEL
            a_layer = min(most_a_layer, max(0, peak - value(base)[name]) / max(1, deep - 1)) if grows else 0
            found[name] = peak + max(0, value(both_more)[name] - peak) * share + (layers - deep) * a_layer
        return int(max(found.values(), default=0))

    # where a GPU holds all layers, RAM has of each at most what is read and written; libraries grow with the first
    in_ram = (weights_bytes(whole, torch.bfloat16) + packed_bytes(whole, recipe)) / layers if on_gpu else math.inf
    return Estimate(
        seconds=sum(map(seconds_of, base.seconds)),
        memory=at_most(lambda run: run.peaks, in_ram),
        gpu_memory=at_most(lambda run: run.gpu_peaks),
        disk=int(extended(lambda run: run.disk))
        + (packed_bytes(whole, recipe) if command == "pack" and recipe.tuning.epochs else 0)
        + _spilled(whole, recipe, device, dtype, command),
    )


def _spilled(source: ModelSource, recipe: Recipe, device: str, dtype: str, command: str) -> int:
    """Bytes of hidden states that a run keeps in files: all of them, where they are more than memory should hold."""
    spec, (_, compute) = recipe.calibration, resolve_lanes(device, dtype)
    states = spec.samples * spec.seq_len * int(source.config.get_text_config().hidden_size) * compute.itemsize
    twice = command == "pack" and needs_sixteen(recipe.weights)
    return 0 if states <= DEFAULT_LIMIT else states * (2 if twice else 1)


class _Peaks(SilentProgress):
    """Listens to a run and notes the peak of each of its steps, of the process and of its GPUs. The steps grow
    differently with the windows: which of them is the largest in a small run says nothing about a large one."""

    def __init__(self, lanes: Lanes) -> None:
        self.seconds: dict[str, float] = {}
        self.found: dict[str, int] = {}
        self.on_gpu: dict[str, int] = {}
        self._gpus = [device for device in lanes.devices if device.type == "cuda"]
        self._step = "start"
        gc.collect()
        trim()
        if self._gpus:
            torch.cuda.empty_cache()  # a run of its own has to ask for its memory
        self._forget()

    def _forget(self) -> None:
        forget_peak()
        for device in self._gpus:
            torch.cuda.reset_peak_memory_stats(device)
        self._began = time.perf_counter()

    def end(self, following: str) -> None:
        """What ran until now is over."""
        for device in self._gpus:
            torch.cuda.synchronize(device)
        self.seconds[self._step] = self.seconds.get(self._step, 0.0) + time.perf_counter() - self._began
        self.found[self._step] = max(self.found.get(self._step, 0), peak_memory())
        if self._gpus:
            peak = max(map(torch.cuda.max_memory_allocated, self._gpus))
            self.on_gpu[self._step] = max(self.on_gpu.get(self._step, 0), peak)
        self._forget()
        self._step = following

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Task]:
        self.end(description)
        with super().task(description, total) as task:
            yield task
        self.end(f"after {description}")


def _run_small(
    source: ModelSource,
    recipe: Recipe,
    windows: int,
    command: str,
    device: str,
    dtype: str,
    then: Callable[[Path], object],
) -> _Run:
    from comet_core.calibrate import calibrate
    from comet_core.pack import pack

    lanes, _ = resolve_lanes(device, dtype)
    share = windows / recipe.calibration.samples
    recipe = with_calibration(recipe, samples=windows)
    with tempfile.TemporaryDirectory(prefix="comet-rehearsal-") as name:
        home, peaks = Path(name), _Peaks(lanes)
        options: Any = {"device": device, "dtype": dtype, "progress": peaks, "limit_share": share}
        found = calibrate(source, recipe, home / "calibration", **options)
        heat_map(found, home / "outliers.png")
        peaks.end("packing")
        if command == "pack":
            pack(source, home / "calibration", None, home / "packed", **options)
            peaks.end("then")
            then(home / "packed")
        peaks.end("done")
        disk = sum(file.stat().st_size for file in home.rglob("*") if file.is_file())
    return _Run(peaks.seconds, peaks.found, peaks.on_gpu, disk)
