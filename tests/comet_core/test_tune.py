"""Distillation of a packed model: gradients, what it may change, and what it writes."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from comet_core.linear import W4AxLinear
from comet_core.moments import rotated_rows
from comet_core.packed import load_packed, read_manifest
from comet_core.plan import BlockPlan
from comet_core.recipe import TuningSpec, load_recipe
from comet_core.tune import _Codes, _TrainableLinear, _TrainableModel
from comet_cuda.errors import CometError


def tuned_recipe(**changes: Any) -> Any:
    recipe = load_recipe("w4a4kv4")
    return dataclasses.replace(recipe, tuning=TuningSpec(epochs=4, windows=1, **({"learning_rate": 0.004} | changes)))


def test_tuning_changes_what_it_may_and_lowers_the_divergence(tiny: Any, put_through: Any, llama_config: Any) -> None:
    tuned = put_through(llama_config(), tuned_recipe())
    note = read_manifest(tuned.packed).layers[0]["tuning"]
    assert note["after"] < note["before"]
    before = load_packed(tiny.packed).model.state_dict()
    after = load_packed(tuned.packed, verify=True).model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed, "nothing was tuned"
    assert {name.rpartition(".")[2] for name in changed} <= {"w_scale", "weight", "bias"}
    assert not any("embed" in name or "lm_head" in name for name in changed)
    assert not list(tuned.packed.parent.glob(".*untuned"))


def test_what_does_not_help_is_dropped(tiny: Any, put_through: Any, llama_config: Any) -> None:
    """Steps as large as the values themselves ruin the model; the judge then keeps it as it was."""
    ruined = put_through(llama_config(), tuned_recipe(learning_rate=1.0, vector_rate=1.0))
    note = read_manifest(ruined.packed).layers[0]["tuning"]
    assert note["after"] >= note["before"]
    before, after = load_packed(tiny.packed).model.state_dict(), load_packed(ruined.packed).model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_codes_learn_and_are_stored_as_they_ran() -> None:
    torch.manual_seed(0)
    linear = W4AxLinear(256, 16, tensors_of(256, 16), hadamard=True)
    trainable = _TrainableLinear(linear, torch.float32, codes=True)
    x = torch.randn(200, 256)
    wanted = trainable(x).detach() + x @ torch.randn(256, 16) * 0.1
    optimizer = torch.optim.Adam([{"params": [trainable.values], "lr": 0.1}, {"params": [trainable.drift], "lr": 0.01}])
    losses = []
    for _ in range(20):
        loss = (trainable(x) - wanted).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trainable.clamp()
    assert losses[-1] < 0.8 * losses[0]
    stored, ran = trainable.stored(), trainable(x).detach()
    assert not torch.equal(stored["qweight"], linear.qweight)
    linear.qweight, linear.w_scale = stored["qweight"], stored["w_scale"]
    assert torch.allclose(linear(x), ran, atol=1e-4)


class Small(nn.Module):
    """A norm whose weight silences channel 3, and a packed linear with one bias far above the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(128), nn.Linear(16, 4, bias=False)
        with torch.no_grad():
            self.norm.weight[3] = 0.001
        bias = torch.linspace(0.5, 1.0, 16)
        bias[5] = -300.0
        self.proj = W4AxLinear(128, 16, tensors_of(128, 16) | {"bias": bias}, hadamard=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_a_step_of_a_vector_is_a_share_of_each_value_and_of_most_values() -> None:
    torch.manual_seed(0)
    model = Small()
    before = {"norm.weight": model.norm.weight.detach().clone(), "proj.bias": model.proj.bias.clone()}
    trainable = _TrainableModel(model, TuningSpec(epochs=1, learning_rate=0.0, vector_rate=0.01))
    optimizer = torch.optim.Adam(trainable.groups)
    model.proj(model.norm(torch.randn(8, 128))).square().sum().backward()
    optimizer.step()
    stored = trainable.stored()
    for name, value in before.items():
        share = (stored[name] - value).abs() / torch.minimum(value.abs(), value.abs().median())
        assert torch.allclose(share, torch.full_like(share, 0.01), atol=1e-3), name  # Adam's first step is the rate
    assert torch.equal(stored["proj.w_scale"], model.proj.linear.w_scale), "scales had no rate"
    assert "proj.qweight" not in stored


def test_tuning_that_moves_nothing_is_refused() -> None:
    with pytest.raises(CometError, match="all its rates are 0"):
        TuningSpec(epochs=1, learning_rate=0.0, vector_rate=0.0)
    assert TuningSpec(learning_rate=0.0, vector_rate=0.0).epochs == 0


def tensors_of(channels: int, rows: int) -> dict[str, torch.Tensor]:
    """A packed linear with random codes, one 8-bit block, one shuffled order."""
    blocks = channels // 128
    return {
        "qweight": torch.randint(0, 256, (rows, 64 * blocks), dtype=torch.uint8),
        "w_scale": (torch.rand(rows, blocks) * 0.01 + 0.01).to(torch.bfloat16),
        "w_zero": torch.full((rows, blocks), 7, dtype=torch.uint8),
        "block_bits": torch.tensor([8] + [4] * (blocks - 1), dtype=torch.uint8),
        "perm": torch.randperm(channels).int(),
        "act_clip": torch.ones(blocks),
    }


def test_the_gradient_of_codes_is_that_of_the_exact_input() -> None:
    """d(sum(R P x * g)) / dx through the rounding equals that without it."""
    torch.manual_seed(0)
    bits = torch.tensor([8, 4, 4], dtype=torch.uint8)
    perm = torch.randperm(300).int()
    tensors = tensors_of(384, 4) | {"block_bits": bits, "perm": perm}
    linear = W4AxLinear(300, 4, tensors, hadamard=True)
    x, g = torch.randn(7, 300, requires_grad=True), torch.randn(7, 384)
    (ours,) = torch.autograd.grad((_Codes.apply(x, linear) * g).sum(), x)
    linear_map = rotated_rows(torch.eye(300), BlockPlan(perm, bits, torch.ones(3), True))  # [300, 384]
    assert torch.allclose(ours, g @ linear_map.T, atol=1e-5)
