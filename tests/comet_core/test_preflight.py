"""What a run will take, said before it starts."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from comet_core import preflight
from comet_core.calibrate import calibrate
from comet_core.lanes import Lanes
from comet_core.model_source import resolve_model
from comet_core.pack import pack
from comet_core.preflight import SPARE_DISK, packed_bytes, packing_disk, rehearse, require_disk
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
    recipe = with_calibration(load_recipe("w4a4-naive"), samples=8, seq_len=32)  # the fastest to pack
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr("comet_core.preflight.heat_map", lambda found, png: png.touch())  # drawing takes most of it
    cut = lambda n: resolve_model(spec, weights="random", layers=n or None)  # noqa: E731
    found = rehearse(cut, recipe, "pack", device="cpu", dtype="auto")
    assert found.seconds > 0 and found.gpu_memory == 0 and found.disk > packed_bytes(cut(0), recipe)
    assert not list((tmp_path / "scratch").glob("comet-*"))


class Told(SilentProgress):
    """Counts what one task was told."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator["Told"]:
        self.total, self.done = total, 0
        yield self

    def advance(self, steps: int = 1) -> None:
        self.done += steps


@pytest.mark.parametrize("epochs", [0, 2])
@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_what_grows_is_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int, gpus: int) -> None:
    """Time in layers and windows; memory in windows, and in layers where tuning holds them all. Of windows of 64 tokens
    a CPU takes 64 a step; a GPU runs all."""
    spec, asked = make_model(tmp_path / "model", 6, 128), []
    recipe = with_calibration(load_recipe("w4a4kv4"), samples=2000, seq_len=64)
    recipe = replace(recipe, tuning=replace(recipe.tuning, epochs=epochs))

    def run(source: Any, small: Any, windows: int, *rest: Any) -> Any:
        layers = int(source.config.num_hidden_layers)
        asked.append((layers, windows))
        gpu = {"pack": 500 + 2 * windows, "tune": 100 + 1000 * layers + windows}
        peaks = {name: 10 * peak for name, peak in gpu.items()}
        seconds = {"start": 5.0, "pack": layers * (2 + 0.5 * windows)}
        return preflight._Run(seconds, peaks, gpu, 7 + 3 * layers + windows)

    monkeypatch.setattr(preflight, "_run_small", run)
    devices = tuple(torch.device("cuda", i) for i in range(gpus)) or (torch.device("cpu"),)
    monkeypatch.setattr(preflight, "resolve_lanes", lambda *_: (Lanes(devices), torch.float32))
    cut = lambda n: resolve_model(spec, weights="random", layers=n or None)  # noqa: E731
    told = Told()
    found = rehearse(cut, recipe, "pack", device="cpu", dtype="auto", progress=told)
    assert told.total == told.done == len(asked)
    on_cpu = [(1, 64), (1, 64), (1, 250), (2, 64), (2, 250)]
    assert asked == ([(2, 2000), (1, 2000), (3, 2000)] if gpus else on_cpu)
    assert found.seconds == pytest.approx(5 + 6 * (2 + 0.5 * 2000))
    assert found.gpu_memory == (100 + 6000 + 2000 if epochs else max(500 + 4000, 100 + 1000 * asked[-1][0] + 2000))
    assert found.memory == 10 * found.gpu_memory
    assert found.disk == 7 + 18 + 2000 + (packed_bytes(cut(0), recipe) if epochs else 0)


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_libraries_that_grow_with_the_first_layers_are_not_multiplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    """Where a GPU holds the layers, each takes no more RAM than its 16-bit and packed bytes; a CPU's RAM holds them."""
    spec = make_model(tmp_path / "model", 6, 128)

    def run(source: Any, small: Any, windows: int, *rest: Any) -> Any:
        peak = {"tune": int(source.config.num_hidden_layers) << 30}
        return preflight._Run({"start": 1.0}, peak, peak, 0)

    monkeypatch.setattr(preflight, "_run_small", run)
    monkeypatch.setattr(preflight, "resolve_lanes", lambda *_: (Lanes((torch.device(on),)), torch.bfloat16))
    recipe = with_calibration(load_recipe("w4a4kv4-tuned"), samples=8, seq_len=64)
    whole = resolve_model(spec, weights="random")
    cut = lambda n: resolve_model(spec, weights="random", layers=n or None)  # noqa: E731
    found = rehearse(cut, recipe, "pack", device=on, dtype="auto")
    a_layer = (preflight.weights_bytes(whole, torch.bfloat16) + packed_bytes(whole, recipe)) / 6
    assert a_layer < 1 << 20
    assert found.memory == (int((3 << 30) + 3 * a_layer) if on == "cuda" else 6 << 30)
    assert found.gpu_memory == 6 << 30


@pytest.mark.parametrize("slow", [0, 1, 2, 3])
def test_what_no_layer_adds_to_is_not_multiplied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    """On a GPU reading text and drawing take ten times as long as a layer. Whichever rehearsal has them a fifth slower
    than the others, or none, and whatever the first has to load: the run is said within a quarter."""
    spec, runs, loaded = make_model(tmp_path / "model", 30, 128), [], set()

    def run(source: Any, small: Any, windows: int, *rest: Any) -> Any:
        layers, late = int(source.config.num_hidden_layers), 1.2 if len(runs) == slow else 1.0
        loading = sum(0.3 for use in ("kernels", windows) if use not in loaded)
        loaded.update(("kernels", windows))
        runs.append(layers)
        seconds = {"start": 0.6 * late, "calibrate": 0.115 * layers + loading, "after calibrate": 0.7 * late}
        return preflight._Run(seconds, {}, {}, 0)

    monkeypatch.setattr(preflight, "_run_small", run)
    monkeypatch.setattr(preflight, "resolve_lanes", lambda *_: (Lanes((torch.device("cuda"),)), torch.bfloat16))
    recipe = with_calibration(load_recipe("w4a4kv4"), samples=128, seq_len=2048)
    cut = lambda n: resolve_model(spec, weights="random", layers=n or None)  # noqa: E731
    found = rehearse(cut, recipe, "calibrate", device="cuda", dtype="auto")
    assert found.seconds == pytest.approx(1.3 + 30 * 0.115, rel=0.1)
    assert sum(runs) <= 6, "and that costs no more layers"


def test_a_rehearsal_times_its_steps_and_what_follows(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    source = resolve_model(make_model(tmp_path / "model", 1, 128), weights="random")
    recipe = with_calibration(load_recipe("w4a4-naive"), samples=2, seq_len=32)
    start = time.perf_counter()
    run = preflight._run_small(source, recipe, 2, "pack", "cpu", "auto", lambda packed: time.sleep(0.3))
    assert sum(run.seconds.values()) <= time.perf_counter() - start
    assert run.seconds.keys() == {*preflight.ONCE, "calibrate", "pack", "after pack", "then"}
    assert 0.3 <= run.seconds["then"] < 0.6 and all(seconds > 0 for seconds in run.seconds.values())


ONE_RUN = """
import dataclasses, json, pathlib, sys, time
import matplotlib.pyplot, torch, transformers.models.llama.modeling_llama
from comet_core.calibrate import calibrate
from comet_core.calibration import heat_map
from comet_core.host_memory import forget_peak, give_back_freed, peak_memory
from comet_core.model_source import resolve_model
from comet_core.pack import pack
from comet_core.preflight import rehearse
from comet_core.progress import SilentProgress
from comet_core.recipe import load_recipe, with_calibration

give_back_freed()
torch.set_num_threads(1)
time.perf_counter = time.process_time  # of one thread: the same, but for what else this machine does meanwhile
spec, what, home = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
samples, seq_len = map(int, sys.argv[4:6])
recipe = with_calibration(load_recipe("w4a4kv4"), samples=samples, seq_len=seq_len)
if sys.argv[6] == "tuned":
    recipe = with_calibration(load_recipe("w4a4kv4-tuned"), samples=samples, seq_len=seq_len)
if sys.argv[6] != "search":  # twenty times the work, nothing of size to hold
    recipe = dataclasses.replace(recipe, weights=dataclasses.replace(recipe.weights, clip_search=False))
cut = lambda n: resolve_model(spec, weights="random", layers=n or None)
held, start = forget_peak(), time.perf_counter()
if what == "said":
    found = rehearse(cut, recipe, "pack", device="cpu", dtype="auto")
    print(json.dumps([found.seconds, found.memory - held, found.disk]))
else:
    silent = SilentProgress()
    heat_map(calibrate(cut(0), recipe, home / "calibration", device="cpu", progress=silent), home / "map.png")
    pack(cut(0), home / "calibration", None, home / "packed", device="cpu", progress=silent)
    files = [file for name in ("calibration", "map.png", "packed") for file in [home / name, *(home / name).rglob("*")]]
    disk = sum(file.stat().st_size for file in files if file.is_file())
    if recipe.tuning.epochs:  # the draft that it was tuned from is gone
        disk += sum(file.stat().st_size for file in (home / "packed").iterdir())
    print(json.dumps([time.perf_counter() - start, peak_memory() - held, disk]))
"""


def one_run(what: str, spec: str, home: Path, samples: int, seq_len: int, search: str) -> tuple[float, int, int]:
    """Seconds, bytes above what the process held after its imports, bytes on the disk: as said or as taken, each in a
    fresh process."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ONE_RUN, spec, what, str(home), str(samples), str(seq_len), search],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (root / "cuda", root)))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    seconds, memory, disk = json.loads(done.stdout.splitlines()[-1])
    return seconds, memory, disk


NEEDS_PROC = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs /proc/self/clear_refs")


@NEEDS_PROC
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "hidden", "samples", "seq_len", "how"),
    [(3, 256, 16, 128, "no search"), (2, 512, 4, 256, "no search"), (6, 256, 4, 128, "tuned")],
)
def test_memory_and_disk_are_within_a_quarter(
    tmp_path: Path, layers: int, hidden: int, samples: int, seq_len: int, how: str
) -> None:
    spec = make_model(tmp_path / "model", layers, hidden)
    said, took = (one_run(what, spec, tmp_path, samples, seq_len, how)[1:] for what in ("said", "took"))
    print(f"memory {said[0] >> 20} / {took[0] >> 20} MiB above the imports, disk {said[1] >> 10} / {took[1] >> 10} KiB")
    assert took[0] > 40 << 20, "a run that holds next to nothing shows nothing"
    assert said == pytest.approx(took, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "hidden", "samples", "seq_len"),
    [(12, 256, 32, 256), (6, 512, 32, 256), (3, 256, 64, 1024)],  # a rehearsal sees 2 layers; of the last 12 windows
)
def test_time_memory_and_disk_are_within_a_quarter(
    tmp_path: Path, layers: int, hidden: int, samples: int, seq_len: int
) -> None:
    spec = make_model(tmp_path / "model", layers, hidden)
    said, took = (one_run(what, spec, tmp_path, samples, seq_len, "search") for what in ("said", "took"))
    print(f"time {said[0]:.1f} / {took[0]:.1f} s, MiB {said[1] >> 20} / {took[1] >> 20}, disk {said[2]} / {took[2]}")
    assert said == pytest.approx(took, rel=0.25)
