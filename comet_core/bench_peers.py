"""Other kernels that `comet bench kernel` times beside ours: one small adapter each.

An adapter builds random operands for y [M, N] = x [M, K] W^T, says what the product should be, and returns one closure
per copy of its weights (several copies keep the L2 cold). What a library lacks is said, not guessed: `missing`.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from comet_core import bench_vllm
from comet_cuda.timing import copies_for_cold_l2

Built = tuple[list[Callable[[], Tensor]], Tensor, Tensor]  # closures, output of one call, float32 product expected
BASELINE = "cublas_bf16"
INT_MM_ROWS = 32  # torch._int_mm takes no fewer than 17 rows: smaller batches are padded
GROUP = 128


@dataclass(frozen=True)
class Peer:
    """A kernel to compare with."""

    weights: str  # what its weights are, for the tables
    build: Callable[[int, int, int], Built]  # m, n, k
    tolerance: float  # relative norm of the difference to the exact product of its own operands
    module: str = "torch"

    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        return "" if importlib.util.find_spec(self.module) else f"{self.module} is not installed"


def _operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    return x, torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * k**-0.5


def _closures(weight: Tensor, call: Callable[[Tensor], Tensor]) -> list[Callable[[], Tensor]]:
    copies = [weight, *(weight.clone() for _ in range(copies_for_cold_l2(weight.nbytes) - 1))]
    return [(lambda w=w: call(w)) for w in copies]  # type: ignore[misc]


def _bf16(m: int, n: int, k: int) -> Built:
    x, w = _operands(m, n, k)
    runs = _closures(w, lambda w: torch.nn.functional.linear(x, w))
    return runs, runs[0](), x.float() @ w.float().T


def _fp8(m: int, n: int, k: int) -> Built:
    x, w = (tensor.to(torch.float8_e4m3fn) for tensor in _operands(m, n, k))
    one = torch.ones((), device="cuda")

    def call(w: Tensor) -> Tensor:
        return torch._scaled_mm(x, w.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    runs = _closures(w, call)
    return runs, runs[0](), x.float() @ w.float().T


def _int8(m: int, n: int, k: int) -> Built:
    x = torch.randint(-127, 128, (max(m, INT_MM_ROWS), k), dtype=torch.int8, device="cuda")
    w = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
    runs = _closures(w, lambda w: torch._int_mm(x, w.T))
    return runs, runs[0](), x.float() @ w.float().T


def _int4_weight_only(m: int, n: int, k: int) -> Built:
    """torch's own W4A16 kernel ("tinygemm"), groups of 128."""
    x, _ = _operands(m, n, k)
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32, device="cuda")
    scale = torch.rand(k // GROUP, n, device="cuda") * 0.01 + 0.01
    zero = torch.randn(k // GROUP, n, device="cuda") * 0.01
    scales_and_zeros = torch.stack([scale, zero], -1).to(torch.bfloat16).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8), 8)
    runs = _closures(packed, lambda w: torch.ops.aten._weight_int4pack_mm(x, w, GROUP, scales_and_zeros))
    s, z = (part.float().T.repeat_interleave(GROUP, 1) for part in scales_and_zeros.unbind(-1))
    return runs, runs[0](), x.float() @ ((codes - 8) * s + z).T


PEERS = {
    BASELINE: Peer("bf16", _bf16, 5e-3),
    "cublas_fp8": Peer("FP8, scale per tensor", _fp8, 5e-3),
    "torch_int8": Peer("INT8, no scales", _int8, 1e-6),
    "torch_int4": Peer("INT4 weight-only, g128", _int4_weight_only, 1e-2),
    "vllm_marlin": Peer("INT4 weight-only, symmetric g128", bench_vllm.marlin, 1e-2, "vllm"),
    "vllm_machete": Peer("INT4 weight-only, symmetric g128", bench_vllm.machete, 1e-2, "vllm"),
    "vllm_cutlass_w4a8": Peer("INT4, FP8 activations, symmetric g128", bench_vllm.cutlass_w4a8, 3e-2, "vllm"),
}
