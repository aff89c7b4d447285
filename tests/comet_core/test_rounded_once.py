"""Under `rounded_once` the order of sums and the last bit of a library's functions are not seen in any result."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from comet_core.real_text import compare, reference_rows, rounded_rows
from comet_core.rounded_once import rounded_once
from comet_cuda import quantize_token
from comet_cuda.errors import CometError

SUMS = {"addmm": (1, 2), "bmm": (0, 1), "mm": (0, 1)}  # which arguments are multiplied
FUNCTIONS = {"_log_softmax", "_softmax", "cos", "exp", "gelu", "rsqrt", "sigmoid", "silu", "sin", "tanh"}


class OtherDevice(TorchDispatchMode):
    """Adds from the other end, and its functions are off by one in the last place, in whatever type it computes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, args = func._schema.name.removeprefix("aten::"), list(args)
        if name in SUMS:
            left, right = SUMS[name]
            args[left], args[right] = args[left].flip(-1), args[right].flip(-2)
        elif name in ("mean", "sum") and len(args) > 1:
            args[0] = args[0].flip(args[1])
        elif name == "div" and not isinstance(args[1], Tensor):  # GPUs multiply by the reciprocal of a number
            return args[0] * torch.tensor(1 / args[1], dtype=args[0].dtype)
        found = func(*args, **(kwargs or {}))
        if name in FUNCTIONS and found.dtype in (torch.float32, torch.float64):
            found = torch.nextafter(found, torch.full_like(found, 1e9))
        return found


def on_both(run: Callable[[], Any], around: Callable[[], AbstractContextManager[None]] = rounded_once) -> list[Any]:
    results = []
    for device in (nullcontext(), OtherDevice()):
        with device, sdpa_kernel(SDPBackend.MATH), around():
            results.append(run())
    return results


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, W, B = random(64, 512), random(512, 96, seed=1), random(96, seed=2)
Q = random(1, 2, 40, 64, seed=3)
OPERATIONS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "linear": lambda kind: nn.functional.linear(X.to(kind), W.T.to(kind), B.to(kind)),
    "mm": lambda kind: X.to(kind) @ W.to(kind),
    "mean": lambda kind: X.to(kind).pow(2).mean(-1),
    "norm": lambda kind: nn.functional.rms_norm(X.to(kind), (512,), X[0].to(kind), 1e-5),
    "softmax": lambda kind: X.to(kind).softmax(-1),
    "log_softmax of float32": lambda kind: torch.log_softmax(X.to(kind), -1, dtype=torch.float32),
    "attention": lambda kind: nn.functional.scaled_dot_product_attention(Q.to(kind), Q.to(kind), Q.to(kind)),
    "silu": lambda kind: nn.functional.silu(X.to(kind)) * X.to(kind),
    "quotient": lambda kind: X.to(kind) / 15,
    "rope": lambda kind: (X.to(kind) * 100).cos(),
    "in place": lambda kind: X.to(kind).clone().addmm_((X @ W).to(kind), W.T.to(kind)),
    "out": lambda kind: torch.mm(X.to(kind), W.to(kind), out=torch.empty(64, 96, dtype=kind)),
}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_two_devices_say_the_same(name: str, kind: torch.dtype) -> None:
    plain = OPERATIONS[name](kind)
    here, there = on_both(lambda: OPERATIONS[name](kind))
    assert here.dtype == plain.dtype and torch.equal(here, there)
    torch.testing.assert_close(here, plain, rtol=2e-2 if kind != torch.float32 else 2e-5, atol=1e-2)
    if kind == torch.float32:
        assert not torch.equal(*on_both(lambda: OPERATIONS[name](kind), nullcontext))


def test_float64_stays() -> None:
    with rounded_once():
        mixed = W[0].double() / 3 + W[0]
    assert torch.equal(mixed, W[0].double() / 3 + W[0])


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("rand_like", lambda: torch.rand_like(X)),
        ("div", lambda: torch.arange(8) / 3),
        ("flash", lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(Q, Q, Q)),
    ],
)
def test_what_differs_between_devices_is_named(name: str, run: Callable[[], Any]) -> None:
    with rounded_once(), pytest.raises(CometError, match=name):
        run()


def test_a_module_keeps_its_order() -> None:
    """And what comes after it is rounded once again, also after an error inside."""
    linear = nn.Linear(512, 96).requires_grad_(False)
    plain = linear(X)

    def wrong(*_: Any) -> None:
        raise ValueError("inside")

    with rounded_once([linear]):
        assert torch.equal(linear(X), plain)
        handle = linear.register_forward_pre_hook(wrong)
        with pytest.raises(ValueError, match="inside"):
            linear(X)
        handle.remove()
        once = nn.functional.linear(X, linear.weight, linear.bias)
    assert torch.equal(once, nn.functional.linear(X.double(), linear.weight.double(), linear.bias.double()).float())
    assert not torch.equal(once, plain)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_packed_model_says_the_same_on_both(tiny: Any, kind: torch.dtype) -> None:
    """Bit for bit, through packed linears whose references are those of a GPU's kernels; and what it says is right."""
    folder, windows = Path(tiny.packed), torch.randint(0, 256, (2, 100), generator=torch.Generator().manual_seed(0))
    here, there = on_both(lambda: rounded_rows(folder, windows, kind), nullcontext)
    values = compare(None, windows, here, there).values()
    assert values["kl"] == 0 and values["top1"] == values["same_bits"] == 1
    plain, moved = on_both(lambda: reference_rows(folder, windows, kind), nullcontext)
    values = compare(None, windows, plain, moved).values()
    assert values["kl"] != 0 and values["same_bits"] < 0.5
    assert abs(compare(None, windows, plain, here).values()["kl"]) < (1e-6 if kind == torch.float32 else 1e-3)


def test_quantizing_by_torch_s_operations_keeps_its_order(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU quantizes float32: the reference without an op around it."""
    folder, windows = Path(tiny.packed), torch.arange(40)[None]
    (wanted,), plain, as_it_is = rounded_rows(folder, windows, torch.float32), X @ W, []
    reference = quantize_token.quantize_token_ref

    def watched(*args: Any) -> Any:
        as_it_is.append(torch.equal(X @ W, plain))
        return reference(*args)

    monkeypatch.setattr(quantize_token, "is_plain_cuda", lambda _: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", (-1).__int__, raising=False)  # of a tensor on the CPU
    monkeypatch.setattr(quantize_token, "quantize_token_ref", watched)
    (found,) = rounded_rows(folder, windows, torch.float32)
    assert as_it_is and all(as_it_is) and torch.equal(found, wanted)


class Faulty(TorchDispatchMode):
    """One op's first result is a little too large."""

    def __init__(self, op: str, relative: float) -> None:
        super().__init__()
        self.op, self.relative = op, relative

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._schema.name == self.op:
            found = found.clone()
            found[0] *= 1 + self.relative
        return found


def test_a_kernel_that_is_off_is_seen(tiny: Any) -> None:
    """By other bits where it has to equal its reference, by its name where it has to be near."""
    folder, windows = Path(tiny.packed), torch.arange(40)[None]
    right = rounded_rows(folder, windows, torch.float32)
    with Faulty("comet::w4ax_gemm_integer", 2**-20):
        off = rounded_rows(folder, windows, torch.float32)
    assert compare(None, windows, right, off).values()["same_bits"] < 0.5
    with Faulty("comet::w4ax_gemm", 2**-20):
        assert compare(None, windows, right, rounded_rows(folder, windows, torch.float32)).values()["same_bits"] == 1
    with Faulty("comet::w4ax_gemm", 1e-3), pytest.raises(CometError, match=r"o_proj: its kernel"):
        rounded_rows(folder, windows, torch.float32)
