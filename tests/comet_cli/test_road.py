"""The road a user takes, on a model of two narrow layers: pack (which calibrates first), eval as typed, once more."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from comet_cli import main

TEXT = "the cat sat on the mat and the dog lay by the door, while rain fell on the roof of the old house. "
SMALL = ("--samples", "4", "--seq-len", "64", "--device", "cpu")


def comet(*arguments: str) -> tuple[str, str]:
    """stdout and stderr of a command that must succeed."""
    done = CliRunner().invoke(main.app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    """A working folder that holds `tiny`, a Llama of two layers with a byte tokenizer, and `text.txt`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    home = tmp_path_factory.mktemp("road")
    (home / "text.txt").write_text(TEXT * 60)
    byte_tokenizer.save_pretrained(home / "tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float16).save_pretrained(home / "tiny")
    return home


def test_pack_calibrates_first_and_eval_finds_the_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    out, err = comet("pack", "tiny", "--data", "text.txt", *SMALL, "--json")
    packed = json.loads(out)
    assert (packed["kind"], packed["model"], packed["recipe"]) == ("packed", "tiny", "w4a4kv4")
    assert packed["folder"] == "runs/tiny-w4a4kv4/packed" and packed["int4_mac_fraction"] > 0
    assert "calibrating first" in err
    assert (folder / "runs/tiny-w4a4kv4/calibration/outliers.png").read_bytes()[:4] == b"\x89PNG"

    measure = ("--ppl", "text.txt", "--windows", "2", "--seq-len", "64", "--device", "cpu")
    out, err = comet("eval", *measure, "--prompt", "the cat", "--tokens", "3", "--json")
    assert "runs/tiny-w4a4kv4/packed, the last one packed" in err
    *records, text = map(json.loads, out.splitlines())
    values = {(record["recipe"], record["metric"]): record["value"] for record in records}
    assert set(values) == {("w4a4kv4", metric) for metric in ("perplexity", "kl", "top1")} | {("fp16", "perplexity")}
    assert 100 < values["fp16", "perplexity"] < 600  # random weights: near the 257 tokens to choose from
    assert values["w4a4kv4", "perplexity"] == pytest.approx(values["fp16", "perplexity"], rel=0.2)
    assert text["kind"] == "text" and text["prompt"] == "the cat"
    kept = [json.loads(line) for line in (folder / "runs/eval.jsonl").read_text().splitlines()]
    assert kept == records

    shutil.copytree("runs/tiny-w4a4kv4/packed", "far/away/packed")
    for run in ("runs/tiny-w4a4kv4", "far/away"):
        found = json.loads(comet("report", run, "--dry-run", "--json")[0])
        assert found["records"] == f"{len(records)} found, {len(records)} of this model"

    out, _ = comet("eval", *measure)
    assert "w4a4kv4" in out and "fp16" in out and "protocol: data: " in out


def refused(*arguments: str) -> str:
    """What a command says that must end in an error and a hint."""
    done = CliRunner().invoke(main.app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 2 and "hint:" in done.stderr, done.stderr
    return done.stderr


def bytes_of(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_pack_again_takes_the_calibration_it_finds_unless_told_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    comet("calibrate", "tiny", "--data", "text.txt", *SMALL)
    _, err = comet("pack", "tiny", "--out", "once more", "--device", "cpu")
    assert "calibration: runs/tiny-w4a4kv4/calibration, found" in err
    kept, two = bytes_of(folder / "runs/tiny-w4a4kv4"), ("--data", "text.txt", "--samples", "2", *SMALL[2:])
    assert "holds the calibration of tiny" in (err := refused("calibrate", "tiny", *two)) and "windows\n" in err
    _, err = comet("pack", "tiny", *two, "--out", "fewer")
    assert "other data, samples, length or seed, so the one taken is fewer-calibration" in err
    assert "fewer: already packed" in comet("pack", "tiny", *two, "--out", "fewer")[1]
    assert bytes_of(folder / "runs/tiny-w4a4kv4") == kept
    given = "runs/tiny-w4a4kv4/calibration"
    out, _ = comet("pack", "tiny", "--calibration", given, "--out", "elsewhere", "--device", "cpu")
    assert "elsewhere" in out and json.loads(Path("runs/last.json").read_text()) == {"packed": "elsewhere"}
    done = CliRunner().invoke(main.app, ["pack", "tiny", "--calibration", given, "--samples", "3"])
    assert done.exit_code == 2 and "exclude each other" in done.stderr


def never(*_: object, **__: object) -> None:
    raise AssertionError("calibrates or measures")


def test_what_another_job_packed_is_refused_before_anything_is_calibrated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    plain = ("--recipe", "w4a4-naive", "--data", "text.txt", *SMALL)
    comet("pack", "tiny", *plain, "--out", "mine")
    kept = bytes_of(folder / "mine")
    shutil.rmtree("runs/tiny-w4a4-naive")
    shutil.copytree("tiny", "other")
    config = json.loads(Path("other/config.json").read_text())
    Path("other/config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.01}))
    monkeypatch.setattr("comet_core.calibrate._calibrate", never)
    monkeypatch.setattr("comet_core.preflight.rehearse", never)
    for asked, wrong in (
        (("other", *plain), "model"),
        (("tiny", *plain, "--recipe", "w4a16"), "weights, activations"),
        (("tiny", *plain, "--seed", "1"), "calibration\n"),
    ):
        for more in ((), ("--dry-run",)):
            said = refused("pack", *asked, "--out", "mine", *more)
            assert "mine: holds the finished packing of tiny by recipe w4a4-naive" in said
            assert f"differ in {wrong}" in said and "--out" in said.partition("hint:")[2]
    shutil.copytree("mine", ".tuned.untuned")
    said = refused("pack", "tiny", *plain, "--recipe", "w4a4kv4-tuned", "--out", "tuned")
    assert ".tuned.untuned: holds the finished packing of tiny by recipe w4a4-naive" in said
    Path("thesis").mkdir()
    Path("thesis/chapter").write_text("years of work")
    assert "is not empty and holds no packed model" in refused("pack", "tiny", *plain, "--out", "thesis")
    assert bytes_of(folder / "mine") == kept


def test_what_is_packed_already_is_said_and_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its calibration, without one, in a dry run; and what another program reads is still written beside it."""
    monkeypatch.chdir(folder)
    ask = ("pack", "tiny", "--recipe", "w4a16-rtn", "--data", "text.txt", *SMALL, "--out", "done/packed")
    first, _ = comet(*ask)
    monkeypatch.setattr("comet_core.calibrate._calibrate", never)
    monkeypatch.setattr("comet_core.pack_job.PackJob", never)
    monkeypatch.setattr("comet_core.preflight.rehearse", never)
    for gone in ("nothing", "runs/tiny-w4a16-rtn"):
        shutil.rmtree(gone, ignore_errors=True)
        Path("runs/last.json").unlink(missing_ok=True)
        out, err = comet(*ask)
        assert out == first and "done/packed: already packed; remove the folder to pack it anew" in err
        assert json.loads(Path("runs/last.json").read_text()) == {"packed": "done/packed"}
    form = ("--format", "compressed-tensors")
    for more in ((), form):
        said = json.loads(comet(*ask, *more, "--dry-run", "--json")[0])
        assert "already packed" in said["folder"] and ("left" in said) == bool(more)
    _, exported = comet(*ask, *form, "--json")[0].splitlines()
    assert json.loads(exported)["folder"] == "done/packed-compressed-tensors"
    (folder / "text.txt").write_text(TEXT * 61)
    assert "differ in the calibration's text" in refused(*ask)
    (folder / "text.txt").write_text(TEXT * 60)


def test_random_weights_calibrated_in_one_process_pack_in_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest that ties calibration and model together must not depend on what a process did before."""
    monkeypatch.chdir(folder)
    cut = ("smollm2-135m", "--weights", "random", "--layers", "1", "--recipe", "w4a4-naive")
    comet("calibrate", *cut, *SMALL)
    _, err = comet("pack", *cut, "--device", "cpu")
    assert "calibration: runs/smollm2-135m-random-1layers-w4a4-naive/calibration, found" in err


def test_packing_for_other_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    form = ("--format", "compressed-tensors")
    refused = CliRunner().invoke(main.app, ["pack", "tiny", "--recipe", "w4a4kv4", *form, "--data", "text.txt", *SMALL])
    assert refused.exit_code == 2 and "stores weights rotated" in refused.stderr and "w4a16" in refused.stderr
    monkeypatch.setattr("comet_core.preflight.heat_map", lambda found, png: png.touch())  # drawing takes most of it
    said = json.loads(comet("pack", "tiny", *form, "--data", "text.txt", *SMALL, "--dry-run", "--json")[0])
    assert not (folder / "runs/tiny-w4a16").exists()
    out, err = comet("pack", "tiny", *form, "--data", "text.txt", *SMALL, "--json")
    left = [file for file in (folder / "runs/tiny-w4a16").rglob("*") if file.is_file() and file.suffix != ".png"]
    sizes = {
        part: sum(file.stat().st_size for file in left if part in file.parts)
        for part in ("packed", f"packed-{form[1]}")
    }
    assert min(sizes.values()) > 80_000, "both are counted"
    assert said["estimate"]["disk"] == pytest.approx(sum(file.stat().st_size for file in left), rel=0.05)
    packed, exported = map(json.loads, out.splitlines())
    assert (packed["recipe"], exported["kind"]) == ("w4a16", "export")
    assert "which compressed-tensors keeps as it is" in err
    assert exported["folder"] == "runs/tiny-w4a16/packed-compressed-tensors"
    assert len(exported["exact"]) == 14 and not exported["requantized"]
    config = json.loads((folder / exported["folder"] / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    again = CliRunner().invoke(main.app, ["pack", "tiny", *form, "--data", "text.txt", *SMALL])
    assert again.exit_code == 2 and "is not empty" in again.stderr
    assert CliRunner().invoke(main.app, ["pack", "tiny", "--format", "gguf"]).exit_code == 2
