"""Export to compressed-tensors: the same weights bit for bit, read by stock transformers, and what cannot be kept."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from comet_core.integrations.compressed_tensors import export
from comet_core.linear import W4AxLinear
from comet_core.packed import load_packed
from comet_core.recipe import load_recipe
from comet_cuda.errors import CometError
from comet_cuda.w4ax_gemm import weight_integers

if TYPE_CHECKING:
    from conftest import Packed


@pytest.fixture(scope="module")
def weight_only(put_through: Callable[..., "Packed"], llama_config: Callable[..., Any]) -> "Packed":
    """W4A16, asymmetric, gathered and folded permutations, widths 128 and 320 (groups of 128 and 64), biases."""
    return put_through(llama_config(attention_bias=True), "w4a16")


@pytest.fixture(scope="module")
def exported(weight_only: "Packed", tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "ct"
    done = export(weight_only.packed, out)
    assert not done.requantized and not done.left_out and len(done.exact) == 14
    assert done.bytes == sum(file.stat().st_size for file in out.iterdir())
    return out


def stored(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def scheme_of(folder: Path, name: str) -> dict[str, Any]:
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    found = [group for group in groups if name in group["targets"]]
    assert len(found) == 1
    return dict(found[0]["weights"])


def decoded(tensors: dict[str, torch.Tensor], name: str, scheme: dict[str, Any]) -> torch.Tensor:
    """The format read by the letter, one weight at a time where it matters: f32 [N, K]."""
    rows, width = tensors[f"{name}.weight_shape"].tolist()
    words, scale = tensors[f"{name}.weight_packed"].long(), tensors[f"{name}.weight_scale"].float()
    zeros = tensors.get(f"{name}.weight_zero_point")
    weight = torch.empty(rows, width)
    group_of = tensors.get(f"{name}.weight_g_idx", torch.arange(width) // scheme["group_size"])
    for k in range(width):
        code = (words[:, k // 8] >> (4 * (k % 8))) & 15
        g = int(group_of[k])
        n = torch.arange(rows)
        zero = torch.full((rows,), 8) if zeros is None else (zeros.long()[n // 8, g] >> (4 * (n % 8))) & 15
        weight[:, k] = (code - zero) * scale[:, g]
    return weight


def weight_of(linear: W4AxLinear) -> torch.Tensor:
    """What a weight-only linear multiplies by, in the model's channel order."""
    weight = (weight_integers(linear.qweight, linear.w_zero) * linear.w_scale.float()[..., None]).flatten(1)
    weight = weight[:, : linear.in_features]
    return weight if linear.perm is None else weight[:, linear.perm.long().argsort()]


def test_weights_are_the_packed_ones(weight_only: "Packed", exported: Path) -> None:
    model, tensors = load_packed(weight_only.packed).model, stored(exported)
    orders, sizes = set(), set()
    for name, linear in model.named_modules():
        if isinstance(linear, W4AxLinear):
            scheme = scheme_of(exported, name)
            orders.add(scheme["actorder"])
            sizes.add(scheme["group_size"])
            assert torch.equal(decoded(tensors, name, scheme), weight_of(linear))
            assert (f"{name}.weight_g_idx" in tensors) == (linear.perm is not None)
    assert (orders, sizes) == ({None, "group"}, {64, 128})
    config = json.loads((exported / "config.json").read_text())
    assert "experts_implementation" not in config
    assert "lm_head" in config["quantization_config"]["ignore"]


@pytest.mark.parametrize("symmetric", [False, True])
def test_rotated_weights_are_refused_or_rounded_anew_at_a_stated_loss(
    put_through: Callable[..., "Packed"], llama_config: Callable[..., Any], symmetric: bool, tmp_path: Path
) -> None:
    recipe = load_recipe("w4a4kv4")
    made = put_through(llama_config(), replace(recipe, weights=replace(recipe.weights, symmetric=symmetric)))
    with pytest.raises(CometError, match="stored rotated"):
        export(made.packed, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    done = export(made.packed, tmp_path / "anew", requantize=True)
    assert any("activations" in words for words in done.left_out) and any("KV" in words for words in done.left_out)
    tensors, model = stored(tmp_path / "anew"), load_packed(made.packed).model
    for name in (name for name in done.requantized if "q_proj" in name or "up_proj" in name):
        exact = rotated_weight(model.get_submodule(name))
        error = (decoded(tensors, name, scheme_of(tmp_path / "anew", name)) - exact).norm() / exact.norm()
        assert 0.01 < error < 0.2
        assert done.requantized[name] == pytest.approx(float(error), rel=1e-3)


def test_contiguous_groups_round_gathered_linears_anew_and_keep_the_others(
    weight_only: "Packed", tmp_path: Path
) -> None:
    done = export(weight_only.packed, tmp_path / "ct", contiguous=True)
    tensors, model = stored(tmp_path / "ct"), load_packed(weight_only.packed).model
    assert not any(name.endswith("g_idx") for name in tensors)
    assert sorted(done.exact) == [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    for name, error in done.requantized.items():
        exact = weight_of(model.get_submodule(name))
        found = decoded(tensors, name, scheme_of(tmp_path / "ct", name))
        assert float((found - exact).norm() / exact.norm()) == pytest.approx(error, rel=1e-3)
        assert 0 <= error < 0.2  # a single group of 128 is found again exactly


@pytest.fixture(scope="module")
def default_packed(tiny: "Packed") -> "Packed":
    """W4A4 with INT8 blocks: rotated, clipped, asymmetric."""
    return tiny


@pytest.mark.parametrize(("bits", "lost"), [(8, "all have 8 bits"), (4, "all activations have 4 bits")])
def test_activations_of_one_width_are_told_to_readers_and_what_they_lose_to_the_user(
    default_packed: "Packed", tmp_path: Path, bits: int, lost: str
) -> None:
    done = export(default_packed.packed, tmp_path / "ct", activations=bits, requantize=True)
    assert any(lost in words for words in done.left_out) and any("clipped at 0.9" in words for words in done.left_out)
    assert any("linear_backend=humming" in words for words in done.left_out)
    assert not done.reordered
    tensors, model = stored(tmp_path / "ct"), load_packed(default_packed.packed).model
    groups = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["config_groups"]
    for group in groups.values():
        assert group["input_activations"] == {
            "num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "dynamic": True,
            "group_size": group["weights"]["group_size"],
        }  # fmt: skip
        assert group["weights"]["symmetric"] and group["weights"]["actorder"] is None
    name = "model.layers.0.self_attn.q_proj"
    exact = rotated_weight(model.get_submodule(name))
    error = (decoded(tensors, name, scheme_of(tmp_path / "ct", name)) - exact).norm() / exact.norm()
    assert done.requantized[name] == pytest.approx(float(error), rel=1e-3)
    assert 0.01 < error < 0.2


def test_asymmetric_weights_are_not_rounded_anew_without_a_word(weight_only: "Packed", tmp_path: Path) -> None:
    with pytest.raises(CometError, match="asymmetric weights, which readers of W4A8 do not take"):
        export(weight_only.packed, tmp_path / "ct", activations=8)
    with pytest.raises(CometError, match="5-bit activations"):
        export(weight_only.packed, tmp_path / "ct", activations=5)
    assert not (tmp_path / "ct").exists()


def test_symmetric_weights_have_no_zero_points(weight_only: "Packed", tmp_path: Path) -> None:
    done = export(weight_only.packed, tmp_path / "ct", symmetric=True)
    assert not any(name.endswith("zero_point") for name in stored(tmp_path / "ct"))
    assert not done.asymmetric and not done.exact and all(0.01 < error < 0.2 for error in done.requantized.values())


def rotated_weight(linear: Any) -> torch.Tensor:
    """The real weight of a linear whose INT4 blocks are rotated, by an explicit Hadamard matrix."""
    hadamard = torch.ones(1, 1)
    for _ in range(7):
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    blocks = weight_integers(linear.qweight, linear.w_zero) * linear.w_scale.float()[..., None]
    for b, bits in enumerate(linear.block_bits.tolist()):
        if bits == 4:
            blocks[:, b] = blocks[:, b] @ (hadamard / 128**0.5)
    weight = blocks.flatten(1)[:, : linear.in_features]
    return weight if linear.perm is None else weight[:, linear.perm.long().argsort()]


def test_eight_bit_parts_become_sixteen_bit(
    put_through: Callable[..., "Packed"], llama_config: Callable[..., Any], tmp_path: Path
) -> None:
    recipe = replace(load_recipe("w4a16"), embedding_bits=8, lm_head_bits=8)
    made = put_through(llama_config(), recipe)
    done = export(made.packed, tmp_path / "ct")
    assert done.left_out == ["8-bit embedding or head: written in 16 bit"]
    tensors, model = stored(tmp_path / "ct"), load_packed(made.packed, dtype=torch.bfloat16).model
    assert torch.equal(tensors["model.embed_tokens.weight"], model.get_input_embeddings()(torch.arange(257)))
    assert tensors["lm_head.weight"].shape == (257, 128)


def test_command(weight_only: "Packed", tmp_path: Path) -> None:
    from comet_cli import main

    done = CliRunner().invoke(main.app, ["export", str(weight_only.packed), "--out", str(tmp_path / "x"), "--json"])
    assert done.exit_code == 0 and len(json.loads(done.stdout)["exact"]) == 14
    again = CliRunner().invoke(main.app, ["export", str(weight_only.packed), "--out", str(tmp_path / "x")])
    assert again.exit_code == 2 and "not empty" in again.stderr
    assert CliRunner().invoke(main.app, ["export", str(weight_only.packed), "--format", "gguf"]).exit_code == 2


LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(40)[None]).logits
    torch.save(logits, folder + ".logits.pt")
assert "comet_core" not in sys.modules
"""


def stock_logits(*folders: Path) -> list[torch.Tensor]:
    """Logits of 40 tokens from transformers alone, in a process without COMET."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (pip install compressed-tensors)")
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOAD, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [torch.load(f"{folder}.logits.pt") for folder in folders]


def reads_channel_order() -> bool:
    """Whether the compressed-tensors that is installed reads weight_g_idx."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return tuple(map(int, version("compressed-tensors").split(".")[:2])) < (0, 18)
    except PackageNotFoundError:
        return True  # the test skips for that


def by_hand(packed: Path, folder: Path, bits: int) -> torch.Tensor:
    """Logits of a packed model whose linears multiply what `folder` holds, inputs rounded in groups by the letter."""
    model: Any = load_packed(packed).model
    model.set_attn_implementation("sdpa")
    tensors = stored(folder)
    for name in [name for name, linear in model.named_modules() if isinstance(linear, W4AxLinear)]:
        scheme = scheme_of(folder, name)
        weight, size = decoded(tensors, name, scheme), scheme["group_size"]
        plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=f"{name}.bias" in tensors)
        plain.weight.data = weight
        if plain.bias is not None:
            plain.bias.data = tensors[f"{name}.bias"].float()

        def rounded(_: Any, inputs: tuple[torch.Tensor], size: int = size) -> tuple[torch.Tensor]:
            x = inputs[0].unflatten(-1, (-1, size))
            scale = x.abs().amax(-1, keepdim=True) / (2**bits - 1) * 2
            return ((x / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).mul(scale).flatten(-2),)

        if bits < 16:
            plain.register_forward_pre_hook(rounded)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, plain)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(40)[None]).logits
    return logits


def contiguous(packed: Path, out: Path, bits: int) -> Path:
    """An export without a channel order; newer readers load no zero points either."""
    newer = not reads_channel_order()
    export(packed, out, activations=bits, requantize=True, contiguous=True, symmetric=newer)
    return out


def agrees(theirs: torch.Tensor, packed: Path, folder: Path, bits: int) -> None:
    """A reader's logits against `by_hand`; against rounded inputs much more than against unrounded ones."""
    ours, plain = by_hand(packed, folder, bits), by_hand(packed, folder, 16)
    assert torch.allclose(theirs, ours, atol=1e-4 if bits == 16 else 2e-2)
    assert bits == 16 or (theirs - ours).abs().mean() < 0.1 * (theirs - plain).abs().mean()


def test_stock_transformers_gives_our_logits(
    weight_only: "Packed", default_packed: "Packed", exported: Path, tmp_path: Path
) -> None:
    """With a channel order, where the compressed-tensors that is installed reads one; with contiguous groups, inputs of
    16 bits and 4. All in one process: what takes long is starting it."""
    folders = {bits: contiguous(default_packed.packed, tmp_path / str(bits), bits) for bits in (16, 4)}
    ordered = [exported] if reads_channel_order() else []
    found = stock_logits(*folders.values(), *ordered)
    for (bits, folder), theirs in zip(folders.items(), found, strict=False):
        agrees(theirs, default_packed.packed, folder, bits)
    if ordered:
        with torch.no_grad():
            ours = load_packed(weight_only.packed).model(input_ids=torch.arange(40)[None]).logits
        assert torch.allclose(found[-1], ours, atol=1e-4)


@pytest.mark.slow
def test_stock_transformers_rounds_activations_to_8_bits(default_packed: "Packed", tmp_path: Path) -> None:
    folder = contiguous(default_packed.packed, tmp_path / "8", 8)
    agrees(stock_logits(folder)[0], default_packed.packed, folder, 8)
