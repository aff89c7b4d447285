"""quantize_token on the GPU equals the reference bit for bit; the norm and SiLU may round a code the other way."""

import itertools

import pytest
import torch
from torch import Tensor

from comet_cuda.errors import CometError
from comet_cuda.quantize_token import (
    quantize_token,
    rms_norm_quantize_token,
    silu_mul_quantize_token,
)
from comet_cuda.quantize_token_ref import (
    MOST_CHANNELS,
    TokenOperand,
    quantize_token_ref,
    rms_norm_quantize_token_ref,
    silu_mul_quantize_token_ref,
)
from tests.comet_cuda.token_problems import MIXES, equal, exact_norm, exact_silu, on_gpu, problem, untile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SHAPES = [
    (1, 4096), (2, 576), (3, 130), (7, 1), (8, 579), (9, 8192), (17, 11008), (33, 4096), (64, 28672), (129, 640),
    (600, 4096), (1000, 8192), (531, 576), (300, 14336), (3, 40000), (2, MOST_CHANNELS), (257, 1023),
    (200, 4096), (400, 8192), (520, 28672),
]  # fmt: skip
FUSED_SHAPES = [
    (1, 4096), (5, 576), (33, 579), (600, 2048), (64, 14336), (2, 40000), (1030, 4096), (200, 4096), (300, 8192),
    (300, 14336), (520, 28672),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "channels"), SHAPES)
def test_integers_equal_the_reference(rows: int, channels: int, dtype: torch.dtype) -> None:
    for i, mix in enumerate(MIXES):
        for gathered in (True, False):
            how = {"gathered": gathered, "hadamard": i != 2 or gathered}
            x, arguments = problem(rows, channels, dtype, mix, **how)
            x, arguments = x.cuda(), on_gpu(arguments)
            got, wanted = quantize_token(x, *arguments), quantize_token_ref(x, *arguments)
            assert equal(got, wanted, rows, arguments[1]), (mix, gathered)


STAY = [
    (16, 14336), (9, MOST_CHANNELS), (3, 8840), (16, 8192),  # four ctas a token
    (64, 14336), (139, 22016), (70, 28672), (133, 14336), (40, MOST_CHANNELS), (150, 8192), (30, 8840),  # two
    (300, 4096), (530, 8192), (128, 14336), (540, 14336), (400, 2888), (400, 584), (1030, 1536), (1024, 4096),  # one
]  # fmt: skip


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
)
@pytest.mark.parametrize(("rows", "channels"), STAY)
def test_ctas_that_stay_equal_the_reference(rows: int, channels: int) -> None:
    for (i, mix), gathered in itertools.product(enumerate(MIXES), (True, False)):
        x, arguments = problem(rows, channels, torch.bfloat16, mix, gathered=gathered, hadamard=i != 1)
        gate_up = exact_silu(x.float().clamp(-900, 900).to(x.dtype)).cuda()
        x, arguments = x.cuda(), on_gpu(arguments)
        wanted = quantize_token_ref(x, *arguments)
        for _ in range(3):
            assert equal(quantize_token(x, *arguments), wanted, rows, arguments[1]), (mix, gathered)
        wanted = silu_mul_quantize_token_ref(gate_up, *arguments)
        assert equal(silu_mul_quantize_token(gate_up, *arguments), wanted, rows, arguments[1]), (mix, gathered)


def test_the_reference_is_the_same_on_both_devices() -> None:
    x, arguments = problem(40, 4736, torch.bfloat16, "mixed", gathered=True, hadamard=True)
    on_cpu = quantize_token_ref(x, *arguments)
    assert all(
        torch.equal(a.cpu(), b) for a, b in zip(quantize_token_ref(x.cuda(), *on_gpu(arguments)), on_cpu, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "channels"), FUSED_SHAPES)
def test_fused_forms_equal_the_reference_where_their_arithmetic_is_exact(
    rows: int, channels: int, dtype: torch.dtype
) -> None:
    for gathered in (True, False):
        x, arguments = problem(rows, channels, dtype, "mixed", gathered=gathered, hadamard=True)
        arguments = on_gpu(arguments)
        gate_up = exact_silu(x.float().clamp(-900, 900).to(dtype)).cuda()
        wanted_silu = silu_mul_quantize_token_ref(gate_up, *arguments)
        assert equal(silu_mul_quantize_token(gate_up, *arguments), wanted_silu, rows, arguments[1])
        y, residual, weight = (tensor.cuda() for tensor in exact_norm(rows, channels, dtype))
        for other in (residual, None):
            y = y if other is not None else y + residual
            *got, summed = rms_norm_quantize_token(y, other, weight, 0.0, *arguments)
            *wanted, wanted_sum = rms_norm_quantize_token_ref(y, other, weight, 0.0, *arguments)
            assert torch.equal(summed, wanted_sum)
            assert equal(operand(got), operand(wanted), rows, arguments[1])


def operand(found: list[Tensor]) -> TokenOperand:
    codes, multiples, scale = found
    return codes, multiples, scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "channels"), [(1, 4096), (33, 579), (64, 14336), (600, 4096)])
def test_fused_forms_round_nearly_every_value_alike(rows: int, channels: int, dtype: torch.dtype) -> None:
    """What tokens stand for, in steps of their INT4 blocks: one in a thousand may take the other neighbour."""
    arguments = on_gpu(problem(rows, channels, dtype, "mixed", gathered=True, hadamard=True)[1])
    eights = arguments[1]
    generator = torch.Generator().manual_seed(1)
    y, residual = (torch.randn(rows, channels, generator=generator).to(dtype).cuda() for _ in range(2))
    weight = (1 + 0.1 * torch.randn(channels, generator=generator)).to(dtype).cuda()
    gate_up = (3 * torch.randn(rows, 2 * channels, generator=generator)).to(dtype).cuda()
    pairs = [
        (rms_norm_quantize_token(y, residual, weight, 1e-6, *arguments)[:3],
         rms_norm_quantize_token_ref(y, residual, weight, 1e-6, *arguments)[:3]),
        (silu_mul_quantize_token(gate_up, *arguments), silu_mul_quantize_token_ref(gate_up, *arguments)),
    ]  # fmt: skip
    for got, wanted in pairs:
        values = []
        for each in (got, wanted):
            codes, words, scale = untile(each, rows)
            powers = torch.ones(codes.shape[:2], dtype=torch.float64, device="cuda")
            powers[:, :eights] = 2.0 ** (words[:, :eights] & 255)
            values.append(codes.double() * (powers * scale[:, None].double())[..., None])
        powers[:, eights:] = 18
        off = (values[0] - values[1]).abs() / (powers * scale[:, None].double())[..., None]
        assert off.max() < 1.1
        assert (off > 0.01).double().mean() < 1e-3


def test_in_a_cuda_graph_on_another_stream() -> None:
    for rows in (16, 1024):
        x, arguments = problem(rows, 4096, torch.bfloat16, "mixed", gathered=True, hadamard=True)
        x, arguments = x.cuda(), on_gpu(arguments)
        torch.ops.comet.quantize_token(x, *arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = torch.ops.comet.quantize_token(x, *arguments)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert equal(got, quantize_token_ref(x, *arguments), rows, arguments[1])


def test_under_torch_compile() -> None:
    x, arguments = problem(16, 4096, torch.bfloat16, "mixed", gathered=True, hadamard=True)
    x, arguments = x.cuda(), on_gpu(arguments)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    @torch.compile(fullgraph=True)
    def step(x: Tensor) -> tuple[Tensor, ...]:
        codes, multiples, scale = torch.ops.comet.quantize_token(x * 2, *arguments)
        summed = torch.ops.comet.rms_norm_quantize_token(x, x, weight, 1e-5, *arguments)[3]
        silu = torch.ops.comet.silu_mul_quantize_token(torch.cat((x, x), 1), *arguments)[2]
        return codes, multiples, scale * 1, summed + 1, silu * 2

    codes, multiples, scale, summed, silu = step(x)
    assert equal((codes, multiples, scale), quantize_token_ref(x * 2, *arguments), 16, arguments[1])
    assert torch.equal(summed, x + x + 1)
    assert torch.equal(silu, 2 * silu_mul_quantize_token(torch.cat((x, x), 1), *arguments)[2])


def test_no_rows_and_views_that_are_not_contiguous_or_aligned() -> None:
    x, arguments = problem(5, 576, torch.bfloat16, "mixed", gathered=True, hadamard=True)
    x, arguments = x.cuda(), on_gpu(arguments)
    assert [each.shape[-1] for each in quantize_token(x[:0], *arguments)] == [1024, 8, 0]
    wide = torch.randn(5, 600, device="cuda").bfloat16()
    wide[:, 7:583] = x
    shifted = torch.empty(5 * 576 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(5, 576)
    shifted.copy_(x)
    wanted = quantize_token_ref(x, *arguments)
    assert equal(quantize_token(wide[:, 7:583], *arguments), wanted, 5, arguments[1])
    assert equal(quantize_token(shifted, *arguments), wanted, 5, arguments[1])


def test_float32_has_no_kernel_but_runs() -> None:
    x, arguments = problem(4, 256, torch.float16, "mixed", gathered=True, hadamard=True)
    found = quantize_token(x.cuda().float(), *on_gpu(arguments))
    assert equal(found, quantize_token_ref(x.cuda(), *on_gpu(arguments)), 4, arguments[1])


def test_wrong_arguments_are_named() -> None:
    x, arguments = problem(4, 256, torch.bfloat16, "mixed", gathered=True, hadamard=True)
    x, (perm, eights, clip, _) = x.cuda(), on_gpu(arguments)
    with pytest.raises(CometError, match="int8_blocks"):
        quantize_token(x, perm, 3, clip, True)
    with pytest.raises(CometError, match="clip is"):
        quantize_token(x, perm, eights, clip[:1], True)
    with pytest.raises(CometError, match="clip is"):
        quantize_token(x, perm, eights, clip.cpu(), True)
    with pytest.raises(CometError, match="float64"):
        quantize_token(x.double(), perm, eights, clip, True)
    with pytest.raises(CometError, match="tokens, channels"):
        quantize_token(x[0], perm, eights, clip, True)
    wide = torch.zeros(1, MOST_CHANNELS + 128, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(CometError, match="channels"):
        quantize_token(wide, None, 0, torch.ones(wide.shape[1] // 128, device="cuda"), True)
