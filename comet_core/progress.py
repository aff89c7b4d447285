"""How long work reports where it is, without knowing who listens: the command line draws bars, tests stay silent."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Task(Protocol):
    """One running bar."""

    def advance(self, steps: int = 1) -> None:
        """Report `steps` more of the task's total as done."""


class Progress(Protocol):
    """What calibrate, pack and evaluate report to."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Task]:
        """A bar of `total` steps for the duration of a with block."""

    def log(self, message: str) -> None:
        """One line for the user, on stderr."""


class _SilentTask:
    def advance(self, steps: int = 1) -> None:
        pass


class SilentProgress:
    """Says nothing."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Task]:
        yield _SilentTask()

    def log(self, message: str) -> None:
        pass
