"""activations.share: token. Scales are integer multiples of one number a token and of one base a weight row."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comet_core.calibrate import _share
from comet_core.calibration import load_calibration
from comet_core.descent import descend
from comet_core.fused_linear import W4AxTiled, fuse
from comet_core.inspection import inspect_packed
from comet_core.integrations.compressed_tensors import export
from comet_core.linear import W4AxLinear
from comet_core.pack import pack
from comet_core.packed import load_packed, read_manifest
from comet_core.plan import block_error
from comet_core.progress import SilentProgress
from comet_core.quantize import QuantizedWeight, quantize_gptq, quantize_rtn
from comet_core.recipe import ActivationSpec, WeightSpec, load_recipe, recipe_from_dict
from comet_core.safetensors_files import read_header
from comet_core.tune import _TrainableLinear
from comet_cuda.affine import split_blocks
from comet_cuda.errors import CometError
from comet_cuda.int4 import SYMMETRIC_ZERO, unpack_nibbles
from comet_cuda.prepared_linear import prepare_linear
from comet_cuda.quantize_act import TOKEN, quantize_act
from comet_cuda.quantize_act_cuda import quantize_act_tiled
from comet_cuda.quantize_token_ref import MOST_CHANNELS, first_blocks, quantize_by_token
from comet_cuda.w4ax_gemm_integer import IntegerWeight
from comet_cuda.weight_grid import MOST_MULTIPLE, choose_base, choose_grid, most_multiple, scale_fault, snap_scale


def rows_of(seed: int, rows: int, blocks: int, spread: float) -> Tensor:
    """f32 [rows, blocks, 128]: blocks and rows of very different size, one-sided blocks, rows and blocks of zeros."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, blocks, 128, generator=generator)
    w *= torch.exp2(spread * torch.randn(rows, 1, 1, generator=generator))
    w *= torch.exp2(spread / 3 * torch.randn(rows, blocks, 1, generator=generator))
    w[0] = 0
    w[-1, 0] = 0
    w[1, -1] = w[1, -1].abs()
    return w.clamp(-(2.0**100), 2.0**100)  # finite, as weights are


def check(weight: QuantizedWeight) -> Tensor:
    """The multiples, int64 [N, NB], after everything that integer sums rely on was looked at."""
    assert weight.base is not None and weight.base.dtype == torch.bfloat16 == weight.scale.dtype
    assert scale_fault(weight.scale, weight.base, weight.zero) is None
    multiple = weight.scale.double() / weight.base.double()[:, None]
    assert torch.equal(multiple, multiple.round()) and multiple.min() >= 1 and multiple.max() <= MOST_MULTIPLE
    codes = split_blocks(unpack_nibbles(weight.qweight).long())
    zero = torch.full_like(weight.scale, SYMMETRIC_ZERO) if weight.zero is None else weight.zero
    assert int(((codes - zero.long()[..., None]) * multiple.long()[..., None]).abs().max()) <= 127
    mantissa, _ = torch.frexp(weight.base.float())
    assert torch.equal(mantissa * 16, (mantissa * 16).round())  # 4 significant bits
    return multiple.long()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), spread=st.floats(0, 40), symmetric=st.booleans(), search=st.booleans())
def test_every_rounded_weight_is_an_integer_operand(seed: int, spread: float, symmetric: bool, search: bool) -> None:
    w = rows_of(seed, 6, 3, spread)
    spec = WeightSpec(symmetric=symmetric, clip_search=search)
    weight = quantize_rtn(w, torch.ones(384), spec, integer=True)
    check(weight)
    free = quantize_rtn(w, torch.ones(384), spec)
    whole = free if not search else quantize_rtn(w, torch.ones(384), WeightSpec(symmetric=symmetric, clip_search=False))
    largest = whole.scale.float().amax(1, keepdim=True).clamp(min=1e-29)  # bases are found before anything is clipped
    assert bool((weight.scale.float() <= 1.2 * largest)[1:].all())
    error, free_error = ((q.dequantize().double() - w).square().sum() for q in (weight, free))
    if float(w.abs().amax()) < 2.0**100:  # where rows were cut off, all values are one and cost nothing by free scales
        assert float(error) <= 1.5 * float(free_error) + 1e-30  # six rows: one large one decides; 1.31 seen


@pytest.mark.parametrize("symmetric", [True, False])
def test_without_a_search_no_weight_is_clipped(symmetric: bool) -> None:
    """A multiple of the base reaches every block's range, but for what rounding it to a whole number leaves out."""
    w = rows_of(3, 40, 5, 1.0)
    weight = quantize_rtn(w, torch.ones(640), WeightSpec(symmetric=symmetric, clip_search=False), integer=True)
    assert check(weight).unique().numel() > 9
    assert weight.base is not None
    steps = 0.5 if symmetric else 1.0  # a zero point is rounded too
    most = steps * weight.scale.float() + 7.6 * weight.base.float()[:, None]  # 15 codes by half a base
    assert bool(((weight.dequantize() - w).abs().amax(-1) <= most + 1e-6).all())


def problem() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(600, 384) @ (0.2 * torch.randn(384, 384) + torch.eye(384))
    return rows_of(1, 40, 3, 0.5) * 0.05, x.T @ x


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_and_descent_stay_on_the_lattice_at_little_cost(symmetric: bool) -> None:
    w, hessian = problem()
    spec = WeightSpec(symmetric=symmetric, passes=2)
    errors = {}
    for integer in (False, True):
        found = quantize_gptq(w, hessian, spec, integer=integer)
        assert found is not None
        better = descend(w, found[0], hessian, spec)
        for name, weight in (("gptq", found[0]), ("descent", better)):
            delta = (weight.dequantize() - w).flatten(1)
            errors[name, integer] = float(((delta @ hessian) * delta).sum())
            assert weight.base is None if not integer else check(weight).unique().numel() > 4
    assert errors["descent", True] < errors["gptq", True] < 1.1 * errors["gptq", False]
    assert len({errors[key] for key in errors}) == 4


def test_a_grid_is_snapped_before_its_error_is_known() -> None:
    """No multiple of the base with a zero point from it is better than the chosen one by the search's own measure."""
    w = rows_of(2, 8, 1, 0.3)[:, 0]
    base = choose_base(w[:, None] * 1.7, False)  # as if another block were wider
    grid = choose_grid(w, torch.ones(128), 4, False, True, base)
    error = (grid.values(grid.codes(w)) - w).square().sum(-1)
    for shrink in (1.0, 0.9, 0.75):
        low, high = (w.amin(-1).clamp(max=0) * shrink, w.amax(-1).clamp(min=0) * shrink)
        near = ((high - low) / 15 / base).round().clamp(1, 15) * base
        zero = (-low / near).round().clamp(0, 15)
        scale = snap_scale(near, base, zero)
        other = ((w / scale[:, None]).round() + zero[:, None]).clamp(0, 15)
        assert bool((error <= ((other - zero[:, None]) * scale[:, None] - w).square().sum(-1) + 1e-6).all())


def test_bounds_of_multiples() -> None:
    zero = torch.arange(16.0)
    most = most_multiple(zero)
    assert most.tolist() == [8, 9, 9, 10, 11, 12, 14, 15, 15, 14, 12, 11, 10, 9, 9, 8]
    assert bool((most * torch.maximum(zero, 15 - zero) <= 127).all())


FAULTS = {
    "no multiple": lambda scale, base, zero: scale.__setitem__((2, 1), scale[2, 1] * 1.5),
    "2\\^-100": lambda scale, base, zero: base.__setitem__(3, float("inf")),
    "significant bits": lambda scale, base, zero: base.__setitem__(0, base[0] * 1.0625),
    "exceed 8 bits": lambda scale, base, zero: zero.__setitem__((1, 0), 15),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_scales_off_the_lattice_are_named(fault: str) -> None:
    base = torch.full((4,), 0.25, dtype=torch.bfloat16)
    scale = base[:, None] * torch.tensor([[9, 15], [15, 3], [4, 11], [1, 2]], dtype=torch.bfloat16)
    zero = torch.full((4, 2), 7, dtype=torch.uint8)
    assert scale_fault(scale, base, zero) is None
    FAULTS[fault](scale, base, zero)
    assert fault.replace("\\", "").split()[0] in str(scale_fault(scale, base, zero))


def test_activations_go_through_the_canonical_op() -> None:
    torch.manual_seed(1)
    x, bits = torch.randn(700, 5 * 128 - 9), torch.tensor([8, 8, 4, 4, 4], dtype=torch.uint8)
    x[:, :128] *= 20
    perm, clip = torch.randperm(631).int(), torch.tensor([1.0, 1.0, 0.9, 0.8, 0.9])
    codes, scale = quantize_act(x, perm, bits, clip, True, TOKEN)
    wanted, token, multiple = quantize_by_token(x, perm, first_blocks(5, 2, x.device), clip, True)
    assert torch.equal(codes, wanted) and torch.equal(scale, token[:, None] * multiple)
    with pytest.raises(CometError, match="8-bit blocks do not come first"):
        quantize_act(x, perm, bits.flip(0), clip, True, TOKEN)
    with pytest.raises(CometError, match="share=2"):
        quantize_act(x, perm, bits, clip, True, 2)


def test_plans_judge_blocks_by_scales_of_their_own() -> None:
    torch.manual_seed(2)
    x, grams = torch.randn(50, 256), torch.eye(128).expand(2, 128, 128)
    x[:, :128] *= 1000  # as INT4 they would leave the others one multiple
    perm = torch.arange(256, dtype=torch.int32)
    alone, tied = (block_error(x, grams, perm, 4, ActivationSpec(share=share)) for share in (1, "token"))
    assert torch.equal(alone, tied)


@pytest.fixture(scope="module")
def made(put_through: Any, llama_config: Any) -> Any:
    config = llama_config(hidden_size=384, intermediate_size=576, num_attention_heads=6, attention_bias=True)
    return put_through(config, "w4a4kv4", {"model.layers.0.self_attn.q_proj.weight": 3.0})


def test_a_packed_model_holds_and_shows_it(made: Any) -> None:
    packed = load_packed(made.packed, verify=True)
    linears = [m for m in packed.model.modules() if isinstance(m, W4AxLinear)]
    assert len(linears) == 14 and {linear.share for linear in linears} == {TOKEN}
    for linear in linears:
        check(QuantizedWeight(linear.qweight, linear.w_scale, linear.w_zero, linear.weight_base))
    assert any(int((linear.block_bits == 8).sum()) for linear in linears)
    found = inspect_packed(made.packed)
    assert {row["share"] for row in found["linears"]} == {"token"}
    paths = {(row["gpu"].split()[0], row["op"]): row for row in found["paths"]}
    assert "int32" in paths["sm_90", "w4ax_gemm"]["why"]
    assert paths["sm_80", "quantize_act"]["path"] == "sm_80" and "one a token" in paths["sm_80", "quantize_act"]["why"]
    assert json.loads((made.packed / "comet.json").read_text())["format_version"] == 3


def test_the_reference_computes_with_integers_over_all_of_k(made: Any) -> None:
    """y = S * base * (integer sum over all of K), the form that the GEMM for integer scales relies on."""
    linear = load_packed(made.packed).model.model.layers[0].mlp.down_proj
    x = torch.randn(30, linear.in_features, generator=torch.Generator().manual_seed(4))
    x[:, 5] *= 40
    eights = int((linear.block_bits == 8).sum())
    is_int8 = first_blocks(len(linear.block_bits), eights, x.device)
    codes, token, multiple = quantize_by_token(x, linear.perm, is_int8, linear.act_clip, linear.hadamard)
    wide = codes.long() * multiple.long()[..., None]
    weights = split_blocks(unpack_nibbles(linear.qweight).long()) - linear.w_zero.long()[..., None]
    assert linear.weight_base is not None
    base = linear.weight_base.double()
    weights = weights * (linear.w_scale.double() / base[:, None]).long()[..., None]
    assert int(weights.abs().max()) <= 127 and int(wide[:, eights:].abs().max()) <= 126
    total = wide.flatten(1) @ weights.flatten(1).T
    y = (token.double()[:, None] * base * total).float()
    y = y if linear.bias is None else y + linear.bias.float()
    torch.testing.assert_close(linear(x), y, rtol=1e-5, atol=1e-5)
    hopper = prepare_linear(linear.qweight, linear.w_scale, linear.w_zero, linear.inputs, "sm_90")
    assert isinstance(hopper.weight, IntegerWeight)
    torch.testing.assert_close(hopper(x, linear.bias), y, rtol=1e-6, atol=1e-6)


def test_linears_that_run_as_one_keep_a_base_a_row(made: Any) -> None:
    attention = load_packed(made.packed).model.model.layers[0].self_attn
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(6))
    together = fuse("qkv", linears, torch.float32, "sm_90")
    assert isinstance(together, W4AxTiled) and isinstance(together.prepared.weight, IntegerWeight)
    wanted = torch.cat([linear(x) for linear in linears], 1)
    torch.testing.assert_close(together.multiply(together.take(x)), wanted, rtol=1e-5, atol=1e-2)  # a bfloat16 bias
    for tokens in (0, 1, 7):
        assert together.multiply(together.take(x.repeat(2, 1)[:tokens])).shape == (tokens, wanted.shape[1])


@torch.no_grad()
def test_other_programs_read_it(made: Any, tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(60).view(2, 30)
    wanted = load_packed(made.packed).model(input_ids=tokens).logits
    model = AutoModelForCausalLM.from_pretrained(made.packed, dtype=torch.float32)
    model.save_pretrained(tmp_path / "again")
    for found in (model, load_packed(tmp_path / "again").model):
        assert torch.equal(found(input_ids=tokens).logits, wanted)
    export(made.packed, tmp_path / "ct", requantize=True)
    with safe_open(next((tmp_path / "ct").glob("*.safetensors")), "pt") as file:
        assert not [name for name in file.keys() if "base" in name]  # noqa: SIM118


def test_tuned_scales_stay_on_the_lattice(made: Any) -> None:
    linear = load_packed(made.packed).model.model.layers[1].mlp.up_proj
    trained = _TrainableLinear(linear, torch.float32, codes=False)
    assert torch.equal(trained.stored()["w_scale"], linear.w_scale)
    with torch.no_grad():
        trained.drift.add_(0.2 * torch.randn(trained.drift.shape, generator=torch.Generator().manual_seed(0)))
    moved = trained.stored()["w_scale"]
    assert float((moved != linear.w_scale).float().mean()) > 0.3
    check(QuantizedWeight(linear.qweight, moved, linear.w_zero, linear.weight_base))
    trained.scale().sum().backward()
    assert float(trained.drift.grad.abs().min()) > 0  # rounding lets gradients pass


def test_a_folder_off_the_lattice_is_refused(made: Any, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder = tmp_path / "bad"
    shutil.copytree(made.packed, folder)
    shard = folder / "model-00001-of-00003.safetensors"
    with safe_open(shard, "pt") as file:
        tensors, notes = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    name = "model.layers.0.mlp.down_proj"
    assert read_header(shard)
    tensors[f"{name}.w_scale"][3, 1] *= 1.03125
    save_file(tensors, shard, notes)
    with pytest.raises(CometError, match=f"{name}.w_scale and weight_base: hold a scale that is no multiple"):
        load_packed(folder)
    del tensors[f"{name}.weight_base"]
    save_file(tensors, shard, notes)
    with pytest.raises(CometError, match=f"{name}.weight_base"):
        load_packed(folder)


@pytest.mark.parametrize("kind", ["calibration", "packed"])
def test_what_older_comets_wrote_is_read_or_refused_in_words(made: Any, kind: str, tmp_path: Path) -> None:
    load, name = (load_calibration, "calibration.json") if kind == "calibration" else (read_manifest, "comet.json")
    folder = shutil.copytree(getattr(made, kind), tmp_path / "old")
    content = json.loads((folder / name).read_text())

    def loaded(changed: dict[str, Any]) -> Any:
        (folder / name).write_text(json.dumps(changed))
        return load(folder)

    activations, others = content["recipe"]["activations"], {"match": "*.0.*", "activations": {"unit": False}}
    content["recipe"]["overrides"] = [others | {"blocks": {"permute": True}}]
    activations["unit"] = True  # a key of share 4
    assert loaded(content).recipe.activations.share == "token"
    entries = content["groups"] if kind == "calibration" else [*content["linears"].values()]
    for place in (activations, content["recipe"]["overrides"][0]["activations"], entries[-1]):
        before = place.get("share")
        place["share"] = 4
        with pytest.raises(CometError, match=f"{name}: activations.share 4 is no longer supported") as caught:
            loaded(content)
        assert "calibrate and pack again" in caught.value.hint
        place.pop("share") if before is None else place.update(share=before)
    assert loaded(content).recipe.overrides


@pytest.mark.parametrize("weights", [{"bits": 8}, {"group": "row"}])
def test_inputs_of_weights_that_cannot_be_multiples_keep_scales_of_their_own(
    put_through: Any, llama_config: Any, weights: dict[str, Any]
) -> None:
    recipe = recipe_from_dict({"weights": weights})
    assert recipe.for_linear("model.layers.0.mlp.down_proj").activations.share == 1
    recipe = recipe_from_dict({
        "blocks": {"int4_mac_fraction": 0.7}, "overrides": [{"match": "*.v_proj", "weights": weights}]
    })  # fmt: skip
    config = llama_config(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
    made = put_through(config, recipe)
    entries = {name.removeprefix("model.layers."): entry for name, entry in read_manifest(made.packed).linears.items()}
    assert [entries[f"1.self_attn.{name}_proj"].share for name in "qkv"] == [1, 1, 1]  # they read one input
    assert entries["1.mlp.up_proj"].share == TOKEN
    other, home = dataclasses.replace(recipe, weights=WeightSpec(**weights)), made.packed.parent
    with pytest.raises(CometError, match="_proj was calibrated for one scale a token"):
        pack(made.source, made.calibration, other, home / "other", device="cpu", progress=SilentProgress())
    assert recipe.for_linear("model.layers.0.mlp.up_proj").activations.share == "token"
    skipped = dataclasses.replace(load_recipe("w4a4kv4"), skip=("*",)).for_linear("lm_head")
    assert skipped.kept


def test_inputs_that_are_cut_or_hold_no_int4_keep_scales_of_their_own(put_through: Any, llama_config: Any) -> None:
    recipe = recipe_from_dict({
        "activations": {"share": "token"}, "blocks": {"tp_granularity": 2, "int4_mac_fraction": 0.7},
        "overrides": [{"match": "*.0.self_attn.?_proj", "activations": {"bits": 8}}],
    })  # fmt: skip
    config = llama_config(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
    entries = load_packed(put_through(config, recipe).packed).manifest.linears
    shares = {name.removeprefix("model.layers."): entry.share for name, entry in entries.items()}
    assert shares["0.self_attn.q_proj"] == 1 and shares["1.self_attn.q_proj"] == TOKEN  # 8 bit; not cut
    assert shares["0.mlp.up_proj"] == TOKEN and shares["1.mlp.down_proj"] == shares["1.self_attn.o_proj"] == 1  # cut


@pytest.mark.parametrize(("channels", "share"), [(MOST_CHANNELS, TOKEN), (MOST_CHANNELS + 1, 1)])
def test_inputs_that_integer_sums_do_not_hold_keep_scales_of_their_own(channels: int, share: int) -> None:
    measured = SimpleNamespace(
        spec=SimpleNamespace(activations=ActivationSpec(share="token")),
        choice=SimpleNamespace(segments=1),
        group=SimpleNamespace(in_channels=channels),
    )
    assert _share(measured, torch.tensor([8, 4], dtype=torch.uint8)) == share  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_computes_what_the_cpu_does(made: Any) -> None:
    layer = load_packed(made.packed).model.model.layers[0]
    x = torch.randn(30, 384, generator=torch.Generator().manual_seed(4))
    x[:, 5] *= 40
    for linear, rows in ((layer.self_attn.q_proj, x), (layer.mlp.down_proj, torch.cat((x, x), 1)[:, :576])):
        codes, scale = linear._quantize(rows)
        wanted = linear(rows)
        linear.cuda()
        on_gpu = linear._quantize(rows.cuda())  # float32: the reference
        assert torch.equal(on_gpu[0].cpu(), codes) and torch.equal(on_gpu[1].cpu(), scale)
        torch.testing.assert_close(linear(rows.cuda()).cpu(), wanted, rtol=1e-5, atol=1e-5)
        half, by_half = rows.half(), linear(rows.cuda().half())
        torch.testing.assert_close(by_half.cpu(), linear.cpu()(half), rtol=2e-3, atol=2e-3)  # rounding of the output
        for layout in ("sm_80", "portable"):  # what older GPUs run
            f = linear.inputs
            found = quantize_act_tiled(
                rows.cuda(),
                *(None if t is None else t.cuda() for t in (f.perm, f.block_bits, f.clip)),
                f.hadamard,
                layout,
                TOKEN,
            )
            wanted_tiled = quantize_act_tiled(rows, f.perm, f.block_bits, f.clip, f.hadamard, layout, TOKEN)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted_tiled, strict=True))
