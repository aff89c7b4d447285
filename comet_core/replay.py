"""A function of tensors that launches hundreds of small kernels -> the same function, launched at once on a GPU.

Coordinate descent walks the columns of a block one after the other, ten small kernels each; started one by one they
leave a GPU idle most of the time. A CUDA graph, recorded once per function and shapes, starts them together. On a
CPU the function runs as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_RECORDED: dict[Any, "_Recording"] = {}
MOST_RECORDED = 32  # each holds its buffers; shapes of one model are few


class _Recording:
    def __init__(self, function: Callable[..., tuple[Tensor, ...]], arguments: tuple[Tensor, ...]) -> None:
        self.inputs = [argument.clone() for argument in arguments]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once before recording: libraries allocate what they need
            function(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = function(*self.inputs)

    def __call__(self, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for own, given in zip(self.inputs, arguments, strict=True):
            own.copy_(given)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


def replay(function: Callable[..., tuple[Tensor, ...]], *arguments: Tensor) -> tuple[Tensor, ...]:
    """function(*arguments); `function` works on tensors only and returns tensors. It may overwrite its arguments on a
    GPU's copies and must not be given tensors that are needed afterwards on a CPU."""
    if not arguments[0].is_cuda:
        return function(*arguments)
    key = (function, tuple((tuple(a.shape), a.dtype, a.device) for a in arguments))
    if key not in _RECORDED:
        if len(_RECORDED) >= MOST_RECORDED:
            _RECORDED.clear()
        _RECORDED[key] = _Recording(function, arguments)
    return _RECORDED[key](arguments)
