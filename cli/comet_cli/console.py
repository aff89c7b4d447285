"""How COMET speaks: data to stdout, talk to stderr.

Talk is drawn with rich on a terminal; elsewhere (a pipe, CI, NO_COLOR, TERM=dumb) it is plain lines, a progress line
every few seconds. rich is imported only when something is drawn.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars

PLAIN_INTERVAL = 10.0  # seconds between two progress lines where no bar can be drawn
MIB = 1 << 20


def is_plain(stream: TextIO) -> bool:
    """True where colours, boxes and moving bars do not belong."""
    silenced = os.environ.get("NO_COLOR") or os.environ.get("CI") or os.environ.get("TERM") == "dumb"
    return bool(silenced) or not stream.isatty()


def data(text: str) -> None:
    """One result, as text, on stdout."""
    print(text, file=sys.stdout, flush=True)


def data_json(result: Mapping[str, Any]) -> None:
    """One result, as one JSON object on one line of stdout; numbers that are not finite become null."""
    from comet_core.results import finite

    data(json.dumps(finite(dict(result)), ensure_ascii=False, allow_nan=False, default=str))


def talk(message: str) -> None:
    """One line for the user on stderr."""
    print(message, file=sys.stderr, flush=True)


def fail(error: CometError) -> None:
    """What went wrong and what to do about it, on stderr."""
    red, plain = ("\x1b[1;31m", "\x1b[0m") if not is_plain(sys.stderr) else ("", "")
    talk(f"{red}error:{plain} {error.message}")
    if error.hint:
        talk(f"hint: {error.hint}")


def table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Rows with equal keys as a table on stdout, keys as its head; numbers stand right-aligned, as given."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    plain = is_plain(sys.stdout)
    drawn = Table(title=title, title_justify="left", box=None if plain else box.SIMPLE_HEAD, pad_edge=False)
    for key in rows[0] if rows else ():
        numeric = all(isinstance(row[key], int | float) or is_figure(str(row[key])) for row in rows)
        drawn.add_column(key, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(str(value) for value in row.values()))
    width = 200 if plain else None  # a pipe has no width: lines must not break at 80
    Console(file=sys.stdout, width=width, no_color=plain, highlight=False, markup=False).print(drawn)


def is_figure(text: str) -> bool:
    """Whether a cell reads as a number, perhaps with a unit or sign; an empty cell may stand among numbers."""
    return not text or text[0].isdigit() or text[0] in "+-~" or text == "nan"


def resident_mib() -> float:
    """Memory that this process holds now, MiB."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
    except (OSError, IndexError, ValueError):
        return 0.0


def human_bytes(count: float) -> str:
    """1234567 -> "1.2 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """3725 -> "1:02:05", 65 -> "1:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def time_left(spent: float, done: int, total: int) -> str:
    """What the rest will take if it goes as the first `done` steps did, which took `spent` seconds."""
    return human_seconds(spent / max(done, 1) * (total - done))


class PlainTask:
    """A task that prints a line now and then: done/total, time left, memory."""

    def __init__(self, description: str, total: int) -> None:
        self.description, self.total, self.done = description, total, 0
        self.start = self.spoken = time.monotonic()

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        now = time.monotonic()
        if now - self.spoken < PLAIN_INTERVAL or self.done >= self.total:
            return
        self.spoken = now
        talk(
            f"{self.description}: {self.done}/{self.total}, {time_left(now - self.start, self.done, self.total)} left, "
            f"{human_bytes(resident_mib() * MIB)} in memory"
        )


class PlainProgress:
    """Progress as lines; the form for pipes and CI."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[PlainTask]:
        task = PlainTask(description, total)
        yield task
        talk(f"{description}: done in {human_seconds(time.monotonic() - task.start)}")

    def log(self, message: str) -> None:
        talk(message)


class BarTask:
    """One bar of a BarProgress."""

    def __init__(self, bars: "Bars", description: str, total: int) -> None:
        self.bars, self.total, self.done = bars, total, 0
        self.id = bars.add_task(description, total=total, left="", memory="")
        self.start = time.monotonic()

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        left = f"{time_left(time.monotonic() - self.start, self.done, self.total)} left"
        self.bars.update(self.id, advance=steps, left=left, memory=human_bytes(resident_mib() * MIB))


class BarProgress:
    """Progress as bars with time left and memory; bars nest, all of them live in one display.

    rich's own column of the time left knows steps of the last 30 seconds alone: it is empty where one is longer.
    """

    def __init__(self, console: "Console") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[left]}")
        self.bars = Progress(*columns, "{task.fields[memory]}", console=console, transient=True)
        self.open = 0

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[BarTask]:
        if self.open == 0:
            self.bars.start()
        self.open += 1
        task = BarTask(self.bars, description, total)
        start = time.monotonic()
        try:
            yield task
            if self.open == 1:
                self.log(f"{description}: done in {human_seconds(time.monotonic() - start)}")
        finally:
            self.bars.remove_task(task.id)
            self.open -= 1
            if self.open == 0:
                self.bars.stop()

    def log(self, message: str) -> None:
        self.bars.console.print(message, markup=False, highlight=False)


def progress() -> PlainProgress | BarProgress:
    """The progress that fits stderr."""
    if is_plain(sys.stderr):
        return PlainProgress()
    from rich.console import Console

    return BarProgress(Console(file=sys.stderr))
