"""`pack` killed at any moment and started again ends with the bytes of an undisturbed run.

The victim is a forked child that calls pack(): it starts in no time, and SIGKILL leaves what a power cut of the
process leaves. Two kinds of moments: every single change of the folder (half of a write, before and after a rename,
an unlink), one kill each, the next run going on from there; and moments that nothing in the program chose.
"""

import errno
import gc
import importlib.metadata
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comet_core.progress import SilentProgress
from comet_cuda.errors import CometError

SURVIVED, KILLED = 0, -signal.SIGKILL


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child; its exit code, negative for the signal that killed it."""
    child = start_child(work)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start_child(work: Callable[[], object]) -> int:
    """Fork a child that runs `work` and never returns into the test; its process id."""
    child = os.fork()
    if child:
        return child
    gc.disable()  # a collection touches, and so copies, every page of this process
    code = 1
    try:
        work()
        code = SURVIVED
    finally:
        os._exit(code)


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


class Moments:
    """Counts the changes that a process makes in `folder`, and kills it at change `fatal` (from 1)."""

    def __init__(self, folder: Path, fatal: int) -> None:
        self.folder, self.left = folder, fatal

    def reach(self, path: Any) -> None:
        if Path(path).parent == self.folder:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        """Patch this process: writes stop in the middle, renames and unlinks before and after they happen."""
        rename, unlink, sync = Path.rename, Path.unlink, os.fsync

        def killing_rename(path: Path, target: Path) -> Path:
            self.reach(path)
            done = rename(path, target)
            self.reach(path)
            return done

        def killing_unlink(path: Path, missing_ok: bool = False) -> None:
            unlink(path, missing_ok=missing_ok)
            self.reach(path)

        def killing_sync(descriptor: int) -> None:
            halved(Path(os.readlink(f"/proc/self/fd/{descriptor}")), self)
            sync(descriptor)

        Path.rename, Path.unlink = killing_rename, killing_unlink  # type: ignore[method-assign,assignment]
        os.fsync = killing_sync  # every file is flushed to the disk before it gets its name


def halved(path: Path, moments: Moments) -> None:
    """Show the folder with `path` half written at the moment of the kill, and whole if it does not come."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    moments.reach(path)
    path.write_bytes(content)


@pytest.fixture(scope="module")
def model(put_through: Callable[..., Any], llama_config: Callable[..., Any]) -> Any:
    """Three layers in float32, two with an unquantized linear, whose rounding to 16 bit must survive a restart."""
    from comet_core.recipe import load_recipe

    recipe = replace(load_recipe("w4a4kv4"), skip=("*.1.mlp.down_proj", "*.2.self_attn.o_proj"))
    recipe = replace(
        recipe, weights=replace(recipe.weights, clip_search=False)
    )  # most of the time, nothing on the disk
    return put_through(llama_config(num_hidden_layers=3, attention_bias=True), recipe)


def is_refused_or_whole(folder: Path, whole: dict[str, bytes]) -> None:
    """A folder in any state either loads as the finished one or is refused with an error that says so."""
    from comet_core.packed import load_packed

    try:
        load_packed(folder, verify=True)
    except CometError as error:
        assert "packing has not finished" in error.message or "no packed model" in error.message
        assert error.hint
    else:
        assert whole.items() <= files(folder).items()


def test_killed_at_every_change_of_the_folder(model: Any, tmp_path: Path) -> None:
    whole, out = files(model.packed), tmp_path / "out"
    kills, fatal, code = 0, 0, KILLED
    finished: set[str] = set()  # files under their final names
    while code == KILLED:
        fatal += 1  # one change further than the last run; after one that finished a file, a few changes before it
        moments = Moments(out, fatal)
        code = in_child(lambda armed=moments: (armed.arm(), model.pack(out)))
        kills += code == KILLED
        is_refused_or_whole(out, whole)
        now = {name for name in os.listdir(out) if not name.endswith(".tmp")}
        fatal = fatal if now <= finished else max(0, fatal - 4)
        finished |= now
    assert code == SURVIVED
    assert kills > 3 * len(whole), "each file has at least three moments"
    assert files(out) == whole


def test_the_run_through_the_16_bit_model_survives_a_kill(
    put_through: Callable[..., Any], llama_config: Callable[..., Any], tmp_path: Path
) -> None:
    """GPTQ that aims at the 16-bit model's outputs needs its hidden states, which pass finished layers again."""
    from comet_core.recipe import load_recipe

    recipe = load_recipe("w4a4kv4")
    weights = replace(recipe.weights, inputs="quantized", target="sixteen", passes=1, clip_search=False)
    made = put_through(llama_config(num_hidden_layers=3), replace(recipe, weights=weights))
    whole, out = files(made.packed), tmp_path / "out"
    moments = Moments(out, 10)  # the second shard has its name, the third has not
    assert in_child(lambda: (moments.arm(), made.pack(out))) == KILLED
    assert sum(name.endswith(".safetensors") for name in os.listdir(out)) == 2
    made.pack(out)
    assert files(out) == whole


def test_killed_while_replacing_a_finished_folder(model: Any, tmp_path: Path) -> None:
    """Packing into a finished folder that is damaged starts anew; a kill while the old files go must not strand it."""
    whole, out = files(model.packed), tmp_path / "out"
    shutil.copytree(model.packed, out)
    (out / "model-00002-of-00004.safetensors").write_bytes(b"another model's layer")
    for fatal in (1, 3, 5, 7, 3):
        moments = Moments(out, fatal)
        assert in_child(lambda armed=moments: (armed.arm(), model.pack(out))) == KILLED
        is_refused_or_whole(out, whole)
    assert in_child(lambda: model.pack(out)) == SURVIVED
    assert files(out) == whole


def renamed(folder: Path, **made: Any) -> None:
    """Let the manifest say that another version packed the folder, or with `version=None` that none is known."""
    manifest = folder / "comet.json"
    content = json.loads(manifest.read_text())
    content["made"] |= made
    if made["version"] is None:
        del content["made"]
    manifest.write_text(json.dumps(content))


class Said(SilentProgress):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, message: str) -> None:
        self.lines.append(message)


def test_a_finished_folder_of_this_job_is_left_as_it_is(model: Any, tmp_path: Path) -> None:
    out, said = tmp_path / "out", Said()
    first = model.pack(out)
    made = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert model.pack(out, progress=said) == first
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == made
    assert said.lines == [f"{out}: already packed; remove the folder to pack it anew"]
    other_name = replace(model.recipe, name="mine", description="the same under another name")
    assert model.pack(out, recipe=other_name) == first
    assert json.loads((out / "comet.json").read_text())["made"]["version"] == importlib.metadata.version(
        "comet-w4a4kv4"
    )


@pytest.mark.parametrize("version", ["0.0.1", None])
def test_what_another_version_packed_is_packed_anew(model: Any, tmp_path: Path, version: str | None) -> None:
    out, said = tmp_path / "out", Said()
    shutil.copytree(model.packed, out)
    renamed(out, version=version)
    (out / "model-00002-of-00004.safetensors").write_bytes((out / "model-00001-of-00004.safetensors").read_bytes())
    model.pack(out, progress=said)
    assert said.lines[0].startswith(f"{out}: was packed by COMET {version or 'of an unknown version'}, this is COMET ")
    assert files(out) == files(model.packed)


def test_a_finished_folder_of_another_job_is_refused(model: Any, tmp_path: Path) -> None:
    """By another recipe, calibration or model; whole, half cleared, of another version, and as the draft of tuning."""
    from comet_core.calibrate import calibrate

    out = tmp_path / "out"
    shutil.copytree(model.packed, out)
    other = replace(model.recipe, weights=replace(model.recipe.weights, damping=0.02))
    holds = "holds the finished packing of model by recipe w4a4kv4, not what is asked for"
    for harm in (lambda: None, lambda: renamed(out, version="0.0.1"), (out / "config.json").unlink):
        harm()
        left = files(out)
        with pytest.raises(CometError, match=f"{holds}.*differ in weights\n") as error:
            model.pack(out, recipe=other)
        assert error.value.hint == "choose another folder with --out, or remove this one" and files(out) == left
    shutil.rmtree(out)
    shutil.copytree(model.packed, out)
    for change in ({"seed": 1}, {"samples": 1}):
        moved = replace(model.recipe, calibration=replace(model.recipe.calibration, **change))
        folder = tmp_path / f"calibration-{next(iter(change))}"
        calibrate(model.source, moved, folder, device="cpu", progress=SilentProgress())
        with pytest.raises(CometError, match=f"{holds}.*differ in calibration\n"):
            replace(model, calibration=folder).pack(out)
    manifest = json.loads((out / "comet.json").read_text())
    for key, change, differs in (
        ("model", {"digest": "0" * 16}, "model"),
        ("data", {"sha256": "0" * 64}, "the calibration's text"),
        ("made", {"calibration": "0" * 64}, "the calibration's plans"),
    ):
        (out / "comet.json").write_text(json.dumps(manifest | {key: manifest[key] | change}))
        with pytest.raises(CometError, match=f"{holds}.*differ in {differs}\n"):
            model.pack(out)
    (out / "comet.json").write_text("{")
    with pytest.raises(CometError, match="cannot be understood") as error:
        model.pack(out)
    assert "remove this one" in error.value.hint
    draft = tmp_path / ".tuned.untuned"
    shutil.copytree(model.packed, draft)
    with pytest.raises(CometError, match=f"{draft}: {holds}.*differ in weights\n"):
        model.pack(tmp_path / "tuned", recipe=replace(other, tuning=replace(other.tuning, epochs=1)))
    assert files(draft) == files(model.packed) and not (tmp_path / "tuned").exists()


def test_killed_at_moments_nobody_chose(model: Any, tmp_path: Path) -> None:
    whole, out = files(model.packed), tmp_path / "out"
    draw = random.Random(0)
    started = time.monotonic()
    assert in_child(lambda: model.pack(tmp_path / "undisturbed")) == SURVIVED
    longest = 0.6 * (time.monotonic() - started)
    kills = 0
    for _ in range(30):
        child = start_child(lambda: model.pack(out))
        time.sleep(draw.uniform(0.1, 1) * longest)
        os.kill(child, signal.SIGKILL)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
        if out.exists():
            is_refused_or_whole(out, whole)
        if not killed:  # the machine is less busy than it was
            longest *= 0.7
            shutil.rmtree(out)
        elif (kills := kills + 1) == 6:
            break
    assert kills == 6
    assert in_child(lambda: model.pack(out)) == SURVIVED
    assert files(out) == whole


class StopsAt:
    """Progress that stops its own process (SIGSTOP) at the first step, in the middle of the work."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator["StopsAt"]:
        yield self

    def advance(self, steps: int = 1) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def log(self, message: str) -> None:
        pass


def test_two_at_once_are_refused_and_a_dead_one_holds_nothing(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = start_child(lambda: model.pack(out, progress=StopsAt()))
    os.waitpid(child, os.WUNTRACED)
    try:
        with pytest.raises(CometError, match="another command is writing into this folder") as error:
            model.pack(out)
        assert str(out) in error.value.message and error.value.hint
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    model.pack(out)
    assert files(out) == files(model.packed)


def test_an_unfinished_folder_of_another_job_is_refused(model: Any, tmp_path: Path) -> None:
    from comet_core.calibrate import calibrate
    from comet_core.progress import SilentProgress

    out = tmp_path / "out"
    assert in_child(lambda: (Moments(out, 7).arm(), model.pack(out))) == KILLED
    left = files(out)
    other = replace(model.recipe, weights=replace(model.recipe.weights, damping=0.02))
    with pytest.raises(CometError, match="unfinished packing of another model, recipe or calibration"):
        model.pack(out, recipe=other)
    seeded = replace(model.recipe, calibration=replace(model.recipe.calibration, seed=1))
    calibrate(model.source, seeded, tmp_path / "calibration", device="cpu", progress=SilentProgress())
    with pytest.raises(CometError, match="unfinished packing of another model, recipe or calibration"):
        replace(model, calibration=tmp_path / "calibration").pack(out)
    assert files(out) == left


def test_a_folder_with_other_files_is_left_alone(model: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CometError, match="is not empty"):
        model.pack(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CometError, match="cannot be written"):
        model.pack(tmp_path / "file" / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "thesis.txt"]


def test_a_disk_that_keeps_other_bytes_than_were_written_is_found(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def lying(descriptor: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if file.name.startswith("model-00002"):
            content = bytearray(file.read_bytes())
            content[-40] ^= 1
            file.write_bytes(content)
        sync(descriptor)

    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(CometError, match="is not what was written") as error:
        patch.setattr(os, "fsync", lying)
        model.pack(out)
    assert "model-00002" in error.value.message and not (out / "model-00002-of-00004.safetensors").exists()
    model.pack(out)
    assert files(out) == files(model.packed)


def test_a_linear_that_lost_its_outputs_is_named() -> None:
    from comet_core.pack_job import judged

    note = {"linear": "up_proj", "method": "gptq", "relative_output_error": {"rtn": 0.1, "gptq": 0.6}}
    assert "60%" in judged(note, 0.5)["warning"] and "warning" not in judged(note, 0.7)
    for fine in ({"rtn": 0.9, "gptq": 0.4}, {}):
        assert "warning" not in judged(note | {"relative_output_error": fine}, 0.5)
    assert "warning" in judged(note | {"relative_output_error": {"gptq": float("nan")}}, 0.5)


@pytest.mark.parametrize("written", [0, 2, 6])
def test_a_full_disk_is_an_error_and_packing_goes_on_later(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    left, sync = [None] * written, os.fsync

    def full(descriptor: int) -> None:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left.pop()
        sync(descriptor)

    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(CometError, match="cannot be written") as error:
        patch.setattr(os, "fsync", full)
        model.pack(out)
    assert "free disk space" in error.value.hint
    assert not list(out.glob("*.tmp"))
    model.pack(out)
    assert files(out) == files(model.packed)
