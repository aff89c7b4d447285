"""What the vLLM plugin says of the KV cache, without vLLM."""

from comet_core.integrations.vllm_cache import FOUR_BIT, cache_warning

PLAIN = ["model.layers.0.self_attn.k_proj.qweight", "model.layers.0.self_attn.o_proj.bias"]
BIASED = [*PLAIN, "model.layers.0.self_attn.k_proj.bias"]


def test_a_four_bit_cache_by_token_is_warned_of_with_what_it_cost() -> None:
    biased, plain = cache_warning(FOUR_BIT, 4, BIASED), cache_warning(FOUR_BIT, 16, PLAIN)
    assert (
        biased is not None and "does not stand" in biased and "qwen2.5-coder-0.5b" in biased and "auto or fp8" in biased
    )
    assert plain is not None and "25.38" in plain and "does not stand" not in plain


def test_a_recipe_with_a_four_bit_cache_hears_that_vllm_keeps_sixteen_bits() -> None:
    said = cache_warning("auto", 4, PLAIN)
    assert said is not None and "not used" in said and "--attention-backend CUSTOM" in said
    assert cache_warning("auto", 4, PLAIN, ours=True) is None
    assert cache_warning("auto", 16, BIASED) is None
    assert cache_warning("fp8", 4, BIASED) is None
