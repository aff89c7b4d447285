"""The attention that reads its open page in 4 bit: equal to one query at a time; padding changes nothing."""

import pytest
import torch
from torch import Tensor

from comet_core.kv_cache import fake_quantize_values, kv4_attention
from comet_core.kv_open_page import open_page_attention
from comet_core.recipe import KVCacheSpec
from comet_cuda.affine import dequantize_minmax
from comet_cuda.kv4_append import quantize_key_page, quantize_tokens

D, PAGE, SINKS, SCALE = 8, 16, 3, 8**-0.5


def heads(length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, h, length, D, generator=generator) for h in (4, 2, 2))
    return q, k + 3, v


def one_by_one(q: Tensor, k: Tensor, v: Tensor, granularity: str, softcap: float) -> Tensor:
    """Every query alone: all pages so far quantized over the tokens that they hold by then."""
    out = torch.empty_like(q)
    v4 = torch.cat((v[:, :, :SINKS], fake_quantize_values(v[:, :, SINKS:])), 2)
    for t in range(q.shape[2]):
        seen = k[:, :, : t + 1].clone()
        for start in range(SINKS, t + 1, PAGE):
            page = seen[:, :, start : start + PAGE]
            if granularity == "channel":
                codes, scale, low = quantize_key_page(page)
                page[:] = dequantize_minmax(codes, scale[..., None, :], low[..., None, :])
            else:
                codes, scale, low = quantize_tokens(page)
                page[:] = dequantize_minmax(codes, scale[..., None], low[..., None])
        scores = q[:, :, t : t + 1] @ seen.repeat_interleave(2, 1).mT * SCALE
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        out[:, :, t : t + 1] = scores.softmax(-1) @ v4[:, :, : t + 1].repeat_interleave(2, 1)
    return out


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("granularity", ["channel", "token"])
def test_equals_every_query_alone(granularity: str, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comet_core.kv_open_page.ELEMENTS_AT_ONCE", 5 * 4 * PAGE * D)  # several steps a page
    q, k, v = heads(45)
    spec = KVCacheSpec(bits=4, key_granularity=granularity, page=PAGE, sinks=SINKS)
    before = k.clone(), v.clone()
    found = open_page_attention(q, k, v, None, spec, SCALE, softcap)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])
    assert torch.allclose(found, one_by_one(q, k, v, granularity, softcap), atol=1e-5)


def test_differs_from_the_rule_only_by_the_open_page() -> None:
    """At a page's last token the rule still reads that page in 16 bit; the sinks agree."""
    q, k, v = heads(45)
    spec = KVCacheSpec(bits=4, page=PAGE, sinks=SINKS)
    found = open_page_attention(q, k, v, None, spec, SCALE, 0.0)
    rule = kv4_attention(q, k, v, None, spec, SCALE, 0.0)
    assert torch.allclose(found[:, :, :SINKS], rule[:, :, :SINKS], atol=1e-6)
    apart = (found - rule)[:, :, SINKS:].abs().amax((0, 1, 3))
    assert float(apart.median()) > 5e-3 and float(apart[0]) < 1e-3, "a page of one token is exact to float16"


@pytest.mark.parametrize("left", [0, 5])
def test_padding_on_either_side_changes_nothing(left: int) -> None:
    q, k, v = heads(37)
    spec = KVCacheSpec(bits=4, page=PAGE, sinks=SINKS)
    alone = open_page_attention(q, k, v, None, spec, SCALE, 0.0)
    right = 9
    padded = [torch.nn.functional.pad(x, (0, 0, left, right), value=50.0) for x in (q, k, v)]
    length = 37 + left + right
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(2, 1, length, length).clone()
    mask[..., :left] = False
    if left:
        mask.comet_starts = [left, left]  # type: ignore[attr-defined]
    found = open_page_attention(*padded, mask, spec, SCALE, 0.0)
    assert torch.allclose(found[:, :, left : left + 37], alone, atol=1e-5)
