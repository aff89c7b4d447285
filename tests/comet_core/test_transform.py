"""Changes before quantization: each keeps the model's function (or trains on it), and does what it is made for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comet_core.decoder import layer_linears
from comet_core.evaluate import load_sixteen
from comet_core.learned_clip import block_extremes, clamp_to, learn_ranges, rounded
from comet_core.model_source import ModelSource, resolve_model
from comet_core.progress import SilentProgress
from comet_core.recipe import TransformSpec, WeightSpec
from comet_core.rotate import paley, rotation
from comet_core.transform import transformed
from comet_cuda.errors import CometError

TOKENS = torch.randint(0, 256, (4, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_CACHE_DIR", str(tmp_path / "cache"))


def source_of(folder: Path, config: Any) -> ModelSource:
    """A saved model with biases, uneven norms, and one channel of huge activations in front of every linear."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.3 * torch.randn(parameter.shape))
            if name.endswith("layernorm.weight"):
                parameter[3] = 40.0
    model.save_pretrained(folder)
    return resolve_model(str(folder))


def qwen(**changes: Any) -> Any:
    from transformers import Qwen2Config

    shapes = {
        "vocab_size": 257, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    return Qwen2Config(**(shapes | changes))


def gemma() -> Any:
    """Norms behind attention and MLP, and norms that add one to their weight."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip


@torch.no_grad()
def logits(source: ModelSource) -> Tensor:
    return load_sixteen(source, "cpu", torch.float32)(input_ids=TOKENS[:1]).logits


def change(source: ModelSource, **keys: Any) -> ModelSource:
    spec = TransformSpec(**keys)
    return transformed(source, spec, TOKENS, device="cpu", dtype=torch.float32, progress=SilentProgress())


def linear_inputs(source: ModelSource) -> dict[str, Tensor]:
    """What enters each linear of layer 0."""
    model = load_sixteen(source, "cpu", torch.float32)
    seen: dict[str, Tensor] = {}
    for name, linear in layer_linears(model.model.layers[0]).items():

        def keep(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            seen[name] = args[0].detach()

        linear.register_forward_pre_hook(keep)
    with torch.no_grad():
        model(input_ids=TOKENS)
    return seen


@pytest.mark.parametrize("order", [1, 2, 4, 8, 12, 20, 24, 28, 36, 44])
def test_paley_matrices_are_hadamard(order: int) -> None:
    matrix = paley(order)
    assert matrix is not None and set(matrix.flatten().tolist()) <= {1.0, -1.0}
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("width", [7, 100, 128, 576, 640, 896, 1536])
def test_rotations_are_orthogonal_and_flat_where_a_hadamard_matrix_exists(width: int) -> None:
    q = rotation(width, 0)
    assert torch.allclose(q @ q.T, torch.eye(width, dtype=torch.float64), atol=1e-10)
    if width not in (7, 100):
        assert float(q.abs().max()) == pytest.approx(width**-0.5)


@pytest.mark.parametrize("keys", [{"rotate": "residual"}, {"smooth": "smoothquant"}, {"smooth": "awq"}])
@pytest.mark.parametrize("tied", [True, False])
def test_the_function_stays(tmp_path: Path, keys: dict[str, str], tied: bool) -> None:
    source = source_of(tmp_path / "model", qwen(tie_word_embeddings=tied))
    changed = change(source, **keys)
    before, after = logits(source), logits(changed)
    assert float((after - before).norm() / before.norm()) < 2e-5
    assert changed.digest() != source.digest() and changed.name == source.name
    names = [
        n for n in source.weights().names() if not torch.equal(source.weights().load(n), changed.weights().load(n))
    ]
    assert any("q_proj.weight" in name for name in names), "nothing was changed at all"


def test_rotation_spreads_outliers_of_every_linear(tmp_path: Path) -> None:
    source = source_of(tmp_path / "model", qwen())
    before, after = linear_inputs(source), linear_inputs(change(source, rotate="residual"))
    for name in ("self_attn.q_proj", "mlp.up_proj"):
        peak = [float((x.abs().amax(-1) / x.square().mean(-1).sqrt()).mean()) for x in (before[name], after[name])]
        assert peak[1] < 0.6 * peak[0], name


def test_smoothquant_flattens_inputs_of_norm_fed_linears_only(tmp_path: Path) -> None:
    source = source_of(tmp_path / "model", qwen())
    before, after = linear_inputs(source), linear_inputs(change(source, smooth="smoothquant", alpha=0.9))

    def unevenness(x: Tensor) -> float:
        channels = x.flatten(0, 1).abs().amax(0)
        return float(channels.max() / channels.median())

    assert unevenness(after["mlp.up_proj"]) < 0.3 * unevenness(before["mlp.up_proj"])
    assert torch.allclose(after["mlp.down_proj"], before["mlp.down_proj"], rtol=1e-3, atol=1e-3)


def test_awq_lowers_the_error_of_rounding(tmp_path: Path) -> None:
    """Layer 0's up_proj, rounded to 4 bits per row and block, on its own inputs."""
    from comet_core.smooth import output_error
    from comet_core.smooth import rounded as round_weight

    source = source_of(tmp_path / "model", qwen())
    changed = change(source, smooth="awq")
    errors = []
    for one in (source, changed):
        weight = one.weights().load("model.layers.0.mlp.up_proj.weight").float()
        errors.append(output_error(weight, round_weight(weight), linear_inputs(one)["mlp.up_proj"].flatten(0, 1)))
    assert errors[1] < 0.8 * errors[0]


def test_learned_ranges_lower_the_layers_error_and_are_what_rounding_finds(tmp_path: Path) -> None:
    from comet_core.plan import BlockPlan
    from comet_core.quantize import quantize_rtn, to_storage

    source = source_of(tmp_path / "model", qwen(hidden_size=128, num_attention_heads=8))
    model = load_sixteen(source, "cpu", torch.float32)
    layer, inputs = model.model.layers[0], [torch.randn(2, 24, 128) for _ in range(4)]
    from comet_core.decoder import Call, run_layer

    positions = model.model.rotary_emb(inputs[0], torch.arange(24)[None])
    call = Call((), {"position_embeddings": positions, "attention_mask": None})
    ranges = learn_ranges(layer, inputs, call)
    linears = layer_linears(layer)
    exact = {name: linear.weight.detach().clone() for name, linear in linears.items()}
    errors = []
    with torch.no_grad():
        target = run_layer(layer, inputs[0], call)
        for learned in (False, True):
            for name, linear in linears.items():
                low, high = ranges[name] if learned else block_extremes(exact[name])
                linear.weight.copy_(rounded(exact[name], low, high))
            errors.append(float((run_layer(layer, inputs[0], call) - target).square().mean()))
    assert errors[1] < 0.97 * errors[0]
    name = "self_attn.q_proj"  # 128 wide: one block
    low, high = ranges[name]
    clamped = clamp_to(exact[name], low, high)
    plan = BlockPlan(
        torch.arange(128, dtype=torch.int32), torch.full((1,), 16, dtype=torch.uint8), torch.ones(1), False
    )
    spec = WeightSpec(method="rtn", clip_search=False)
    packed = quantize_rtn(to_storage(clamped, plan), torch.ones(128), spec).dequantize().flatten(1)
    wanted, unlearned = rounded(exact[name], low, high), rounded(exact[name], *block_extremes(exact[name]))
    assert float((packed - wanted).norm() / packed.norm()) < 0.03, "but for codes that bfloat16 scales move"
    assert float((packed - unlearned).norm() / packed.norm()) > 0.06


def test_what_was_learned_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tmp_path / "model", qwen())
    first = change(source, smooth="awq", clip="learned")
    monkeypatch.setattr("comet_core.transform._layers", lambda *_: pytest.fail("it was learned again"))
    again = change(source, smooth="awq", clip="learned")
    assert again.digest() == first.digest()
    for name in source.weights().names():
        assert torch.equal(first.weights().load(name), again.weights().load(name))


def test_nothing_to_do_is_the_source_itself(tmp_path: Path) -> None:
    source = source_of(tmp_path / "model", qwen())
    assert change(source) is source


def test_a_family_that_cannot_carry_a_rotation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CometError, match="cannot carry a rotation"):
        change(source_of(tmp_path / "model", gemma()), rotate="residual")


def test_gemma_norms_are_smoothed_with_their_offset(tmp_path: Path) -> None:
    source = source_of(tmp_path / "model", gemma())
    before, after = logits(source), logits(change(source, smooth="smoothquant"))
    assert float((after - before).norm() / before.norm()) < 1e-3
