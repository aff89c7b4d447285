"""A runner against the packed model on windows of text, and passkeys: what the numbers mean, on a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from comet_core.real_text import (
    DECODED,
    QUESTION,
    compare,
    passkey_prompts,
    passkeys_found,
    perplexity,
    reference_rows,
    runner_rows,
)  # fmt: skip
from comet_core.runner import Runner
from comet_core.runner_weights import runner_from_packed
from comet_cuda.errors import CometError


@pytest.fixture(scope="module")
def folder(tiny: Any) -> Path:
    return Path(tiny.packed)


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    return torch.randint(0, 256, (2, 150), generator=torch.Generator().manual_seed(0))


def test_the_runner_says_what_the_reference_says(folder: Path, windows: torch.Tensor) -> None:
    """Prefill in chunks, then decode; a reference whose rows are one token off is far away."""
    wanted = reference_rows(folder, windows, torch.float32)
    runner = Runner(runner_from_packed(folder, "cpu", torch.float32), kv_bits=4, batch=1, context=150, chunk=50)
    sums = compare(runner, windows, wanted)
    assert sums.tokens == 2 * 149 and len(list(runner_rows(runner, windows[0], DECODED))) > DECODED
    values = sums.values()
    assert abs(values["kl"]) < 1e-4 and values["top1"] > 0.97
    assert values["perplexity"] == pytest.approx(values["reference_perplexity"], rel=1e-3)
    shifted = compare(runner, windows, [rows.roll(1, 0) for rows in wanted]).values()
    assert shifted["kl"] > 0.01 and shifted["top1"] < 0.5
    itself = compare(None, windows, wanted, wanted).values()
    assert itself["kl"] == 0 and itself["top1"] == 1
    assert perplexity(runner.model, windows, 4) == pytest.approx(values["perplexity"], rel=1e-3)


class Words:
    """A tokenizer of characters."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_passkeys_stand_where_they_should() -> None:
    prompts = passkey_prompts(Words(), [ord("x")] * 1000, 400, depths=3, seeds=2)
    texts = [Words().decode(ids) for ids, _ in prompts]
    assert len(prompts) == 6 and len({key for _, key in prompts}) == 2 and all(len(text) < 400 for text in texts)
    for index, (text, (_, key)) in enumerate(zip(texts, prompts, strict=True)):
        assert text.count(key) == 2 and text.endswith(QUESTION)
        before = text.index("The pass key") / (len(text) - len(QUESTION))
        assert abs(before - (0.0, 0.38, 0.78)[index % 3]) < 0.06, before
    with pytest.raises(CometError, match="passkeys"):
        passkey_prompts(Words(), [1] * 100, 400, depths=3, seeds=1)


def test_only_the_key_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([" 12345.", " 123456", "12 345", ": 99999"])
    monkeypatch.setattr(Runner, "generate", lambda *_, **__: [[ord(letter) for letter in next(said)] for _ in range(4)])
    model = runner_from_packed(folder, "cpu", torch.float32)
    prompts = [([1, 2], "12345")] * 4
    assert passkeys_found(model, Words(), prompts, 4) == [True, False, False, False]
