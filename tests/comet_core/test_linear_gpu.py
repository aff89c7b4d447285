"""Packed layers on a GPU: the kernels behind W4AxLinear against the references behind it on the CPU."""

import copy
from pathlib import Path

import pytest
import torch

from comet_core.linear import W4AxLinear
from comet_core.packed import load_packed
from comet_cuda.int4 import SYMMETRIC_ZERO
from comet_cuda.w4ax_gemm import weight_integers

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def allowed(layer: W4AxLinear, x: torch.Tensor) -> torch.Tensor:
    """How far two right answers may lie apart, f32 [M, N].

    Rounding of float32 products and sums, and 3 * 2^-16 of what the zero points take off: the sm_90 kernel multiplies
    that part in bfloat16 halves for many tokens (w4ax_gemm_sm90.cu). A value less its two halves is at most 2^-16 of
    it, for either factor, and the product of the two lower halves, which is left out, is another 2^-16.
    """
    codes, scale = (part.float() for part in layer._quantize(x))
    weight, w_scale = weight_integers(layer.qweight, layer.w_zero), layer.w_scale.float()
    dots = torch.einsum("mbk,nbk->mnb", codes, weight).abs()
    rounding = torch.einsum("mnb,mb,nb->mn", dots, scale, w_scale)
    zero = torch.full_like(w_scale, SYMMETRIC_ZERO) if layer.w_zero is None else layer.w_zero.float()
    halves = (codes.sum(-1).abs() * scale) @ (zero * w_scale).T
    bias = 0 if layer.bias is None else layer.bias.float().abs()
    return 2**-20 * (rounding + bias) + 3 * 2**-16 * halves


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_every_layer_gives_what_the_reference_gives(version: int, tokens: int) -> None:
    model = load_packed(GOLDEN / f"packed-v{version}").model
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, W4AxLinear)}
    assert len(layers) == 14
    torch.manual_seed(tokens)
    for name, layer in layers.items():
        x = torch.randn(tokens, layer.in_features) * torch.rand(layer.in_features).exp()
        on_gpu = copy.deepcopy(layer).cuda()
        y = on_gpu(x.cuda())
        assert on_gpu.prepared().layout in ("sm_90", "sm_80", "portable")
        excess = (y.cpu() - layer(x)).abs() - allowed(layer, x)
        assert excess.max() <= 0, f"{name}: {excess.max()} too far at {divmod(int(excess.argmax()), y.shape[1])}"


def test_moving_a_layer_makes_its_layout_anew() -> None:
    layer = next(m for m in load_packed(GOLDEN / "packed-v3").model.modules() if isinstance(m, W4AxLinear))
    x = torch.randn(5, layer.in_features)
    want = layer(x)
    there = layer.cuda()(x.cuda()).cpu()
    back = layer.cpu()(x)
    assert torch.equal(back, want)
    torch.testing.assert_close(there, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_packed_model_generates_on_the_gpu(dtype: torch.dtype) -> None:
    model = load_packed(GOLDEN / "packed-v3", device="cuda", dtype=dtype).model
    tokens = torch.tensor([[7, 3, 61, 12, 0, 44]], device="cuda")
    with torch.no_grad():
        first = model(input_ids=tokens, use_cache=False).logits
        again = model(input_ids=tokens, use_cache=False).logits
    assert torch.equal(first, again) and bool(torch.isfinite(first).all())
    assert model.generate(tokens, max_new_tokens=4, do_sample=False).shape == (1, 10)
