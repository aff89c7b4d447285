"""Mixtures of experts: taken apart, calibrated, packed and opened as any other model, router in 16 bit."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comet_core.calibration import load_calibration
from comet_core.decoder import Decoder, layer_linears, load_sixteen, run_layer
from comet_core.experts import Experts, expert_of, list_experts
from comet_core.hidden import HiddenStates
from comet_core.lanes import Copies, Lanes
from comet_core.model_source import resolve_model
from comet_core.packed import load_packed, read_manifest
from comet_core.preflight import packed_bytes
from comet_core.recipe import load_recipe
from comet_core.shards import read_shard
from comet_core.windows import OutputMemo, Sixteen, Windows, sixteen_layer
from comet_cuda.errors import CometError

EXPERTS, LONELY = 6, 3  # expert 3 of layer 1 gets no token
TOKENS = torch.arange(48).view(2, 24) % 251


def config(kind: str) -> Any:
    """A small config of a family with six experts, two of them for each token."""
    import transformers as tf

    shape = {
        "vocab_size": 257, "hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None,
        "eos_token_id": 256, "pad_token_id": None,
    }  # fmt: skip
    if kind == "mixtral":
        return tf.MixtralConfig(**shape, num_local_experts=EXPERTS)
    if kind == "phimoe":
        return tf.PhimoeConfig(**shape, num_local_experts=EXPERTS)
    shape |= {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
    if kind == "deepseek_v3":
        return tf.DeepseekV3Config(
            **shape, n_routed_experts=EXPERTS, n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16,
            q_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32,
        )  # fmt: skip
    if kind == "qwen2_moe":
        return tf.Qwen2MoeConfig(**shape, num_experts=EXPERTS, shared_expert_intermediate_size=160)
    return tf.Qwen3MoeConfig(**shape, num_experts=EXPERTS, head_dim=32)


def routed(model: Any) -> None:
    """Routers that decide; in the last layer one that never takes expert 3: of each other pair one is ahead of it."""
    for name, value in model.state_dict().items():
        if ("gate.weight" in name and value.shape[0] == EXPERTS) or "router.weight" in name:
            value.normal_()
            if ".1." in name:
                value[LONELY] = 0
                value[0], value[4] = -value[1], -value[5]
        elif name.endswith("e_score_correction_bias"):
            value.normal_(std=0.01)


@pytest.fixture(scope="module", params=["mixtral", "qwen2_moe"])
def mixture(request: pytest.FixtureRequest, put_through: Callable[..., Any]) -> Any:
    """A random mixture in several shards, as on the hub, calibrated and packed."""
    return put_through(config(request.param), change=routed, max_shard_size="200KB")


def logits(model: Any) -> Tensor:
    """The last token's logits."""
    with torch.no_grad():
        found: Tensor = model(input_ids=TOKENS, use_cache=False).logits[:, -1].float()
    return found


@pytest.mark.parametrize("hub_names", [True, False])
@pytest.mark.parametrize("kind", ["mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_separate_experts_compute_what_the_stack_computes(tmp_path: Path, kind: str, hub_names: bool) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(kind), dtype=torch.float32).eval()
    with torch.no_grad():
        routed(model)
    model.save_pretrained(tmp_path, max_shard_size="200KB", save_original_format=hub_names)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    mine = load_sixteen(resolve_model(str(tmp_path)), "cpu", torch.float32)
    assert any(isinstance(module, Experts) for module in mine.modules())
    torch.testing.assert_close(logits(mine), logits(model), rtol=0, atol=1e-6)
    assert float(logits(model).std()) > 0.01, "logits near zero would agree with anything"


def test_every_expert_is_packed_and_every_router_stays(mixture: Any) -> None:
    manifest = read_manifest(mixture.packed)
    for layer in range(2):
        for expert in range(EXPERTS):
            for part in ("gate_proj", "up_proj", "down_proj"):
                entry = manifest.linears[f"model.layers.{layer}.mlp.experts.{expert}.{part}"]
                assert entry.weight_bits == 4 and entry.folded == (part == "down_proj")
    tensors, _ = read_shard(mixture.packed / "model-00001-of-00003.safetensors")
    stored = {name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16 and name.endswith(".weight")}
    assert "model.layers.0.mlp.gate.weight" in stored and not any(".experts." in name for name in stored)
    assert ("model.layers.0.mlp.shared_expert_gate.weight" in stored) == ("shared" in str(list(tensors)))
    size = sum(file.stat().st_size for file in mixture.packed.glob("*.safetensors"))
    assert 0.85 < packed_bytes(mixture.source, mixture.recipe) / size <= 1  # many small tensors: headers count


def test_transformers_and_comet_open_the_same_model(mixture: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    import comet_core  # noqa: F401 - teaches transformers the format

    mine = load_packed(mixture.packed, verify=True).model
    theirs = AutoModelForCausalLM.from_pretrained(mixture.packed, dtype=torch.float32)
    assert torch.equal(logits(mine), logits(theirs))
    whole = logits(load_sixteen(mixture.source, "cpu", torch.float32))
    assert 0 < float((logits(mine) - whole).norm() / whole.norm()) < 0.4
    theirs.save_pretrained(tmp_path)
    assert torch.equal(logits(load_packed(tmp_path, verify=True).model), logits(mine))


class Talk:
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Any]:
        from comet_core.progress import SilentProgress

        with SilentProgress().task(description, total) as task:
            yield task

    def log(self, message: str) -> None:
        self.said.append(message)


def test_an_expert_without_tokens_is_named_and_rounded(mixture: Any, tmp_path: Path) -> None:
    from comet_core.calibrate import calibrate

    talk = Talk()
    calibrate(mixture.source, mixture.recipe, tmp_path / "calibration", device="cpu", progress=talk)
    warnings = [line for line in talk.said if "no token" in line]
    assert len(warnings) == 1 and warnings[0].startswith(f"warning: model.layers.1.mlp.experts {LONELY}: ")
    info = mixture.pack(tmp_path / "packed")
    where = f"model.layers.1.mlp.experts {LONELY}: calibration sent no token there; "
    assert [line for line in info.warnings if line.startswith(where)]
    assert not [line for line in info.warnings if "layers.0" in line]
    notes = {note["linear"]: note for note in read_manifest(tmp_path / "packed").layers}
    methods = {}
    for name, note in notes.items():
        if (found := expert_of(name)) and ".1." in found[0]:
            methods.setdefault(found[1], set()).add(note["method"])
    assert notes[f"model.layers.1.mlp.experts.{LONELY}.up_proj"]["relative_output_error"] == {}  # nobody saw an output
    assert methods[LONELY] == {"rtn"} and "gptq" in methods[0] | methods[1]
    linear = load_packed(tmp_path / "packed").model.get_submodule(f"model.layers.1.mlp.experts.{LONELY}.down_proj")
    assert set(linear.block_bits.tolist()) == {8}  # nothing is known of its outliers


def test_the_share_of_four_bits_counts_multiply_adds_that_happen(mixture: Any) -> None:
    found = load_calibration(mixture.calibration)
    tokens = found.tokens.numel()
    reach: dict[tuple[int, int], float] = {}
    model = load_sixteen(mixture.source, "cpu", torch.float32)
    for layer in range(2):

        def see(_: nn.Module, args: tuple[Tensor, ...], layer: int = layer) -> None:
            counts = args[1].flatten().bincount(minlength=EXPERTS)
            reach.update({(layer, expert): int(count) / tokens for expert, count in enumerate(counts)})

        model.get_submodule(f"model.layers.{layer}.mlp.experts").register_forward_pre_hook(see)
    with torch.no_grad():
        model(input_ids=found.tokens, use_cache=False)
    assert reach[1, LONELY] == 0 and sum(reach.values()) == pytest.approx(4)
    four = everything = 0.0
    for item in found.groups:
        inside = expert_of(item.group.names[0])
        share = reach[item.layer, inside[1]] if inside else 1.0
        bits = item.plan.block_bits.repeat_interleave(128)[: item.group.in_channels]
        four += int((bits == 4).sum()) * item.group.out_rows * share
        everything += item.group.in_channels * item.group.out_rows * share
    assert found.int4_mac_fraction == pytest.approx(four / everything, abs=1e-3)
    assert four / everything > 0.83


def _layer_windows(source: Any, sixteen: bool) -> tuple[nn.Module, Windows, HiddenStates]:
    """The last layer, materialized, and windows of hidden states that enter it; in the 16-bit model other ones."""
    decoder = Decoder(source, device="cpu", dtype=torch.float32)
    decoder.load_non_layers()
    tokens = torch.arange(5 * 24).view(5, 24) % 251
    states, call = decoder.first_hidden(tokens), decoder.calls(tokens)[1]
    layer = decoder.load_layer(1)
    hidden = HiddenStates((5, 24, decoder.width), dtype=torch.float32, device=torch.device("cpu"))
    hidden.write(0, 5, states)
    other = hidden.copy()
    other.write(0, 5, states + 0.5 * torch.randn(states.shape, generator=torch.Generator().manual_seed(1)))
    lanes = Lanes.of("cpu")
    twin = Sixteen(other, Copies(lanes, sixteen_layer(layer, "sdpa")), [OutputMemo()]) if sixteen else None
    return layer, Windows(lanes, Copies(lanes, layer), hidden, [{5: call}], 5, [OutputMemo()], twin), other


def _seen(layer: nn.Module, name: str, windows: Windows, hidden: HiddenStates) -> Tensor:
    """What enters the linear when the layer runs as it is."""
    seen: list[Tensor] = []
    handle = layer.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        run_layer(layer, hidden.read(0, 5), windows.calls[0][5])
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("part", ["up_proj", "down_proj"])
@torch.no_grad()
def test_rows_of_an_expert_are_those_of_its_tokens(mixture: Any, part: str) -> None:
    layer, windows, other = _layer_windows(mixture.source, sixteen=True)
    name = f"mlp.experts.1.{part}"
    rows = list(windows.rows(name, 5, follow=True))
    own = _seen(layer, name, windows, windows.hidden)
    order = lambda x: x[x[:, 0].argsort()]  # noqa: E731 - rows come by held-out windows, the layer's by token
    together = torch.cat([row.own for row in rows])
    torch.testing.assert_close(order(together), order(own), rtol=0, atol=1e-5)
    assert {row.held_out for row in rows} == {True, False}
    assert 0 < sum(int(row.first.sum()) for row in rows) <= 5
    whole = _seen(layer, "mlp.experts.1.up_proj", windows, other)  # where the other model routes its own tokens
    wanted = torch.cat([row.wanted for row in rows])
    assert wanted.shape == together.shape and not torch.allclose(wanted, together)
    assert len(whole) != len(wanted), "both models route alike, so this test shows nothing"
    assert not list(windows.rows(f"mlp.experts.{LONELY}.{part}", 5, follow=True))


@torch.no_grad()
def test_a_shared_expert_sees_every_token(mixture: Any) -> None:
    layer, windows, _ = _layer_windows(mixture.source, sixteen=False)
    name = max(layer_linears(layer), key=lambda name: ("shared" in name, name == "self_attn.q_proj"))
    rows = list(windows.rows(name, 5, follow=False))
    own = _seen(layer, name, windows, windows.hidden).flatten(0, -2)
    assert torch.equal(torch.cat([row.own for row in rows]), own) and len(own) == 5 * 24
    assert [int(row.first.sum()) for row in rows] == [1] * 5 and all(bool(row.first[0]) for row in rows)


def test_packing_goes_on_inside_a_mixture(mixture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import comet_core.pack_job as job

    recipe = replace(mixture.recipe, weights=replace(mixture.recipe.weights, target="sixteen", inputs="quantized"))
    mixture.pack(tmp_path / "whole", recipe)
    write = job.write_checked_shard

    def stop_after_one(path: Path, *rest: Any) -> Any:
        if "00001-of" not in path.name:
            raise KeyboardInterrupt
        return write(path, *rest)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(job, "write_checked_shard", stop_after_one)
        mixture.pack(tmp_path / "again", recipe)
    mixture.pack(tmp_path / "again", recipe)
    for file in sorted((tmp_path / "whole").iterdir()):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_an_expert_that_is_kept_opens_everywhere(put_through: Callable[..., Any]) -> None:
    from transformers import AutoModelForCausalLM

    recipe = load_recipe("w4a4kv4")
    recipe = replace(recipe, skip=("*.experts.1.*",), blocks=replace(recipe.blocks, int4_mac_fraction=0.5))
    made = put_through(config("qwen3_moe"), recipe, change=routed)
    model = AutoModelForCausalLM.from_pretrained(made.packed, dtype=torch.float32)
    assert isinstance(model.get_submodule("model.layers.0.mlp.experts.1.up_proj"), nn.Linear)
    assert torch.equal(logits(model), logits(load_packed(made.packed).model))


def test_a_router_with_a_bias_keeps_it(put_through: Callable[..., Any]) -> None:
    from transformers import AutoModelForCausalLM

    made = put_through(config("deepseek_v3"), change=routed)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    opened = [load_packed(made.packed).model, AutoModelForCausalLM.from_pretrained(made.packed, dtype=torch.float32)]
    bias = made.source.weights().load(name)
    assert bias.abs().max() > 0
    assert all(torch.equal(model.get_buffer(name), bias) for model in opened)
    assert torch.equal(*map(logits, opened))


def test_a_report_gives_the_experts_of_a_layer_one_row(mixture: Any, tmp_path: Path) -> None:
    from comet_core.report import write_report

    write_report(mixture.packed, tmp_path / "report.html", [], tmp_path / "tables")
    rows = (tmp_path / "tables" / "linears.csv").read_text().splitlines()
    mine = [row for row in rows if row.startswith("model.layers.1.mlp.experts.")]
    assert [row.split(",")[0].rpartition(".")[2] for row in mine] == ["down_proj", "gate_proj", "up_proj"]
    assert all(".experts.*." in row and "gptq" in row and "rtn" in row for row in mine)


def test_what_does_not_know_experts_says_so(mixture: Any, tmp_path: Path) -> None:
    from comet_core.integrations.compressed_tensors import export
    from comet_core.progress import SilentProgress
    from comet_core.recipe import TransformSpec
    from comet_core.transform import transformed

    with pytest.raises(CometError, match=r"experts\.0\.\w+: is part of an expert"):
        export(mixture.packed, tmp_path / "out", requantize=True)
    for change in ({"rotate": "residual"}, {"smooth": "awq"}, {"clip": "learned"}):
        with pytest.raises(CometError, match=f"transform.{next(iter(change))} is .*mixtures of experts"):
            transformed(
                mixture.source, TransformSpec(**change), TOKENS, device="cpu", dtype=torch.float32,
                progress=SilentProgress(),
            )  # fmt: skip


def test_a_stack_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config("mixtral")).save_pretrained(tmp_path, save_original_format=False)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for damaged in (tensors[name][:, 1:], tensors[name][:-1], tensors[name][:, :, 1:], tensors[name][:, :-2]):
        save_file(tensors | {name: damaged.contiguous()}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CometError, match=r"model\.layers\.1\.mlp\.experts\.\d\.\w+"):
            resolve_model(str(tmp_path))


def test_names_of_experts() -> None:
    assert expert_of("model.layers.3.mlp.experts.12.up_proj") == ("model.layers.3.mlp.experts", 12)
    assert expert_of("mlp.shared_expert.up_proj") is None and expert_of("model.layers.3.mlp.gate") is None
    names = ["a.experts.10.up_proj", "a.experts.2.down_proj", "a.experts.2.up_proj", "b.experts.1.up_proj", "b.o_proj"]
    assert list_experts(names) == ["a.experts 2, 10", "b.experts 1"]


def test_layer_linears_leave_a_gate_of_one_row_alone() -> None:
    layer = nn.ModuleDict({"up": nn.Linear(8, 4), "gate": nn.Linear(8, 1)})
    assert list(layer_linears(layer)) == ["up"]


def test_the_manifest_is_json_of_finite_numbers(mixture: Any) -> None:
    json.loads((mixture.packed / "comet.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    json.loads((mixture.calibration / "calibration.json").read_text(), parse_constant=lambda word: pytest.fail(word))
