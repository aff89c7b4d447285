"""Model folders, aliases and random weights: what is read is what was saved, and broken input is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from comet_core.gguf_folder import gguf_to_folder
from comet_core.model_cache import file_sha256
from comet_core.model_source import alias_names, alias_shapes, resolve_model
from comet_core.safetensors_files import read_header
from comet_cuda.errors import CometError

SHAPES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
}
EXTRA = {"opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}}
PAPER_MODELS = {
    *("llama-7b", "llama-13b", "llama-30b", "llama-65b", "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b"),
    *("llama-3-70b", "mistral-7b", "opt-13b", "opt-175b", "qwen2-72b"),
}


@pytest.fixture(autouse=True)
def own_cache_and_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("COMET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def save_model(folder: Path, family: str = "llama", shard: str = "1GB", **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPES, **EXTRA.get(family, {}), **options)
    model = AutoModelForCausalLM.from_config(config).to(torch.float16)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def message(call, *args, **options) -> str:
    with pytest.raises(CometError) as caught:
        call(*args, **options)
    assert caught.value.hint
    return f"{caught.value.message} | {caught.value.hint}"


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma3_text", "opt", "gpt2", "qwen3"])
@pytest.mark.parametrize("tie", [True, False])
def test_every_parameter_is_read_as_saved(tmp_path, family, tie):
    model = save_model(tmp_path / "m", family, shard="60KB", tie_word_embeddings=tie)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    source = resolve_model(str(tmp_path / "m"))
    weights, state = source.weights(), model.state_dict()
    assert set(state) - set(weights.names()) == ({"lm_head.weight"} if tie else set())
    for name in weights.names():
        loaded = weights.load(name)
        assert loaded.shape == weights.shape(name) and loaded.dtype == torch.float16
        assert torch.equal(loaded, state[name])
    assert (source.name, source.origin, source.note) == ("m", "folder", "")


def rewrite(folder: Path, change) -> None:
    """Applies `change` to the tensors of a one-file model."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("old_new", [("model.", ""), ("model.", "model.language_model."), ("", "language_model.")])
def test_names_under_other_prefixes_are_found(tmp_path, old_new):
    old, new = old_new
    state = save_model(tmp_path / "m").state_dict()
    rewrite(tmp_path / "m", lambda t: {new + k.removeprefix(old) if k.startswith(old) else k: v for k, v in t.items()})
    weights = resolve_model(str(tmp_path / "m")).weights()
    assert set(weights.names()) == set(state)
    assert all(torch.equal(weights.load(name), state[name]) for name in weights.names())


def test_an_lm_head_saved_beside_a_tied_embedding(tmp_path):
    save_model(tmp_path / "m", tie_word_embeddings=True)
    rewrite(tmp_path / "m", lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()})
    same = resolve_model(str(tmp_path / "m"))
    assert same.config.tie_word_embeddings and "lm_head.weight" not in same.weights().names()
    rewrite(tmp_path / "m", lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] * 2})
    other = resolve_model(str(tmp_path / "m"))
    assert not other.config.tie_word_embeddings and "lm_head.weight" in other.weights().names()


def test_layers_cuts_the_model_and_its_layer_lists(tmp_path):
    save_model(tmp_path / "m", "gemma3_text")
    source = resolve_model(str(tmp_path / "m"), layers=2)
    assert source.config.num_hidden_layers == 2 and len(source.config.layer_types) == 2
    assert not any(".layers.2." in name for name in source.weights().names())
    assert source.digest() != resolve_model(str(tmp_path / "m")).digest()
    assert "has 3" in message(resolve_model, str(tmp_path / "m"), layers=4)
    assert "--layers is 0" in message(resolve_model, str(tmp_path / "m"), layers=0)


def test_digest_follows_content(tmp_path):
    save_model(tmp_path / "a")
    save_model(tmp_path / "b")
    first = resolve_model(str(tmp_path / "a")).digest()
    assert first == resolve_model(str(tmp_path / "b")).digest() and len(first) == 16
    rewrite(tmp_path / "b", lambda t: {**t, "model.norm.weight": t["model.norm.weight"] + 1})
    assert first != resolve_model(str(tmp_path / "b")).digest()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_a_damaged_digest_note_is_computed_again(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    digest = file_sha256(tmp_path / "f")
    assert digest == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (note,) = (tmp_path / "cache" / "digests").iterdir()
    note.write_text("{")
    assert file_sha256(tmp_path / "f") == digest


# --- broken folders ---------------------------------------------------------------------------------------------


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_missing_shard_is_named(tmp_path):
    save_model(tmp_path / "m", shard="60KB")
    shard = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    shard.unlink()
    text = message(resolve_model, str(tmp_path / "m"))
    assert "lacks 1 of" in text and shard.name in text


@pytest.mark.parametrize("target", ["../model.safetensors", "/etc/passwd", "..", "sub/x.safetensors", "x.bin", 3, None])
def test_an_index_cannot_leave_its_folder(tmp_path, target):
    save_model(tmp_path / "m", shard="60KB")
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    path = tmp_path / "m" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = target
    path.write_text(json.dumps(index))
    assert "index" in message(resolve_model, str(tmp_path / "m"))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}', "[" * 100_000]
)
def test_a_broken_index_is_named(tmp_path, content):
    save_model(tmp_path / "m", shard="60KB")
    (tmp_path / "m" / "model.safetensors.index.json").write_text(content)
    assert "index" in message(resolve_model, str(tmp_path / "m"))


def test_an_index_entry_that_its_shard_lacks_is_named(tmp_path):
    save_model(tmp_path / "m", shard="60KB")
    path = tmp_path / "m" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    wrong = next(s for s in index["weight_map"].values() if s != index["weight_map"]["model.norm.weight"])
    index["weight_map"]["model.norm.weight"] = wrong
    path.write_text(json.dumps(index))
    assert "names model.norm.weight in" in message(resolve_model, str(tmp_path / "m"))


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1000, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    save_model(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    text = message(resolve_model, str(tmp_path / "m"))
    assert str(path) in text and "Fetch the file again" in text


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype="F16", shape=(2,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        ({}, b"", 2**63),  # a header longer than any file
        ({}, b"", 10_000),
        (b"not json", b"", None),
        (b"[" * 50_000, b"", None),
        ([1, 2], b"", None),
        ({"a": 3}, b"", None),
        ({"a": entry()}, b"123", None),  # data cut short
        ({"a": entry()}, b"12345", None),  # data too long
        ({"a": entry(shape=(3,))}, b"1234", None),
        ({"a": entry(shape=(2**40, 2**40))}, b"1234", None),
        ({"a": entry(shape=(-2,), offsets=(0, -4))}, b"1234", None),
        ({"a": entry(offsets=(4, 8))}, b"12345678", None),  # a hole
        ({"a": entry(), "b": entry()}, b"12345678", None),  # an overlap
        ({"a": entry(offsets=(-4, 0))}, b"1234", None),
        ({"a": entry(dtype="Q4")}, b"1234", None),
        ({"a": entry(shape="x")}, b"1234", None),
        ({"a": {"dtype": "F16", "shape": [2]}}, b"1234", None),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, data, length):
    path = raw_file(tmp_path / "x.safetensors", header, data, length)
    assert str(path) in message(read_header, path)


def test_a_whole_header_is_read(tmp_path):
    path = raw_file(tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}, "a": entry()}, b"1234")
    assert read_header(path)["a"].shape == (2,)


def test_a_file_that_shrinks_after_the_check_is_an_error(tmp_path):
    save_model(tmp_path / "m")
    weights = resolve_model(str(tmp_path / "m")).weights()
    path = tmp_path / "m" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    assert "became shorter" in message(weights.load, weights.names()[-1])


def test_wrong_shapes_dtypes_and_missing_parameters_are_named(tmp_path):
    save_model(tmp_path / "m")
    edit_config(tmp_path / "m", intermediate_size=128)
    assert "mlp.gate_proj.weight has shape (96, 64), config.json implies (128, 64)" in message(
        resolve_model, str(tmp_path / "m")
    )
    edit_config(tmp_path / "m", intermediate_size=96)
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(tmp_path / "m", lambda t: {**t, name: t[name].to(torch.int8)})
    assert f"{name} is stored as I8" in message(resolve_model, str(tmp_path / "m"))
    rewrite(tmp_path / "m", lambda t: {k: v for k, v in t.items() if k != name})
    assert f"lacks 1 of the 30 parameters, for example {name}" in message(resolve_model, str(tmp_path / "m"))


def test_pickled_weights_are_refused_unopened(tmp_path):
    save_model(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    assert "never unpickles" in message(resolve_model, str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("name", "expected"), [("model-00001-of-00002.safetensors", "neither"), ("weights.dat", "holds no weights")]
)
def test_other_file_names_are_explained(tmp_path, name, expected):
    save_model(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / name)
    assert expected in message(resolve_model, str(tmp_path / "m"))


def test_config_errors_are_named(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    assert "has no config.json" in message(resolve_model, str(folder))
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter" in message(resolve_model, str(folder))
    for content in ("{", "[]", '{"a": ' * 30_000):
        (folder / "config.json").write_text(content)
        assert "config.json" in message(resolve_model, str(folder))
    for content in ("{}", '{"model_type": "new-family"}', '{"model_type": "llama", "hidden_size": "big"}'):
        (folder / "config.json").write_text(content)
        assert "transformers" in message(resolve_model, str(folder))
    (folder / "config.json").write_text('{"model_type": "t5"}')
    assert "writes no text" in message(resolve_model, str(folder))


def test_code_in_a_model_folder_is_never_run(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    assert "never runs code" in message(resolve_model, str(folder))
    assert not (tmp_path / "ran").exists()


def test_packed_and_quantized_models_are_refused_with_a_remedy(tmp_path):
    save_model(tmp_path / "m")
    edit_config(tmp_path / "m", quantization_config={"quant_method": "comet", "format_version": 1})
    text = message(resolve_model, str(tmp_path / "m"))
    assert "already packed by COMET" in text and "comet eval" in text
    for quantization in ({"quant_method": "fp8", "bits": 8}, {"bits": 4}, "fp8"):
        edit_config(tmp_path / "m", quantization_config=quantization)
        assert "already quantized" in message(resolve_model, str(tmp_path / "m"))


@pytest.mark.parametrize("spec", ["./absent", "/absent/model", "absent.gguf", "a/b/c"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(spec):
    assert "no model folder or file" in message(resolve_model, spec)


def test_files_that_are_no_gguf(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"")
    assert "no .gguf file" in message(resolve_model, str(tmp_path / "x.safetensors"))
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")
    assert "is not a GGUF file" in message(resolve_model, str(tmp_path / "x.gguf"))
    (tmp_path / "y.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 40)
    assert "cannot be read" in message(resolve_model, str(tmp_path / "y.gguf"))
    assert not list((tmp_path / "cache" / "converted").glob("*.partial-*"))


# --- GGUF -------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """A two-layer Llama as a float GGUF file with a three-merge tokenizer; returns three of its tensors."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(8)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "a", "b", "c", "ab", "bc", "abc"])
    writer.add_token_merges(["a b", "b c", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    random = np.random.default_rng(0)
    tensors = {"token_embd": (8, 32), "output_norm": (32,), "output": (8, 32)}
    for i in range(2):
        parts = {"attn_q": (32, 32), "attn_k": (32, 32), "attn_v": (32, 32), "attn_output": (32, 32)}
        parts |= {"ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48), "attn_norm": (32,), "ffn_norm": (32,)}
        tensors |= {f"blk.{i}.{name}": shape for name, shape in parts.items()}
    values = {name: (random.normal(size=shape) * scale).astype(np.float32) for name, shape in tensors.items()}
    for name, value in values.items():
        writer.add_tensor(f"{name}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: torch.from_numpy(values[name]) for name in ("token_embd", "output", "blk.1.ffn_down")}


HF_NAMES = {
    "token_embd": "model.embed_tokens.weight",
    "output": "lm_head.weight",
    "blk.1.ffn_down": "model.layers.1.mlp.down_proj.weight",
}


@pytest.mark.parametrize(("scale", "dtype"), [(1.0, torch.float16), (1e5, torch.bfloat16)])
def test_a_gguf_file_becomes_a_16_bit_folder_once(tmp_path, scale, dtype):
    saved = write_gguf(tmp_path / "tiny.gguf", scale)
    source = resolve_model(str(tmp_path / "tiny.gguf"))
    assert (source.name, source.origin, source.note) == ("tiny", "gguf", "")
    for name, value in saved.items():
        assert torch.equal(source.weights().load(HF_NAMES[name]), value.to(dtype))
    assert source.tokenizer()("abc")["input_ids"] == [7]
    assert source.folder.is_relative_to(tmp_path / "cache")
    stamp = source.folder.stat().st_mtime_ns
    again = resolve_model(str(tmp_path / "tiny.gguf"))
    assert again.folder == source.folder and again.folder.stat().st_mtime_ns == stamp
    assert again.digest() == source.digest()


def test_a_gguf_header_is_parsed_once_and_the_reader_given_back(tmp_path, monkeypatch):
    import gguf

    parsed = []
    original = gguf.GGUFReader._build_fields
    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", lambda *a: (parsed.append(1), original(*a))[1])
    reader = gguf.GGUFReader
    write_gguf(tmp_path / "tiny.gguf")
    gguf_to_folder(tmp_path / "tiny.gguf")
    assert len(parsed) == 1 and gguf.GGUFReader is reader


def test_a_gguf_file_with_values_that_are_not_finite_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", float("nan"))
    assert "not finite" in message(gguf_to_folder, tmp_path / "tiny.gguf")


def test_a_truncated_gguf_file_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(content[: len(content) // 2])
    assert "cannot be read" in message(resolve_model, str(tmp_path / "tiny.gguf"))


def test_an_alias_finds_its_gguf_file_or_folder_in_the_cache(tmp_path):
    place = tmp_path / "cache" / "models" / "llama-7b"
    save_model(place)
    assert (resolve_model("llama-7b").name, resolve_model("llama-7b").origin) == ("llama-7b", "folder")
    write_gguf(place / "a.gguf")
    source = resolve_model("llama-7b")
    assert (source.name, source.origin, source.config.hidden_size) == ("llama-7b", "gguf", 32)
    write_gguf(place / "b.gguf")
    assert "2 GGUF files" in message(resolve_model, "llama-7b")


# --- aliases and random weights -----------------------------------------------------------------------------------


def test_an_alias_without_weights_says_how_to_give_them():
    text = message(resolve_model, "llama-7b")
    assert "huggyllama/llama-7b" in text and "--weights random" in text and "GGUF" in text
    assert "on no public hub" in message(resolve_model, "opt-175b")
    assert "Did you mean llama-7b?" in message(resolve_model, "lama-7b")


def test_every_paper_model_has_an_alias():
    assert set(alias_names()) >= PAPER_MODELS
    assert "Did you mean mistral-7b?" in message(alias_shapes, "mistral7b")


@pytest.mark.parametrize("alias", alias_names())
def test_an_alias_builds_the_shapes_it_states(alias):
    shapes = alias_shapes(alias)
    source = resolve_model(alias, weights="random", layers=1)
    weights, heads = source.weights(), shapes["num_attention_heads"]
    of = {name.split("layers.0.")[-1].removesuffix(".weight"): weights.shape(name) for name in weights.names()}
    width, wide, vocab = shapes["hidden_size"], shapes["intermediate_size"], shapes["vocab_size"]
    assert of["self_attn.q_proj"] == (heads * shapes["head_dim"], width)
    assert of["self_attn.k_proj"] == (shapes["num_key_value_heads"] * shapes["head_dim"], width)
    wide = getattr(source.config, "moe_intermediate_size", wide)  # of one expert, where a model says it apart
    up = next(name for name in of if name.endswith(("up_proj", "fc1")))
    assert of[up] == (wide, width)
    assert next(shape for name, shape in of.items() if "embed_tokens" in name) == (vocab, width)
    assert source.random_seed == 0 and source.origin == "random" and source.tokenizer() is None


def test_random_weights_depend_on_seed_and_name_alone(tmp_path):
    save_model(tmp_path / "m", "qwen2")
    first, again = (resolve_model(str(tmp_path / "m"), weights="random", seed=3).weights() for _ in range(2))
    other = resolve_model(str(tmp_path / "m"), weights="random", seed=4)
    names = first.names()
    values = {name: first.load(name) for name in names}
    for name in reversed(names):
        assert torch.equal(again.load(name), values[name])
    up, gate = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    assert not torch.equal(values[up], values[gate]) and not torch.equal(values[up], other.weights().load(up))
    assert abs(values[up].float().std().item() - 0.02) < 0.001
    assert torch.equal(values["model.norm.weight"], torch.ones(64, dtype=torch.bfloat16))
    assert 0 < values["model.layers.0.self_attn.q_proj.bias"].abs().max() < 0.2
    assert other.digest() != resolve_model(str(tmp_path / "m"), weights="random", seed=3).digest()
    assert other.note == "random weights, seed 4" and other.name == "m"


def test_weights_is_real_or_random():
    assert "--weights is 'fake'" in message(resolve_model, "llama-7b", weights="fake")


def test_the_tokenizer_of_a_folder(tmp_path):
    from tokenizers import Tokenizer, models

    save_model(tmp_path / "m")
    assert "no readable tokenizer" in message(resolve_model(str(tmp_path / "m")).tokenizer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")))
    tokenizer.save_pretrained(tmp_path / "m")
    assert resolve_model(str(tmp_path / "m")).tokenizer()("a")["input_ids"] == [0]


def test_importing_model_source_needs_no_torch():
    code = "import sys, comet_core.model_source as m; m.alias_names(); assert not {'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
