"""Which recipe a model gets for which none was named."""

from pathlib import Path

import pytest
import torch

from comet_core import preflight
from comet_core.model_source import ModelSource, resolve_model
from comet_core.recipe import load_recipe


@pytest.fixture(scope="module")
def small() -> ModelSource:
    """A source that says it has real weights; nobody reads them here."""
    import dataclasses

    return dataclasses.replace(resolve_model("smollm2-135m", weights="random"), random_seed=None, folder=Path("."))


@pytest.mark.parametrize(("gib", "name"), [(24, "w4a4kv4-tuned"), (8, "w4a4kv4")])
def test_it_tunes_where_a_gpu_holds_the_model_several_times_over(
    monkeypatch: pytest.MonkeyPatch, small: ModelSource, gib: int, name: str
) -> None:
    monkeypatch.setattr(preflight, "resolve_compute", lambda device, dtype: ("cuda:0", torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, gib << 30))
    chosen, why = preflight.default_recipe(small, "auto")
    assert chosen == name and (name == "w4a4kv4-tuned" or "has 8" in why)


def test_it_does_not_tune_without_a_gpu_or_without_weights(small: ModelSource) -> None:
    assert preflight.default_recipe(small, "cpu")[0] == "w4a4kv4"
    random = resolve_model("llama-3-8b", weights="random")
    assert preflight.default_recipe(random, "cuda")[0] == "w4a4kv4"
    assert preflight.tuning_memory(random) > 24 * 8.0e9  # bytes for each parameter


def test_both_defaults_are_one_format() -> None:
    plain, tuned = load_recipe("w4a4kv4"), load_recipe("w4a4kv4-tuned")
    assert tuned.tuning.epochs and not plain.tuning.epochs
    assert (plain.weights, plain.activations, plain.kv_cache) == (tuned.weights, tuned.activations, tuned.kv_cache)
    assert plain.activations.share == "token" and load_recipe("w4a4kv4-free").activations.share == 1
