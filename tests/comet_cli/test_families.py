"""Every kind of decoder through every command: mixtures of experts, LayerNorm with biases and learned positions (OPT),
capped scores and sliding windows (Gemma), fused projections (Phi-3), normed heads (Qwen3)."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from comet_cli import main

TEXT = "the cat sat on the mat and the dog lay by the door, while rain fell on the roof of the old house. "
SMALL = ("--data", "text.txt", "--samples", "2", "--seq-len", "48", "--device", "cpu")


def family(kind: str) -> Any:
    """A config of two narrow layers."""
    import transformers as tf

    shape: dict[str, Any] = {
        "vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None,
    }  # fmt: skip
    if kind == "opt":
        return tf.OPTConfig(**shape | {"pad_token_id": 1}, ffn_dim=144, word_embed_proj_dim=64)
    shape |= {"intermediate_size": 144, "num_key_value_heads": 1}
    if kind == "phi3":
        return tf.Phi3Config(**shape)
    if kind == "mixtral":
        return tf.MixtralConfig(**shape, num_local_experts=4)
    if kind == "qwen2_moe":
        sizes = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 80}
        return tf.Qwen2MoeConfig(**shape, **sizes, num_experts=4, num_experts_per_tok=2)
    shape |= {"head_dim": 32}
    if kind == "qwen3_moe":
        return tf.Qwen3MoeConfig(**shape, moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2)
    if kind == "gemma2":
        return tf.Gemma2Config(**shape, sliding_window=16, query_pre_attn_scalar=32)
    if kind == "gemma3":
        layer_types = ["sliding_attention", "full_attention"]
        return tf.Gemma3TextConfig(**shape, sliding_window=16, query_pre_attn_scalar=32, layer_types=layer_types)
    return tf.Qwen3Config(**shape)


def comet(*arguments: str) -> str:
    """stdout of a command that must succeed."""
    done = CliRunner().invoke(main.app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "opt", "gemma2", "gemma3", "phi3", "qwen3"])
def test_a_family_goes_through_all_commands(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte_tokenizer: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    import comet_core  # noqa: F401 - teaches transformers the format

    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT * 20)
    byte_tokenizer.save_pretrained(kind)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(family(kind), dtype=torch.float16).save_pretrained(kind, max_shard_size="100KB")

    if kind not in ("mixtral", "opt"):
        monkeypatch.setattr("comet_core.calibration.heat_map", lambda found, png: png.write_bytes(b"\x89PNG"))
    else:
        monkeypatch.setattr("comet_core.preflight.heat_map", lambda found, png: png.touch())  # drawing takes most of it
        plan = json.loads(comet("pack", kind, *SMALL, "--dry-run", "--json"))
        assert plan["estimate"]["seconds"] > 0 and not Path("runs").exists()
    calibration = json.loads(comet("calibrate", kind, *SMALL, "--json"))
    assert calibration["int4_mac_fraction"] >= 0.84
    comet("pack", kind, *SMALL)
    measure = ("--ppl", "text.txt", "--windows", "1", "--seq-len", "48", "--device", "cpu")
    *records, text = map(
        json.loads, comet("eval", *measure, "--prompt", "the cat", "--tokens", "2", "--json").split("\n")[:-1]
    )
    values = {(record["recipe"], record["metric"]): record["value"] for record in records}
    assert values["w4a4kv4", "perplexity"] == pytest.approx(values["fp16", "perplexity"], rel=0.2)
    assert text["prompt"] == "the cat"
    found = json.loads(comet("inspect", "--verify", "--json"))
    assert found["verified"] and len(found["linears"]) == len(calibration_linears(Path("runs")))
    comet("report")
    assert "w4a4kv4" in Path(f"runs/{kind}-w4a4kv4/report.html").read_text()
    model = AutoModelForCausalLM.from_pretrained(f"runs/{kind}-w4a4kv4/packed", dtype=torch.float32)
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False).shape == (1, 5)


def calibration_linears(runs: Path) -> list[str]:
    """Names of every quantized linear of the only run."""
    manifest = json.loads(next(runs.glob("*/calibration/calibration.json")).read_text())
    return [name for group in manifest["groups"] for name in group["quantized"]]
