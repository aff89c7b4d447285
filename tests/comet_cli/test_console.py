"""Talk on stderr, data on stdout, bars only where they can be drawn."""

import io
import json

import pytest
from rich.console import Console

from comet_cli import console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI", "TERM"):
        monkeypatch.delenv(name, raising=False)


def test_plain_where_no_terminal_or_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert console.is_plain(io.StringIO())
    assert not console.is_plain(Terminal())
    for name, value in (("NO_COLOR", "1"), ("CI", "true"), ("TERM", "dumb")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert console.is_plain(Terminal())


def test_json_is_one_line_without_nan(capsys: pytest.CaptureFixture[str]) -> None:
    console.data_json({"value": float("nan"), "text": "two\nlines", "list": [float("inf"), 1]})
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    assert json.loads(out) == {"value": None, "text": "two\nlines", "list": [None, 1]}


def test_tables_in_a_pipe_are_plain_and_do_not_break_long_lines(capsys: pytest.CaptureFixture[str]) -> None:
    text = "word " * 30
    console.table("Title", [{"name": "a", "n": "1.5", "text": text}, {"name": "b", "n": "12", "text": "[red]x"}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "Title" and lines[1].split() == ["name", "n", "text"]
    assert lines[2].split()[2:] == text.split() and lines[3].split() == ["b", "12", "[red]x"]
    assert lines[2].index("1.5") + 3 == lines[3].index("12") + 2  # figures end in one column
    console.table("Empty", [])


def test_plain_progress_speaks_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 20.0, 21.0, 22.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.PlainProgress().task("layers", 4) as task:
        for _ in range(3):
            task.advance()
    out, err = capsys.readouterr()
    first, last = err.splitlines()
    assert out == ""
    assert first.startswith("layers: 2/4, 0:20 left, ") and first.endswith("in memory")
    assert last == "layers: done in 0:22"


def test_plain_progress_does_not_call_a_failed_task_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), console.PlainProgress().task("layers", 4):
        raise ValueError
    assert "done" not in capsys.readouterr().err


def test_bars_nest_and_leave_the_screen_clean() -> None:
    screen = Terminal()
    progress = console.BarProgress(Console(file=screen, force_terminal=True, width=100))
    with progress.task("layers", 2) as outer:
        with progress.task("rows", 10) as inner:
            inner.advance(10)
        progress.log("a word")
        outer.advance()
        progress.bars.refresh()
    drawn = screen.getvalue()
    assert "layers" in drawn and "1/2" in drawn and "MiB" in drawn and "a word" in drawn
    assert progress.bars.tasks == [] and progress.open == 0


def test_a_bar_says_the_time_left_where_a_step_takes_longer_than_half_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    screen = Terminal()
    progress = console.BarProgress(Console(file=screen, force_terminal=True, width=100))
    progress.bars.get_time = lambda: clock[0]
    with progress.task("layers", 32) as task:
        for _ in range(2):
            clock[0] += 40
            task.advance()
        progress.bars.refresh()
    assert "2/32" in screen.getvalue() and "20:00 left" in screen.getvalue()


def test_figures() -> None:
    assert console.human_bytes(12) == "12 B" and console.human_bytes(3 << 30) == "3.0 GiB"
    assert console.human_seconds(65) == "1:05" and console.human_seconds(3725) == "1:02:05"
    assert console.resident_mib() > 10
