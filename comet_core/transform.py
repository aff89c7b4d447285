"""ModelSource + TransformSpec -> the model that is calibrated and packed in its place.

Baselines change a model before they quantize it: rotate it, move scales from activations into weights, clamp weights
to trained ranges. Each is a step from one ModelSource to another, so everything after it stays as it is. What a step
learns from text is kept in the cache folder under everything that decides it: calibrate and pack see one model.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.decoder import PROBE_TOKENS, Call, Decoder, layer_linears, linear_groups, run_layer
from comet_core.edited_source import Edit, edited
from comet_core.folding import Fold, divide_producer, find_folds, float32_probe, multiply_consumer
from comet_core.hidden import HiddenStates
from comet_core.learned_clip import clamp_to, learn_ranges
from comet_core.model_source import ModelSource
from comet_core.progress import Progress
from comet_core.recipe import TransformSpec
from comet_core.rotate_model import rotated
from comet_core.smooth import AWQ_ROWS, METHODS, InputSums
from comet_cuda.errors import CometError
from comet_cuda.folders import cache_dir

SMOOTH_WINDOWS = 32  # calibration windows that scales are read from
CLIP_TOKENS = 512  # of each of the windows that ranges are trained on
CLIP_WINDOWS = 32
CLIP_BATCH = 4  # windows a step
VERSION = 1  # of what is kept; raised when the same inputs would give other numbers


def transformed(
    source: ModelSource, spec: TransformSpec, tokens: Tensor, *, device: str, dtype: torch.dtype, progress: Progress
) -> ModelSource:
    """The model after the recipe's transformations; `source` itself if there are none.

    Args:
        tokens: calibration windows int64 [windows, length]. device, dtype: of the computation.

    Errors:
        CometError if the family cannot carry the rotation, or has experts.
    """
    wanted = {"rotate": spec.rotate, "smooth": spec.smooth, "clip": spec.clip}
    for key, value in wanted.items():
        if value != "none" and source.parameters.file_names is not None:
            raise CometError(
                f"{source.name}: transform.{key} is {value}, which does not know mixtures of experts",
                f"set transform.{key} to none, or take a recipe without it, such as w4a4kv4",
            )
    if spec.rotate != "none":
        progress.log(f"rotate: {source.name}")
        source = rotated(source, tokens, device=device)
    if spec.smooth != "none":
        settings = {"smooth": spec.smooth, "alpha": spec.alpha if spec.smooth == "smoothquant" else None}
        source = _step(source, settings, tokens[:SMOOTH_WINDOWS], _smooth(spec), device, dtype, progress)
    if spec.clip != "none":
        windows = tokens[:CLIP_WINDOWS, :CLIP_TOKENS]
        source = _step(source, {"clip": spec.clip}, windows, _clip, device, dtype, progress)
    return source


@dataclass(frozen=True)
class LayerRun:
    """One layer on its way: materialized, with the windows that enter it."""

    label: str
    layer: nn.Module
    hidden: HiddenStates
    calls: dict[int, Call]
    probe: Tensor
    probe_call: Call
    head_dim: int

    def run(self, start: int, stop: int) -> Tensor:
        """Windows [start, stop) through the layer."""
        return run_layer(self.layer, self.hidden.read(start, stop), self.calls[stop - start])


# what a step learns of one layer: tensors by name, and what they mean (JSON)
Learned = tuple[dict[str, Tensor], list[dict[str, Any]]]


def _step(
    source: ModelSource,
    settings: dict[str, Any],
    tokens: Tensor,
    learn: Callable[[LayerRun], Learned],
    device: str,
    dtype: torch.dtype,
    progress: Progress,
) -> ModelSource:
    """One step: learned, or found in the cache; then the edited model."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    data = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]
    change = json.dumps(settings | {"data": data, "version": VERSION}, sort_keys=True)
    key = hashlib.sha256(f"{source.digest()} {change}".encode()).hexdigest()[:24]
    file = cache_dir() / "transform" / f"{key}.safetensors"
    if not file.exists():
        tensors: dict[str, Tensor] = {}
        meanings: list[dict[str, Any]] = []
        name = next(str(value) for value in settings.values())
        with progress.task(name, source.config.num_hidden_layers) as task:
            for run in _layers(source, tokens, device, dtype):
                found, meaning = learn(run)
                tensors |= {f"{run.label}.{k}": v.cpu().contiguous() for k, v in found.items()}
                meanings += [one | {"layer": run.label} for one in meaning]
                task.advance(1)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.tmp")
        save_file(tensors, partial, metadata={"meanings": json.dumps(meanings)})
        partial.replace(file)
    edits: dict[str, list[Edit]] = {}
    with safe_open(file, "pt") as kept:
        for meaning in json.loads(kept.metadata()["meanings"]):
            MEANINGS[meaning["kind"]](meaning, kept.get_tensor, edits)
    parameters = set(source.weights().names())
    return edited(source, {name: todo for name, todo in edits.items() if name in parameters}, change)


@torch.no_grad()
def _layers(source: ModelSource, tokens: Tensor, device: str, dtype: torch.dtype) -> Iterator[LayerRun]:
    """Every layer in turn, its input being what the unquantized layers before it make of the windows."""
    decoder = Decoder(source, device=device, dtype=dtype)
    head = decoder.model.get_output_embeddings()  # type: ignore[operator]
    for name, module in decoder.non_layer_modules():
        if module is not head:
            decoder.load(module, name)
    hidden = HiddenStates((*tokens.shape, decoder.width), dtype=dtype, device=decoder.device)
    calls: dict[int, list[Call]] = {}
    for start, stop in hidden.ranges():
        hidden.write(start, stop, decoder.first_hidden(tokens[start:stop]))
        if stop - start not in calls:
            calls[stop - start] = decoder.calls(tokens[start:stop])
    probe = tokens[:1, :PROBE_TOKENS]
    probe_hidden, probe_calls = decoder.first_hidden(probe), decoder.calls(probe)
    config = source.config
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    for index in range(len(decoder.layers)):
        layer = decoder.load_layer(index)
        here = {size: every[index] for size, every in calls.items()}
        run = LayerRun(
            f"{decoder.layer_prefix}.{index}", layer, hidden, here, probe_hidden, probe_calls[index], head_dim
        )
        yield run
        for start, stop in hidden.ranges():
            hidden.write(start, stop, run.run(start, stop))
        probe_hidden = run_layer(layer, probe_hidden, probe_calls[index])
        decoder.release_layer(index)


def _smooth(spec: TransformSpec) -> Callable[[LayerRun], Learned]:
    method = METHODS[spec.smooth]

    @torch.no_grad()
    def learn(run: LayerRun) -> Learned:
        groups = linear_groups(run.layer, run.probe, run.probe_call, run.label)
        wide, states, call = float32_probe(run.layer, run.probe, run.probe_call)
        folds = find_folds(wide, groups, states, call, run.head_dim)
        linears = layer_linears(run.layer)
        sums = {fold.producer: InputSums(-(-AWQ_ROWS // len(run.hidden.ranges()))) for fold in folds}
        handles = [
            linears[fold.consumers[0]].register_forward_pre_hook(
                lambda _, args, into=sums[fold.producer]: into.add(args[0].reshape(-1, args[0].shape[-1]))
            )
            for fold in folds
        ]
        try:
            for start, stop in run.hidden.ranges():
                run.run(start, stop)
        finally:
            for handle in handles:
                handle.remove()
        tensors, meanings = {}, []
        for fold in folds:
            weight = torch.cat([linears[name].weight.float() for name in fold.consumers])
            scale = method(fold, sums[fold.producer].stats(), weight, spec.alpha)
            if scale is not None:
                tensors[f"{fold.producer}.scale"] = scale
                meanings.append({"kind": "scale", "fold": asdict(fold)})
        return tensors, meanings

    return learn


def _scale_edits(meaning: dict[str, Any], tensor: Callable[[str], Tensor], edits: dict[str, list[Edit]]) -> None:
    given = meaning["fold"]
    fold = Fold(**{**given, "consumers": tuple(given["consumers"])})
    scale = tensor(f"{meaning['layer']}.{fold.producer}.scale")
    for leaf in ("weight", "bias"):  # a name that the model does not have is dropped by the caller
        edits.setdefault(f"{meaning['layer']}.{fold.producer}.{leaf}", []).append(
            lambda value: divide_producer(value, scale, fold)
        )
    wide = fold.spread(scale)
    for name in fold.consumers:
        edits.setdefault(f"{meaning['layer']}.{name}.weight", []).append(
            lambda value: multiply_consumer("weight", value, wide)
        )


def _clip(run: LayerRun) -> Learned:
    count = len(run.hidden.read(0, CLIP_WINDOWS))
    size = min(CLIP_BATCH, count)
    batches = [run.hidden.read(start, start + size) for start in range(0, count - size + 1, size)]
    call = _batch_call(run, size)
    ranges = learn_ranges(run.layer, batches, call)
    tensors: dict[str, Tensor] = {}
    for name, (low, high) in ranges.items():
        tensors |= {f"{name}.low": low, f"{name}.high": high}
    return tensors, [{"kind": "clip", "linear": name} for name in ranges]


def _batch_call(run: LayerRun, size: int) -> Call:
    """The layer's arguments for `size` windows, cut from those for more or widened from those for fewer."""
    have = next(iter(run.calls))
    call = run.calls[have]

    def fit(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == have and have != 1:
            return value[:1].expand(size, *value.shape[1:])
        return tuple(map(fit, value)) if isinstance(value, tuple) else value

    return Call(tuple(map(fit, call.args)), {key: fit(value) for key, value in call.kwargs.items()})


def _clip_edits(meaning: dict[str, Any], tensor: Callable[[str], Tensor], edits: dict[str, list[Edit]]) -> None:
    name = f"{meaning['layer']}.{meaning['linear']}"
    low, high = tensor(f"{name}.low"), tensor(f"{name}.high")
    edits.setdefault(f"{name}.weight", []).append(lambda value: clamp_to(value, low, high))


MEANINGS: dict[str, Callable[[dict[str, Any], Callable[[str], Tensor], dict[str, list[Edit]]], None]] = {
    "scale": _scale_edits,
    "clip": _clip_edits,
}
