"""quantize_act on the GPU equals the reference bit for bit; fused forms differ by at most one code in 10,000."""

import pytest
import torch
from torch import Tensor

from comet_cuda.affine import num_blocks
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import quantize_act_ref
from comet_cuda.quantize_act_cuda import (
    plan_launch,
    quantize_act_gpu,
    quantize_act_tiled,
    quantize_act_tiled_gpu,
    quantize_act_tiled_ref,
)
from comet_cuda.quantize_fused import (
    rms_norm_quantize,
    rms_norm_quantize_ref,
    silu_mul_quantize,
    silu_mul_quantize_ref,
)
from comet_cuda.weight_layout import untile_activations_sm90
from comet_cuda.weight_layout_sm80 import untile_activations_sm80

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MIXES = {"int4": 0.0, "mixed": 0.2, "half": 0.5, "int8": 1.0}  # share of INT8 blocks
LAYOUTS = ("sm_90", "sm_80", "portable")


def problem(
    rows: int,
    channels: int,
    dtype: torch.dtype,
    mix: str,
    gathered: bool,
    seed: int = 0,
    width: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """x with outlier channels, a zero row, a tiny row (denormal) and a huge row; perm, bits and clip."""
    generator = torch.Generator().manual_seed(seed)
    blocks = num_blocks(channels)
    x = torch.randn(rows, channels * width, generator=generator)
    x[:, :: max(1, channels // 5)] *= 60
    for row, factor in ((3, 0.0), (4, 1e-41), (5, 1e36)):
        if row < rows and dtype == torch.float32:
            x[row] *= factor
    if rows > 6:
        x[6] = 0
    eight = round(MIXES[mix] * blocks)
    bits = torch.full((blocks,), 4, dtype=torch.uint8)
    bits[:eight] = 8
    if mix == "half":  # precisions that change inside a warp
        bits = bits[torch.randperm(blocks, generator=generator)]
    clip = torch.where(torch.arange(blocks) % 3 == 0, 1.0, 0.4 + 0.6 * torch.rand(blocks, generator=generator))
    perm = torch.randperm(channels, generator=generator).to(torch.int32) if gathered else None
    return (
        x.to(dtype).cuda(),
        None if perm is None else perm.cuda(),
        bits.cuda(),
        clip.float().cuda(),
    )


def untile(layout: str, codes: Tensor, meta: Tensor, rows: int, bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if layout == "sm_90":
        return untile_activations_sm90(codes, meta, rows, bits)
    return untile_activations_sm80(codes, meta, bits, portable=layout == "portable")


SHAPES = [
    (1, 4096), (2, 576), (3, 130), (7, 1), (8, 579), (9, 8192), (17, 11008), (33, 4096), (64, 28672), (129, 640),
    (600, 4096), (1000, 8192), (531, 576), (3, 60000), (2, 120000),
]  # fmt: skip


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize(("rows", "channels"), SHAPES)
    def test_integers_equal_the_reference(self, rows: int, channels: int, dtype: torch.dtype) -> None:
        for i, mix in enumerate(MIXES):
            for hadamard in (False, True):
                x, perm, bits, clip = problem(rows, channels, dtype, mix, gathered=(i + hadamard) % 2 == 0, seed=rows)
                expected, expected_scale = quantize_act_ref(x, perm, bits, clip, hadamard)
                codes, scale = quantize_act_gpu(x, perm, bits, clip, hadamard)
                assert torch.equal(scale, expected_scale), (mix, hadamard)
                assert torch.equal(codes, expected), (mix, hadamard)
                for layout in LAYOUTS:
                    tiled = quantize_act_tiled_gpu(x, perm, bits, clip, hadamard, layout)
                    codes, scale, total = untile(layout, *tiled, rows, bits)
                    assert torch.equal(codes, expected), (mix, hadamard, layout)
                    assert torch.equal(scale, expected_scale), (mix, hadamard, layout)
                    assert torch.equal(total, expected.float().sum(-1)), (mix, hadamard, layout)

    def test_values_at_rounding_boundaries(self) -> None:
        """Every code's boundary, from both sides: the lanes that take the exact way must agree with the rest."""
        bits, clip = torch.full((8,), 4, dtype=torch.uint8).cuda(), torch.ones(8).cuda()
        generator = torch.Generator().manual_seed(0)
        step = torch.rand(64, 8, 1, generator=generator) + 0.5  # of each block
        near = (torch.arange(128) % 14 - 6.5) * step
        ulps = torch.randint(-3, 4, (64, 8, 128), generator=generator, dtype=torch.int32)
        x = (near.view(torch.int32) + ulps).view(torch.float32)
        x[..., 0] = 7 * step[..., 0]
        x = x.flatten(1).cuda()
        expected = quantize_act_ref(x, None, bits, clip, False)
        got = quantize_act_gpu(x, None, bits, clip, False)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        flips = (quantize_act_ref(x * (1 + 2**-20), None, bits, clip, False)[0] != expected[0]).float().mean()
        assert flips > 0.01  # the values are so near that it matters

    def test_small_clips_leave_the_quick_way(self) -> None:
        x = torch.randn(40, 1024, device="cuda") * 3
        bits = torch.full((8,), 4, dtype=torch.uint8).cuda()
        clip = torch.tensor([1.0, 0.07, 0.06, 0.03, 0.01, 1e-3, 1e-6, 1e-12]).cuda()
        expected = quantize_act_ref(x, None, bits, clip, True)
        got = quantize_act_gpu(x, None, bits, clip, True)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])

    def test_the_reference_is_the_same_on_both_devices(self) -> None:
        x, perm, bits, clip = problem(40, 1024, torch.float32, "mixed", gathered=True)
        codes, scale = quantize_act_gpu(x, perm, bits, clip, True)
        assert perm is not None
        on_cpu = quantize_act_ref(x.cpu(), perm.cpu(), bits.cpu(), clip.cpu(), True)
        assert torch.equal(codes.cpu(), on_cpu[0])
        assert torch.equal(scale.cpu(), on_cpu[1])

    def test_no_rows(self) -> None:
        x, perm, bits, clip = problem(0, 256, torch.bfloat16, "mixed", gathered=True)
        codes, scale = quantize_act_gpu(x, perm, bits, clip, True)
        assert codes.shape == (0, 2, 128) and scale.shape == (0, 2)
        assert quantize_act_tiled_gpu(x, perm, bits, clip, True)[0].shape == (2, 0, 1024)

    def test_views_that_are_not_contiguous_or_aligned(self) -> None:
        x, perm, bits, clip = problem(5, 576, torch.bfloat16, "mixed", gathered=True)
        wide = torch.randn(5, 600, device="cuda").bfloat16()
        wide[:, 7:583] = x
        shifted = torch.empty(5 * 576 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(5, 576)
        shifted.copy_(x)
        expected = quantize_act_ref(x, perm, bits, clip, True)[0]
        assert torch.equal(quantize_act_gpu(wide[:, 7:583], perm, bits, clip, True)[0], expected)
        assert torch.equal(quantize_act_gpu(shifted, perm, bits, clip, True)[0], expected)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize(("rows", "channels"), [(1, 4096), (5, 576), (33, 579), (600, 2048), (1030, 4096)])
    def test_fused_norm_and_silu(self, rows: int, channels: int, dtype: torch.dtype) -> None:
        x, perm, bits, clip = problem(rows, channels, dtype, "mixed", gathered=True)
        rest = (perm, bits, clip, True, "sm_90")
        x = torch.nan_to_num(x.float().clamp(-3e3, 3e3)).to(dtype)
        weight = (1 + 0.1 * torch.randn(channels, device="cuda")).to(dtype)
        for residual in (None, torch.randn_like(x)):
            expected = rms_norm_quantize_ref(x, residual, weight, 1e-6, *rest)
            got = rms_norm_quantize(x, residual, weight, 1e-6, *rest)
            assert torch.equal(got[2], expected[2])
            self.close(got[:2], expected[:2], rows, bits)
        gate_up, perm, bits, clip = problem(rows, channels, dtype, "mixed", gathered=True, width=2)
        gate_up = torch.nan_to_num(gate_up.float().clamp(-50, 50)).to(dtype)
        for order in (perm, None):  # None: the producer's rows carry the permutation
            rest = (order, bits, clip, *rest[3:])
            got, expected = silu_mul_quantize(gate_up, *rest), silu_mul_quantize_ref(gate_up, *rest)
            self.close(got, expected, rows, bits)

    def close(self, got: tuple[Tensor, ...], expected: tuple[Tensor, ...], rows: int, bits: Tensor) -> None:
        codes, scale, total = untile_activations_sm90(got[0], got[1], rows, bits)
        expected_codes, expected_scale, _ = untile_activations_sm90(expected[0], expected[1], rows, bits)
        assert torch.allclose(scale, expected_scale, rtol=2**-7)  # one step of bf16 in the largest value
        assert torch.equal(total, codes.float().sum(-1))
        off = (codes.int() - expected_codes.int()).abs()
        assert off.max() <= 1
        assert (off > 0).float().mean() <= 1e-4 + 4 / off.numel()

    def test_in_a_cuda_graph_on_another_stream(self) -> None:
        x, perm, bits, clip = problem(16, 4096, torch.bfloat16, "mixed", gathered=True)
        torch.ops.comet.quantize_act_tiled(x, perm, bits, clip, True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            codes, meta = torch.ops.comet.quantize_act_tiled(x, perm, bits, clip, True)
        x.copy_(torch.randn_like(x))
        graph.replay()
        expected = quantize_act_tiled_ref(x, perm, bits, clip, True)
        assert torch.equal(codes, expected[0])
        assert torch.equal(meta, expected[1])

    def test_under_torch_compile(self) -> None:
        x, perm, bits, clip = problem(16, 4096, torch.bfloat16, "mixed", gathered=True)

        @torch.compile(fullgraph=True)
        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            codes, meta = torch.ops.comet.quantize_act_tiled(x * 2, perm, bits, clip, True)
            return codes, meta + 1

        codes, meta = step(x)
        expected = quantize_act_tiled_ref(x * 2, perm, bits, clip, True)
        assert torch.equal(codes, expected[0])
        assert torch.equal(meta, expected[1] + 1)

    def test_wrong_arguments_are_named(self) -> None:
        x, perm, bits, clip = problem(4, 256, torch.bfloat16, "mixed", gathered=True)
        with pytest.raises(CometError, match="block_bits"):
            quantize_act_gpu(x, perm, bits[:1], clip, True)
        with pytest.raises(CometError, match="perm"):
            quantize_act_gpu(x, bits, bits, clip, True)
        with pytest.raises(CometError, match="x is on cuda:0, its permutation, bits or clip are not"):
            quantize_act_gpu(x, perm, bits.cpu(), clip, True)
        with pytest.raises(CometError, match="share=2"):
            quantize_act_gpu(x, perm, bits, clip, True, 2)
        with pytest.raises(CometError, match="tokens, channels"):
            quantize_act_gpu(x[0], perm, bits, clip, True)


@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_plans_fit_the_gpu(limit: int, element_bytes: int) -> None:
    for rows in (1, 64, 600, 4096):
        for channels in (1, 576, 4096, 8192, 28672, 53248, 120000):
            plan = plan_launch(rows, channels, element_bytes, 132, limit)
            assert plan.shared_bytes <= limit - 1024
            assert plan.stage == (plan.shared_bytes > 0)
            assert plan.stage or plan.tokens == 1
            assert plan.splits >= 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ops_trace_and_equal_their_references_on_the_cpu(layout: str) -> None:
    x = torch.randn(5, 300).bfloat16()
    bits, clip = torch.tensor([8, 4, 4], dtype=torch.uint8), torch.full((3,), 0.9)
    perm = torch.randperm(300).to(torch.int32)
    common = (perm, bits, clip, True, layout)
    weight = torch.ones(300).bfloat16()
    gate_up = torch.cat((x, x), 1)
    for op, function, arguments, reference in (
        (torch.ops.comet.quantize_act_tiled, quantize_act_tiled, (x, *common), quantize_act_tiled_ref),
        (torch.ops.comet.silu_mul_quantize, silu_mul_quantize, (gate_up, *common), silu_mul_quantize_ref),
        (torch.ops.comet.rms_norm_quantize, rms_norm_quantize, (x, x, weight, 1e-5, *common), rms_norm_quantize_ref),
        (torch.ops.comet.rms_norm_quantize, rms_norm_quantize, (x, None, weight, 1e-5, *common), rms_norm_quantize_ref),
    ):
        torch.library.opcheck(op, arguments, test_utils="test_faketensor")
        for got, expected in zip(function(*arguments), reference(*arguments), strict=True):
            assert torch.equal(got, expected)


def test_a_layout_that_there_is_not_is_named() -> None:
    x, bits, clip = torch.randn(5, 128), torch.tensor([4], dtype=torch.uint8), torch.ones(1)
    with pytest.raises(CometError, match="sm_70"):
        quantize_act_tiled_ref(x, None, bits, clip, True, "sm_70")
