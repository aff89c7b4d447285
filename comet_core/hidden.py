"""The hidden states between two layers, for all calibration windows: in memory, or in a file over a limit."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from comet_core.whole_files import CannotWrite
from comet_cuda.errors import CometError

TOKENS_A_STEP = {"cpu": 4096, "cuda": 32768}  # that go through a layer at once; longer windows go one by one
DEFAULT_LIMIT = 8 << 30  # bytes; over this the hidden states live in a temporary file


class HiddenStates:
    """A buffer of [windows, length, D] that is read and overwritten window range by window range.

    Args:
        shape: windows, tokens a window, channels.
        dtype: of the values. device: or several, on which the ranges live in turn.
        limit: bytes; a larger buffer lives in a nameless file of `spill_folder` instead, and only the range that is
            read or written is in memory.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | Sequence[torch.device],
        limit: int = DEFAULT_LIMIT,
        spill_folder: Path | None = None,
    ) -> None:
        self.devices = (device,) if isinstance(device, torch.device) else tuple(device)
        self.shape, self.dtype, self.device = shape, dtype, self.devices[0]
        self._limit, self._spill_folder = limit, spill_folder
        windows, length, width = shape
        self.step = max(1, TOKENS_A_STEP.get(self.device.type, 4096) // length)
        self._window = length * width * dtype.itemsize  # bytes of one
        self.spilled = windows * self._window > limit
        if self.spilled:
            self._file = _reserved(windows * self._window, spill_folder)
        elif len(self.devices) == 1:
            self._values = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            self._parts = {
                start: torch.empty(stop - start, length, width, dtype=dtype, device=self.devices[self.lane(start)])
                for start, stop in self.ranges()
            }

    def like(self, width: int) -> "HiddenStates":
        """A buffer for as many windows and tokens, of `width` channels."""
        shape = (self.shape[0], self.shape[1], width)
        folder = self._spill_folder
        return HiddenStates(shape, dtype=self.dtype, device=self.devices, limit=self._limit, spill_folder=folder)

    def copy(self) -> "HiddenStates":
        """Another buffer with the same values."""
        other = self.like(self.shape[2])
        for start, stop in self.ranges():
            other.write(start, stop, self.read(start, stop))
        return other

    def ranges(self) -> list[tuple[int, int]]:
        """Window ranges [start, stop) of one step each, in order."""
        windows = self.shape[0]
        return [(start, min(start + self.step, windows)) for start in range(0, windows, self.step)]

    def lane(self, start: int) -> int:
        """Which of the devices the range from window `start` lives on."""
        return start // self.step % len(self.devices)

    def read(self, start: int, stop: int) -> Tensor:
        """Hidden states [stop - start, length, D] on the device; on one of several if [start, stop) is a range."""
        if not self.spilled:
            return self._values[start:stop] if len(self.devices) == 1 else self._parts[start]
        values = torch.empty(min(stop, self.shape[0]) - start, *self.shape[1:], dtype=self.dtype)
        view, done = _bytes_of(values), 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], start * self._window + done)
            if count == 0:
                raise CometError("the file of hidden states became shorter", "start the same command again")
            done += count
        return values.to(self.devices[self.lane(start)])

    def write(self, start: int, stop: int, values: Tensor) -> None:
        """Replace the hidden states of windows [start, stop)."""
        if not self.spilled:
            into = self._values[start:stop] if len(self.devices) == 1 else self._parts[start]
            into.copy_(values)
            return
        view, done = _bytes_of(values.to("cpu", self.dtype).contiguous()), 0
        while done < len(view):
            done += os.pwritev(self._file.fileno(), [view[done:]], start * self._window + done)


def _bytes_of(values: Tensor) -> memoryview:
    return values.view(-1).view(torch.uint8).numpy().data


def _reserved(size: int, folder: Path | None) -> IO[bytes]:
    """A file of `size` bytes that never has a name, so that not even a kill leaves it. A full disk is an error here,
    not hours later."""
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as the hidden states
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise CannotWrite(
            f"{folder or tempfile.gettempdir()}: {size / 2**30:.1f} GiB for the hidden states cannot be reserved "
            f"({error.strerror})",
            "free disk space, write to another disk with --out, or use fewer or shorter calibration windows",
        ) from error
    return file
