"""The CUDA driver through ctypes: load a cubin, look up a kernel, launch it on torch's current stream.

In: a cubin's bytes. Out: a `LoadedKernel` whose `launch` costs a few microseconds, because it writes the arguments
and the launch configuration into two buffers laid out once, and makes one foreign call. The parameter layout comes
from the driver (cuFuncGetParamInfo), so callers pass plain values: tensors, integers, floats for float parameters.
Works under CUDA graph capture (loading included) and from any thread. Nothing here touches the GPU at import.
"""

import ctypes
import functools
import itertools
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from comet_cuda.errors import CometError

Dim = int | tuple[int, ...]
BoundLaunch = Callable[..., None]  # takes 64-bit words; see LoadedKernel.bind

_INVALID_CONTEXT = 201
_SUCCESS = 0
_ATTRIBUTE_PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_FUNCTION_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_FUNCTION_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_EXTRA_BUFFER_POINTER, _EXTRA_BUFFER_SIZE, _EXTRA_END = 1, 2, 0
_CAPTURE_RELAXED = 2
_SHAPE = struct.Struct("7I4x")  # the first part of CUlaunchConfig: grid, block, shared bytes
_CONFIG = struct.Struct("32sQQI4x")  # CUlaunchConfig: that part, stream, attributes, their number
_MOST_PARAMETER_BYTES = 4096  # of a kernel, CUDA's limit before 12.1
_MOST_SHAPES = 4096  # launch shapes remembered by a kernel
_DEFAULT_SHARED_LIMIT = 48 * 1024  # bytes a kernel may use without asking for more


@functools.cache
def driver_library() -> ctypes.CDLL:
    """libcuda, initialized. Raises CometError where no NVIDIA driver is installed."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CometError(
            "the NVIDIA driver (libcuda.so.1) was not found, so no kernel can run here",
            "install the driver, or run this on the CPU: everything but speed works there",
        ) from error
    status = library.cuInit(0)
    if status != _SUCCESS:
        raise CometError(f"the NVIDIA driver did not start (cuInit returned {status})", "check that nvidia-smi works")
    return library


def _name(status: int) -> str:
    text = ctypes.c_char_p()
    driver_library().cuGetErrorString(status, ctypes.byref(text))
    return f"{status} ({text.value.decode() if text.value else 'unknown'})"


def _check(status: int, doing: str) -> None:
    if status != _SUCCESS:
        raise CometError(f"the CUDA driver failed to {doing}: error {_name(status)}")


def _use_torch_context(device: int) -> None:
    """Make the device's primary context, the one torch uses, current in this thread."""
    library = driver_library()
    context = ctypes.c_void_p()
    _check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"use GPU {device}")
    _check(library.cuCtxSetCurrent(context), f"use GPU {device}")


def gpu_of(tensor: torch.Tensor, name: str) -> torch.cuda.device:
    """The context in which the tensor's GPU is torch's current one. Raises CometError if it is on none."""
    if tensor.get_device() < 0:
        raise CometError(f"{name} is on {tensor.device}, other arguments are on a GPU", "move all to one device")
    return torch.cuda.device(tensor.get_device())


def _dim3(dim: Dim) -> tuple[int, int, int]:
    if isinstance(dim, int):
        return dim, 1, 1
    return (*dim, 1, 1, 1)[:3]  # type: ignore[return-value]


class _ThreadBuffers(threading.local):
    """Launch buffers, one set a thread (the foreign call releases Python's lock)."""

    def __init__(
        self,
        parameter_bytes: ctypes.c_size_t,
        parameters: bytes,
        config: tuple[bytes, bool] = (b"", False),
        words: int = 0,
    ) -> None:
        """parameters: what they are before the first launch. config: shape and pdl, where they are always the same.

        words: how many 64-bit words of the parameters a bound launch writes.
        """
        self.parameters = ctypes.create_string_buffer(parameters, len(parameters))
        self.parameter_bytes = parameter_bytes
        pointers = (ctypes.addressof(self.parameters), ctypes.addressof(parameter_bytes))
        self.extra = (ctypes.c_void_p * 5)(
            _EXTRA_BUFFER_POINTER, pointers[0], _EXTRA_BUFFER_SIZE, pointers[1], _EXTRA_END
        )
        self.attributes = ctypes.create_string_buffer(72)  # one CUlaunchAttribute: id, padding, 64 bytes of value
        struct.pack_into("I4xi", self.attributes, 0, _ATTRIBUTE_PDL, 1)
        self.attributes_at = ctypes.addressof(self.attributes)
        shape, pdl = config
        self.config = ctypes.create_string_buffer(_CONFIG.pack(shape, 0, self.attributes_at, pdl), _CONFIG.size)
        written = (ctypes.c_uint64 * words).from_buffer(self.parameters)
        stream = ctypes.c_uint64.from_buffer(self.config, _SHAPE.size)
        self.bound = (written, stream, self.config, self.extra)  # all that a bound launch needs, in one look-up


class LoadedKernel:
    """One kernel in one device's context."""

    def __init__(self, cubin: bytes, entry: str, device: int) -> None:
        """Load `cubin` on `device`, torch's current one, and look up `entry`; also while a stream is being captured."""
        library = driver_library()
        _use_torch_context(device)
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            module = ctypes.c_void_p()
            _check(library.cuModuleLoadData(ctypes.byref(module), cubin), f"load the kernel {entry}")
            function = ctypes.c_void_p()
            _check(
                library.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"find the kernel {entry}"
            )
        finally:
            library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self.entry = entry
        self.device = device
        self._function = function
        self._parameter_bytes = ctypes.c_size_t(0)  # known with the first arguments
        self._buffers = _ThreadBuffers(self._parameter_bytes, bytes(_MOST_PARAMETER_BYTES))
        self._pack = struct.Struct("")
        self._shapes: dict[tuple[Dim, Dim, int], bytes] = {}
        self._launch = library.cuLaunchKernelEx
        self._shared_limit = _DEFAULT_SHARED_LIMIT

    def _parameter(self, index: int) -> tuple[int, int]:
        """(offset, bytes) of one parameter."""
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        status = driver_library().cuFuncGetParamInfo(
            self._function, ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size)
        )
        if status != _SUCCESS:
            raise TypeError(f"{self.entry} has no parameter {index}: error {_name(status)}")
        return offset.value, size.value

    def _layout(self, args: Sequence[Any]) -> struct.Struct:
        """The struct format of the parameter buffer, from the driver's offsets and the kinds of the arguments.

        Only as many parameters are asked for as there are arguments, so that no call fails in a correct program
        (compute-sanitizer reports those); with too few arguments the launch itself fails, by the buffer's size.
        """
        code, end = "<", 0
        for index, value in enumerate(args):
            offset, size = self._parameter(index)
            code += f"{offset - end}x" if offset > end else ""
            if isinstance(value, bytes):
                code += f"{size}s"
            elif isinstance(value, float):
                code += {4: "f", 8: "d"}[size]
            else:
                code += {1: "b", 2: "h", 4: "i", 8: "q"}[size]
            end = offset + size
        self._parameter_bytes.value = end
        return struct.Struct(code)

    def allow_shared(self, shared_bytes: int) -> None:
        """Let the kernel use `shared_bytes` of dynamic shared memory (needed above 48 KB)."""
        status = driver_library().cuFuncSetAttribute(self._function, _FUNCTION_MAX_DYNAMIC_SHARED, shared_bytes)
        _check(status, f"give {self.entry} {shared_bytes} bytes of shared memory")
        driver_library().cuFuncSetAttribute(self._function, _FUNCTION_CARVEOUT, 100)
        self._shared_limit = shared_bytes

    def _new_shape(self, grid: Dim, block: Dim, shared_bytes: int) -> bytes:
        """Pack a launch shape that has not been seen before, and make room for its shared memory."""
        if shared_bytes > self._shared_limit:
            self.allow_shared(shared_bytes)
        if len(self._shapes) >= _MOST_SHAPES:
            self._shapes.clear()
        packed = _SHAPE.pack(*_dim3(grid), *_dim3(block), shared_bytes)
        self._shapes[grid, block, shared_bytes] = packed
        return packed

    def bind(
        self, grid: Dim, block: Dim, words: int, shared_bytes: int = 0, pdl: bool = False, fixed: bytes = b""
    ) -> BoundLaunch:
        """A launch of one shape, for callers that keep it, of a kernel whose only parameter is a struct.

        Calling it with the struct's 64-bit words launches on torch's current stream, and costs a microsecond. The
        kernel's device must be torch's current one.

        Args:
            words: how many 64-bit words of the struct calls give, as integers: the first ones. fixed: the rest of it.
        """
        device, function, start = self.device, self._function, self._launch
        current_stream = torch._C._cuda_getCurrentRawStream  # type: ignore[attr-defined,unused-ignore]
        offset, size = self._parameter(0)
        if offset != 0 or size != 8 * words + len(fixed):
            raise TypeError(f"{self.entry} takes {size} bytes of parameters, not {8 * words + len(fixed)}")
        config = (self._new_shape(grid, block, shared_bytes), pdl)
        buffers = _ThreadBuffers(ctypes.c_size_t(size), bytes(8 * words) + fixed, config, words)

        def launch(*values: int) -> None:
            parameters, stream, config, extra = buffers.bound
            parameters[:] = values  # type: ignore[call-overload]  # a tuple does
            stream.value = current_stream(device)
            status = start(config, function, None, extra)
            if status == _INVALID_CONTEXT:  # a thread in which torch has not used this GPU yet
                _use_torch_context(device)
                status = start(config, function, None, extra)
            if status != _SUCCESS:
                _check(status, f"launch {self.entry}")

        return launch

    def launch(self, grid: Dim, block: Dim, args: Sequence[Any], shared_bytes: int = 0, pdl: bool = False) -> None:
        """Launch on torch's current stream of this device; see `CompiledKernel.launch`."""
        values = [
            value.data_ptr() if isinstance(value, torch.Tensor) else 0 if value is None else value for value in args
        ]
        shape = self._shapes.get((grid, block, shared_bytes)) or self._new_shape(grid, block, shared_bytes)
        buffers = self._buffers
        try:
            self._pack.pack_into(buffers.parameters, 0, *values)
        except struct.error:
            self._pack = self._layout(values)
            self._pack.pack_into(buffers.parameters, 0, *values)
        stream = torch._C._cuda_getCurrentRawStream(self.device)  # type: ignore[attr-defined,unused-ignore]
        _CONFIG.pack_into(buffers.config, 0, shape, stream, buffers.attributes_at, pdl)
        status = self._launch(buffers.config, self._function, None, buffers.extra)
        if status == _INVALID_CONTEXT:  # a thread in which torch has not used this GPU yet
            _use_torch_context(self.device)
            status = self._launch(buffers.config, self._function, None, buffers.extra)
        if status != _SUCCESS:
            _check(
                status, f"launch {self.entry} with grid {grid}, block {block}, {shared_bytes} bytes of shared memory"
            )


def _torch_internal(name: str) -> Callable[..., Any] | None:
    """What torch's compiler calls from its code, `torch._C._dynamo.guards.<name>`; None where a version has none."""
    try:
        from torch._C._dynamo import guards
    except ImportError:
        return None
    return getattr(guards, name, None)


_empty_strided = _torch_internal("_empty_strided_cuda")
_tensor_guards = _torch_internal("TensorGuards")


def nothing_alike(*_: torch.Tensor) -> bool:
    """The guard of no tensors."""
    return False


def guard(*tensors: torch.Tensor) -> Callable[..., bool]:
    """A function of as many tensors that tells, at a third of the time of checks, whether they are like these.

    It compares class, type, shape, strides, device and requires_grad, and keeps no tensor. It does not see addresses:
    callers look at their alignment. False says nothing: one tensor given twice is never like two, and tensors are not
    like themselves in another mode (inference, autocast).
    """
    try:
        check: Callable[..., bool] = _tensor_guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check  # type: ignore[misc]
    except (TypeError, AttributeError):  # a version of torch without it, or with another one
        return nothing_alike
    return check


def _empty(shape: tuple[int, ...], _: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


class EmptyTensors:
    """Uninitialized contiguous tensors of fixed shapes and types, at a third of torch.empty's host time.

    here() makes a fresh set, an iterator, on torch's current GPU.
    """

    def __init__(self, *kinds: tuple[tuple[int, ...], torch.dtype]) -> None:
        """kinds: shape and type of each tensor."""
        strided = [(shape, torch.empty(shape, device="meta").stride(), dtype) for shape, dtype in kinds]
        self.here: Callable[[], Iterator[torch.Tensor]] = functools.partial(
            itertools.starmap, _empty_strided or _empty, strided
        )

    def on(self, device: int) -> Iterator[torch.Tensor]:
        """A fresh set on GPU `device`."""
        if device == torch._C._cuda_getDevice():
            return self.here()
        with torch.cuda.device(device):
            return iter([*self.here()])
