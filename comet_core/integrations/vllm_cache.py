"""What is said of the KV cache that vLLM keeps for a packed model. No vLLM in here.

COMET's 4-bit cache rounds keys per channel and page; vLLM's own 4-bit kind (int4_per_token_head) rounds them per token
and head after a rotation. A key channel that is large in every token, as a bias on keys makes it, then takes the whole
range of its head. How much that costs was measured with cuda/tools/kv_per_token.py (records in results/measured).
"""

from collections.abc import Iterable

FOUR_BIT = "int4_per_token_head"
MEASURED = {  # perplexity on WikiText-2, 16-bit weights; four windows of 2,048 tokens, and one
    "plain": "smollm2-135m 24.15 in 16 bit, 25.38 with it, 24.47 with COMET's",
    "biased": "qwen2.5-coder-0.5b 21.26 in 16 bit, 40.22 with it, 21.52 with COMET's",
}
KEY_BIASES = ("k_proj.bias", "qkv_proj.bias", "query_key_value.bias", "c_attn.bias")


def cache_warning(cache_dtype: str, recipe_bits: int, tensors: Iterable[str], *, ours: bool = False) -> str | None:
    """What a user should know before the server answers, or None.

    Args:
        cache_dtype: vLLM's --kv-cache-dtype. recipe_bits: of the recipe's KV cache.
        tensors: names of the packed folder's tensors. ours: the cache is COMET's own (vllm_kv4.py).
    """
    biased = any(name.endswith(KEY_BIASES) for name in tensors)
    if cache_dtype == FOUR_BIT and biased:
        return (
            "COMET: this model adds a bias to its keys, and vLLM's int4_per_token_head cache does not stand that: "
            f"{MEASURED['biased']}. Use --kv-cache-dtype auto or fp8"
        )
    if cache_dtype == FOUR_BIT:
        return (
            "COMET: vLLM's int4_per_token_head cache rounds keys by token, which costs more than the recipe's cache: "
            f"{MEASURED['plain']}"
        )
    if recipe_bits == 4 and cache_dtype in ("auto", "bfloat16", "float16") and not ours:
        return (
            "COMET: vLLM keeps its own KV cache, in 16 bit unless --kv-cache-dtype says otherwise; the recipe's 4-bit "
            "cache is not used (with --attention-backend CUSTOM --no-enable-prefix-caching it is)"
        )
    return None
