"""One scale a token in the layouts of the other GEMMs (share TOKEN of quantize_act): emulated, and on a GPU."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from comet_cuda import quantize_act_cuda
from comet_cuda.errors import CometError
from comet_cuda.prepared_linear import ActivationFormat, prepare_linear
from comet_cuda.quantize_act import TOKEN, quantize_act, quantize_act_ref
from comet_cuda.quantize_act_cuda import quantize_act_tiled, quantize_act_tiled_ref
from comet_cuda.quantize_fused import (
    rms_norm_quantize,
    rms_norm_quantize_ref,
    silu_mul_quantize,
    silu_mul_quantize_ref,
)
from comet_cuda.quantize_token_plan import has_kernel
from comet_cuda.quantize_token_ref import MOST_CHANNELS
from comet_cuda.w4ax_gemm import w4ax_gemm_ref
from tests.comet_cuda.test_quantize_act_emulated import build, run  # noqa: F401
from tests.comet_cuda.test_quantize_act_emulated import pytestmark as emulation
from tests.comet_cuda.test_quantize_token_gpu import FUSED_SHAPES, SHAPES
from tests.comet_cuda.test_w4ax_gemm_integer import canonical
from tests.comet_cuda.token_problems import MIXES, exact_norm, exact_silu
from tests.comet_cuda.token_problems import problem as token_problem

LAYOUTS = ("sm_80", "portable", "canonical")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
Arguments = tuple[Tensor | None, Tensor, Tensor, bool]  # perm, bits, clip, hadamard


def problem(
    rows: int, channels: int, dtype: torch.dtype, mix: str, *, gathered: bool = True, hadamard: bool = True
) -> tuple[Tensor, Arguments]:
    x, (perm, eights, clip, hadamard) = token_problem(rows, channels, dtype, mix, gathered=gathered, hadamard=hadamard)
    bits = torch.tensor([8] * eights + [4] * (len(clip) - eights), dtype=torch.uint8)
    return x, (perm, bits, clip, hadamard)


def reference(x: Tensor, arguments: Arguments, layout: str) -> tuple[Tensor, Tensor]:
    if layout == "canonical":
        return quantize_act_ref(x, *arguments, TOKEN)
    return quantize_act_tiled_ref(x, *arguments, layout, TOKEN)


def used(found: tuple[Tensor, ...], arguments: Arguments, layout: str) -> list[Tensor]:
    """Without the half of an INT4 block's bytes that the sm_80 layout leaves alone."""
    codes, *rest = found
    if layout == "sm_80":
        codes = codes.clone()
        codes.flatten(1)[arguments[1] == 4, codes[0].numel() // 2 :] = 0
    return [codes, *rest]


def same(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], arguments: Arguments, layout: str) -> bool:
    pairs = zip(used(got, arguments, layout), used(wanted, arguments, layout), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def emulate(build: Any, x: Tensor, arguments: Arguments, layout: str, **how: Any) -> list[Tensor]:  # noqa: F811
    return run(build, x, arguments, layout, TOKEN, 1, arch=800, **how)


EVERY = [pytest.param(*shape, marks=pytest.mark.slow) for shape in ((7, 2308, 2), (2, 20608, 2), (3, 9216, 3))]


@emulation
@pytest.mark.parametrize(("rows", "channels", "sms"), [(9, 1152, 132), (3, 579, 132), *EVERY])
def test_the_kernel_equals_the_reference(build: Any, rows: int, channels: int, sms: int) -> None:  # noqa: F811
    for i, (mix, gathered) in enumerate(itertools.product(MIXES, (True, False))):
        x, arguments = problem(rows, channels, torch.bfloat16, mix, gathered=gathered, hadamard=i % 4 != 3)
        for layout in LAYOUTS if channels > 2000 else LAYOUTS[i % 3 : i % 3 + 1]:
            got = emulate(build, x, arguments, layout, sms=sms)
            assert same(tuple(got), reference(x, arguments, layout), arguments, layout), (mix, gathered, layout)


@emulation
@pytest.mark.parametrize(("rows", "channels"), [(9, 1152), pytest.param(3, 577, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["sm_80", pytest.param("portable", marks=pytest.mark.slow)])
def test_fused_forms_equal_the_reference_where_their_arithmetic_is_exact(
    build: Any,  # noqa: F811
    rows: int,
    channels: int,
    layout: str,
) -> None:
    for mix in ("mixed", "half"):
        x, arguments = problem(rows, channels, torch.float16, mix, gathered=mix == "mixed")
        rest = (*arguments, layout, TOKEN)
        gate_up = exact_silu(x.clamp(-900, 900))
        got = emulate(build, gate_up, arguments, layout, fuse="silu_mul")
        assert same(tuple(got), silu_mul_quantize_ref(gate_up, *rest), arguments, layout)
        y, residual, weight = exact_norm(rows, channels, torch.float16)
        got = emulate(build, y, arguments, layout, fuse="rms_norm", residual=residual, weight=weight)
        assert same(tuple(got), rms_norm_quantize_ref(y, residual, weight, 0.0, *rest), arguments, layout)
        assert got[0].unique().numel() > 100


def test_eight_bit_blocks_must_come_first() -> None:
    bits = torch.tensor([4, 8], dtype=torch.uint8)
    weight = torch.zeros(8, 128, dtype=torch.uint8), torch.ones(8, 2, dtype=torch.bfloat16), None
    with pytest.raises(CometError, match="8-bit blocks first"):
        prepare_linear(*weight, ActivationFormat(None, bits, torch.ones(2), True, TOKEN), "sm_80")


@contextlib.contextmanager
def no_reference() -> Iterator[None]:
    """The launchers may not fall back. The reference itself does not work here either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize_act_cuda, "quantize_act_tiled_ref", None)
        patch.setattr(quantize_act_cuda, "quantize_act_ref", None)
        yield


def cuda(arguments: Arguments) -> Arguments:
    perm, bits, clip, hadamard = arguments
    return None if perm is None else perm.cuda(), bits.cuda(), clip.cuda(), hadamard


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "channels"), SHAPES)
def test_integers_equal_the_reference(rows: int, channels: int, dtype: torch.dtype) -> None:
    for i, (mix, gathered) in enumerate(itertools.product(MIXES, (True, False))):
        x, arguments = problem(rows, channels, dtype, mix, gathered=gathered, hadamard=i % 4 != 3)
        x, arguments = x.cuda(), cuda(arguments)
        for layout in LAYOUTS:
            wanted = reference(x, arguments, layout)
            with no_reference():
                if layout == "canonical":
                    got = quantize_act(x, *arguments, TOKEN)
                else:
                    got = quantize_act_tiled(x, *arguments, layout, TOKEN)
            assert same(got, wanted, arguments, layout), (mix, gathered, layout)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("layout", ["sm_80", "portable"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "channels"), FUSED_SHAPES)
def test_fused_forms_on_a_gpu_equal_the_reference(rows: int, channels: int, dtype: torch.dtype, layout: str) -> None:
    for gathered in (True, False):
        x, arguments = problem(rows, channels, dtype, "mixed", gathered=gathered)
        arguments = cuda(arguments)
        rest = (*arguments, layout, TOKEN)
        gate_up = exact_silu(x.float().clamp(-900, 900).to(dtype)).cuda()
        assert same(silu_mul_quantize(gate_up, *rest), silu_mul_quantize_ref(gate_up, *rest), arguments, layout)
        y, residual, weight = (tensor.cuda() for tensor in exact_norm(rows, channels, dtype))
        for other in (residual, None):
            y = y if other is not None else y + residual
            got = rms_norm_quantize(y, other, weight, 0.0, *rest)
            assert same(got, rms_norm_quantize_ref(y, other, weight, 0.0, *rest), arguments, layout)


@pytest.mark.gpu
@on_gpu
def test_what_the_kernel_cannot_take_is_named_or_left_to_the_reference() -> None:
    x, arguments = problem(3, 512, torch.bfloat16, "mixed")
    x, arguments = x.cuda(), cuda(arguments)
    wide = torch.zeros(1, MOST_CHANNELS + 128, device="cuda").bfloat16()
    bits, clip = torch.full((385,), 4, dtype=torch.uint8).cuda(), torch.ones(385).cuda()
    with pytest.raises(CometError, match="49280 channels"):
        quantize_act_tiled(wide, None, bits, clip, False, "sm_80", TOKEN)
    assert not has_kernel(x.float(), "sm_80", TOKEN) and not has_kernel(x, "sm_90", TOKEN)
    for layout in LAYOUTS[:2]:
        got = quantize_act_tiled(x.float(), *arguments, layout, TOKEN)
        assert same(got, reference(x.float(), arguments, layout), arguments, layout)
    assert quantize_act_tiled(x[:0], *arguments, "sm_80", TOKEN)[0].shape == (4, 0, 128)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("layout", ["sm_80", "portable"])
@pytest.mark.parametrize(("tokens", "blocks", "eights"), [(1, 32, 5), (17, 5, 2), (300, 33, 0), (64, 9, 9)])
def test_a_linear_with_integer_scales_equals_the_reference(tokens: int, blocks: int, eights: int, layout: str) -> None:
    """What an older GPU runs: the kernel's codes and scales through the mma.sync GEMM."""
    p = canonical(tokens, 264, blocks, eights)
    x, (perm, _, clip, _) = problem(tokens, 128 * blocks, torch.bfloat16, "mixed")
    x = x.float().clamp(-1e4, 1e4).bfloat16()
    inputs = ActivationFormat(perm.cuda(), p["bits"].cuda(), clip.cuda(), True, TOKEN)
    weight = [p[name].cuda() for name in ("qweight", "w_scale", "w_zero")]
    bias = torch.randn(264).cuda()
    with no_reference():
        got = prepare_linear(*weight, inputs, layout)(x.cuda(), bias)
    codes, scale = quantize_act_ref(x, perm, p["bits"], clip, True, TOKEN)
    canonical_weight = p["qweight"], p["w_scale"], p["w_zero"]
    wanted = w4ax_gemm_ref(codes, scale, *canonical_weight, p["bits"], bias.cpu(), torch.float32)
    rounding = 2.0**-8 * wanted.abs().amax(1, keepdim=True)  # of bfloat16
    assert ((got.float().cpu() - wanted).abs() <= rounding).all()
