"""The integrations on a GPU: a packed folder opened by transformers, and its 4-bit pages beside the CPU's."""

from typing import TYPE_CHECKING, Any

import pytest
import torch

from comet_core.integrations.kv4_cache import KV4Layer
from comet_core.packed import load_packed
from comet_core.recipe import KVCacheSpec

if TYPE_CHECKING:
    from conftest import Packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize(
    ("query_heads", "heads", "width", "page"), [(9, 3, 64, 64), (32, 8, 128, 128), (4, 2, 32, 64), (4, 2, 64, 48)]
)
def test_pages_on_a_gpu_answer_as_on_a_cpu(query_heads: int, heads: int, width: int, page: int) -> None:
    """A prompt of 200 tokens in one shot, then 80 single ones, across a page's end; shapes with kernels and without."""
    torch.manual_seed(0)
    count, prompt = 280, 200
    q, k, v = (torch.randn(2, h, count, width, dtype=torch.bfloat16) for h in (query_heads, heads, heads))
    outputs = {}
    for device in ("cpu", "cuda"):
        layer, parts = KV4Layer(KVCacheSpec(page=page, sinks=4)), []
        for low, high in [(0, prompt)] + [(t, t + 1) for t in range(prompt, count)]:
            keys, values = layer.update(*(x[:, :, low:high].to(device) for x in (k, v)))
            seen = torch.ones(high - low, high, dtype=torch.bool, device=device).tril(low).expand(2, 1, -1, -1)
            parts.append(layer.attend(q[:, :, low:high].to(device), keys, values, seen, width**-0.5, 0.0, 0).cpu())
        assert layer.tiled == (device == "cuda" and width > 32 and page != 48)
        outputs[device] = torch.cat(parts, 2).float()
    assert (outputs["cuda"] - outputs["cpu"]).abs().max() < 2**-5  # two roundings to bfloat16 of values below 4


@torch.no_grad()
def test_from_pretrained_on_a_gpu(tiny: "Packed") -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny.packed, dtype=torch.bfloat16, device_map="cuda")
    x = torch.randint(0, 256, (2, 150), device="cuda")
    ours = load_packed(tiny.packed, device="cuda", dtype=torch.bfloat16).model(input_ids=x).logits
    assert torch.equal(model(input_ids=x).logits, ours)
    out = model.generate(
        input_ids=x, attention_mask=torch.ones_like(x), max_new_tokens=140, do_sample=False, eos_token_id=None,
        return_dict_in_generate=True,
    )  # fmt: skip
    cache = out["cache"] if "cache" in out else out["past_key_values"]
    assert type(cache).__name__ == "KV4Cache" and cache.get_seq_length() == 289
