"""A packed folder in transformers: the same logits as load_packed, generation on 4-bit pages, saving, and the guard."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import comet_core  # noqa: F401 - what registers the quantizer
from comet_core.packed import load_packed
from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from conftest import Packed

ROOT = Path(__file__).resolve().parents[2]
DTYPES = [torch.float32, torch.bfloat16]


def opened(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options})


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def same_logits(model: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    x = tokens(2, 150)
    assert torch.equal(model(input_ids=x).logits, load_packed(folder, dtype=dtype).model(input_ids=x).logits)


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


@pytest.mark.parametrize("dtype", DTYPES)
def test_from_pretrained_gives_the_model_of_load_packed(tiny: "Packed", dtype: torch.dtype) -> None:
    same_logits(opened(tiny.packed, dtype=dtype), tiny.packed, dtype)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_device_map(tiny: "Packed", device_map: Any) -> None:
    same_logits(opened(tiny.packed, device_map=device_map), tiny.packed)


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_layers_on_the_disk(tiny: "Packed", tmp_path: Path, offload_buffers: bool) -> None:
    inside = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    device_map = inside | {"model.layers.0": "cpu", "model.layers.1": "disk"}
    options = {"device_map": device_map, "offload_folder": tmp_path, "offload_buffers": offload_buffers}
    same_logits(opened(tiny.packed, **options), tiny.packed)


@pytest.mark.parametrize("tied", [False, True])
def test_eight_bit_embedding_and_head(
    put_through: Callable[..., "Packed"], llama_config: Callable[..., Any], tied: bool, tmp_path: Path
) -> None:
    from dataclasses import replace

    from comet_core.recipe import load_recipe

    recipe = replace(load_recipe("w4a4kv4"), embedding_bits=8, lm_head_bits=8)
    made = put_through(llama_config(tie_word_embeddings=tied), recipe)
    model = opened(made.packed)
    same_logits(model, made.packed)
    model.save_pretrained(tmp_path / "again")
    same_logits(opened(tmp_path / "again"), made.packed)


@pytest.mark.parametrize("max_shard_size", ["10GB", "200KB"])
def test_saved_again_it_is_a_packed_folder(tiny: "Packed", tmp_path: Path, max_shard_size: str) -> None:
    from comet_core.ledger import GUARD

    opened(tiny.packed).save_pretrained(tmp_path / "again", max_shard_size=max_shard_size)
    assert load_packed(tmp_path / "again", verify=True).manifest.recipe.name == "w4a4kv4"
    same_logits(load_packed(tmp_path / "again").model, tiny.packed)
    same_logits(opened(tmp_path / "again"), tiny.packed)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["experts_implementation"] == GUARD


def test_sixteen_bit_cache(put_through: Callable[..., "Packed"], llama_config: Callable[..., Any]) -> None:
    made = put_through(llama_config(), "w4a16")
    model = opened(made.packed)
    assert model.config._attn_implementation == "sdpa"
    same_logits(model, made.packed)
    assert model.generate(input_ids=tokens(1, 5), max_new_tokens=3, do_sample=False).shape == (1, 8)


@torch.no_grad()
def test_generation_fills_four_bit_pages_and_says_what_a_full_pass_prefers(tiny: "Packed") -> None:
    model = opened(tiny.packed)
    x = tokens(2, 140)  # default pages hold 128 tokens after 4 sinks
    out = model.generate(
        input_ids=x, attention_mask=torch.ones_like(x), max_new_tokens=130, do_sample=False, eos_token_id=None,
        return_dict_in_generate=True,
    )  # fmt: skip
    cache = out["cache"] if "cache" in out else out["past_key_values"]
    assert type(cache).__name__ == "KV4Cache"
    assert cache.get_seq_length() == 269
    logits = model(input_ids=out.sequences, use_cache=False).logits
    assert torch.equal(logits[:, 139:-1].argmax(-1), out.sequences[:, 140:])


@torch.no_grad()
def test_pages_take_a_quarter_of_the_memory(tiny: "Packed") -> None:
    from comet_core.evaluate import cache_argument
    from comet_core.integrations.kv4_cache import cache_for

    model = opened(tiny.packed, dtype=torch.bfloat16)
    cache = cache_for(model)
    assert cache is not None
    length = 4 + 128 * 40
    model.model.config.max_position_embeddings = length
    model(input_ids=tokens(1, length), **{cache_argument(model): cache}, logits_to_keep=1)
    config = model.config
    sixteen = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length
    open_page = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * (128 + 2 * 4)
    assert cache.nbytes - open_page < 0.28 * sixteen
    assert cache.nbytes < 0.30 * sixteen


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[30, 1, 1, 200, 1, 37], [270], [1] * 3 + [129, 129, 9]])
def test_any_chunking_gives_one_shot_logits(tiny: "Packed", chunks: list[int]) -> None:
    from comet_core.evaluate import cache_argument
    from comet_core.integrations.kv4_cache import cache_for

    model = opened(tiny.packed)
    x = tokens(2, 270, seed=1)
    cache = cache_for(model)
    parts = [model(input_ids=part, **{cache_argument(model): cache}).logits for part in x.split(chunks, 1)]
    whole = model(input_ids=x, use_cache=False).logits
    away = (torch.cat(parts, 1) - whole).abs().amax(-1)
    assert away.quantile(0.99) <= 2e-4
    assert away.max() < 0.05  # a code of one token may round the other way, and moves what depends on it a little


@torch.no_grad()
def test_the_ops_decode_what_pages_hold(tiny: "Packed", monkeypatch: pytest.MonkeyPatch) -> None:
    """The road that a GPU takes for single tokens, on the CPU's references, with padding and beyond a page's end."""
    from comet_core.integrations.kv4_cache import KV4Layer

    model = opened(tiny.packed)
    x, mask = tokens(2, 129), torch.ones(2, 129, dtype=torch.long)
    mask[1, :7] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "output_logits": True}
    options |= {"return_dict_in_generate": True, "pad_token_id": 0}
    plain = model.generate(input_ids=x, attention_mask=mask, **options)
    decoded = []

    def through_ops(layer: KV4Layer, query: Any, key: Any, value: Any, mask: Any, *rest: Any) -> torch.Tensor:
        if key.shape[2] > 1:
            return attend(layer, query, key, value, mask, *rest)
        decoded.append(layer.tokens)
        return layer.decode(query, key, value, mask.comet_starts, *rest)

    attend = KV4Layer.attend
    monkeypatch.setattr(KV4Layer, "attend", through_ops)
    ops = model.generate(input_ids=x, attention_mask=mask, **options)
    assert len(decoded) == 11 * model.config.num_hidden_layers
    assert torch.equal(ops.sequences, plain.sequences)
    assert torch.allclose(torch.stack(ops.logits), torch.stack(plain.logits), atol=2e-4)


@pytest.mark.parametrize("starts", [[0, 0], [0, 9]])
def test_tiled_pages_hold_the_same(starts: list[int]) -> None:
    """As a GPU's kernels lay codes out: a prompt, a chunk across two pages' ends and single tokens, through torch."""
    from comet_core.integrations.kv4_cache import KV4Layer
    from comet_core.recipe import KVCacheSpec
    from comet_cuda.kv4_layout import untile_pages

    class Tiled(KV4Layer):
        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            super().lazy_initialization(key_states, value_states)
            self.tiled = True

    torch.manual_seed(0)
    count, width = 300, 64
    q, k, v = (torch.randn(2, heads, count, width) for heads in (6, 2, 2))
    layers, outputs = [KV4Layer(KVCacheSpec(page=64, sinks=4)), Tiled(KVCacheSpec(page=64, sinks=4))], []
    for layer in layers:
        parts = []
        for low, high in [(0, 100), (100, 250), (250, 252), (252, count)]:
            keys, values = layer.update(k[:, :, low:high], v[:, :, low:high])
            seen = torch.ones(high - low, high, dtype=torch.bool).tril(low).expand(2, 1, -1, -1).clone()
            for b, start in enumerate(starts):
                seen[b, :, :, :start] = False
            seen.comet_starts = starts  # type: ignore[attr-defined]
            parts.append(layer.attend(q[:, :, low:high], keys, values, seen, width**-0.5, 0.0, 0))
        outputs.append(torch.cat(parts, 2)[:, :, max(starts) :])
    assert torch.equal(*outputs)
    plain, tiled = (layer.pages for layer in layers)
    assert plain is not None and tiled is not None
    assert not torch.equal(plain.v_codes, tiled.v_codes)
    for mine, theirs in zip(plain.tensors, untile_pages(tiled).tensors, strict=True):
        assert torch.equal(mine, theirs)


@torch.no_grad()
def test_left_padding_changes_no_token(tiny: "Packed") -> None:
    model = opened(tiny.packed)
    long, short = tokens(1, 150), tokens(1, 111, seed=1)
    x = torch.cat((long, torch.cat((torch.zeros(1, 39, dtype=torch.long), short), 1)))
    mask = torch.ones_like(x)
    mask[1, :39] = 0
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    both = model.generate(input_ids=x, attention_mask=mask, pad_token_id=0, **options)
    alone = model.generate(input_ids=short, attention_mask=torch.ones_like(short), **options)
    assert torch.equal(both[1, 150:], alone[0, 111:])
    mask[0, -1] = 0
    with pytest.raises(CometError, match="pads on the right"):
        model.generate(input_ids=x, attention_mask=mask, pad_token_id=0, **options)


@torch.no_grad()
def test_beams_are_reordered(tiny: "Packed") -> None:
    from transformers import DynamicCache

    from comet_core.evaluate import cache_argument

    model = opened(tiny.packed)
    x = tokens(1, 130)
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    paged = model.generate(input_ids=x, attention_mask=torch.ones_like(x), **options)
    plain = model.generate(
        input_ids=x, attention_mask=torch.ones_like(x), **{cache_argument(model): DynamicCache()}, **options
    )
    assert torch.equal(paged, plain)


def test_pipeline(tiny: "Packed") -> None:
    from transformers import AutoTokenizer, pipeline

    pipe = pipeline("text-generation", model=opened(tiny.packed), tokenizer=AutoTokenizer.from_pretrained(tiny.packed))
    by_folder = pipeline("text-generation", model=str(tiny.packed), dtype=torch.float32)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert pipe("the cat", **options) == by_folder("the cat", **options)


def test_lm_eval(tiny: "Packed") -> None:
    lm_eval = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    model = lm_eval.HFLM(pretrained=str(tiny.packed), dtype="float32", device="cpu", batch_size=2)
    pairs = [("the cat sat on", " the mat"), ("the dog", " lay by the door")]
    found = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)], True)
    packed = load_packed(tiny.packed).model
    for (context, continuation), (score, _) in zip(pairs, found, strict=True):
        ids = model.tokenizer(context + continuation, return_tensors="pt").input_ids
        length = len(model.tokenizer(continuation).input_ids)
        with torch.no_grad():
            log_p = packed(input_ids=ids).logits[0].log_softmax(-1)
        expected = log_p[-length - 1 : -1].gather(1, ids[0, -length:, None]).sum()
        assert score == pytest.approx(float(expected), abs=1e-3)


def test_attention_can_be_switched_off(tiny: "Packed") -> None:
    model = opened(tiny.packed)
    model.set_attn_implementation("sdpa")
    out = model.generate(input_ids=tokens(1, 5), max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert "DynamicCache" in {type(value).__name__ for value in out.values()}


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (lambda f: (f / "comet.json").unlink(), "no packed model"),
        (lambda f: swap(f, "model.layers.0.mlp.up_proj.w_scale", lambda t: t * 0), "w_scale"),
        (lambda f: swap(f, "model.norm.weight", None), "model.norm.weight is missing"),
        (lambda f: swap(f, "model.layers.1.self_attn.q_proj.qweight", None), "qweight"),
    ],
)
def test_damage_is_an_error(tiny: "Packed", tmp_path: Path, harm: Callable[[Path], None], word: str) -> None:
    folder = copied(tiny.packed, tmp_path / "bad")
    harm(folder)
    with pytest.raises(CometError, match=word):
        opened(folder)


def swap(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Change or remove one tensor of a packed folder."""
    from safetensors.torch import load_file, save_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(folder / index[name])
    old = tensors.pop(name)
    if change is not None:
        tensors[name] = change(old)
    save_file(tensors, folder / index[name], metadata={"format": "pt"})


LOAD = """
import sys
from transformers import AutoModelForCausalLM
for options in ({}, {"attn_implementation": "sdpa"}, {"dtype": "bfloat16", "trust_remote_code": True}):
    try:
        AutoModelForCausalLM.from_pretrained(sys.argv[1], **options)
    except Exception as error:
        print(type(error).__name__, str(error).replace(chr(10), " "))
    else:
        print("loaded")
"""


def in_a_process(code: str, *arguments: str) -> list[str]:
    paths = [*(str(ROOT / part) for part in ("cli", "cuda", ".")), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.splitlines()


def test_without_comet_it_is_an_error_that_says_what_to_do_and_comet_may_come_later(tiny: "Packed") -> None:
    said = in_a_process(f"import transformers.quantizers.auto\n{LOAD}\nimport comet_core\n{LOAD}", str(tiny.packed))
    assert len(said) == 6 and said[3:] == ["loaded"] * 3
    assert all(line.startswith("ValueError") and "import comet_core" in line for line in said[:3])


def test_comet_may_be_imported_first(tiny: "Packed") -> None:
    assert in_a_process(f"import comet_core\n{LOAD}", str(tiny.packed)) == ["loaded"] * 3


def test_importing_comet_core_is_free() -> None:
    code = "import sys, comet_core\nprint(sorted({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)))"
    assert in_a_process(code) == ["[]"]
