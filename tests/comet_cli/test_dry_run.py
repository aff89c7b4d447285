"""`--dry-run` of eval, export, report and bench: problems are named, figures are those of the run, nothing is left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from comet_cli import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = "the cat sat on the mat and the dog lay by the door, while rain fell on the roof of the old house. "
LAYERS = 5
MEASURE = ("--ppl", "text.txt", "--windows", "4", "--seq-len", "64", "--device", "cpu")


def comet(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    done = CliRunner().invoke(main.app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if not path.name.endswith(".lock")}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    """A folder with `tiny`, a Llama of five layers, `packed`, the same with 4-bit weights, and `text.txt`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from comet_core.calibrate import calibrate
    from comet_core.model_source import resolve_model
    from comet_core.pack import pack
    from comet_core.progress import SilentProgress
    from comet_core.recipe import load_recipe, with_calibration

    folder = tmp_path_factory.mktemp("dry")
    (folder / "text.txt").write_text(TEXT * 60)
    byte_tokenizer.save_pretrained(folder / "tiny")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=257, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=256, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float16).save_pretrained(folder / "tiny")
    data = {"data": str(folder / "text.txt"), "samples": 2, "seq_len": 64}
    recipe, source = with_calibration(load_recipe("w4a16"), **data), resolve_model(str(folder / "tiny"))
    calibrate(source, recipe, folder / "run" / "calibration", device="cpu", progress=SilentProgress())
    pack(
        source, folder / "run" / "calibration", None, folder / "run" / "packed", device="cpu", progress=SilentProgress()
    )
    return folder


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


@pytest.mark.parametrize("model", ["tiny", "run/packed"])
def test_a_dry_evaluation_reads_two_layers_and_writes_nothing(
    model: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comet_core import evaluate

    asked, original, before = [], evaluate.loaded, files(home)
    monkeypatch.setattr("comet_core.preflight_eval.loaded", lambda *a: (asked.append(a[3]), original(*a))[1])
    code, out, err = comet("eval", model, *MEASURE, "--prompt", "the cat", "--dry-run", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["kind"], found["command"], asked) == ("dry-run", "eval", [2])
    assert found["text"].startswith("text.txt, whole") and found["text"].endswith("(file), 4 x 64 tokens")
    assert ("read by calibration" in found["text"]) == (model != "tiny") and found["prompt"] == "7 tokens"
    assert found["beside it"] == ("nothing" if model == "tiny" else "the 16-bit model")
    assert found["estimate"]["seconds"] > 0 and found["estimate"]["memory"] > 10 << 20
    assert [row["path"] for row in found["paths"]] == ([] if model == "tiny" else ["reference"])
    assert files(home) == before
    code, out, _ = comet("eval", model, *MEASURE, "--dry-run")
    assert code == 0 and "comet eval would take" in out and "about" in out


@pytest.mark.parametrize("packed", [False, True])
def test_the_layers_that_were_not_measured_are_counted(packed: bool, home: Path) -> None:
    """Bytes of the whole model follow exactly from those of the cut one; time grows with every layer and step."""
    import torch

    from comet_core.evaluate import Scores, find_subject, loaded, score_windows
    from comet_core.preflight_eval import MEASURED, _held, _measure

    subject = find_subject("run/packed" if packed else "tiny")
    tokens = torch.randint(0, 257, (1, 64))

    def step(models: list[torch.nn.Module]) -> None:
        score_windows(models[0], None, tokens, Scores())

    found = _measure(lambda: [loaded(subject, "cpu", torch.float32, MEASURED).model], step, "cpu")
    whole = _held(loaded(subject, "cpu", torch.float32).model)
    assert found.weights + (LAYERS - MEASURED) * found.layer_bytes == whole
    assert 0 < MEASURED * found.layer_seconds < found.seconds
    said, once = found.whole(LAYERS, 10.0), found.whole(LAYERS, 1.0)
    assert said.memory - found.memory == whole - found.weights
    steps = found.seconds + (LAYERS - MEASURED) * found.layer_seconds
    assert said.seconds - once.seconds == pytest.approx(9 * steps)


ONE_EVALUATION = """
import json, sys, time
import torch, transformers.models.llama.modeling_llama
from comet_core.evaluate import evaluate_perplexity, plan_perplexity
from comet_core.host_memory import forget_peak, give_back_freed, peak_memory
from comet_core.preflight_eval import rehearse_perplexity
from comet_core.progress import SilentProgress

give_back_freed()
torch.set_num_threads(1)
time.perf_counter = time.process_time  # of one thread: the same, but for what else this machine does meanwhile
how = {"data": "pydoc", "windows": 32, "seq_len": 512, "compare": False, "progress": SilentProgress()}
plan = plan_perplexity("model", **how)
held, start = forget_peak(), time.perf_counter()
if sys.argv[1] == "said":
    found = rehearse_perplexity(plan, "cpu", torch.float32)
    print(json.dumps([found.seconds, found.memory - held]))
else:
    evaluate_perplexity("model", device="cpu", dtype="float32", **how)
    print(json.dumps([time.perf_counter() - start, peak_memory() - held]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "hidden"), [(24, 256), (8, 768)])
def test_time_and_memory_of_an_evaluation_are_within_a_quarter(
    layers: int, hidden: int, tmp_path: Path, byte_tokenizer: Any
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=257, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, head_dim=64, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer.save_pretrained(tmp_path / "model")
    found = []
    for what in ("said", "took"):
        done = subprocess.run(
            [sys.executable, "-c", ONE_EVALUATION, what],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("cuda", "."))},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (said, memory_said), (took, memory_took) = found
    print(f"time {said:.1f} / {took:.1f} s, memory {memory_said >> 20} / {memory_took >> 20} MiB above the imports")
    assert [said, memory_said] == pytest.approx([took, memory_took], rel=0.25)


def test_a_packed_model_cut_to_its_first_layers_computes_like_them(home: Path) -> None:
    import torch

    from comet_core.packed import load_packed

    whole, cut = load_packed(Path("run/packed")).model, load_packed(Path("run/packed"), layers=2).model
    assert len(cut.model.layers) == 2  # type: ignore[union-attr, arg-type]
    whole.model.layers = whole.model.layers[:2]  # type: ignore[union-attr, index]
    tokens = torch.randint(0, 257, (1, 16))
    with torch.no_grad():
        assert torch.equal(whole(tokens, use_cache=False).logits, cut(tokens, use_cache=False).logits)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("arguments", "words", "remedy"),
    [
        (("tiny", "--ppl", "text.txt", "--windows", "999", "--seq-len", "64"), "windows of 64 tokens", "--windows"),
        (("tiny", "--ppl", "text.txt", "--seq-len", "99999"), "fewer than one window", "--seq-len"),
        (("tiny", "--ppl", "gone.txt"), "no text file gone.txt", "Give a file"),
        (("./gone", "--ppl", "text.txt"), "no model folder", ""),
        (("tiny", "--ppl", "text.txt", "--record", "gone.csv"), "ends in .jsonl", "gone.csv.jsonl"),
    ],
)
def test_what_is_missing_is_named_before_any_weights_are_read(
    arguments: tuple[str, ...], words: str, remedy: str, dry: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("comet_core.preflight_eval.loaded", "comet_core.evaluate.loaded"):
        monkeypatch.setattr(place, lambda *_: pytest.fail("weights were read first"))
    code, out, err = comet("eval", *arguments, "--device", "cpu", *dry)
    assert (code, out) == (2, "") and words in err and remedy in err.partition("hint: ")[2]


def test_a_model_larger_than_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("comet_core.preflight_eval.loaded", "comet_core.evaluate.loaded"):
        monkeypatch.setattr(place, lambda *_: pytest.fail("weights were read first"))
    monkeypatch.setattr("comet_core.preflight.total_memory", lambda: 1 << 20)
    for dry in ((), ("--dry-run",)):
        code, out, err = comet("eval", "tiny", *MEASURE, *dry)
        assert (code, out) == (2, "") and "tiny needs at least 0.0 GiB of memory" in err and "--dtype" in err


def test_what_one_measured_layer_shows_to_be_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comet_core.host_memory.total_memory", lambda: 16 << 20)
    code, out, err = comet("eval", "tiny", *MEASURE, "--dry-run")
    assert (code, out) == (2, "") and "eval tiny needs about" in err and "--seq-len" in err


def test_a_dry_run_of_tasks_counts_documents_and_what_is_kept(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="zero-shot tasks need lm-eval")
    rows = [{"goal": f"sit {i}", "sol1": "on the mat", "sol2": "on the roof", "label": i % 2} for i in range(9)]
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("COMET_DATA", str(tmp_path))
    monkeypatch.setenv("COMET_CACHE_DIR", str(tmp_path / "cache"))
    ask = ("eval", "run/packed", "--tasks", "piqa", "--limit", "4", "--device", "cpu")
    code, out, err = comet(*ask, "--dry-run", "--json")
    first = json.loads(out)
    assert code == 0 and first["tasks"] == "piqa (COMET_DATA), 4 documents" and first["estimate"]["seconds"] > 0
    assert comet(*ask, "--record", str(tmp_path / "r.jsonl"))[0] == 0
    again = json.loads(comet(*ask, "--dry-run", "--json")[1])
    assert again["estimate"]["seconds"] == 0, "every answer is kept"
    monkeypatch.setattr("comet_core.zero_shot_tasks._why_no_hub", lambda: "no network")
    code, out, err = comet("eval", "run/packed", "--tasks", "piqa,arc_easy", "--dry-run", "--device", "cpu")
    assert (code, out) == (2, "") and "arc_easy/test.jsonl" in err


def test_a_cut_model_is_not_compared_with_the_whole_one(home: Path, tmp_path: Path) -> None:
    import shutil

    from comet_core.evaluate import find_base, find_subject
    from comet_core.progress import SilentProgress

    subject = find_subject("run/packed")
    assert subject.base is not None and find_base(subject, SilentProgress()) is not None
    shutil.copytree("run/packed", tmp_path / "cut")
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    (tmp_path / "cut" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    assert find_base(find_subject(str(tmp_path / "cut")), SilentProgress()) is None


def test_a_dry_export_says_what_the_export_then_takes(home: Path, tmp_path: Path) -> None:
    before = files(home)
    how = ("export", "run/packed", "--out", str(tmp_path / "out"), "--contiguous")
    code, out, err = comet(*how, "--dry-run", "--json")
    said = json.loads(out)
    assert code == 0, err
    assert files(home) == before and not (tmp_path / "out").exists()
    code, out, _ = comet(*how, "--json")
    done = json.loads(out)
    shards = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert said["estimate"]["disk"] == pytest.approx(shards, rel=0.02)
    layer = f"{len(done['exact']) // LAYERS} linears as packed, {len(done['requantized']) // LAYERS} rounded anew"
    assert said["of a layer"] == layer
    code, _, err = comet(*how, "--dry-run")
    assert code == 2 and "is not empty" in err
    assert comet("export", "run/packed", "--activations", "5", "--dry-run")[0] == 2


def test_an_export_needs_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1024))
    for dry in ((), ("--dry-run",)):
        code, _, err = comet("export", "run/packed", "--out", str(tmp_path / "out"), *dry)
        assert code == 2 and "the export takes" in err and not (tmp_path / "out").exists()


def test_a_dry_report_says_what_the_page_would_hold(home: Path, tmp_path: Path) -> None:
    before = files(home)
    code, out, _ = comet("report", "run", "--dry-run", "--json")
    found = json.loads(out)
    assert code == 0 and found["page"] == "run/report.html" and found["model"] == f"tiny, {LAYERS} layers"
    assert found["records"].endswith("of this model") and files(home) == before
    (tmp_path / "file").write_text("")
    for flags in (
        ("--out", str(tmp_path)),
        ("--tables", str(tmp_path / "file")),
        ("--out", str(tmp_path / "file" / "p")),
    ):
        code, _, err = comet("report", "run", *flags)
        assert code == 2 and "cannot be written" in err and files(home) == before


def test_bench_says_what_fits_and_needs_no_gpu_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = comet(
        "bench", "--model", "llama-3-8b", "--batch", "64,max", "--load", "1024/512", "--dry-run", "--json"
    )
    plans = json.loads(out)["plans"]
    assert code == 2 and "needs an NVIDIA GPU" in err, "the plan, and what is missing"
    assert [(one["scheme"], one["batch"], one["fits"]) for one in plans] == [
        ("16-bit", 64, None), ("16-bit", "max", None), ("W4A4KV4", 64, None), ("W4A4KV4", "max", None)
    ]  # fmt: skip
    assert plans[0]["bytes"] > 2 * plans[2]["bytes"] > 0
    for wrong in (("--scheme", "W3"), ("--model", "llama-9000b"), ("--roofline",)):
        assert comet("bench", "--dry-run", *wrong)[0] == 2
    code, out, err = comet("bench", "kernel", "--dry-run", "--shape", "llama-3-8b", "--batch", "1,16")
    assert code == 2 and "needs an NVIDIA GPU" in err and "cublas_bf16, cublas_fp8" in out
    code, _, err = comet("bench", "kernel", "--dry-run", "--peer", "nonsense")
    assert code == 2 and "nonsense is not known" in err


def test_what_fits_on_a_gpu_follows_from_what_is_free() -> None:
    from comet_core.llama_shape import shape_of_alias
    from comet_core.serving_scheme import GIB, SCHEMES, memory_plan, plan_serving

    shape, schemes = shape_of_alias("llama-3-8b"), [SCHEMES["16-bit"], SCHEMES["W4A4KV4"]]
    rows = plan_serving(shape, schemes, [64, "max"], [(1024, 512)], 24 * GIB)
    assert [row["fits"] for row in rows] == [False, True, True, True]
    most = rows[3]["batch"]
    assert memory_plan(shape, schemes[1], most, 1536).fits(24 * GIB)
    assert not memory_plan(shape, schemes[1], most + 1, 1536).fits(24 * GIB)
    assert not plan_serving(shape, schemes[:1], ["max"], [(1024, 512)], 8 * GIB)[0]["fits"], "not even one sequence"


def test_reproduce_speed_lists_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = comet("reproduce-speed", "--dry-run", "--out", str(tmp_path / "out"))
    assert code == 2 and "needs an NVIDIA GPU" in err and out.count("would be measured") > 5
    assert not (tmp_path / "out").exists()
