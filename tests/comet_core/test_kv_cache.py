"""KV4 inside attention: the one rule, whatever the chunking, batch or padding."""

import pytest
import torch
from torch import Tensor

from comet_core.kv_cache import attention_name, int4_key_fraction, kv4_attention
from comet_core.recipe import KVCacheSpec
from comet_cuda.errors import CometError
from comet_cuda.kv4_append import allocate_pages, kv4_append_ref
from comet_cuda.kv4_decode import kv4_decode_ref

SCALE = 0.3


def random_qkv(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(2, 4, tokens, 16), torch.randn(2, 2, tokens, 16) + 3, torch.randn(2, 2, tokens, 16)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 0.0), (0, 5.0)])
def test_prefill_reads_what_decode_reads(sinks: int, window: int, softcap: float) -> None:
    """One shot over 70 tokens equals appending them one by one to the paged cache and decoding each."""
    q, k, v = random_qkv(70)
    spec = KVCacheSpec(page=16, sinks=sinks)
    distance = torch.arange(70)[:, None] - torch.arange(70)[None]
    mask = (distance >= 0) & ((distance < window) if window else True)
    shot = kv4_attention(q, k, v, mask.expand(2, 1, 70, 70), spec, SCALE, softcap)
    cache = allocate_pages(12, 2, 2, 16, 16, sinks, torch.float32, "cpu")
    table, slots = torch.randperm(12).view(2, 6), torch.arange(2)
    for t in range(70):
        kv4_append_ref(k[:, :, t], v[:, :, t], slots, torch.full((2,), t), table, cache)
        step = kv4_decode_ref(q[:, :, t], slots, torch.full((2,), t + 1), table, cache, SCALE, window, softcap)
        assert torch.allclose(step, shot[:, :, t], atol=1e-5), t


@pytest.mark.parametrize("chunks", [[1] * 50, [17, 16, 17], [49, 1]])
def test_chunks_give_the_same_answers(chunks: list[int]) -> None:
    q, k, v = random_qkv(50)
    spec = KVCacheSpec(page=16, sinks=4)
    whole = kv4_attention(q, k, v, None, spec, SCALE, 0.0)
    start, parts = 0, []
    for size in chunks:
        stop = start + size
        parts.append(kv4_attention(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], None, spec, SCALE, 0.0))
        start = stop
    assert torch.allclose(torch.cat(parts, 2), whole, atol=1e-6)


def test_four_bits_are_really_read() -> None:
    q, k, v = random_qkv(64)
    exact = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True, scale=SCALE
    )
    coarse = kv4_attention(q, k, v, None, KVCacheSpec(page=16, sinks=0), SCALE, 0.0)
    assert 1e-3 < (coarse - exact).abs().max() < 0.5
    all_sinks = kv4_attention(q, k, v, None, KVCacheSpec(page=16, sinks=64), SCALE, 0.0)
    assert torch.allclose(all_sinks, exact, atol=1e-5)


def test_keys_per_token_suffer_from_a_constant_channel_and_keys_per_channel_do_not() -> None:
    q, k, v = random_qkv(64)
    k[..., 0] = 300.0
    exact = kv4_attention(q, k, v, None, KVCacheSpec(page=16, sinks=64), SCALE, 0.0)
    error = {
        by: (kv4_attention(q, k, v, None, KVCacheSpec(page=16, sinks=0, key_granularity=by), SCALE, 0.0) - exact).norm()
        for by in ("channel", "token")
    }
    assert error["channel"] < 0.5 * error["token"]


def tiny_model(name: str, **changes: object) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, attn_implementation=name, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing(side: str) -> None:
    model = tiny_model(attention_name(KVCacheSpec(page=16, sinks=4), None))
    long, short = torch.randint(0, 97, (1, 60)), torch.randint(0, 97, (1, 41))
    pad = torch.zeros(1, 19, dtype=torch.long)
    padded = torch.cat((pad, short) if side == "left" else (short, pad), 1)
    mask = torch.ones(2, 60, dtype=torch.long)
    if side == "left":
        mask[1] = torch.cat((torch.zeros(19), torch.ones(41))).long()
    else:
        mask[1] = torch.cat((torch.ones(41), torch.zeros(19))).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = model(input_ids=torch.cat((long, padded)), attention_mask=mask, position_ids=positions).logits
    real = batch[1, 19:] if side == "left" else batch[1, :41]
    assert torch.allclose(real, model(input_ids=short).logits[0], atol=1e-4)
    assert torch.allclose(batch[0], model(input_ids=long).logits[0], atol=1e-4)


@torch.no_grad()
def test_generation_equals_one_shot_scoring() -> None:
    """Greedy tokens from cached decoding are the ones that a full forward prefers."""
    from transformers import DynamicCache

    model = tiny_model(attention_name(KVCacheSpec(page=16, sinks=4), None))
    from comet_core.evaluate import cache_argument

    prompt = torch.randint(0, 97, (1, 30))
    out = model.generate(
        input_ids=prompt, max_new_tokens=40, do_sample=False, **{cache_argument(model): DynamicCache()}
    )
    logits = model(input_ids=out).logits[0]
    assert torch.equal(logits[29:-1].argmax(1), out[0, 30:])


def test_a_cache_that_drops_keys_is_refused() -> None:
    from transformers import AttentionMaskInterface

    mask_function = AttentionMaskInterface()[attention_name(KVCacheSpec(), None)]
    with pytest.raises(CometError, match="sliding window"):
        mask_function(batch_size=1, q_length=1, kv_length=8, q_offset=20, kv_offset=12)


def test_share_of_keys_read_in_four_bits() -> None:
    assert int4_key_fraction(100, KVCacheSpec(bits=16)) == 0.0
    spec = KVCacheSpec(page=16, sinks=2)
    counted = sum(1 for t in range(50) for j in range(t + 1) if j >= 2 and t >= 2 and (j - 2) // 16 < (t - 2) // 16)
    assert int4_key_fraction(50, spec) == pytest.approx(counted / (50 * 51 / 2))
