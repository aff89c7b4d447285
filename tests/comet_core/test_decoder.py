"""What is read off a model by running it: layers, groups, arguments, and permutations that can move."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from comet_core.decoder import Decoder, find_layers, is_tied, linear_groups, run_layer
from comet_core.hidden import HiddenStates
from comet_core.model_source import resolve_model
from comet_cuda.errors import CometError


def saved(folder: Path, config: Any) -> nn.Module:
    """A random model of `config`, saved to `folder` in float32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def small(kind: str) -> Any:
    """A small config of a family."""
    import transformers as tf

    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "opt":
        return tf.OPTConfig(
            **shape, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=32, do_layer_norm_before=True
        )
    shape |= {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if kind == "phi3":
        return tf.Phi3Config(**shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if kind == "gemma2":  # caps attention scores, so transformers has no sdpa for it
        return tf.Gemma2Config(**shape, head_dim=8, sliding_window=8, attn_logit_softcapping=0.5)
    if kind == "gemma3":
        return tf.Gemma3TextConfig(
            **shape, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
        )
    return tf.LlamaConfig(**shape)


def walk(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """The hidden states behind the last layer, layer by layer."""
    decoder.load_non_layers()
    states, calls = decoder.first_hidden(tokens), decoder.calls(tokens)
    for index, call in enumerate(calls):
        states = run_layer(decoder.load_layer(index), states, call)
    return states


@pytest.mark.parametrize("kind", ["llama", "opt", "phi3", "gemma2", "gemma3"])
@torch.no_grad()
def test_layer_by_layer_equals_the_whole_model(tmp_path: Path, kind: str) -> None:
    model = saved(tmp_path, small(kind))
    tokens = torch.randint(3, 64, (2, 24))
    seen: list[torch.Tensor] = []
    layers = find_layers(model)[1]
    layers[-1].register_forward_hook(
        lambda *given: seen.append(given[2] if isinstance(given[2], torch.Tensor) else given[2][0])
    )
    model(input_ids=tokens)
    decoder = Decoder(resolve_model(str(tmp_path)), device="cpu", dtype=torch.float32)
    assert torch.allclose(walk(decoder, tokens), seen[0], atol=1e-5)
    assert is_tied(decoder.model) == (kind in ("opt", "gemma2", "gemma3"))


@pytest.mark.parametrize(
    ("kind", "names", "producers"),
    [
        ("llama", ["q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj"], "gate_proj+up_proj"),
        ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "gate_up_proj"),
        ("opt", ["q_proj+k_proj+v_proj", "out_proj", "fc1", "fc2"], "fc1"),
    ],
)
@torch.no_grad()
def test_groups_share_an_input_and_the_mlp_folds(tmp_path: Path, kind: str, names: list[str], producers: str) -> None:
    saved(tmp_path, small(kind))
    decoder = Decoder(resolve_model(str(tmp_path)), device="cpu", dtype=torch.float32)
    decoder.load_non_layers()
    tokens = torch.arange(3, 19)[None]
    hidden, calls = decoder.first_hidden(tokens), decoder.calls(tokens)
    layer = decoder.load_layer(0)
    before = run_layer(layer, hidden, calls[0])
    groups = linear_groups(layer, hidden, calls[0], "layer 0")
    found = ["+".join(sorted((n.rpartition(".")[2] for n in g.names), key="qkvgu".find)) for g in groups]
    leaves = [sorted(name.split("+")) for name in found]
    assert leaves == [sorted(name.split("+")) for name in names]
    folds = {
        g.names[0].rpartition(".")[2]: sorted(p.rpartition(".")[2] for p in g.producers) for g in groups if g.producers
    }
    assert folds == {names[-1]: sorted(producers.split("+"))}  # attention outputs must not be taken for foldable
    assert torch.equal(run_layer(layer, hidden, calls[0]), before)  # probing left the layer as it was


def test_a_model_without_linears_is_refused() -> None:
    with pytest.raises(CometError, match="no list of decoder layers"):
        find_layers(nn.Sequential(nn.Embedding(4, 4)))


def test_stacks_in_another_layout_are_named(tmp_path: Path) -> None:
    import transformers as tf

    config = tf.Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    saved(tmp_path, config)
    with pytest.raises(CometError, match=r"experts\.gate_up_proj: shape \(2, 32, 96\) is a stack"):
        Decoder(resolve_model(str(tmp_path)), device="cpu", dtype=torch.float32)


def test_hidden_states_spill_to_disk_over_the_limit(tmp_path: Path) -> None:
    values = torch.randn(5, 8, 4)
    for limit in (0, 1 << 20):
        buffer = HiddenStates(
            (5, 8, 4), dtype=torch.float32, device=torch.device("cpu"), limit=limit, spill_folder=tmp_path
        )
        assert buffer.spilled == (limit == 0)
        for start, stop in buffer.ranges():
            buffer.write(start, stop, values[start:stop])
        assert torch.equal(torch.cat([buffer.read(*bounds) for bounds in buffer.ranges()]), values)
    del buffer
    assert not list(tmp_path.iterdir())
