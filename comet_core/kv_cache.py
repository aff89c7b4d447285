"""KV4 inside attention: one function in transformers' attention registry, so that every evaluation includes it.

The rule, the same for prefill in one shot or in chunks, decode and evaluation: query t reads key j in 4 bit if j's page
is complete and comes before t's page, else in 16 bit; values always in 4 bit; the first tokens (sinks) in 16 bit.
Pages are counted from each sequence's first real token, so padding never enters a range and never moves a page.

The function quantizes what the model's own cache hands it, so it holds no state: the codes of a page depend on the
page's tokens alone, and quantizing them again gives the same codes. A cache that keeps 4-bit pages itself attaches its
layer to the keys it hands over (`PAGED`), and answers for the attention.
"""

from typing import Any

import torch
from torch import Tensor, nn

from comet_core.recipe import KVCacheSpec
from comet_cuda.affine import dequantize_minmax
from comet_cuda.errors import CometError
from comet_cuda.kv4_append import quantize_key_page, quantize_tokens

PAGED = "comet_layer"  # attribute of a key tensor that holds only new tokens: the cache layer that holds the others


def sixteen_name(config: Any) -> str:
    """The name of the attention of a 16-bit cache for models of this config: sdpa, or ours where the family caps its
    scores (Gemma 2), which sdpa cannot."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True):
        return "sdpa"
    return _registered("comet-kv16", None)


def attention_name(spec: KVCacheSpec, config: Any) -> str:
    """The name under which transformers finds the attention of this cache; registers it at first use.

    Args:
        config: of the model that will use it.
    """
    if spec.bits == 16:
        return sixteen_name(config)
    return _registered(f"comet-kv{spec.bits}-{spec.key_granularity}-page{spec.page}-sinks{spec.sinks}", spec)


def _registered(name: str, spec: KVCacheSpec | None) -> str:
    """Enter the attention of a cache (None: 16 bit) under `name`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sliding_window: int | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        if s_aux is not None:
            raise CometError(
                f"{type(module).__name__}: attention with learned sinks is not supported", "use another model"
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        paged = getattr(key, PAGED, None)
        if paged is not None:
            out = paged.attend(query, key, value, attention_mask, scale, softcap or 0.0, sliding_window or 0)
        elif spec is None:
            assert attention_mask is not None
            out = attend(query, key, value, attention_mask, scale, softcap or 0.0)
        else:
            out = kv4_attention(query, key, value, attention_mask, spec, scale, softcap or 0.0)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _mask if spec is None else _mask_with_starts)
    return name


def _mask(*args: object, **kwargs: object) -> Tensor:
    """transformers' boolean mask [B, 1, Q, KV], always built."""
    from transformers.masking_utils import sdpa_mask

    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor = sdpa_mask(*args, **kwargs)  # type: ignore[arg-type, assignment]
    return mask


def _mask_with_starts(
    *args: object, attention_mask: Tensor | None = None, kv_offset: int = 0, **kwargs: object
) -> Tensor:
    """`_mask` with each sequence's first real column attached."""
    if kv_offset:
        raise CometError(
            "the KV cache dropped its oldest keys (sliding window), so the pages of a 4-bit cache cannot be told apart",
            "pass past_key_values=DynamicCache(), which keeps every key",
        )
    mask = _mask(*args, attention_mask=attention_mask, **kwargs)
    if attention_mask is not None and attention_mask.dim() == 2:
        starts, real = attention_mask.to(torch.uint8).argmax(1), attention_mask.sum(1)
        mask.comet_starts = starts.tolist()  # type: ignore[attr-defined]
        mask.comet_gaps = bool((starts + real != attention_mask.shape[1]).any())  # type: ignore[attr-defined]
    return mask


def fake_quantize_keys(k: Tensor, spec: KVCacheSpec) -> Tensor:
    """Keys of whole pages, [..., pages * page, D] -> what a 4-bit cache gives back, same type."""
    pages = k.reshape(*k.shape[:-2], -1, spec.page, k.shape[-1])
    if spec.key_granularity == "channel":
        codes, scale, minimum = quantize_key_page(pages)
        return dequantize_minmax(codes, scale[..., None, :], minimum[..., None, :]).flatten(-3, -2).to(k.dtype)
    codes, scale, minimum = quantize_tokens(pages)
    return dequantize_minmax(codes, scale[..., None], minimum[..., None]).flatten(-3, -2).to(k.dtype)


def fake_quantize_values(v: Tensor) -> Tensor:
    """Values [..., D] -> what a 4-bit cache gives back, same type."""
    codes, scale, minimum = quantize_tokens(v)
    return dequantize_minmax(codes, scale[..., None], minimum[..., None]).to(v.dtype)


def kv4_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: KVCacheSpec, scale: float, softcap: float
) -> Tensor:
    """Attention by the rule above.

    Args:
        query: [B, Hq, Q, D]; key, value: [B, H, KV, D], every key of the sequence from its first token on.
        mask: bool [B, 1, Q, KV], True where a query reads a key; None is causal, the queries being the last Q tokens.
        spec: granularity, page, sinks. scale: factor on q . k. softcap: 0 is none.

    Returns:
        query's type [B, Hq, Q, D].
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    starts = getattr(mask, "comet_starts", [0] * query.shape[0])
    if mask is None:
        causal = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril(kv_len - q_len)
        mask = causal.expand(query.shape[0], 1, q_len, kv_len)
    if len(set(starts)) > 1:
        rows = [
            _attend_from(
                query[i : i + 1], key[i : i + 1], value[i : i + 1], mask[i : i + 1], start, spec, scale, softcap
            )
            for i, start in enumerate(starts)
        ]
        return torch.cat(rows)
    return _attend_from(query, key, value, mask, starts[0] if starts else 0, spec, scale, softcap)


def _attend_from(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, start: int, spec: KVCacheSpec, scale: float, softcap: float
) -> Tensor:
    """`kv4_attention` for sequences whose first real token stands in column `start`."""
    first = start + spec.sinks  # column where page 0 begins
    whole = max(key.shape[2] - first, 0) // spec.page * spec.page
    v4 = value.clone()
    v4[:, :, first:] = fake_quantize_values(value[:, :, first:])
    mixed = key.clone()  # columns before the current page hold 4-bit keys, the others 16-bit ones
    if whole:
        key4 = fake_quantize_keys(key[:, :, first : first + whole], spec)
    own = mask.shape[-1] - 1 - mask[0, 0].flip(-1).to(torch.uint8).argmax(-1)  # [Q], each query's own column
    pages = (own - first).div(spec.page, rounding_mode="floor").clamp(min=0).tolist()
    out = torch.empty_like(query)
    low = 0
    done = 0  # columns of whole pages already switched to 4 bit
    while low < len(pages):
        high = low
        while high < len(pages) and pages[high] == pages[low]:
            high += 1
        before = pages[low] * spec.page
        if before < done:  # a padded tail: its queries go back to an earlier page
            mixed[:, :, first + before : first + done] = key[:, :, first + before : first + done]
        elif before > done:
            mixed[:, :, first + done : first + before] = key4[:, :, done:before]
        done = before
        end = min(first + before + spec.page, key.shape[2])  # nothing after the own page is read
        out[:, :, low:high] = attend(
            query[:, :, low:high], mixed[:, :, :end], v4[:, :, :end], mask[:, :, low:high, :end], scale, softcap
        )
        low = high
    return out


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Plain masked attention; kv heads are repeated to the query heads."""
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    if not softcap:
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = softcap * torch.tanh(query.float() @ key.float().mT * scale / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ value.float()).to(query.dtype)


def int4_key_fraction(length: int, spec: KVCacheSpec) -> float:
    """Share of all (query, key) pairs of one causal sequence of `length` tokens whose key is read in 4 bit."""
    if spec.bits == 16:
        return 0.0
    pairs = sum(max(t - spec.sinks, 0) // spec.page * spec.page for t in range(length))
    return pairs / (length * (length + 1) / 2)
