"""`comet demo` on a tiny model: one table, and what was done is not done again."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from comet_cli import demo, fetch, main


@pytest.fixture
def typed(tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that the demo runs, here in this process, on a Llama of one layer in the working folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("COMET_DATA", raising=False)
    byte_tokenizer.save_pretrained("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=192, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float16).save_pretrained("tiny")
    commands: list[str] = []

    def step(*arguments: str) -> demo.Records:
        commands.append(arguments[0])
        done = CliRunner().invoke(main.app, [*arguments, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    monkeypatch.setattr(demo, "MODEL", "tiny")
    monkeypatch.setattr(demo, "step", step)
    monkeypatch.setattr(fetch, "fetch", lambda alias: None)
    return commands


def test_one_table_and_a_calibration_that_lies_there_is_not_made_again(typed: list[str]) -> None:
    small = ["demo", "--samples", "4", "--calibration-seq-len", "32", "--windows", "1", "--seq-len", "32"]
    for count in ("4", "5"):  # the naive recipe takes one window in both
        small[2] = count
        done = CliRunner().invoke(main.app, small, catch_exceptions=False)
        assert done.exit_code == 0 and "minutes" in done.stderr
        for title in ("tiny, 1 windows of 32 tokens", "16-bit", *demo.TITLES.values(), "protocol: "):
            assert title in done.stdout
    road = ["calibrate", "pack", "eval"]
    assert typed == [*road, *road, "eval", "pack", "eval", *road, "eval"]
