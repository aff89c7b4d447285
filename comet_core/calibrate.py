"""ModelSource + Recipe -> Calibration: what every group's input looks like, and the block plan that follows.

The model runs once over the calibration windows, layer by layer in 16-bit precision of its weights: one layer and the
hidden states are in memory at a time. When all layers have been measured, the budget of 8-bit blocks is spent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comet_core.calibration import Calibration, GroupPlan, refuse_other, save, writable_folder
from comet_core.corpus import calibration_windows, load_corpus, random_windows
from comet_core.decoder import PROBE_TOKENS, Call, Decoder, LinearGroup, layer_linears, linear_groups, run_layer
from comet_core.experts import list_experts
from comet_core.hidden import DEFAULT_LIMIT, HiddenStates
from comet_core.lanes import Copies, Lanes, calls_by_lane
from comet_core.model_source import ModelSource
from comet_core.observe import SAMPLE_TOKENS, ChannelStats, observe
from comet_core.outliers import outlier_channels, report_outliers
from comet_core.plan import (
    SHARES,
    BlockPlan,
    PlanChoice,
    block_costs,
    block_error,
    block_grams,
    choose_permutation,
    clip_values,
    output_energy,
    place_int8_blocks,
    search_clips,
    segments_for,
    spend_budget,
)
from comet_core.progress import Progress
from comet_core.recipe import LinearSpec, Recipe
from comet_core.transform import transformed
from comet_core.whole_files import claimed
from comet_cuda.affine import num_blocks
from comet_cuda.bank_order import spread_over_banks
from comet_cuda.errors import CometError
from comet_cuda.quantize_token_ref import MOST_CHANNELS


def resolve_compute(device: str, dtype: str) -> tuple[str, torch.dtype]:
    """("auto" | name, "auto" | name) -> device and compute type: float32 on a CPU, bfloat16 on a GPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if dtype not in names:
        raise CometError(f"dtype={dtype!r} is not known", f"one of auto, {', '.join(names)}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CometError(
            f"device={device!r} cannot be used: {str(error).splitlines()[0]}", "use cpu or auto"
        ) from error
    return device, names[dtype]


def resolve_lanes(device: str, dtype: str) -> tuple[Lanes, torch.dtype]:
    """As `resolve_compute`, for several devices too: "cuda:0,cuda:1" share the calibration windows.

    Errors:
        CometError for one that is named twice, or devices of two kinds.
    """
    found = [resolve_compute(name.strip(), dtype) for name in device.split(",")]
    lanes = Lanes.of(",".join(name for name, _ in found))
    places = {(one.type, one.index or 0) for one in lanes.devices}  # cuda is cuda:0
    if len(places) < len(found) or len({kind for kind, _ in places}) > 1:
        raise CometError(f"device={device!r} cannot share work", "name different GPUs: cuda:0,cuda:1")
    return lanes, found[0][1]


def calibration_tokens(source: ModelSource, recipe: Recipe) -> tuple[Tensor, dict[str, Any]]:
    """Token windows int64 [samples, seq_len] by the recipe, and what they are, for the manifest."""
    spec = recipe.calibration
    how = {"samples": spec.samples, "seq_len": spec.seq_len, "seed": spec.seed}
    tokenizer = source.tokenizer()
    if tokenizer is None:
        vocab = source.config.get_text_config().vocab_size
        tokens = random_windows(vocab, samples=spec.samples, seq_len=spec.seq_len, seed=spec.seed)
        return tokens, {"name": "random tokens", "origin": "random", "sha256": "", **how}
    corpus = load_corpus(spec.data, role="calibration")
    tokens = calibration_windows(corpus, tokenizer, samples=spec.samples, seq_len=spec.seq_len, seed=spec.seed)
    return tokens, {"name": corpus.name, "origin": corpus.origin, "sha256": corpus.sha256, **how}


def embed_windows(decoder: Decoder, tokens: Tensor, hidden: HiddenStates) -> dict[int, list[Call]]:
    """Fill `hidden` with what enters layer 0 and return the layers' arguments by number of windows a step."""
    calls: dict[int, list[Call]] = {}
    head = decoder.model.get_output_embeddings()  # type: ignore[operator]
    for name, module in decoder.non_layer_modules():
        if module is not head:  # as large as the embedding, and nothing here reads it
            decoder.load(module, name)
    for start, stop in hidden.ranges():
        hidden.write(start, stop, decoder.first_hidden(tokens[start:stop]))
        if stop - start not in calls:
            calls[stop - start] = decoder.calls(tokens[start:stop])
    return calls


@torch.no_grad()
def calibrate(
    source: ModelSource,
    recipe: Recipe,
    out: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress,
    limit_share: float = 1.0,
    lanes: Lanes | None = None,
) -> Calibration:
    """Calibrate and write the artifact to `out`.

    Args:
        source: the model. recipe: its calibration, activations and blocks sections are used.
        out: folder, made if missing; the same calibration that is there is replaced at the end.
        device, dtype: "auto" or torch names; several devices as "cuda:0,cuda:1". progress: told about every step.
        limit_share: of the limits on memory; a rehearsal with a part of the windows takes the same part of them.
        lanes: devices that share the windows, in place of those that `device` names.

    Errors:
        CometError for models, data or recipes that do not fit each other, before the long part where possible, and for
        a folder that holds another calibration.
    """
    named, compute = resolve_lanes(device, dtype)
    with claimed(out):
        refuse_other(out, source, recipe)
        writable_folder(out)
        return _calibrate(source, recipe, out, compute, progress, limit_share, lanes or named)


def _calibrate(
    source: ModelSource,
    recipe: Recipe,
    out: Path,
    compute: torch.dtype,
    progress: Progress,
    limit_share: float,
    lanes: Lanes,
) -> Calibration:
    device = str(lanes.devices[0])
    tokens, data = calibration_tokens(source, recipe)
    source = transformed(source, recipe.transform, tokens, device=device, dtype=compute, progress=progress)
    decoder = Decoder(source, device=device, dtype=compute)
    count = len(decoder.layers)
    probe = tokens[:1, :PROBE_TOKENS]
    hidden = HiddenStates(
        (tokens.shape[0], tokens.shape[1], decoder.width),
        dtype=compute,
        device=lanes.devices,
        limit=int(DEFAULT_LIMIT * limit_share),
        spill_folder=out,
    )
    calls = calls_by_lane(lanes, embed_windows(decoder, tokens, hidden))
    probe_hidden, probe_calls = decoder.first_hidden(probe), decoder.calls(probe)
    for _, module in decoder.non_layer_modules():
        decoder.unload(module)
    keep = -(-SAMPLE_TOKENS // len(hidden.ranges()))
    measured: list[_Measured] = []
    with progress.task("calibrate", count * len(hidden.ranges())) as task:
        for index in range(count):
            label = f"{decoder.layer_prefix}.{index}"
            layer = decoder.load_layer(index)
            groups = linear_groups(layer, probe_hidden, probe_calls[index], label)
            copies = Copies(lanes, layer)
            copies.refresh()
            through = partial(_pass, copies, groups, keep, hidden, calls, index)
            stats: dict[str, ChannelStats] = {}
            for seen in lanes.map(through, hidden.ranges()):
                for name, found in seen.items():
                    found = found.to(decoder.device)
                    stats[name] = stats[name].merge(found) if name in stats else found
                task.advance()
            probe_hidden = run_layer(layer, probe_hidden, probe_calls[index])
            for group in groups:
                inputs = stats.get(group.names[0]) or ChannelStats.none(group.in_channels)
                measured.append(_measure(index, label, group, inputs, tokens.numel(), layer, recipe))
            decoder.release_layer(index)
    _name_unreached(measured, decoder.layer_prefix, progress)
    calibration = Calibration(
        recipe=recipe,
        model={"name": source.name, "origin": source.origin, "note": source.note, "digest": source.digest()},
        data=data,
        tokens=tokens,
        groups=tuple(_plan_groups(measured, recipe)),
        layer_prefix=decoder.layer_prefix,
        int4_mac_fraction=_int4_share(measured),
    )
    save(calibration, out)
    return calibration


def _pass(
    copies: Copies,
    groups: Sequence[LinearGroup],
    keep: int,
    hidden: HiddenStates,
    calls: Sequence[dict[int, list[Call]]],
    index: int,
    span: tuple[int, int],
) -> dict[str, ChannelStats]:
    """Windows [start, stop) through layer `index`; what the groups' inputs were."""
    start, stop = span
    lane = hidden.lane(start)
    with observe(copies.on(lane), groups, keep) as stats:
        states = run_layer(copies.on(lane), hidden.read(start, stop), calls[lane][stop - start][index])
    hidden.write(start, stop, states)
    return stats


@dataclass
class _Measured:
    """One group after its layer has run: everything the plan needs, samples and weights already reduced."""

    layer: int
    group: LinearGroup
    quantized: tuple[str, ...]
    spec: LinearSpec
    absmax: Tensor
    report: dict[str, Any]
    perm: Tensor
    choice: PlanChoice
    reach: float  # share of the tokens that enter the group: below 1 for experts
    int8_blocks: int  # by rule threshold or first; the budget rule overwrites it
    clips: Tensor | None = None  # f32 [NB], where the recipe searches them

    @property
    def is_w4a4(self) -> bool:
        """True if blocks of this group may run W4A4."""
        return bool(self.quantized) and self.spec.weights.bits == 4 and self.spec.activations.bits == 4

    @property
    def is_budgeted(self) -> bool:
        """True if the budget decides how many of its blocks are INT8."""
        return self.is_w4a4 and self.spec.blocks.rule == "budget" and self.reach > 0


def _measure(
    index: int, label: str, group: LinearGroup, stats: ChannelStats, tokens: int, layer: torch.nn.Module, recipe: Recipe
) -> _Measured:
    """What one group's statistics mean for its plan. `tokens`: that enter the layer."""
    names = [f"{label}.{name}" for name in group.names]
    specs = {name: recipe.for_linear(full) for name, full in zip(group.names, names, strict=True)}
    quantized = tuple(name for name in group.names if not specs[name].kept)
    spec = _common_spec(quantized, specs, label) if quantized else specs[group.names[0]]
    if not bool(torch.isfinite(stats.absmax).all()):
        raise CometError(f"{names[0]}: its input holds NaN or Inf during calibration", "use --dtype float32")
    channels = group.in_channels
    segments = segments_for(names, channels, spec.blocks)
    importance = IMPORTANCE[spec.blocks.order](stats)
    identity = torch.arange(channels, dtype=torch.int32, device=importance.device)
    perm = choose_permutation(importance, segments) if spec.blocks.permute and quantized else identity
    cost = block_costs(channels, sum(layer_linears(layer)[name].out_features for name in quantized))
    if (reach := stats.tokens / tokens) < 1:  # a mean token's multiply-adds
        cost = (cost * reach).round().long().clamp(min=1 if reach else 0)
    gain = torch.zeros(num_blocks(channels), dtype=torch.float64)
    measured = _Measured(
        layer=index,
        group=group,
        quantized=quantized,
        spec=spec,
        absmax=stats.absmax.cpu(),
        report=report_outliers(names[0], stats, spec.blocks.threshold).row(),
        perm=perm.cpu(),
        choice=PlanChoice(gain, cost, segments),
        reach=reach,
        int8_blocks=0,
    )
    if measured.is_w4a4 and not reach:
        measured.int8_blocks = _unreached_int8(num_blocks(channels), segments, spec)
    elif measured.is_w4a4:
        weight = torch.cat([layer_linears(layer)[name].weight.float() for name in quantized])
        act, x = spec.activations, stats.sample
        rotated, plain = block_grams(weight, perm, rotate=act.hadamard), block_grams(weight, perm, rotate=False)
        error4, error8 = block_error(x, rotated, perm, 4, act), block_error(x, plain, perm, 8, act)
        energy = max(output_energy(x, weight), 1e-30)
        measured.choice = PlanChoice(((error4 - error8) / energy).cpu() * reach, cost, segments)
        if act.clip_search:
            measured.clips = search_clips(x, rotated, perm, act)
        if spec.blocks.rule == "threshold":
            wanted = num_blocks(int(outlier_channels(stats.absmax, spec.blocks.threshold).sum()))
            measured.int8_blocks = -(-wanted // segments) * segments
        elif spec.blocks.rule == "first":
            measured.int8_blocks = segments
    return measured


def _unreached_int8(blocks: int, segments: int, spec: LinearSpec) -> int:
    """INT8 blocks of an input that was never seen: all (any may hold outliers) in recipes that look for outliers."""
    if spec.blocks.rule == "first":
        return segments
    return 0 if spec.blocks.rule == "budget" and spec.blocks.int4_mac_fraction == 1 else blocks


def _name_unreached(measured: Sequence[_Measured], prefix: str, progress: Progress) -> None:
    names = [f"{prefix}.{m.layer}.{name}" for m in measured if not m.reach for name in m.group.names]
    for line in list_experts(names):
        progress.log(
            f"warning: {line}: calibration sent no token there, so these experts are quantized by their weights alone; "
            "more or other text (--samples, --data) reaches more of them"
        )


def _common_spec(names: Sequence[str], specs: dict[str, LinearSpec], label: str) -> LinearSpec:
    """The settings that linears sharing one input must share too; scales of a token are tied if they are for all."""
    common = [specs[name] for name in names]
    if not all(spec.activations.share == "token" for spec in common):
        # What cannot be tied for one is not tied for any.
        common = [_untied(spec) if spec.activations.share == "token" else spec for spec in common]
    first = common[0]
    for name, spec in zip(names[1:], common[1:], strict=True):
        if (spec.activations, spec.blocks) != (first.activations, first.blocks):
            raise CometError(
                f"{label}: {names[0]} and {name} read the same input but the recipe's overrides give them different "
                "activations or blocks settings",
                "make the override's match cover all of them",
            )
    return first


def _untied(spec: LinearSpec) -> LinearSpec:
    return replace(spec, activations=replace(spec.activations, share=1))


IMPORTANCE = {
    "absmax": lambda stats: stats.absmax,
    "hessian": lambda stats: stats.weighted_square_sum.float(),
}


def _plan_groups(measured: list[_Measured], recipe: Recipe) -> list[GroupPlan]:
    """Spend the budget and turn measurements into plans."""
    budgeted = [m for m in measured if m.is_budgeted]
    if budgeted:
        fixed = sum(_fixed_cost(m) for m in measured if not m.is_budgeted)
        counts = spend_budget([m.choice for m in budgeted], fixed, recipe.blocks.int4_mac_fraction)
        for m, blocks in zip(budgeted, counts, strict=True):
            m.int8_blocks = blocks
    return [_plan_group(m) for m in measured]


def _plan_group(m: _Measured) -> GroupPlan:
    total = num_blocks(m.group.in_channels)
    if m.spec.activations.bits == 4 and m.quantized:
        bits = place_int8_blocks(total, m.int8_blocks, m.choice.segments)
    else:
        bits = torch.full((total,), m.spec.activations.bits if m.quantized else 16, dtype=torch.uint8)
    hadamard = m.spec.activations.hadamard and bool((bits == 4).any())
    clip = clip_values(bits, m.spec.activations)
    if m.clips is not None:  # searched before channels change blocks below, which hardly changes what is best
        clip = torch.where(bits == 4, m.clips, clip)
    perm = m.perm
    if hadamard and m.spec.blocks.permute and m.choice.segments == 1 and not m.group.producers:
        perm = spread_over_banks(perm, bits)  # a kernel gathers, and the order is free
    plan = BlockPlan(perm, bits, clip, hadamard, _share(m, bits))
    report = m.report | {"int8_blocks": int((bits == 8).sum()), "blocks": total}
    return GroupPlan(m.layer, m.group, m.quantized, plan, m.absmax, report)


def _share(m: _Measured, bits: Tensor) -> int:
    """The recipe's share, but 1 where no block is INT4, where tensor-parallel ranks would cut a token, or where its
    blocks are more than integer sums hold."""
    if not bool((bits == 4).any()) or m.choice.segments > 1 or m.group.in_channels > MOST_CHANNELS:
        return 1
    return SHARES[m.spec.activations.share]


def _all_cost(m: _Measured) -> int:
    """Multiply-adds of a mean token in the whole group, kept linears included."""
    return round(m.group.in_channels * m.group.out_rows * m.reach)


def _fixed_cost(m: _Measured) -> int:
    """Multiply-adds of a group outside the budget that are not W4A4."""
    return _all_cost(m) - _int4_cost(m)


def _int4_cost(m: _Measured) -> int:
    if not m.is_w4a4:
        return 0
    bits = place_int8_blocks(len(m.choice.cost), m.int8_blocks, m.choice.segments)
    return int(m.choice.cost[bits == 4].sum())


def _int4_share(measured: list[_Measured]) -> float:
    """Share of the decoder linears' multiply-adds, on real channels, that run W4A4."""
    return sum(map(_int4_cost, measured)) / sum(map(_all_cost, measured))
