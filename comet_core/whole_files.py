"""Files that exist under their names only when complete, and folders that one command at a time writes.

A file is written beside its final name, flushed to the disk, then renamed: a process that is killed at any moment
leaves it whole or absent. What it left beside is written over by the next run.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from comet_cuda.errors import CometError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path` when the with block ends; its folder is made if missing.

    Errors:
        CometError naming the file where it cannot be written; nothing of it stays.
    """
    from safetensors import SafetensorError

    partial = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError | SafetensorError):
            raise cannot_write(path, error) from error
        raise


def write_text(path: Path, content: str) -> None:
    """A whole text file."""
    with whole_file(path) as partial:
        partial.write_text(content, encoding="utf-8", newline="")


class CannotWrite(CometError):
    """The place, not the work, is at fault: whatever comes next would fail there too."""


def cannot_write(path: Path, error: Exception) -> CannotWrite:
    """The error for a file that could not be written, with the remedy."""
    full = getattr(error, "errno", None) in NO_ROOM or "os error 28" in str(error) or "os error 27" in str(error)
    return CannotWrite(
        f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})",
        "free disk space and start the same command again" if full else "choose another folder with --out",
    )


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold `folder` for this command alone; a second one is refused, and a dead one holds nothing.

    Errors:
        CometError if another command writes there, or the place cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder.parent / f".{folder.name}.lock", timeout=0)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise CometError(
            f"{folder}: another command is writing into this folder", "wait for it, or choose --out"
        ) from error
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        yield
    finally:
        lock.release()


def discard(folder: Path) -> None:
    """Remove a folder so that no half of it is ever taken for whole: it loses its name first."""
    grave = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(grave, ignore_errors=True)  # of a discard that was killed
    if folder.exists():
        folder.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)
