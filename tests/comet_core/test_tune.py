"""Distillation of a packed model: gradients, what it may change, and what it writes."""

import dataclasses
from typing import Any

import pytest
import torch

from comet_core.linear import W4AxLinear
from comet_core.packed import load_packed, read_manifest
from comet_core.recipe import TuningSpec, load_recipe


def tuned_recipe(**changes: Any) -> Any:
    recipe = load_recipe("w4a4kv4")
    return dataclasses.replace(recipe, tuning=TuningSpec(epochs=4, windows=1, learning_rate=0.01, **changes))


@pytest.mark.parametrize("code_rate", [0.0, 0.3])
def test_tuning_changes_what_it_may_and_lowers_the_divergence(
    put_through: Any, llama_config: Any, code_rate: float
) -> None:
    plain = put_through(llama_config(), load_recipe("w4a4kv4"))
    tuned = put_through(llama_config(), tuned_recipe(code_rate=code_rate))
    note = read_manifest(tuned.packed).layers[0]["tuning"]
    assert note["after"] < note["before"]
    before, after = (
        load_packed(plain.packed).model.state_dict(),
        load_packed(tuned.packed, verify=True).model.state_dict(),
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed, "nothing was tuned"
    leaves = {name.rpartition(".")[2] for name in changed}
    assert leaves <= {"w_scale", "weight", "bias"} | ({"qweight"} if code_rate else set())
    assert ("qweight" in leaves) == bool(code_rate)
    assert not any("embed" in name or "lm_head" in name for name in changed)
    assert not list(tuned.packed.parent.glob(".*untuned"))


def test_the_gradient_of_codes_is_that_of_the_exact_input() -> None:
    """d(sum(R P x * g)) / dx through the rounding equals that without it."""
    from comet_core.moments import rotated_rows
    from comet_core.plan import BlockPlan
    from comet_core.tune import _Codes

    torch.manual_seed(0)
    bits = torch.tensor([8, 4, 4], dtype=torch.uint8)
    unit = torch.tensor([1.0, 0.6, 1.4])
    perm = torch.randperm(300).int()
    tensors = {
        "qweight": torch.zeros(4, 192, dtype=torch.uint8), "w_scale": torch.ones(4, 3, dtype=torch.bfloat16),
        "w_zero": torch.zeros(4, 3, dtype=torch.uint8), "block_bits": bits, "perm": perm,
        "act_clip": torch.ones(3), "act_unit": unit,
    }  # fmt: skip
    linear = W4AxLinear(300, 4, tensors, hadamard=True, share=4)
    x, g = torch.randn(7, 300, requires_grad=True), torch.randn(7, 384)
    (ours,) = torch.autograd.grad((_Codes.apply(x, linear) * g).sum(), x)
    linear_map = rotated_rows(torch.eye(300), BlockPlan(perm, bits, torch.ones(3), True, 4, unit))  # [300, 384]
    assert torch.allclose(ours, g @ linear_map.T, atol=1e-5)
