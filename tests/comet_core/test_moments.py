"""Moments of a group's input, the weights that are best for a target, and coordinate descent after GPTQ."""

import itertools

import pytest
import torch
from torch import Tensor

from comet_core.descent import descend
from comet_core.moments import Moments, exact_rows, quantized_rows, rotated_rows
from comet_core.plan import BlockPlan
from comet_core.quantize import quantize_gptq, quantize_rtn, to_storage
from comet_core.recipe import WeightSpec


def plan_of(channels: int) -> BlockPlan:
    blocks = -(-channels // 128)
    bits = torch.where(torch.arange(blocks) < 1, 8, 4).to(torch.uint8)
    clip = torch.where(bits == 4, 0.9, 1.0)
    return BlockPlan(torch.randperm(channels).int(), bits, clip, True)


def inputs(rows: int = 700, channels: int = 300) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, channels) @ (0.2 * torch.randn(channels, channels) + torch.eye(channels))


def test_the_error_is_that_of_the_outputs() -> None:
    """tr(D H D^T) + 2 tr(W G D^T) + constant against the outputs themselves, computed row by row."""
    x, plan = inputs(), plan_of(300)
    wanted, seen = rotated_rows(x + 0.05 * torch.randn_like(x), plan), quantized_rows(x, plan)
    w = to_storage(torch.randn(20, 300), plan)
    moments = Moments(plan, "none", with_gap=True)
    moments.add(seen[:300], wanted[:300])
    moments.add(seen[300:], wanted[300:])
    quantized = [quantize_rtn(w, torch.ones(384), WeightSpec(clip_search=search)) for search in (True, False)]
    direct = [(wanted @ w.flatten(1).T - seen @ q.dequantize().flatten(1).T).square().sum() for q in quantized]
    assert moments.error(w, quantized[0]) - moments.error(w, quantized[1]) == pytest.approx(
        float(direct[0] - direct[1]), rel=1e-2
    )


def test_order_and_rotation_reach_rows_and_weights_alike() -> None:
    x, plan = inputs(), plan_of(300)
    weight = torch.randn(20, 300)
    stored = rotated_rows(x, plan) @ to_storage(weight, plan).flatten(1).T
    assert torch.allclose(stored, x @ weight.T, rtol=1e-3, atol=1e-3)
    coarse = quantized_rows(x, plan) @ to_storage(weight, plan).flatten(1).T
    assert float((coarse - stored).norm() / stored.norm()) < 0.25


def test_best_weights_make_up_for_coarse_inputs() -> None:
    x, plan = inputs(), plan_of(300)
    moments = Moments(plan, "none", with_gap=True)
    seen, wanted = quantized_rows(x, plan), rotated_rows(x, plan)
    moments.add(seen, wanted)
    w = to_storage(torch.randn(20, 300), plan)
    errors = [
        float((wanted @ w.flatten(1).T - seen @ moments.best_weights(w, share, 1e-4).flatten(1).T).norm())
        for share in (0.0, 0.5, 1.0)
    ]
    assert errors[2] < errors[1] < errors[0]
    assert torch.equal(moments.best_weights(w, 0.0, 1e-4), w)


@pytest.mark.parametrize(("symmetric", "bits"), [(True, 4), (False, 4), (True, 8)])
def test_descent_never_raises_the_error_and_lowers_gptq(symmetric: bool, bits: int) -> None:
    x, plan = inputs(), plan_of(300)
    moments = Moments(plan, "inverse_norm", with_gap=False)
    moments.add(exact_rows(x, plan))
    moments.rotate(plan)
    w = to_storage(torch.randn(20, 300), plan)
    spec = WeightSpec(symmetric=symmetric, bits=bits, passes=1)
    fitted = quantize_gptq(w, moments.hessian, spec)
    assert fitted is not None
    quantized, errors = fitted[0], [moments.error(w, fitted[0])]
    for _ in range(3):
        quantized = descend(w, quantized, moments.hessian, spec)
        errors.append(moments.error(w, quantized))
    assert errors[1] < 0.99 * errors[0]
    assert all(later <= earlier * 1.0001 for earlier, later in itertools.pairwise(errors))
    assert quantized.qweight.dtype == fitted[0].qweight.dtype and (quantized.zero is None) == symmetric


def test_one_grid_a_row() -> None:
    x, plan = inputs(), plan_of(300)
    moments = Moments(plan, "none", with_gap=False)
    moments.add(exact_rows(x, plan))
    w = to_storage(torch.randn(20, 300), plan)
    spec = WeightSpec(group="row", passes=1)
    rounded = quantize_rtn(w, moments.hessian.diagonal(), spec)
    fitted = quantize_gptq(w, moments.hessian, spec)
    assert fitted is not None
    better = descend(w, fitted[0], moments.hessian, spec)
    for found in (rounded, fitted[0], better):
        assert bool((found.scale == found.scale[:, :1]).all())
    assert moments.error(w, better) < moments.error(w, fitted[0]) < moments.error(w, rounded)


def test_rows_count_as_often_as_they_are_told() -> None:
    x, plan = inputs(), plan_of(300)
    rows = exact_rows(x, plan)
    once, thrice = Moments(plan, "inverse_norm", with_gap=False), Moments(plan, "inverse_norm", with_gap=False)
    once.add(rows)
    once.add(rows[:1])
    once.add(rows[:1])
    thrice.add(rows, times=torch.where(torch.arange(len(rows)) == 0, 3.0, 1.0))
    assert torch.allclose(thrice.hessian, once.hessian, rtol=1e-4, atol=1e-5)
