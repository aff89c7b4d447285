"""Launches, without a GPU: what reaches the driver, through a stand-in for libcuda that reads the real buffers."""

import ctypes
import struct
import threading
from typing import Any

import pytest
import torch

from comet_cuda import driver

PARAMETERS = ((0, 8), (8, 4), (12, 4), (16, 8), (24, 24))  # pointer, int, float, long, a struct


class Driver:
    """Answers like libcuda, and keeps what was launched."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], bytes]] = []
        self.failed_queries = 0
        self.shared: list[int] = []
        self.contexts = 0
        self.next_status: list[int] = []

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.contexts += 1
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        return 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:
        return 0 if cubin == b"cubin" else 209

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        return 0

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        if index.value >= len(PARAMETERS):
            self.failed_queries += 1
            return 1
        offset._obj.value, size._obj.value = PARAMETERS[index.value]
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        if attribute == 8:
            self.shared.append(value)
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"no binary for the GPU"
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: None, extra: Any) -> int:
        if self.next_status:
            return self.next_status.pop()
        *shape, _stream, attributes, count = struct.unpack("7I4xQQI4x", config.raw)
        assert (extra[0], extra[2], extra[4]) == (1, 2, None)  # buffer pointer, buffer size, end
        size = ctypes.c_size_t.from_address(extra[3]).value
        if count:
            assert struct.unpack("I4xi", ctypes.string_at(attributes, 12)) == (6, 1)  # programmatic serialization
        self.launches.append(((*shape, count), ctypes.string_at(extra[1], size)))
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(driver, "driver_library", lambda: fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return fake


def test_arguments_lie_where_the_kernel_reads_them(library: Driver) -> None:
    kernel = driver.LoadedKernel(b"cubin", "kernel", 0)
    x = torch.zeros(3)
    kernel.launch((5, 2), 256, (x, -3, 0.5, 1 << 40, b"struct"), shared_bytes=1024, pdl=True)
    kernel.launch(7, (32, 4, 2), (None, 4, 2.0, 9, b"s" * 24))
    (first, packed), (second, other) = library.launches
    assert first == (5, 2, 1, 256, 1, 1, 1024, 1)
    assert struct.unpack("<Qifq24s", packed) == (x.data_ptr(), -3, 0.5, 1 << 40, b"struct".ljust(24, b"\0"))
    assert second == (7, 1, 1, 32, 4, 2, 0, 0)
    assert struct.unpack("<Qifq24s", other) == (0, 4, 2.0, 9, b"s" * 24)
    assert library.failed_queries == 0  # checkers report calls that fail
    assert library.shared == []


def test_large_shared_memory_is_asked_for_once(library: Driver) -> None:
    kernel = driver.LoadedKernel(b"cubin", "kernel", 0)
    for size in (48 * 1024, 100_000, 100_000, 60_000, 200_000):
        kernel.launch(1, 32, (0,), shared_bytes=size)
    assert library.shared == [100_000, 200_000]
    assert len(library.launches) == 5


def test_a_thread_without_a_context_gets_one(library: Driver) -> None:
    kernel = driver.LoadedKernel(b"cubin", "kernel", 0)
    contexts = library.contexts
    library.next_status = [201]
    kernel.launch(1, 32, (0,))
    assert library.contexts == contexts + 1 and len(library.launches) == 1


def test_a_bound_launch_writes_its_words(library: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = struct.Struct("<2Qif")
    with pytest.raises(TypeError, match="takes 8 bytes of parameters, not 16"):
        driver.LoadedKernel(b"cubin", "kernel", 0).bind(1, 32, 2)
    monkeypatch.setattr(__name__ + ".PARAMETERS", ((0, fields.size),))
    fixed = struct.pack("<if", -4, 0.5)
    bound = driver.LoadedKernel(b"cubin", "kernel", 0).bind((5, 2), 256, 2, 100_000, True, fixed)
    assert library.shared == [100_000] and not library.launches
    contexts = library.contexts
    library.next_status = [201]
    for number in (3, 4):
        bound(1 << 40, number)
    assert [shape for shape, _ in library.launches] == [(5, 2, 1, 256, 1, 1, 100_000, 1)] * 2
    assert [fields.unpack(packed) for _, packed in library.launches] == [(1 << 40, n, -4, 0.5) for n in (3, 4)]
    assert library.contexts == contexts + 1
    with pytest.raises(ValueError, match="same size"):
        bound(1)
    library.next_status = [9]
    with pytest.raises(driver.CometError, match="launch kernel"):
        bound(0, 0)


def test_bound_launches_of_two_threads_keep_apart(library: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The foreign call lets other threads run: each has buffers of its own."""
    monkeypatch.setattr(__name__ + ".PARAMETERS", ((0, 8),))
    buffers: list[int] = []
    monkeypatch.setattr(library, "cuLaunchKernelEx", lambda config, _, __, extra: buffers.append(extra[1]) or 0)
    bound = driver.LoadedKernel(b"cubin", "kernel", 0).bind(1, 32, 1)
    other = threading.Thread(target=bound, args=(1,))
    bound(0)
    other.start()
    other.join()
    bound(2)
    assert buffers[0] == buffers[2] != buffers[1]


def test_empty_tensors_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(driver, "_empty_strided", lambda *kind: asked.append(kind) or torch.empty(0))
    shapes = ((3,), (2, 3, 4), (5, 0, 7), (0,), (1, 1))
    found = [*driver.EmptyTensors(*((shape, torch.uint8) for shape in shapes)).on(1)]
    assert len(found) == len(shapes)
    assert asked == [(shape, torch.empty(shape).stride(), torch.uint8) for shape in shapes]


def test_failures_are_explained(library: Driver) -> None:
    with pytest.raises(driver.CometError, match="no binary for the GPU"):
        driver.LoadedKernel(b"other", "kernel", 0)
    kernel = driver.LoadedKernel(b"cubin", "kernel", 0)
    with pytest.raises(TypeError, match="no parameter 5"):
        kernel.launch(1, 32, (0, 1, 1.0, 2, b"", 3))
    library.next_status = [9]
    with pytest.raises(driver.CometError, match="launch kernel with grid 1"):
        kernel.launch(1, 32, (0,))
