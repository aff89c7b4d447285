"""Layer by layer: runner and reference say the same in float32, and a fault shows in its own half of its own layer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comet_core import real_text
from comet_core.layer_text import (
    Halves,
    by_layer,
    compare_layers,
    half_errors,
    layer_metrics,
    reference_halves,
    runner_halves,
)
from comet_core.packed import load_packed
from comet_core.paged_cache import KV4Cache
from comet_core.results import read
from comet_core.runner import Runner
from comet_core.runner_weights import runner_from_packed

LENGTH, DECODED, CHUNK = 240, 60, 100  # tokens: the second chunk and all decoded ones read a whole page in 4 bit
SAME = 1e-5  # by which float32 sums in another order differ, relative to what they add up to


def tiny_runner(folder: Path, dtype: torch.dtype = torch.float32) -> Runner:
    return Runner(runner_from_packed(folder, "cpu", dtype), kv_bits=4, batch=1, context=LENGTH)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def reference(tiny: Any, tokens: Tensor) -> Halves:
    return reference_halves(load_packed(Path(tiny.packed), device="cpu", dtype=torch.float32).model, tokens)


def errors_of(runner: Runner, reference: Halves) -> dict[str, list[float]]:
    found = runner_halves(runner, reference, DECODED, CHUNK)
    return by_layer(half_errors(found, reference)[None], DECODED)


def test_halves_are_those_of_the_model(tiny: Any, tokens: Tensor, reference: Halves) -> None:
    """Each half's input is the sum behind the one before, the last sum is the model's, and an input may be given."""
    assert torch.equal(reference.into[1:], (reference.into + reference.added)[:-1])
    model: Any = load_packed(Path(tiny.packed), device="cpu", dtype=torch.float32).model
    with torch.no_grad():
        said = model.model(input_ids=tokens[None], use_cache=False)[0][0]
        assert torch.equal(model.model.norm(reference.into[-1] + reference.added[-1]), said)
    given = reference.into.roll(1, 0)
    again = reference_halves(model, tokens, given)
    assert torch.equal(again.into, given) and not torch.equal(again.added[2], reference.added[2])
    assert torch.equal(reference_halves(model, tokens, reference.into).added, reference.added)


def test_the_runner_s_layers_say_what_the_reference_s_say(tiny: Any, reference: Halves) -> None:
    errors = errors_of(tiny_runner(Path(tiny.packed)), reference)
    assert errors.keys() == {"attention_prefill", "attention_decode", "mlp_prefill", "mlp_decode"}
    assert all(len(values) == 2 and max(values) < SAME for values in errors.values()), errors


def no_residual(runner: Runner) -> None:
    """The first layer's MLP does not get the hidden states that its attention got."""
    first, others = runner.model.layers[0], runner.model.layers[1:]

    class Fault:
        def __getattr__(self, name: str) -> Any:
            return getattr(first.gate_up, name)

        def take_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Any:
            return first.gate_up.take_norm(x, None, weight, eps)

    runner.model = replace(runner.model, layers=(replace(first, gate_up=Fault()), *others))


def wrong_positions(runner: Runner) -> None:
    """The first layer turns queries and keys of its prefill, not of decode, by the next position's angles: differences
    of positions are right in prefill, but keys that are turned otherwise have other codes in whole pages."""
    prefill = runner.cache.prefill

    def fault(layer: int, qkv: Tensor, chunk: Any, spec: Any) -> Tensor:
        moved = replace(chunk, token_position=chunk.token_position + 1)
        return prefill(layer, qkv, chunk if layer else moved, spec)

    runner.cache.prefill = fault  # type: ignore[method-assign]


def keys_in_16_bit(runner: Runner) -> None:
    """The first layer's pages are not whole yet, so it reads their keys in 16 bit."""
    own, model = runner.cache, runner.model
    long = KV4Cache(
        model.shape, model.rotary(LENGTH), 1, LENGTH, page=256, sinks=4, dtype=model.dtype, device=model.device
    )
    assert long.reserve(0, LENGTH)
    prefill, decode = own.prefill, own.decode
    own.prefill = lambda layer, *rest: (prefill if layer else long.prefill)(layer, *rest)  # type: ignore[method-assign]
    own.decode = lambda layer, *rest: (decode if layer else long.decode)(layer, *rest)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (no_residual, {"mlp_prefill", "mlp_decode"}),
        (wrong_positions, {"attention_prefill", "attention_decode"}),
        (keys_in_16_bit, {"attention_prefill", "attention_decode"}),
    ],
)
def test_a_fault_shows_where_it_is(
    tiny: Any, reference: Halves, fault: Callable[[Runner], None], seen: set[str]
) -> None:
    runner = tiny_runner(Path(tiny.packed))
    fault(runner)
    errors = errors_of(runner, reference)
    for part, (first, second) in errors.items():
        assert second < SAME and (first > 100 * SAME) == (part in seen), errors


def test_in_16_bit_the_runner_is_as_near_to_float32_as_the_reference(tiny: Any, tokens: Tensor) -> None:
    windows = torch.stack((tokens, tokens.flip(0)))
    runner = tiny_runner(Path(tiny.packed), torch.bfloat16)
    found = dict(compare_layers(Path(tiny.packed), runner, windows, DECODED))
    ours, theirs = ("layers of runner cpu bfloat16 beside cpu float32", "layers of cpu bfloat16 beside cpu float32")
    assert found.keys() == {ours, "layers of runner cpu bfloat16 beside cpu bfloat16", theirs}
    assert found[ours].shape == (2, 4, LENGTH) and not torch.equal(found[ours][0], found[ours][1])
    runner_says, reference_says = (by_layer(found[task], DECODED) for task in (ours, theirs))
    for part, values in reference_says.items():
        for one, other in zip(runner_says[part], values, strict=True):
            assert 1e-3 < other < 0.2 and one == pytest.approx(other, rel=0.3), (part, one, other)


def test_every_token_and_layer_counts() -> None:
    """The mean over tokens, whatever their size; the median and the largest of layers; NaN is not passed over."""
    into, added = torch.zeros(4, 5, 8), torch.ones(4, 5, 8)
    added[:, 0] = 1000
    wrong = added.clone()
    wrong[1, 0], wrong[1, 4], wrong[2, 4] = 1500, 1.25, 3
    found = by_layer(half_errors(Halves(into, wrong), Halves(into, added))[None], 1)
    assert found == {
        "attention_prefill": [0, 0], "attention_decode": [0, 2], "mlp_prefill": [0.125, 0], "mlp_decode": [0.25, 0],
    }  # fmt: skip
    metrics = layer_metrics(found)
    assert (metrics["layer_error_max_attention_decode"], metrics["layer_error_median_attention_decode"]) == (2, 1)
    beside = by_layer(half_errors(Halves(into + 1, added), Halves(into, added))[None], 1)
    assert beside["mlp_decode"] == [1, 1], "the sum that goes on counts, too"
    wrong[2, 1] = torch.nan
    metrics = layer_metrics(by_layer(half_errors(Halves(into, wrong), Halves(into, added))[None], 1))
    nan = {name for name, value in metrics.items() if value != value}
    assert nan == {"layer_error_median_attention_prefill", "layer_error_max_attention_prefill"}


def test_the_command_records_layers(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_text, "DECODED", 20)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and the dog lay by the door. " * 20)
    given = [str(tiny.packed), "--device", "cpu", "--dtype", "float32", "--data", str(text), "--windows", "2",
             "--seq-len", "60", "--long", "0", "--seeds", "0", "--record", str(tmp_path / "out.jsonl")]  # fmt: skip
    assert real_text.main(given) == 0
    records = [r for r in read(tmp_path / "out.jsonl") if r["metric"].startswith("layer_error_")]
    assert {r["task"] for r in records} == {
        "layers of runner cpu float32 beside cpu float32", "layers of cpu float32 beside cpu float32"
    }  # fmt: skip
    assert all(r["value"] < SAME and r["windows"] == 1 for r in records)
    assert all(len(values) == 2 for r in records for values in r["protocol"]["by_layer"].values())
