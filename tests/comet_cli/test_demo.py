"""`comet demo` on a tiny model: one table; stopped, it goes on."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from comet_cli import demo, fetch, main

STOPPED_AT = 5  # of the commands it types: the second pack


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

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command[3])
        if len(commands) == STOPPED_AT:
            return subprocess.CompletedProcess(command, 130, "")
        done = CliRunner().invoke(main.app, command[3:], catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        return subprocess.CompletedProcess(command, 0, done.stdout)

    monkeypatch.setattr(demo, "MODEL", "tiny")
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    monkeypatch.setattr(fetch, "fetch", lambda alias: None)
    return commands


def test_one_table_and_what_was_done_when_it_was_stopped_is_not_done_again(typed: list[str]) -> None:
    small = ["demo", "--samples", "4", "--calibration-seq-len", "32", "--windows", "1", "--seq-len", "32"]
    done = CliRunner().invoke(main.app, small, catch_exceptions=False)
    assert done.exit_code == 130 and "goes on" in done.stderr and "minutes" in done.stderr
    road = ["calibrate", "pack", "eval"]
    assert typed == [*road, "calibrate", "pack"]
    done = CliRunner().invoke(main.app, small, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    assert typed == [*road, "calibrate", "pack", "pack", "eval", "eval"]
    for title in ("tiny, 1 windows of 32 tokens", "16-bit", *demo.TITLES.values(), "protocol: "):
        assert title in done.stdout
    assert not demo.STEPS.exists()  # a finished demo is made anew
    done = CliRunner().invoke(main.app, [*small, "--samples", "3"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr  # of another size, beside the first
