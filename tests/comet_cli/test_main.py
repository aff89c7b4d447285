"""The command line as typed: what parses, what is printed where, and which exit code follows."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from comet_cli import calibrate, evaluate, main, runs
from comet_cuda.errors import CometError

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("calibrate", "pack", "eval", "inspect", "report", "export", "bench", "reproduce", "reproduce-speed", "demo",
            "doctor")  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def comet(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command in this process."""
    done = CliRunner().invoke(main.app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("cli", "cuda", "."))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)


def test_help_lists_the_commands_and_loads_no_torch() -> None:
    done = in_a_process(
        "import sys; sys.argv = ['comet', '--help']\n"
        "from comet_cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'datasets', 'matplotlib', 'lm_eval'} & set(sys.modules)\n"
        "print('loaded:', sorted(heavy))"
    )
    listed = done.stdout.partition("Commands:\n")[2].partition("loaded:")[0].splitlines()
    assert {line.split()[0] for line in listed if line} == set(COMMANDS)
    assert not [line for line in listed if line.endswith("...")]  # a line that is cut off
    assert "loaded: []" in done.stdout


@pytest.mark.slow
def test_help_answers_in_under_0_3_seconds() -> None:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        in_a_process("import sys; sys.argv = ['comet', '--help']\nfrom comet_cli.main import main\nmain()")
        times.append(time.perf_counter() - start)
    assert sorted(times)[3] < 0.3, times


@pytest.mark.parametrize("command", [*COMMANDS, "bench kernel"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    code, out, _ = comet(*command.split(), "--help")
    assert code == 0
    assert f"{command} [OPTIONS]" in out
    assert f"\n  Example: comet {command}" in out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("pa", {"pack"}),
        ("pack --dry", {"--dry-run"}),
        ("pack smollm", {"smollm2-135m"}),
        ("pack smollm2-135m --recipe w4a4-n", {"w4a4-naive"}),
        ("bench ker", {"kernel"}),
    ],
)
def test_the_shell_completes_commands_options_models_and_recipes(
    monkeypatch: pytest.MonkeyPatch, typed: str, offered: set[str]
) -> None:
    monkeypatch.setenv("_COMET_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"comet {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    code = "from comet_cli.main import main\nmain()"
    assert set(in_a_process(code).stdout.split()) == offered


def test_version() -> None:
    code, out, _ = comet("--version")
    assert (code, out.split()[0]) == (0, "comet")


def test_an_unknown_option_is_a_usage_error() -> None:
    code, out, err = comet("calibrate", "llama-7b", "--speling", "1")
    assert (code, out) == (2, "")
    assert "--speling" in err


# --- the three lines of the card


def test_calibrate_llama_7b_says_what_is_missing() -> None:
    code, out, err = comet("calibrate", "llama-7b")
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and "\nhint: " in err
    assert "llama-7b" in err and "--weights random" in err
    assert "Traceback" not in err


def test_eval_without_any_packed_model_says_so() -> None:
    code, out, err = comet("eval", "--ppl", "wikitext2")
    assert (code, out) == (2, "")
    assert err == (
        "error: no model given, and none has been packed from this folder yet\n"
        "hint: Give a model, or pack one first: comet pack smollm2-135m\n"
    )


@pytest.mark.parametrize("typed", ["bench --batch 256", "bench kernel", "reproduce-speed"])
def test_what_needs_a_gpu_says_so_and_what_needs_none(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = comet(*typed.split())
    assert (code, out) == (2, "")
    error, hint = err.splitlines()
    assert error.startswith("error: ") and "needs an NVIDIA GPU" in error
    assert hint.startswith("hint: ") and "--roofline" in hint


@pytest.mark.parametrize("batch", ["", "0", "1,,2", "many", "-4", "1.5"])
def test_bench_refuses_what_is_no_batch_size(batch: str) -> None:
    code, _, err = comet("bench", "--batch", batch)
    assert code == 2
    assert "is not a list of batch sizes" in err


# --- errors and interruption


def test_errors_go_to_stderr_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise CometError("the thing is 7", "make it 8")

    monkeypatch.setattr(calibrate, "prepare", broken)
    assert comet("calibrate", "anything") == (2, "", "error: the thing is 7\nhint: make it 8\n")


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt, 130), (main.Terminated, 143)])
def test_a_stop_while_the_commands_are_still_read_is_no_traceback(
    at_once: bool,
    stop: type[BaseException],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def raised(*_: object, **__: object) -> None:
        raise stop

    monkeypatch.setattr(signal if at_once else main, "signal" if at_once else "app", raised)
    if not at_once:
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == code and ended.value.__suppress_context__
    assert "The same command starts it again." in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB"),
        SystemError("error return without exception set"),
        RuntimeError("Error calling __set_name__ on 'a' instance 'b' in 'C'"),
        SystemError("<function call at 0x7f> returned NULL without setting an exception"),
    ],
)
def test_memory_that_is_used_up_is_no_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python raises the others where it had no memory for the first."""

    def starved(*_: object, **__: object) -> None:
        raise error from MemoryError() if "__set_name__" in str(error) else None

    monkeypatch.setattr(main, "app", starved)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main.main()
    place = "GPU" if "CUDA" in str(error) else "machine"
    assert ended.value.code == 2 and f"memory of this {place} is used up" in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_a_word_on_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "prepare", interrupted)
    code, out, err = comet("pack", "anything")
    assert (code, out) == (130, "")
    assert "Stopped." in err and "goes on" in err


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("--weights", "fake", "--weights fake"),
        ("--recipe", "w4a4kv5", "w4a4kv5"),
        ("--layers", "0", "--layers"),
        ("--samples", "0", "--samples"),
    ],
)
def test_bad_values_are_named_before_work_starts(flag: str, value: str, named: str) -> None:
    code, out, err = comet("calibrate", "smollm2-135m", flag, value)
    assert (code, out) == (2, "")
    assert named in err


def test_eval_names_a_bad_device_dtype_or_record_file() -> None:
    for flag, value in (("--device", "tpu"), ("--dtype", "int3"), ("--device", "cuda:99"), ("--record", "numbers.csv")):
        code, out, err = comet("eval", "somewhere", flag, value)
        assert (code, out) == (2, "")
        assert value in err and flag.removeprefix("--") in err


# --- the last packed model


def test_the_last_packed_folder_is_remembered(tmp_path: Path) -> None:
    packed = tmp_path / "runs" / "m-r" / "packed"
    packed.mkdir(parents=True)
    runs.remember_packed(packed)
    assert runs.last_packed() == packed
    packed.rmdir()
    with pytest.raises(CometError, match="is gone"):
        runs.last_packed()


@pytest.mark.parametrize("content", ["", "[]", '{"packed": 7}', '{"other": "x"}'])
def test_a_broken_note_of_the_last_packed_folder_is_named(content: str) -> None:
    runs.RUNS.mkdir()
    runs.LAST.write_text(content)
    with pytest.raises(CometError, match="cannot be read"):
        runs.last_packed()


def test_run_folders_tell_real_and_cut_models_apart() -> None:
    names = {
        str(runs.run_folder("org/m", "r")),
        str(runs.run_folder("org/m", "r", random=True)),
        str(runs.run_folder("org/m", "r", layers=2)),
        str(runs.run_folder("org/m", "r", random=True, layers=2)),
    }
    assert names == {"runs/org--m-r", "runs/org--m-random-r", "runs/org--m-2layers-r", "runs/org--m-random-2layers-r"}


# --- what eval prints


def eval_record(**changes: object) -> dict[str, object]:
    record: dict[str, object] = {
        "kind": "eval", "model": "m", "recipe": "w4a4kv4", "task": "wikitext2", "metric": "perplexity", "value": 28.5,
        "windows": 8, "seq_len": 2048, "kv_quantized": True, "int4_mac_fraction": 0.845, "protocol": {"bos": False},
        "provenance": {},
    }  # fmt: skip
    return {**record, **changes}


def test_eval_shows_one_row_per_recipe() -> None:
    rows = evaluate.table_rows(
        [
            eval_record(recipe="fp16", value=21.774, kv_quantized=False, int4_mac_fraction=None),
            eval_record(),
            eval_record(metric="kl", value=0.25),
            eval_record(metric="top1", value=0.8),
        ]
    )
    names = ("recipe", "perplexity", "KL", "top-1", "4-bit share", "KV")
    assert rows == [
        dict(zip(names, ("fp16", "21.774", "", "", "", "16-bit"), strict=True)),
        dict(zip(names, ("w4a4kv4", "28.500", "0.25000", "80.00%", "84.5%", "4-bit"), strict=True)),
    ]


def test_eval_keeps_its_records_and_prints_them_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import comet_core.evaluate

    asked: dict[str, object] = {}

    def fake(model: str, **arguments: object) -> list[dict[str, object]]:
        asked.update(arguments, model=model)
        return [eval_record(), eval_record(metric="kl", value=float("nan"))]

    monkeypatch.setattr(comet_core.evaluate, "evaluate_perplexity", fake)
    code, out, err = comet("eval", "here", "--ppl", "c4", "--windows", "3", "--device", "cpu", "--no-compare", "--json")
    assert code == 0
    asked.pop("progress")
    text = {"data": "c4", "windows": 3, "seq_len": 2048}
    assert asked == {"model": "here", **text, "device": "cpu", "dtype": "auto", "compare": False, "kv16": False}
    first, second = map(json.loads, out.splitlines())
    assert first["value"] == 28.5 and second["value"] is None
    assert [json.loads(line) for line in (tmp_path / "runs" / "eval.jsonl").read_text().splitlines()] == [first, second]
    assert "records: runs/eval.jsonl" in err


def test_doctor_prints_versions_devices_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    code, out, _ = comet("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["torch"] != "not installed" and "cores" in found["cpu"]
    assert [row["path"] for row in found["paths"]] == ["reference"]
    code, out, _ = comet("doctor")
    assert code == 0 and "transformers" in out


def test_doctor_names_the_path_of_each_gpu_and_one_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from comet_cli import doctor

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (7, 5)][index])
    rows = doctor.op_paths()
    taken = {row["op"]: (row["path"], row["why"]) for row in rows if row["gpu"] == "0"}
    assert taken["w4ax_gemm"][0] == "sm_90" and "int32" in taken["w4ax_gemm, integer scales"][1]
    assert taken["quantize_act, integer scales"][0] == "sm_90a"
    assert [row["path"] for row in rows if row["gpu"] == "1"] == ["none"]


def test_doctor_builds_kernels_ahead_and_clears_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from comet_cuda import kernels, w4ax_gemm_sm80

    monkeypatch.setenv("COMET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "all_configurations", lambda _: w4ax_gemm_sm80.configurations(True)[:2])
    assert comet("doctor", "--build", "--arch", "12.0")[0] == 0
    assert len(list((tmp_path / "kernels").glob("*-sm_120-*.cubin"))) == 2
    code, _, err = comet("doctor", "--clear-cache")
    assert code == 0 and "removed 2 compiled kernels" in err
    assert not list((tmp_path / "kernels").glob("*.cubin"))
    for arch in ("7.5", "nine"):
        assert comet("doctor", "--build", "--arch", arch)[0] == 2


def test_a_dry_run_says_what_packing_takes_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2
    ).save_pretrained(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("comet_core.preflight.heat_map", lambda found, png: png.touch())  # drawing takes most of it
    small = ("--recipe", "w4a4-naive", "--weights", "random", "--samples", "4", "--seq-len", "16", "--dry-run")
    code, out, _ = comet("pack", "m", *small, "--json")
    found = json.loads(out)
    assert code == 0 and found["kind"] == "dry-run" and found["estimate"]["seconds"] > 0
    assert found["widths"] == "hidden 128, intermediate 256, vocab 96"
    assert found["tensor parallel"] == "1 (blocks.tp_granularity 1)"
    assert not (tmp_path / "runs").exists()
    assert comet("calibrate", "m", *small)[0] == 0
    assert not (tmp_path / "runs").exists()


def test_the_roofline_needs_no_gpu(tmp_path: Path) -> None:
    code, out, _ = comet("bench", "--roofline", "--model", "llama-2-7b", "--json", "--plots", str(tmp_path))
    found = json.loads(out)
    last = [row for row in found["memory"] if row["context"] == 131072 and row["scheme"] == "16-bit"]
    assert code == 0 and last[0]["kv_share"] == pytest.approx(0.84, abs=0.005)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = comet("bench", "--roofline")
    assert code == 0 and "memory" in out and "131,072" in out
    parts = json.loads(comet("bench", "--roofline", "--batch", "3,5", "--json")[1])["parts"]
    assert {row["batch"] for row in parts} == {3, 5}
    assert comet("bench", "--roofline", "--gpu", "abacus")[0] == 2
    assert "measures nothing" in comet("bench", "--roofline", "--record", "a.jsonl")[2]


@pytest.mark.parametrize("given", [("--load", "3"), ("--load", "0/5"), ("--load", "5/1"), ("--batch", "maximum")])
def test_bench_refuses_what_is_no_load(given: tuple[str, str]) -> None:
    code, _, err = comet("bench", *given)
    assert code == 2 and "hint:" in err
