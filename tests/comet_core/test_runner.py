"""The runner against the packed Hugging Face model, token by token, in float32 on the references.

Prefill in one shot, in chunks, and decode must all give the logits of one forward pass of the same packed folder. A
code that lies within float rounding of a tie may flip, which moves that token's logits by up to a few hundredths and
those after it by less; so all positions must lie within `FLIP` and nearly all within rounding.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from comet_core.packed import load_packed
from comet_core.paged_cache import SixteenBitCache
from comet_core.recipe import load_recipe
from comet_core.runner import BatchState, Runner, sample, split_chunks
from comet_core.runner_weights import random_runner, runner_from_packed, runner_from_source
from comet_core.serving_scheme import SCHEMES
from comet_cuda.errors import CometError

PAGE, SINKS, LENGTH, PROMPT = 16, 2, 60, 41
ROUNDING, FLIP = 5e-6, 0.05  # of logits of size 1


def config(family: str, llama_config: Callable[..., Any]) -> Any:
    from transformers import MistralConfig, Qwen2Config, Qwen3Config

    if family == "llama":
        return llama_config()
    shapes = {
        "vocab_size": 257, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256,
        "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None,
    }  # fmt: skip
    if family == "qwen2":
        return Qwen2Config(**shapes | {"head_dim": 32, "tie_word_embeddings": True})
    return {"qwen3": Qwen3Config, "mistral": MistralConfig}[family](**shapes)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, put_through: Any, llama_config: Any) -> Any:
    recipe = load_recipe("w4a4kv4")
    recipe = replace(recipe, kv_cache=replace(recipe.kv_cache, page=PAGE, sinks=SINKS))
    return put_through(config(request.param, llama_config), recipe).packed


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def wanted(folder: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of every position, [2, LENGTH, V]."""
    with torch.no_grad():
        return load_packed(folder).model(input_ids=tokens, use_cache=False).logits


def require_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Within FLIP everywhere, within ROUNDING at nine positions of ten."""
    errors = torch.stack([(f - w).abs().max() for f, w in zip(found, wanted, strict=True)])
    assert errors.max() < FLIP, errors
    assert errors.sort().values[int(0.9 * (len(errors) - 1))] < ROUNDING, errors


def make(folder: Any, layout: str | None = None, **changes: Any) -> Runner:
    model = runner_from_packed(folder, "cpu", torch.float32, layout)
    sizes = {"kv_bits": 4, "batch": 2, "context": 96, "page": PAGE, "sinks": SINKS}
    return Runner(model, **(sizes | changes))


@pytest.mark.parametrize("chunk", [8192, 2 * PROMPT, 23, 5])
def test_prefill_and_decode_give_the_logits_of_the_packed_model(
    folder: Any, tokens: torch.Tensor, wanted: torch.Tensor, chunk: int
) -> None:
    runner = make(folder, chunk=chunk)
    for slot in range(2):
        assert runner.cache.reserve(slot, LENGTH)
    prompts = [(0, tokens[0, :PROMPT].tolist()), (1, tokens[1, : PROMPT - 7].tolist())]
    found = list(runner.prefill(prompts))
    expected = [wanted[0, PROMPT - 1], wanted[1, PROMPT - 8]]
    state = BatchState.empty(3, torch.device("cpu"))  # one row is padding
    for step in range(LENGTH - PROMPT):
        at = [PROMPT + step, PROMPT - 7 + step]
        state.write([int(tokens[i, at[i]]) for i in range(2)], (0, 1), at)
        found += runner.decode_logits(state)[:2]
        expected += [wanted[i, at[i]] for i in range(2)]
    require_equal(found, expected)


def test_a_gpu_layout_gives_the_same_logits(folder: Any, tokens: torch.Tensor, wanted: torch.Tensor) -> None:
    """The tiled ops and the fused ops, by their references."""
    for layout in ("sm_90", "sm_80"):
        runner = make(folder, layout)
        assert runner.cache.reserve(0, LENGTH)
        found = runner.prefill_chunk(tokens[0], runner.chunk_of([(0, 0, LENGTH)]), range(LENGTH))
        require_equal(list(found), list(wanted[0]))


def test_a_wrong_position_is_seen(folder: Any, tokens: torch.Tensor, wanted: torch.Tensor) -> None:
    """The bound above is no blank cheque: one position off moves the logits beyond it."""
    runner = make(folder)
    assert runner.cache.reserve(0, LENGTH)
    runner.prefill([(0, tokens[0, :PROMPT].tolist())])
    state = BatchState.empty(1, torch.device("cpu"))
    state.write([int(tokens[0, PROMPT])], (0,), [PROMPT + 1])
    with pytest.raises(AssertionError):
        require_equal(list(runner.decode_logits(state)), [wanted[0, PROMPT]])


@pytest.fixture(scope="module")
def small() -> Runner:
    """A random 4-bit model with the sizes of SmolLM2 cut to one layer; 3 slots."""
    model = random_runner("smollm2-135m", SCHEMES["W4A4KV4"], "cpu", torch.float32, layers=1)
    return Runner(model, kv_bits=4, batch=3, context=48, page=16, sinks=2, chunk=16)


def test_refill_gives_each_prompt_the_answer_it_gets_alone(small: Runner) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in (5, 17, 1, 9, 30, 3, 12)]
    together = small.generate(prompts, max_new_tokens=6)
    assert together == [small.generate([prompt], max_new_tokens=6)[0] for prompt in prompts]
    assert all(len(answer) == 6 for answer in together) and len(set(map(tuple, together))) > 1
    assert small.cache.reserve(0, 48) and small.cache.reserve(1, 48) and small.cache.reserve(2, 48)
    assert not small.cache.reserve(2, 1), "the slot is taken"
    for slot in range(3):
        small.cache.release(slot)


def test_padding_rows_never_read_behind_a_16_bit_cache(small: Runner) -> None:
    """Their positions move on with every step; there is one row for all of them."""
    runner = Runner(small.model, kv_bits=16, batch=2, context=48)
    state = runner.state(2)
    state.write([5], (1,), [30])
    for _ in range(4):
        runner.step(2)
    assert isinstance(runner.cache, SixteenBitCache)
    places, rows = runner.cache._places, len(runner.cache.keys[0])
    assert places.length.tolist() == [34, 1]
    assert ((places.first[:-1] + places.length) <= rows).all()


def test_a_stop_token_ends_an_answer(small: Runner) -> None:
    prompt = [1, 2, 3, 4]
    whole = small.generate([prompt], max_new_tokens=8)[0]
    stop = whole[3]
    assert small.generate([prompt], max_new_tokens=8, stop=[stop])[0] == whole[: whole.index(stop) + 1]


def test_sampling_follows_the_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(20000, 3)
    drawn = sample(logits, 0.5, torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn, minlength=3) / len(drawn)
    torch.testing.assert_close(shares, (logits[0] / 0.5).softmax(0), atol=0.015, rtol=0)  # 4 standard deviations
    assert sample(logits[:1], 0.0, None).tolist() == [2]


def test_sampled_answers_depend_on_the_seed_alone(small: Runner) -> None:
    def answer(seed: int) -> list[int]:
        runner = Runner(small.model, kv_bits=4, batch=1, context=48, page=16, sinks=2, seed=seed)
        return runner.generate([[7, 8]], max_new_tokens=8, temperature=2.0)[0]

    assert answer(1) == answer(1) != answer(2)


@pytest.mark.parametrize(
    ("prompts", "arguments", "word"),
    [
        ([[]], {}, "empty"),
        ([[1, 10**6]], {}, "outside 0"),
        ([[1] * 47], {"max_new_tokens": 2}, "a slot holds 48"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_impossible_prompts_are_refused(small: Runner, prompts: Any, arguments: Any, word: str) -> None:
    with pytest.raises(CometError, match=word):
        small.generate(prompts, **({"max_new_tokens": 1} | arguments))


def test_chunks_cover_every_token_once() -> None:
    chunks = split_chunks([5, 1, 9, 3], 4)
    assert [sum(count for _, _, count in pieces) for pieces in chunks] == [4, 4, 4, 4, 2]
    assert chunks[1] == [(0, 4, 1), (1, 0, 1), (2, 0, 2)]
    assert split_chunks([3], 8) == [[(0, 0, 3)]]


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_every_scheme_runs(scheme: str) -> None:
    chosen = SCHEMES[scheme]  # biases for one of them; W4A16's widths are multiples of 128
    name = "qwen2.5-coder-0.5b" if scheme in ("W4A4KV4", "W4A16KV16") else "smollm2-135m"
    model = random_runner(name, chosen, "cpu", torch.float32, layers=1)
    runner = Runner(model, kv_bits=chosen.kv_bits, batch=2, context=24, page=16, sinks=2)
    answers = runner.generate([[1, 2, 3], [4]], max_new_tokens=3)
    assert [len(answer) for answer in answers] == [3, 3]


def test_the_16_bit_form_is_the_hugging_face_model(tmp_path: Any, llama_config: Any) -> None:
    """Its own weights, 16-bit cache, sliding window included."""
    from transformers import AutoModelForCausalLM

    from comet_core.model_source import resolve_model

    for name, changes in (("llama", {}), ("mistral", {"sliding_window": 9})):
        torch.manual_seed(1)
        made = config(name, llama_config)
        for key, value in changes.items():
            setattr(made, key, value)
        reference = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
        reference.save_pretrained(tmp_path / name)
        model = runner_from_source(resolve_model(str(tmp_path / name)), "cpu", torch.float32)
        ids = torch.randint(0, 256, (1, 30), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            logits = reference(input_ids=ids, use_cache=False).logits[0]
        runner = Runner(model, kv_bits=16, batch=2, context=64, chunk=8)
        assert runner.cache.reserve(1, 40)
        found = runner.prefill([(1, ids[0, :20].tolist())])
        torch.testing.assert_close(found[0], logits[19], atol=1e-5, rtol=0)
        state = BatchState.empty(2, torch.device("cpu"))
        for at in range(20, 30):
            state.write([int(ids[0, at])], (1,), [at])
            torch.testing.assert_close(runner.decode_logits(state)[0], logits[at], atol=1e-5, rtol=0)
        static = Runner(model, kv_bits=16, batch=1, context=64)
        assert static.cache.reserve(0, 40)
        static.prefill([(0, ids[0, :29].tolist())])
        state = BatchState.empty(1, torch.device("cpu"))
        state.write([int(ids[0, 29])], (0,), [29])
        torch.testing.assert_close(static.decode_logits(state, uniform=30)[0], logits[29], atol=1e-5, rtol=0)


def test_what_would_not_be_computed_is_refused(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM, GraniteConfig

    from comet_core.model_source import resolve_model

    made = GraniteConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=1, num_key_value_heads=1)  # fmt: skip
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    with pytest.raises(CometError, match="granite"):
        runner_from_source(resolve_model(str(tmp_path)), "cpu", torch.float32)
