"""Perplexity, KL and agreement: sums over exactly the tokens that the protocol names."""

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from comet_core.evaluate import Scores, evaluate_perplexity, plan_perplexity, score_windows
from comet_core.packed import load_packed
from comet_core.progress import SilentProgress

PLANNED = ("data", "windows", "seq_len", "compare", "progress")


def model_of(vocab: int = 97, **changes: object) -> torch.nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=16, final_logit_softcapping=5.0, attn_implementation="eager",
        **changes,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


@torch.no_grad()
def test_scores_equal_the_models_own_loss() -> None:
    """The soft cap on logits included: Gemma 2's forward applies it behind lm_head."""
    model = model_of()
    tokens = torch.randint(0, 97, (3, 40))
    scores = Scores()
    score_windows(model, None, tokens[:1], scores)
    score_windows(model, None, tokens[1:], scores)
    assert scores.tokens == 3 * 39
    assert scores.nll / scores.tokens == pytest.approx(float(model(input_ids=tokens, labels=tokens).loss), rel=1e-5)


@torch.no_grad()
def test_windows_score_the_same_alone_and_together(tiny: Any) -> None:
    """4-bit activations and a 4-bit cache included: a batch must not reach into a window's scales or pages."""
    model = load_packed(tiny.packed, dtype=torch.float32).model
    tokens = torch.randint(0, 257, (4, 150), generator=torch.Generator().manual_seed(1))
    alone, together = Scores(), Scores()
    for window in tokens.split(1):
        score_windows(model, None, window, alone)
    score_windows(model, None, tokens, together)
    assert together.tokens == alone.tokens == 4 * 149
    assert together.nll == pytest.approx(alone.nll, rel=1e-6)


@torch.no_grad()
def test_divergence_is_zero_from_itself_and_positive_from_another() -> None:
    model, other = model_of(), model_of()
    tokens = torch.randint(0, 97, (2, 30))
    same, different = Scores(), Scores()
    score_windows(model, model, tokens, same)
    assert same.kl == pytest.approx(0, abs=1e-6) and same.agree == same.tokens and same.nll == same.base_nll
    other.get_output_embeddings().weight.data.mul_(0.5)
    score_windows(other, model, tokens, different)
    p = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    q = other(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    assert different.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)
    assert different.agree == int((p.argmax(-1) == q.argmax(-1)).sum())
    assert math.isfinite(different.base_nll) and different.base_nll == pytest.approx(same.nll)


@pytest.mark.parametrize(
    ("perplexity", "warned"), [(12.0, False), (96.0, False), (98.0, True), (math.inf, True), (math.nan, True)]
)
def test_a_perplexity_worse_than_guessing_is_remarked(perplexity: float, warned: bool) -> None:
    from types import SimpleNamespace

    from comet_core.evaluate import _warn_if_implausible, frequency_perplexity
    from comet_core.progress import SilentProgress

    class Listens(SilentProgress):
        said = ""

        def log(self, message: str) -> None:
            self.said = message

    progress = Listens()
    subject: Any = SimpleNamespace(model=model_of())
    _warn_if_implausible(perplexity, torch.randint(0, 97, (2, 300)), subject, progress)
    assert ("worse than guessing among 97 tokens" in progress.said) == warned
    few = torch.randint(0, 8, (2, 300))  # a text of eight words, each as likely as the others
    assert frequency_perplexity(few, 97) == pytest.approx(8, rel=0.1)
    _warn_if_implausible(12.0, few, subject, progress)
    assert "worse than guessing each token by how often it occurred before" in progress.said
    progress.said = ""
    _warn_if_implausible(7.0, few, subject, progress)
    assert not progress.said


def test_a_packed_model_is_also_measured_with_a_16_bit_cache(tiny: Any) -> None:
    """The same weights, and nothing but the attention's own 16-bit form between them."""
    how: Any = {"data": str(tiny.source.folder / "text.txt"), "windows": 2, "seq_len": 300, "compare": False}
    how |= {"device": "cpu", "dtype": "float32", "progress": SilentProgress()}
    (packed,) = evaluate_perplexity(tiny.packed, **how)
    (plain,) = evaluate_perplexity(tiny.packed, **how, kv16=True)
    model = load_packed(tiny.packed, device="cpu", dtype=torch.float32).model
    model.set_attn_implementation("eager")
    scores, tokens = Scores(), plan_perplexity(str(tiny.packed), **{k: how[k] for k in PLANNED}).tokens
    score_windows(model, None, tokens, scores)
    assert math.log(plain["value"]) == pytest.approx(scores.nll / scores.tokens, rel=1e-5)
    assert packed["value"] != pytest.approx(plain["value"], rel=1e-6)
    assert (packed["kv_quantized"], plain["kv_quantized"]) == (True, False)
    assert plain["protocol"]["kv"] == "16-bit" and plain["recipe"] == packed["recipe"]


def test_both_models_are_said_to_read_the_same_bos(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from comet_core import evaluate

    tokenizer = evaluate._tokenizer(tiny.packed)
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(5)
    tokenizer.add_bos_token = True
    monkeypatch.setattr(evaluate, "_tokenizer", lambda folder: tokenizer)
    how: Any = {"data": str(tiny.source.folder / "text.txt"), "windows": 2, "seq_len": 100, "compare": True}
    records = evaluate_perplexity(tiny.packed, **how, device="cpu", dtype="float32", progress=SilentProgress())
    assert {record["recipe"] for record in records} > {"fp16"}
    assert {record["protocol"]["bos"] for record in records} == {"each window starts with it"}


@pytest.mark.parametrize("cache", ["", "ownkv4"])
def test_the_comparison_with_vllm_scores_the_same(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "cuda" / "tools"))
    import vllm_perplexity

    how: Any = {"data": str(tiny.source.folder / "text.txt"), "windows": 2, "seq_len": 300, "compare": False}
    tokens = plan_perplexity(str(tiny.packed), **how, progress=SilentProgress()).tokens
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors", metadata={"data": "a text"})
    monkeypatch.setattr(vllm_perplexity, "on_cpu", lambda: True)
    text = argparse.Namespace(packed=str(tiny.packed), tokens=how["data"], windows=2, seq_len=300)
    assert torch.equal(vllm_perplexity.read_tokens(text)[0], tokens)
    job = argparse.Namespace(packed=str(tiny.packed), tokens=str(tmp_path / "tokens.safetensors"), cache=cache)
    scores = vllm_perplexity.by_comet(job, "float32", eager=False)
    how |= {"device": "cpu", "dtype": "float32", "kv16": not cache, "progress": SilentProgress()}
    (expected,) = evaluate_perplexity(tiny.packed, **how)
    assert math.exp(sum(scores) / len(scores)) == pytest.approx(expected["value"], rel=1e-5)
