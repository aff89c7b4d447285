"""What a run will take, said before it starts."""

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from comet_core.calibrate import calibrate
from comet_core.model_source import ModelSource, resolve_model
from comet_core.pack import pack
from comet_core.preflight import (
    SPARE_DISK,
    forget_peak,
    packed_bytes,
    packing_disk,
    peak_memory,
    rehearse,
    require_disk,
)
from comet_core.progress import SilentProgress
from comet_core.recipe import load_recipe, with_calibration
from comet_cuda.errors import CometError

Usage = namedtuple("Usage", "total used free")


def make_model(folder: Path, layers: int, hidden: int) -> str:
    LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=1, head_dim=64, tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


@pytest.mark.parametrize("name", ["w4a4kv4", "w8a8"])
def test_disk_follows_from_shapes(tmp_path: Path, name: str) -> None:
    torch.set_num_threads(1)
    source = resolve_model(make_model(tmp_path / "model", 3, 192), weights="random")
    recipe = with_calibration(load_recipe(name), samples=2, seq_len=32)
    calibrate(source, recipe, tmp_path / "calibration", device="cpu", progress=SilentProgress())
    info = pack(source, tmp_path / "calibration", None, tmp_path / "packed", device="cpu", progress=SilentProgress())
    tensors = sum(file.stat().st_size for file in (tmp_path / "packed").glob("*.safetensors"))
    assert 0.97 < packed_bytes(source, recipe) / tensors < 1.03
    assert packing_disk(source, recipe) == packed_bytes(source, recipe) + SPARE_DISK > info.bytes
    tuned = replace(recipe, tuning=replace(recipe.tuning, epochs=1))
    assert packing_disk(source, tuned) - SPARE_DISK == 2 * packed_bytes(source, recipe)


def test_a_disk_that_is_too_small_is_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 1 << 40, 3 << 30))
    require_disk(tmp_path / "not" / "there", 2 << 30, "the packed model")
    with pytest.raises(CometError, match=r"takes 4\.00 GiB, the disk has 3\.00 GiB free") as caught:
        require_disk(tmp_path / "not" / "there", 4 << 30, "the packed model")
    assert "--out" in caught.value.hint


def test_a_rehearsal_leaves_nothing_and_counts_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    spec = make_model(tmp_path / "model", 6, 128)
    recipe = with_calibration(load_recipe("w4a4kv4"), samples=8, seq_len=32)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    cut = lambda n: resolve_model(spec, weights="random", layers=n or None)  # noqa: E731
    found = rehearse(cut, recipe, "pack", device="cpu", dtype="auto")
    assert found.seconds > 0 and found.gpu_memory == 0 and found.disk > SPARE_DISK
    assert not list((tmp_path / "scratch").iterdir())
    more = rehearse(cut, with_calibration(recipe, samples=64), "calibrate", device="cpu", dtype="auto")
    assert more.disk == SPARE_DISK


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "hidden"), [(12, 256), (6, 512)])
def test_time_is_within_a_quarter_and_memory_within_a_factor_of_two(tmp_path: Path, layers: int, hidden: int) -> None:
    import time

    torch.set_num_threads(1)
    spec = make_model(tmp_path / "model", layers, hidden)
    recipe = with_calibration(load_recipe("w4a4kv4"), samples=32, seq_len=256)

    def cut(n: int) -> ModelSource:
        return resolve_model(spec, weights="random", layers=n or None)

    held = forget_peak()
    found = rehearse(cut, recipe, "pack", device="cpu", dtype="auto")
    forget_peak()
    start = time.perf_counter()
    calibrate(cut(0), recipe, tmp_path / "calibration", device="cpu", progress=SilentProgress())
    pack(cut(0), tmp_path / "calibration", None, tmp_path / "packed", device="cpu", progress=SilentProgress())
    seconds, memory = time.perf_counter() - start, peak_memory() - held
    print(f"time {found.seconds:.1f} / {seconds:.1f} s, memory {found.memory >> 20} / {memory >> 20} MiB")
    assert found.seconds == pytest.approx(seconds, rel=0.25)
    assert 2 * found.memory >= memory, "the C library keeps at most as much again"
