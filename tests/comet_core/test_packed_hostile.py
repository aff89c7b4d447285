"""Every kind of damage to a packed folder or a calibration ends in a CometError that names the thing and a remedy."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from comet_cuda.errors import CometError

SHARD = "model-00001-of-00003.safetensors"
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    """A packed folder to harm."""
    return Path(shutil.copytree(tiny.packed, tmp_path / "packed"))


def refused(folder: Path, *words: str, verify: bool = False) -> None:
    """load_packed must raise CometError whose message holds the words, with a hint."""
    from comet_core.packed import load_packed

    with pytest.raises(CometError) as error:
        load_packed(folder, verify=verify)
    assert all(word in error.value.message for word in words), error.value.message
    assert error.value.hint


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_shard(folder: Path, change: Callable[[dict[str, Tensor]], Any], shard: str = SHARD) -> None:
    """Change tensors of a shard; the manifest's list follows, as an attacker or a wrong tool would have it."""
    from safetensors.torch import save_file

    from comet_core.shards import read_shard, tensor_sha256

    tensors, _ = read_shard(folder / shard)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    before = set(tensors)
    change(tensors)
    save_file(tensors, folder / shard)

    def follow(manifest: Any) -> None:
        for name in before - set(tensors):
            del manifest["sha256"][name]
        manifest["sha256"] |= {name: tensor_sha256(tensor) for name, tensor in tensors.items()}

    edit_json(folder / "comet.json", follow)


def setter(name: str, value: Any) -> Callable[[dict[str, Tensor]], None]:
    """Put `value` into the first element of a tensor."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[0] = value

    return change


def remade(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    """Replace a tensor by a function of it."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = make(tensors[name]).contiguous()

    return change


def test_the_undamaged_folder_loads(folder: Path) -> None:
    from comet_core.packed import load_packed

    load_packed(folder, verify=True)
    edit_shard(folder, lambda tensors: None)
    load_packed(folder, verify=True)


TENSORS = {
    "scale NaN": (setter(f"{Q}.w_scale", float("nan")), f"{Q}.w_scale"),
    "scale Inf": (setter(f"{Q}.w_scale", float("inf")), f"{Q}.w_scale"),
    "scale zero": (setter(f"{Q}.w_scale", 0.0), f"{Q}.w_scale"),
    "scale negative": (setter(f"{Q}.w_scale", -1.0), f"{Q}.w_scale"),
    "scale as float32": (remade(f"{Q}.w_scale", Tensor.float), f"{Q}.w_scale"),
    "clip above one": (setter(f"{Q}.act_clip", 1.5), f"{Q}.act_clip"),
    "clip NaN": (setter(f"{Q}.act_clip", float("nan")), f"{Q}.act_clip"),
    "5-bit block": (setter(f"{Q}.block_bits", 5), f"{Q}.block_bits"),
    "a 16-bit block among others": (setter(f"{DOWN}.block_bits", 16), f"{DOWN}.block_bits"),
    "zero point 16": (setter(f"{Q}.w_zero", 16), f"{Q}.w_zero"),
    "channel twice": (lambda t: t[f"{Q}.perm"].__setitem__(0, t[f"{Q}.perm"][1]), f"{Q}.perm"),
    "channel negative": (setter(f"{Q}.perm", -1), f"{Q}.perm"),
    "channel beyond": (setter(f"{Q}.perm", 4096), f"{Q}.perm"),
    "perm as int64": (remade(f"{Q}.perm", Tensor.long), f"{Q}.perm"),
    "codes cut": (remade(f"{Q}.qweight", lambda t: t[:-1]), f"{Q}.qweight"),
    "codes signed": (remade(f"{Q}.qweight", lambda t: t.view(torch.int8)), f"{Q}.qweight"),
    "codes flat": (remade(f"{Q}.qweight", Tensor.flatten), f"{Q}.qweight"),
    "zero points missing": (lambda t: t.pop(f"{Q}.w_zero"), f"{Q}.w_zero"),
    "linear missing": (lambda t: [t.pop(name) for name in list(t) if name.startswith(Q)], Q),
    "perm where it is folded": (
        lambda t: t.__setitem__(f"{DOWN}.perm", torch.arange(320, dtype=torch.int32)),
        f"{DOWN}.perm",
    ),
    "bias that the model has not": (lambda t: t.__setitem__(f"{Q}.bias", torch.ones(7)), f"{Q}.bias"),
    "norm NaN": (setter("model.layers.0.input_layernorm.weight", float("nan")), "input_layernorm"),
    "norm of codes": (remade("model.layers.0.input_layernorm.weight", Tensor.char), "input_layernorm"),
    "norm of another width": (remade("model.layers.0.input_layernorm.weight", lambda t: t[:64]), "input_layernorm"),
    "norm missing": (lambda t: t.pop("model.layers.0.input_layernorm.weight"), "input_layernorm"),
    "unknown tensor": (lambda t: t.__setitem__("model.layers.0.mlp.extra", torch.ones(2)), "mlp.extra"),
    "tensor of no module": (lambda t: t.__setitem__("lost", torch.ones(2)), "lost"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_damaged_tensors_are_named(folder: Path, kind: str) -> None:
    change, name = TENSORS[kind]
    edit_shard(folder, change)
    refused(folder, name)


def test_a_lost_bias_is_noticed(put_through: Any, llama_config: Any, tmp_path: Path) -> None:
    made = put_through(llama_config(attention_bias=True, num_hidden_layers=1), "w4a4-naive")
    folder = Path(shutil.copytree(made.packed, tmp_path / "packed"))
    edit_shard(folder, lambda tensors: tensors.pop(f"{Q}.bias"), "model-00001-of-00002.safetensors")
    refused(folder, f"{Q}.bias", "missing")


MANIFEST = {
    "version of the future": (lambda m: m.update(format_version=4), "format_version is 4"),
    "version as text": (lambda m: m.update(format_version="1"), "format_version is '1'"),
    "version true": (lambda m: m.update(format_version=True), "format_version is True"),
    "no version": (lambda m: m.pop("format_version"), "format_version"),
    "linear the model has not": (
        lambda m: m["linears"].update({"model.layers.7.up": m["linears"][Q]}),
        "model.layers.7.up",
    ),
    "linear that is a norm": (lambda m: m["linears"].update({"model.norm": m["linears"][Q]}), "model.norm"),
    "linear left out": (lambda m: m["linears"].pop(Q), Q),
    "linear of another width": (lambda m: m["linears"][Q].update(in_features=256), Q),
    "width as text": (lambda m: m["linears"][Q].update(in_features="128"), Q),
    "width zero": (lambda m: m["linears"][Q].update(in_features=0), Q),
    "5-bit weights": (lambda m: m["linears"][Q].update(weight_bits=5), Q),
    "8-bit weights": (lambda m: m["linears"][Q].update(weight_bits=8), Q),
    "symmetric with zero points": (lambda m: m["linears"][Q].update(symmetric=True), f"{Q}.w_zero"),
    "hadamard as text": (lambda m: m["linears"][Q].update(hadamard="yes"), Q),
    "folded with perm": (lambda m: m["linears"][Q].update(folded=True), f"{Q}.perm"),
    "unknown key of a linear": (lambda m: m["linears"][Q].update(colour="red"), "colour"),
    "embedding 8": (lambda m: m.update(embedding_bits=8), "embedding_bits is 8"),
    "embedding 5": (lambda m: m.update(embedding_bits=5), "5"),
    "recipe key unknown": (lambda m: m["recipe"].update(colour="red"), "colour"),
    "model without name": (lambda m: m["model"].pop("name"), "name"),
    "tensor not listed": (lambda m: m["sha256"].pop(f"{Q}.perm"), f"{Q}.perm"),
    "tensor listed in vain": (lambda m: m["sha256"].update({"model.ghost": ""}), "model.ghost"),
    "share infinite": (lambda m: m.update(int4_mac_fraction=10**400), "comet.json"),
    "linears a list": (lambda m: m.update(linears=[1]), "comet.json"),
}


@pytest.mark.parametrize("kind", MANIFEST)
def test_a_manifest_that_lies_is_refused(folder: Path, kind: str) -> None:
    change, words = MANIFEST[kind]
    edit_json(folder / "comet.json", change)
    refused(folder, words)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"format_version": 1}', "\udcff"])
@pytest.mark.parametrize("name", ["comet.json", "model.safetensors.index.json", "config.json"])
def test_files_that_are_no_json_table(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(folder, name)


@pytest.mark.parametrize("config", [{"model_type": "perceptron-9000"}, {"hidden_size": -5}, {"num_hidden_layers": 3}])
def test_a_config_of_another_model(folder: Path, config: dict[str, Any]) -> None:
    edit_json(folder / "config.json", lambda content: content.update(config))
    refused(folder)


def test_a_config_without_quantization_is_not_taken_for_packed(folder: Path) -> None:
    edit_json(folder / "config.json", lambda content: content.pop("quantization_config"))
    refused(folder, "config.json")


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "", "..", "comet.json", 3, ["x"], "a\0.safetensors",
              "n" * 5000 + ".safetensors"],
)  # fmt: skip
def test_an_index_may_name_files_of_its_folder_only(folder: Path, shard: Any) -> None:
    (folder.parent / "x.safetensors").write_bytes((folder / SHARD).read_bytes())
    edit_json(folder / "model.safetensors.index.json", lambda index: index["weight_map"].update({f"{Q}.perm": shard}))
    refused(folder, "model.safetensors.index.json")


def test_links_may_lead_inside_the_folder_or_the_hub_cache_only(folder: Path, tmp_path: Path) -> None:
    from comet_core.packed import load_packed

    outside = tmp_path / "outside.safetensors"
    (folder / SHARD).rename(outside)
    (folder / SHARD).symlink_to(outside)
    refused(folder, SHARD)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    shutil.copytree(folder, snapshot)
    blob = tmp_path / "models--a--b" / "blobs" / "abc"
    outside.rename(blob)
    (snapshot / SHARD).unlink(missing_ok=True)
    (snapshot / SHARD).symlink_to(os.path.relpath(blob, snapshot))
    load_packed(snapshot)


@pytest.mark.parametrize("kept", [0, 7, 200, 0.5, -1])
def test_a_truncated_shard(folder: Path, kept: float) -> None:
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    refused(folder, SHARD)


def test_a_missing_shard_an_unfinished_and_an_empty_folder(folder: Path, tmp_path: Path) -> None:
    (folder / SHARD).unlink()
    refused(folder, SHARD, "missing")
    (folder / "config.json").unlink()
    refused(folder, "no packed model")
    (folder / "packing.json").write_text("{}")
    refused(folder, "packing has not finished")
    refused(tmp_path / "nothing", "no packed model")


def test_verify_finds_a_changed_tensor(folder: Path) -> None:
    from comet_core.packed import load_packed

    content = bytearray((folder / SHARD).read_bytes())
    content[-1] ^= 1  # the last byte of the last tensor, uint8: a zero point or a code
    (folder / SHARD).write_bytes(content)
    load_packed(folder)  # no shape or range is wrong
    refused(folder, SHARD, "sha256", verify=True)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_loads_or_is_refused(tiny: Any, tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of the manifest, the index or a shard's header flipped, or a file cut short."""
    from comet_core.packed import load_packed

    folder = tmp_path / "fuzzed"
    if not folder.exists():
        shutil.copytree(tiny.packed, folder)
    name = data.draw(st.sampled_from(["comet.json", "model.safetensors.index.json", SHARD]))
    whole = (tiny.packed / name).read_bytes()
    length = int.from_bytes(whole[:8], "little") + 8 if name == SHARD else len(whole)
    harmed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        harmed[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        harmed = harmed[: data.draw(st.integers(0, length))]
    try:
        (folder / name).write_bytes(harmed)
        load_packed(folder)
    except CometError as error:
        assert error.hint and error.message
    finally:
        (folder / name).write_bytes(whole)


CALIBRATION = {
    "version of the future": (lambda m: m.update(format_version=4), "format_version is 4"),
    "version as text": (lambda m: m.update(format_version="1"), "format_version is '1'"),
    "no groups": (lambda m: m.pop("groups"), "groups"),
    "a group lost": (lambda m: m["groups"].pop(), "groups are not the linears"),
    "a group twice": (lambda m: m["groups"].append(m["groups"][0]), "groups are not the linears"),
    "a linear renamed": (lambda m: m["groups"][2]["group"]["names"].append("mlp.side_proj"), "mlp.side_proj"),
    "width negative": (lambda m: m["groups"][0]["group"].update(in_channels=-3), "damaged"),
    "another model": (lambda m: m["model"].update(digest="0123456789abcdef"), "was made from"),
    "recipe key unknown": (lambda m: m["recipe"].update(colour="red"), "colour"),
    "no model": (lambda m: m.update(model=None), "damaged"),
}


@pytest.mark.parametrize("kind", CALIBRATION)
def test_a_calibration_manifest_that_lies_is_refused(tiny: Any, tmp_path: Path, kind: str) -> None:
    change, words = CALIBRATION[kind]
    folder = Path(shutil.copytree(tiny.calibration, tmp_path / "calibration"))
    edit_json(folder / "calibration.json", change)
    cannot_pack(tiny, folder, tmp_path, words)


def cannot_pack(tiny: Any, calibration: Path, tmp_path: Path, words: str, recipe: Any = None) -> None:
    with pytest.raises(CometError) as error:
        replace(tiny, calibration=calibration).pack(tmp_path / "out", recipe=recipe)
    assert words in error.value.message, error.value.message
    assert error.value.hint
    assert not (tmp_path / "out").exists(), "refused before anything is written"


KEY = "model.layers.0.self_attn.q_proj"
STATISTICS = {
    "channel twice": lambda t: t[f"{KEY}.perm"].__setitem__(0, t[f"{KEY}.perm"][1]),
    "perm as int64": remade(f"{KEY}.perm", Tensor.long),
    "perm missing": lambda t: t.pop(f"{KEY}.perm"),
    "5-bit block": setter(f"{KEY}.block_bits", 5),
    "clip zero": setter(f"{KEY}.act_clip", 0.0),
    "clip NaN": setter(f"{KEY}.act_clip", float("nan")),
    "maxima NaN": setter(f"{KEY}.absmax", float("nan")),
    "maxima of another width": remade(f"{KEY}.absmax", lambda t: t[:3]),
    "tokens negative": setter("tokens", -1),
    "tokens real": remade("tokens", Tensor.float),
    "tokens missing": lambda t: t.pop("tokens"),
}


@pytest.mark.parametrize("kind", STATISTICS)
def test_damaged_statistics_are_refused(tiny: Any, tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(tiny.calibration, tmp_path / "calibration"))
    tensors = load_file(folder / "statistics.safetensors")
    STATISTICS[kind](tensors)
    save_file(tensors, folder / "statistics.safetensors")
    cannot_pack(tiny, folder, tmp_path, "damaged")


def test_calibrations_that_are_cut_missing_or_of_another_recipe(tiny: Any, tmp_path: Path) -> None:
    from comet_core.recipe import load_recipe

    folder = Path(shutil.copytree(tiny.calibration, tmp_path / "calibration"))
    cannot_pack(tiny, folder, tmp_path, "activations, blocks", recipe=load_recipe("w8a8"))
    statistics = folder / "statistics.safetensors"
    whole = statistics.read_bytes()
    for length in (0, 100, len(whole) - 1):
        statistics.write_bytes(whole[:length])
        cannot_pack(tiny, folder, tmp_path, "damaged")
    statistics.unlink()
    cannot_pack(tiny, folder, tmp_path, "damaged")
    (folder / "calibration.json").write_text("{")
    cannot_pack(tiny, folder, tmp_path, "damaged")
    (folder / "calibration.json").unlink()
    cannot_pack(tiny, folder, tmp_path, "no calibration.json")


def test_a_token_beyond_the_vocabulary_is_refused(tiny: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(tiny.calibration, tmp_path / "calibration"))
    tensors = load_file(folder / "statistics.safetensors")
    tensors["tokens"].view(-1)[0] = 257
    save_file(tensors, folder / "statistics.safetensors")
    cannot_pack(tiny, folder, tmp_path, "token 257")
