"""Torch code whose float results do not depend on the device: each operation is computed in float64 and rounded once.

In: any torch code, under `rounded_once`. Out: what it computes, of the types that it has without. The order of a sum,
or whose exp it is, moves a float64 result by about 1e-16 of its terms; that reaches a float32 about once in 1e8
results, and a 16-bit type hardly ever. Two devices that run the same code say the same then, bit for bit.

Not touched: what moves or chooses values, COMET's ops, and whole modules that define the order of their operations
(packed linears, whose kernels equal their references bit by bit). An operation of which it is not known that it can be
computed so, since it exists on one device only, draws random numbers or makes floats of integers, is an error.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from comet_cuda.errors import CometError

MOVES = frozenset({  # they round at most once, alike on all devices, or not at all
    "_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy_", "embedding", "empty_like", "fill_", "flip",
    "full_like", "gather", "index", "index_select", "lift_fresh_copy", "masked_fill", "new_empty", "new_full",
    "new_ones", "new_zeros", "ones_like", "repeat", "roll", "stack", "where", "zero_", "zeros_like",
})  # fmt: skip
MAKES = frozenset({"arange", "empty", "empty_strided", "full", "ones", "scalar_tensor", "zeros"})  # floats, of none
ONE_DEVICE = ("cudnn", "efficient", "flash", "fused", "miopen", "mkldnn")  # in the name of an op that not all have
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_RMS_NORM = ("input", "normalized_shape", "weight", "eps")
WHOLE: dict[Callable[..., Any], tuple[str, ...]] = {  # and their arguments
    # Each device takes these apart in a way of its own, so they are one operation here.
    nn.functional.scaled_dot_product_attention: _ATTENTION,
    nn.functional.rms_norm: _RMS_NORM,
    torch.rms_norm: _RMS_NORM,
}


def _is_narrow(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _rounded(x: Any, dtype: torch.dtype) -> Any:
    """float64 tensors to dtype, by way of float32, as casts to 16 bit go on some devices."""
    is_wide = isinstance(x, Tensor) and x.dtype == torch.float64 != dtype
    return x.float().to(dtype) if is_wide else x


def _result_type(given: dict[str, Any]) -> torch.dtype:
    """Of an operation that is called with these arguments, at least one a float tensor."""
    if given.get("dtype") is not None:
        asked: torch.dtype = given["dtype"]
        return asked
    if given.get("half_to_float"):
        return torch.float32
    floats = [x for x in tree_leaves(list(given.values())) if isinstance(x, Tensor) and x.is_floating_point()]
    kinds = [x.dtype for x in floats if x.dim()] or [x.dtype for x in floats]
    return functools.reduce(torch.promote_types, kinds)


def _wide(func: Callable[..., Any], given: dict[str, Any], written: Iterable[str] = ()) -> Any:
    """func(**given) in float64, rounded once. written: names of arguments that it writes."""
    wide: dict[int, Tensor] = {}

    def widen(x: Any) -> Any:
        return wide.setdefault(id(x), x.double()) if _is_narrow(x) else x

    changed = {"dtype": torch.float64, "half_to_float": False}
    asked = {name: changed[name] if name in changed and given[name] else given[name] for name in given}
    found = func(**tree_map(widen, asked))
    originals = {}
    for name in written:
        for x in tree_leaves(given.get(name)):
            if id(x) in wide:
                originals[id(wide[id(x)])] = x.copy_(_rounded(wide[id(x)], x.dtype))
    dtype = _result_type(given)
    return tree_map(lambda x: originals[id(x)] if id(x) in originals else _rounded(x, dtype), found)


class _Operations(TorchDispatchMode):
    """Every operation of torch's core."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paused = 0  # how many have asked for operations as they are

    def pause(self, change: int) -> None:
        self.paused += change

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        schema, kwargs = func._schema, kwargs or {}
        name = schema.name.removeprefix("aten::")
        views = any(value.alias_info and not value.alias_info.is_write for value in schema.returns)
        if self.paused or views or name in MOVES or name.startswith("comet::"):
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or any(word in name for word in ONE_DEVICE) or "::" in name:
            raise _unknown(func)
        if any(map(_is_narrow, tree_leaves((args, kwargs)))):
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
            return _wide(func, given, [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write])
        found = func(*args, **kwargs)
        if name not in MAKES and any(map(_is_narrow, tree_leaves(found))):
            raise _unknown(func)
        return found


def _unknown(func: Any) -> CometError:
    return CometError(
        f"{func}: it is not known whether its result, computed in float64 and rounded, is the same on all devices",
        "compute it by other operations, or enter it in comet_core/rounded_once.py",
    )


class _Functions(TorchFunctionMode):
    """The functions in `WHOLE`."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in WHOLE or self.operations.paused:
            return func(*args, **(kwargs or {}))
        self.operations.pause(1)
        try:
            return _wide(func, dict(zip(WHOLE[func], args, strict=False)) | (kwargs or {}))
        finally:
            self.operations.pause(-1)


@contextmanager
def rounded_once(as_they_are: Iterable[nn.Module] = ()) -> Iterator[None]:
    """A context in which float operations are computed in float64 and rounded once to the type that they have.

    Args:
        as_they_are: modules whose forward is not touched.

    Errors:
        CometError, in the context, naming an operation that is not known to be the same on all devices then.
    """
    operations = _Operations()
    with ExitStack() as stack:
        for module in as_they_are:
            before = module.register_forward_pre_hook(lambda *_: operations.pause(1))
            after = module.register_forward_hook(lambda *_: operations.pause(-1), always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(operations)
        stack.enter_context(_Functions(operations))
        yield
