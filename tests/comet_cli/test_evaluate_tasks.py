"""`comet eval --tasks`: what the table shows, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from comet_cli import evaluate, main
from comet_core.results import read


def record(**changes: object) -> dict[str, object]:
    one = {
        "task": "piqa", "recipe": "w4a4kv4", "metric": "acc", "value": 0.75, "stderr": 0.01, "windows": 1838,
        "kv_quantized": True, "kv_open_page": "16bit",
    }  # fmt: skip
    return one | changes


def test_rows_hold_percent_errors_and_the_reading_of_the_cache() -> None:
    rows = evaluate.task_rows(
        [
            record(drop=0.02, drop_stderr=0.005),
            record(kv_open_page="4bit", metric="acc_norm"),
            record(recipe="fp16", kv_quantized=False),
        ]
    )
    assert [row["KV"] for row in rows] == ["4-bit", "4-bit, open page too", "16-bit"]
    assert rows[0]["%"] == "75.00 +- 1.00" and rows[0]["16-bit minus this, paired"] == "+2.00 +- 0.50"
    assert rows[1]["16-bit minus this, paired"] == "" and rows[1]["metric"] == "acc_norm"


@pytest.mark.parametrize(
    ("flag", "value", "word"), [("--tasks", ",", "names no task"), ("--kv-open-page", "x", "16bit")]
)
def test_bad_values_end_with_a_hint(flag: str, value: str, word: str) -> None:
    pytest.importorskip("lm_eval", reason="zero-shot tasks need lm-eval")
    arguments = ["eval", "nowhere", "--tasks", "piqa", flag, value]
    result = CliRunner().invoke(main.app, arguments)
    assert result.exit_code == 2 and word in result.stderr and "hint:" in result.stderr


def test_bad_tasks_are_refused_before_the_perplexity(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="zero-shot tasks need lm-eval")
    monkeypatch.setattr(evaluate, "measure", lambda *_, **__: pytest.fail("hours of perplexity came first"))
    arguments = ["eval", "nowhere", "--ppl", "pydoc", "--tasks", "piqa", "--kv-open-page", "x"]
    result = CliRunner().invoke(main.app, arguments)
    assert result.exit_code == 2 and "--kv-open-page x" in result.stderr


def test_records_that_are_known_are_kept_when_the_rest_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="zero-shot tasks need lm-eval")
    more = {"kind": "eval", "model": "m", "seq_len": 0, "int4_mac_fraction": None, "protocol": {}, "provenance": {}}
    found, stops = [record(task=task, **more) for task in ("piqa", "boolq", "average")], True

    def scored(*_: Any, known: Any, **__: Any) -> list[Any]:
        for one in found:
            known([one])
            if stops:
                raise KeyboardInterrupt
        return found

    monkeypatch.setattr("comet_core.zero_shot.evaluate_zero_shot", scored)
    file = tmp_path / "records.jsonl"
    asked = ("m", "piqa,boolq", None, "16bit", "cpu", "auto")
    with pytest.raises(KeyboardInterrupt):
        evaluate.ask(*asked, compare=True, record=file, json=True)
    assert read(file) == found[:1]
    stops = False
    evaluate.ask(*asked, compare=True, record=file, json=True)
    assert read(file) == [*found[:1], *found], "each once"


@pytest.mark.parametrize("place", ["folder.jsonl", "file/records.jsonl"])
def test_a_record_file_that_cannot_be_written_is_refused_first(place: str, tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(main.app, ["eval", "nowhere", "--record", str(tmp_path / place)])
    assert result.exit_code == 2 and "cannot be written" in result.stderr and "hint:" in result.stderr
