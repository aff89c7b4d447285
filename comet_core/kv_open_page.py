"""KV4 at its worst: attention in which a query reads its own, still open page in 4 bit too.

The rule of kv_cache.py keeps the page that is being filled in 16 bit, so a prompt shorter than a page never reads a
4-bit key. Zero-shot prompts are that short. Here the open page is quantized at every token anew, from the tokens that
it holds by then, as if it ended there: no range sees a later token, and at a page's last token the codes are those
that the cache stores. Complete pages, values and sinks follow the rule. This is a second figure beside the rule's,
not a cache that anybody would build.
"""

from typing import Any

import torch
from torch import Tensor, nn

from comet_core.kv_cache import attention_name, fake_quantize_keys, fake_quantize_values
from comet_core.recipe import KVCacheSpec
from comet_cuda.affine import choose_minmax_qparams, dequantize_minmax, quantize_minmax
from comet_cuda.kv4_append import KV_BITS, PARAM_DTYPE, quantize_tokens

ELEMENTS_AT_ONCE = 1 << 25  # of keys quantized for one query each, float32


def open_page_attention_name(spec: KVCacheSpec, config: Any) -> str:
    """The name of this attention in transformers' registry; that of the rule where the cache is in 16 bit. `config`: of
    the model that will use it."""
    rule = attention_name(spec, config)
    if spec.bits == 16:
        return rule
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"{rule}-open4"

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = open_page_attention(query, key, value, attention_mask, spec, scale, softcap or 0.0)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, AttentionMaskInterface()[rule])
    return name


def open_page_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: KVCacheSpec, scale: float, softcap: float
) -> Tensor:
    """Attention whose every key behind the sinks is read in 4 bit.

    Args:
        query: [B, Hq, Q, D]; key, value: [B, H, KV, D], every key of the sequence from its first token on.
        mask: bool [B, 1, Q, KV], True where a query reads a key; None is causal, the queries being the last Q tokens.
        spec: granularity, page, sinks. scale: factor on q . k. softcap: 0 is none.

    Returns:
        query's type [B, Hq, Q, D].
    """
    batch, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    starts = getattr(mask, "comet_starts", [0] * batch)
    if mask is None:
        causal = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril(kv_len - q_len)
        mask = causal.expand(batch, 1, q_len, kv_len)
    if len(set(starts)) <= 1:
        return _from_start(query, key, value, mask, starts[0] if starts else 0, spec, scale, softcap)
    parts = [slice(i, i + 1) for i in range(batch)]
    rows = [
        _from_start(query[i], key[i], value[i], mask[i], start, spec, scale, softcap)
        for i, start in zip(parts, starts, strict=True)
    ]
    return torch.cat(rows)


def _from_start(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, start: int, spec: KVCacheSpec, scale: float, softcap: float
) -> Tensor:
    """The same for sequences whose first real token stands in column `start`."""
    first = start + spec.sinks  # column where page 0 begins
    whole = max(key.shape[2] - first, 0) // spec.page * spec.page
    v4, past = value.float().clone(), key.float().clone()
    v4[:, :, first:] = fake_quantize_values(v4[:, :, first:])
    if whole:
        past[:, :, first : first + whole] = fake_quantize_keys(past[:, :, first : first + whole], spec)
    own = mask.shape[-1] - 1 - mask[0, 0].flip(-1).to(torch.uint8).argmax(-1)  # [Q], each query's own column
    out = torch.empty_like(query)
    columns = own.tolist()
    low = 0
    while low < len(columns):
        page = (columns[low] - first) // spec.page  # negative: a sink
        begin = max(first + page * spec.page, 0) if page >= 0 else first
        high, most = low, _queries_at_once(key, spec.page)
        while high < min(len(columns), low + most) and (columns[high] - first) // spec.page == page:
            high += 1
        rows = slice(low, high)
        scores = _scores(query[:, :, rows], past[:, :, :begin])
        end = begin
        if page >= 0:
            end = min(begin + spec.page, key.shape[2])
            upto = own[rows] - begin  # place of each query's own token in the page
            keys = _open_keys(key[:, :, begin:end].float(), upto, spec)
            scores = torch.cat((scores, _scores_of_own(query[:, :, rows], keys)), -1)
        scores = scores * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~mask[:, :, rows, :end], float("-inf")).softmax(-1)
        weights = weights.nan_to_num(0.0)  # rows of padding read nothing
        repeat = query.shape[1] // key.shape[1]
        out[:, :, rows] = (weights @ v4[:, :, :end].repeat_interleave(repeat, 1)).to(query.dtype)
        low = high
    return out


def _queries_at_once(key: Tensor, page: int) -> int:
    return max(1, ELEMENTS_AT_ONCE // (key.shape[0] * key.shape[1] * page * key.shape[3]))


def _open_keys(keys: Tensor, upto: Tensor, spec: KVCacheSpec) -> Tensor:
    """What each query reads of the page it stands in: f32 [B, H, T, D], places [q] -> f32 [B, H, q, T, D].

    Query i sees keys 0 .. upto[i], quantized over exactly these; what stands behind them is masked later.
    """
    if spec.key_granularity == "token":
        codes, scale, minimum = quantize_tokens(keys)
        same = dequantize_minmax(codes, scale[..., None], minimum[..., None])
        return same[:, :, None].expand(-1, -1, len(upto), -1, -1)
    low, high = keys.cummin(2).values[:, :, upto], keys.cummax(2).values[:, :, upto]  # [B, H, q, D]
    scale, minimum = choose_minmax_qparams(low, high, KV_BITS, PARAM_DTYPE)
    scale, minimum = scale[..., None, :], minimum[..., None, :]
    return dequantize_minmax(quantize_minmax(keys[:, :, None], scale, minimum, KV_BITS), scale, minimum)


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """q . k with keys [B, H, n, D] shared by all queries, f32 [B, Hq, q, n]."""
    repeat = query.shape[1] // keys.shape[1]
    return query.float() @ keys.repeat_interleave(repeat, 1).mT


def _scores_of_own(query: Tensor, keys: Tensor) -> Tensor:
    """q . k with keys [B, H, q, n, D], each query its own, f32 [B, Hq, q, n]."""
    repeat = query.shape[1] // keys.shape[1]
    grouped = query.float().unflatten(1, (keys.shape[1], repeat))  # [B, H, repeat, q, D]
    return torch.einsum("bhrqd,bhqnd->bhrqn", grouped, keys).flatten(1, 2)
