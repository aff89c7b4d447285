"""Other people's methods as recipes: each goes through calibrate and pack, and is what its file promises."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comet_core.calibration import load_calibration
from comet_core.evaluate import load_sixteen
from comet_core.packed import load_packed
from comet_core.recipe import Recipe, load_recipe

METHODS = (
    "w8a8-smoothquant", "w4a16-rtn", "w4a16-gptq", "w4a16-awq", "w4a16-omniquant", "w4a4-omniquant", "atom", "quarot",
    "quarot-local", "qoq-g128", "qoq-channel", "fmpq-kv16", "fmpq-paper", "w4a4-naive",
)  # fmt: skip
TOKENS = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def models(put_through: Callable[..., Any], llama_config: Callable[..., Any]) -> Callable[[str], Any]:
    """The packed model of a recipe, made once."""
    made: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in made:
            shapes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
            config = llama_config(**shapes, tie_word_embeddings=True)
            made[name] = put_through(config, name)
        return made[name]

    return of


@torch.no_grad()
def distance(made: Any) -> float:
    """Relative distance of the logits from the 16-bit model's."""
    exact: Tensor = load_sixteen(made.source, "cpu", torch.float32)(input_ids=TOKENS).logits
    found = load_packed(made.packed).model(input_ids=TOKENS).logits
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", METHODS)
def test_every_method_packs_to_a_model_near_the_original(models: Callable[[str], Any], name: str) -> None:
    found = distance(models(name))
    assert math.isfinite(found)
    assert found < (0.02 if name.startswith("w8a8") else 0.6), name
    assert found > 1e-4, "nothing was quantized"


def test_more_bits_are_nearer(models: Callable[[str], Any]) -> None:
    """Eight bits, four-bit weights alone, and four bits everywhere stand in this order whatever the model."""
    by_name = {name: distance(models(name)) for name in ("w8a8-smoothquant", "w4a16-gptq", "w4a4-naive")}
    assert by_name["w8a8-smoothquant"] < by_name["w4a16-gptq"] < by_name["w4a4-naive"]


def test_atom_keeps_one_block_of_every_input_in_8_bit(models: Callable[[str], Any]) -> None:
    for group in load_calibration(models("atom").calibration).groups:
        assert group.plan.block_bits.tolist() == [8] + [4] * (len(group.plan.block_bits) - 1)


def test_quarot_rotates_online_only_where_no_norm_stands(models: Callable[[str], Any]) -> None:
    for group in load_calibration(models("quarot").calibration).groups:
        behind_norm = not any(name.endswith(("o_proj", "down_proj")) for name in group.group.names)
        assert group.plan.hadamard != behind_norm
        assert set(group.plan.block_bits.tolist()) == {4}


def test_a_row_shares_one_scale_in_qoq_per_channel(models: Callable[[str], Any]) -> None:
    linear = load_packed(models("qoq-channel").packed).model.model.layers[0].self_attn.q_proj
    assert bool((linear.w_scale == linear.w_scale[:, :1]).all()) and linear.w_scale.shape[1] == 2


@pytest.mark.parametrize("name", METHODS)
def test_no_method_borrows_what_this_project_adds(name: str) -> None:
    """The defaults may change; a baseline must not change with them."""
    recipe, plain = load_recipe(name), Recipe()
    assert recipe.description != plain.description and recipe.activations.share == 1
    assert not recipe.activations.clip_search and recipe.tuning.epochs == 0
    if recipe.weights.method == "gptq":
        spec = recipe.weights
        assert (spec.token_weighting, spec.holdout, spec.inputs, spec.target, spec.passes) == (
            "none", 0, "exact", "weights", 0
        )  # fmt: skip
        assert (spec.damping, spec.first_token) == (0.01, 1)
    assert recipe.blocks.rule in ("none", "first") or name.startswith("fmpq")
