"""The torch.library namespace `comet`: every op with its schema, a CPU implementation (the reference) and a fake.

A raw Library dispatches cheaper than custom_op decorators. The reference is registered for every device
(CompositeExplicitAutograd), so ops run wherever torch runs; a kernel registers itself on top for "CUDA".
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

LIBRARY = torch.library.Library("comet", "DEF")


def define_op(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define `comet::<name>` from its schema, with the reference on every device and a fake for tracing."""
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"comet::{name}", fake, lib=LIBRARY)


def is_plain_cuda(x: Tensor) -> bool:
    """Whether the dispatcher, which costs a third of all host time, has nothing to add: no tracing, no subclass."""
    return x.is_cuda and type(x) is Tensor and not is_dynamo_compiling()
