"""argmax of each row of logits: greedy sampling, one launch. torch's takes four times as long for few, long rows."""

import functools

import torch
from torch import Tensor

from comet_cuda.dispatch import device_arch, device_capability
from comet_cuda.jit import Configuration, compile_kernel
from comet_cuda.library import LIBRARY, define_op

SOURCE = "argmax.cu"
ELEMENTS = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
THREADS, WIDE = 256, 8  # a cta; values a thread loads at once
CTAS = 1024  # over all rows, about: enough loads in flight on any GPU
MOST_ROWS = 4096


def configurations(_: str) -> list[Configuration]:
    """Every way that the source is compiled."""
    return [Configuration(SOURCE, {"ELEMENT": element}) for element in ELEMENTS.values()]


def argmax_rows_ref(logits: Tensor) -> Tensor:
    """Column of the largest value of each row, the first of equals: float [B, V] -> int64 [B]."""
    return (logits == logits.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)


@functools.cache
def _scratch(device: int) -> tuple[Tensor, Tensor]:
    """Best value and finished ctas of each row; zeros whenever no kernel runs. Launches of one device take turns."""
    where = torch.device("cuda", device)
    return torch.zeros(MOST_ROWS, dtype=torch.int64, device=where), torch.zeros(
        MOST_ROWS, dtype=torch.int32, device=where
    )


def argmax_rows_gpu(logits: Tensor) -> Tensor:
    """`argmax_rows_ref` on CUDA tensors."""
    rows, columns = logits.shape
    fits = logits.dtype in ELEMENTS and logits.is_contiguous() and columns % WIDE == 0 and 0 < rows <= MOST_ROWS
    if not fits:
        return argmax_rows_ref(logits)
    device = logits.get_device()
    out = logits.new_empty(rows, dtype=torch.int64)
    splits = max(1, min(-(-columns // (THREADS * WIDE)), CTAS // rows))
    kernel = compile_kernel(SOURCE, "argmax_rows", device_arch(device), {"ELEMENT": ELEMENTS[logits.dtype]})
    arguments = (logits, *_scratch(device), out, columns)
    kernel.launch_on(device, (splits, rows), THREADS, arguments, pdl=device_capability(device) >= (9, 0))
    return out


define_op(
    "argmax_rows(Tensor logits) -> Tensor",
    argmax_rows_ref,
    lambda logits: logits.new_empty(logits.shape[0], dtype=torch.int64),
)
LIBRARY.impl("argmax_rows", argmax_rows_gpu, "CUDA")


def argmax_rows(logits: Tensor) -> Tensor:
    """The op behind `argmax_rows_ref`."""
    found: Tensor = torch.ops.comet.argmax_rows(logits)
    return found
