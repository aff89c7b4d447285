"""The hidden states between two layers, for all calibration windows: in memory, or in a file over a limit."""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from comet_cuda.errors import CometError

TOKENS_A_STEP = {"cpu": 4096, "cuda": 32768}  # that go through a layer at once; longer windows go one by one
DEFAULT_LIMIT = 8 << 30  # bytes; over this the hidden states live in a temporary file


class HiddenStates:
    """A buffer of [windows, length, D] that is read and overwritten window range by window range.

    Args:
        shape: windows, tokens a window, channels.
        dtype, device: of the values; a buffer over `limit` bytes lives in an unnamed file of `spill_folder` instead and
            is moved to `device` piece by piece.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        limit: int = DEFAULT_LIMIT,
        spill_folder: Path | None = None,
    ) -> None:
        windows, length, width = shape
        self.device = device
        self.step = max(1, TOKENS_A_STEP.get(device.type, 4096) // length)
        count = windows * length * width
        self.spilled = count * dtype.itemsize > limit
        if self.spilled:
            self._values = _spilled(count, dtype, spill_folder).view(windows, length, width)
        else:
            self._values = torch.empty(windows, length, width, dtype=dtype, device=device)

    def copy(self, spill_folder: Path | None = None) -> "HiddenStates":
        """Another buffer with the same values."""
        limit = 0 if self.spilled else DEFAULT_LIMIT
        shape = (self._values.shape[0], self._values.shape[1], self._values.shape[2])
        other = HiddenStates(
            shape, dtype=self._values.dtype, device=self.device, limit=limit, spill_folder=spill_folder
        )
        other._values.copy_(self._values)
        return other

    def ranges(self) -> list[tuple[int, int]]:
        """Window ranges [start, stop) of one step each, in order."""
        windows = self._values.shape[0]
        return [(start, min(start + self.step, windows)) for start in range(0, windows, self.step)]

    def read(self, start: int, stop: int) -> Tensor:
        """Hidden states [stop - start, length, D] on the device."""
        return self._values[start:stop].to(self.device)

    def write(self, start: int, stop: int, values: Tensor) -> None:
        """Replace the hidden states of windows [start, stop)."""
        self._values[start:stop] = values.to(self._values.device)


def _spilled(count: int, dtype: torch.dtype, folder: Path | None) -> Tensor:
    """A tensor [count] in a file that has no name any more when this returns, so that not even a kill leaves it."""
    size = count * dtype.itemsize
    with tempfile.NamedTemporaryFile(dir=folder, prefix="hidden-", suffix=".tmp") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a bus error later
        except OSError as error:
            raise CometError(
                f"{file.name}: {size / 2**30:.1f} GiB for the hidden states cannot be reserved ({error.strerror})",
                "free disk space, write to another disk with --out, or use fewer or shorter calibration windows",
            ) from error
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype)
