"""Rounding, GPTQ and the Hessian they work with."""

import dataclasses

import pytest
import torch
from torch import Tensor

from comet_core.moments import Moments, exact_rows
from comet_core.plan import BlockPlan
from comet_core.quantize import quantize_gptq, quantize_rtn, to_storage
from comet_core.recipe import WeightSpec
from comet_cuda.int4 import unpack_nibbles
from comet_cuda.weight_grid import choose_grid


def plan_of(channels: int, int8: int = 0, hadamard: bool = False) -> BlockPlan:
    blocks = -(-channels // 128)
    bits = torch.where(torch.arange(blocks) < int8, 8, 4).to(torch.uint8)
    return BlockPlan(torch.randperm(channels).int(), bits, torch.ones(blocks), hadamard)


def problem(hadamard: bool = False) -> tuple[Tensor, Tensor, Moments, BlockPlan]:
    torch.manual_seed(0)
    x = torch.randn(600, 300) @ (0.2 * torch.randn(300, 300) + torch.eye(300))
    weight, plan = torch.randn(40, 300) * 0.05, plan_of(300, 1, hadamard)
    hessian = Moments(plan, "inverse_norm", with_gap=False)
    hessian.add(exact_rows(x, plan))
    hessian.rotate(plan)
    return x, to_storage(weight, plan), hessian, plan


def test_hessian_is_that_of_rotated_rows_with_equal_tokens() -> None:
    x, _, hessian, plan = problem(hadamard=True)
    rows = to_storage(x, plan).flatten(1)
    rows = rows / rows.norm(dim=1, keepdim=True)
    assert torch.allclose(hessian.hessian, rows.T @ rows, atol=1e-4)
    assert float(hessian.hessian.trace()) == pytest.approx(600, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_rotates_moments_as_a_cpu_does() -> None:
    plan = plan_of(300, 1, hadamard=True)
    on_gpu = Moments(dataclasses.replace(plan, block_bits=plan.block_bits.cuda()), "none", with_gap=True)
    on_cpu = Moments(plan, "none", with_gap=True)
    assert on_gpu.gap is not None and on_cpu.gap is not None
    for name in ("hessian", "gap"):
        matrix = torch.randn(384, 384)
        getattr(on_cpu, name).copy_(matrix)
        getattr(on_gpu, name).copy_(matrix)
    on_cpu.rotate(plan)
    on_gpu.rotate(dataclasses.replace(plan, block_bits=plan.block_bits.cuda()))
    assert torch.allclose(on_gpu.hessian.cpu(), on_cpu.hessian, atol=1e-4)
    assert torch.allclose(on_gpu.gap.cpu(), on_cpu.gap, atol=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_beats_rounding_on_the_inputs_it_saw(symmetric: bool) -> None:
    _, w, hessian, _ = problem()
    spec = WeightSpec(symmetric=symmetric)
    found = quantize_gptq(w, hessian.hessian, spec)
    assert found is not None and found[1] == spec.damping
    rounded = quantize_rtn(w, hessian.hessian.diagonal(), spec)
    assert hessian.error(w, found[0]) < 0.8 * hessian.error(w, rounded)
    assert (found[0].zero is None) == symmetric


def test_gptq_without_correlation_is_rounding() -> None:
    """A diagonal Hessian moves no error, so both must choose the same codes."""
    w = torch.randn(8, 2, 128)
    spec = WeightSpec(damping=1e-6)
    hessian = torch.diag(torch.rand(256) + 0.5)
    found = quantize_gptq(w, hessian, spec)
    assert found is not None
    assert torch.equal(found[0].qweight, quantize_rtn(w, hessian.diagonal(), spec).qweight)


@pytest.mark.parametrize("symmetric", [True, False])
def test_rounding_error_is_half_a_step_without_clipping(symmetric: bool) -> None:
    w = torch.randn(6, 3, 128)
    q = quantize_rtn(w, torch.ones(384), WeightSpec(symmetric=symmetric, clip_search=False))
    step = q.scale.float()[..., None]
    assert bool(((q.dequantize() - w).abs() <= 1.02 * step).all())  # bf16 scales may cut the end of a range by 2**-8
    assert float(((q.dequantize() - w).abs() <= 0.5001 * step).float().mean()) > 0.98


def test_clip_search_lowers_the_weighted_error() -> None:
    w = torch.randn(16, 128) * torch.where(torch.arange(128) == 0, 20.0, 1.0)
    importance = torch.where(torch.arange(128) == 0, 1e-4, 1.0)
    error = {}
    for search in (True, False):
        grid = choose_grid(w, importance, 4, False, search)
        error[search] = float(((grid.values(grid.codes(w)) - w).square() * importance).sum())
    assert error[True] < 0.7 * error[False]


def test_zero_rows_dead_channels_and_padding_stay_finite() -> None:
    x, _, _, plan = problem()
    x[:, :100] = 0  # channels that never fire
    weight = torch.randn(4, 300)
    weight[1] = 0
    w = to_storage(weight, plan)
    hessian = Moments(plan, "none", with_gap=False)
    hessian.add(exact_rows(x, plan))
    for result in (
        quantize_gptq(w, hessian.hessian, WeightSpec()),
        (quantize_rtn(w, hessian.hessian.diagonal(), WeightSpec()),),
    ):
        assert result is not None
        values = result[0].dequantize()
        assert bool(torch.isfinite(values).all()) and not values[1].any()
        assert not values.flatten(1)[:, 300:].any()  # padding decodes to zero exactly


def test_indefinite_hessian_is_damped_harder_then_given_up() -> None:
    w = torch.randn(4, 1, 128)
    slightly = torch.eye(128)
    slightly[0, 1] = slightly[1, 0] = 1.05
    found = quantize_gptq(w, slightly, WeightSpec())
    assert found is not None and found[1] > 0.01
    assert quantize_gptq(w, torch.eye(128) - 1e6 * torch.ones(128, 128), WeightSpec()) is None


def test_eight_bit_weights_are_symmetric_bytes() -> None:
    w = torch.randn(4, 2, 128)
    q = quantize_rtn(w, torch.ones(256), WeightSpec(bits=8))
    assert q.qweight.dtype == torch.int8 and q.zero is None and q.qweight.shape == (4, 256)
    assert float((q.dequantize() - w).abs().max() / w.abs().max()) < 0.01


def test_codes_are_what_the_layout_says() -> None:
    q = quantize_rtn(torch.linspace(-0.5, 1, 128).view(1, 1, 128), torch.ones(128), WeightSpec(clip_search=False))
    codes = unpack_nibbles(q.qweight)
    assert codes.shape == (1, 128) and int(codes[0, 0]) == 0 and int(codes[0, -1]) == 15
