"""vLLM's kernels with 4-bit weights as peers of the GEMM: Marlin, Machete and CUTLASS W4A8, groups of 128.

Random codes are put into each kernel's own layout by vLLM's functions; the expected product is computed from the codes.
Written against vLLM 0.26; a version that lacks a function is reported as a peer that cannot run.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from comet_cuda.timing import copies_for_cold_l2

Built = tuple[list[Callable[[], Tensor]], Tensor, Tensor]
GROUP = 128


def _random(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x bf16 [M, K]; codes [K, N] 0..15 (8 is zero), eight along K in an int32 [K / 8, N]; scales bf16 [K / 128, N]."""
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    codes = torch.randint(0, 16, (k, n), dtype=torch.int32, device="cuda")
    packed = torch.zeros(k // 8, n, dtype=torch.int32, device="cuda")
    for i in range(8):
        packed |= codes[i::8] << (4 * i)
    scales = (torch.rand(k // GROUP, n, device="cuda") * 0.01 + 0.01).to(torch.bfloat16)
    return x, codes, packed, scales


def _expected(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return x.float() @ ((codes - 8) * scales.float().repeat_interleave(GROUP, 0))


def _closures(weight: Tensor, call: Callable[[Tensor], Tensor]) -> list[Callable[[], Tensor]]:
    copies = [weight, *(weight.clone() for _ in range(copies_for_cold_l2(weight.nbytes) - 1))]
    return [(lambda w=w: call(w)) for w in copies]  # type: ignore[misc]


def marlin(m: int, n: int, k: int) -> Built:
    """W4A16 Marlin, symmetric."""
    from vllm import _custom_ops as ops  # type: ignore[import-not-found,unused-ignore]
    from vllm.model_executor.layers.quantization.utils.marlin_utils import (  # type: ignore[import-not-found,unused-ignore]
        marlin_make_workspace_new,
        marlin_permute_scales,
    )
    from vllm.scalar_type import scalar_types  # type: ignore[import-not-found,unused-ignore]

    x, codes, packed, scales = _random(m, n, k)
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    weight = ops.gptq_marlin_repack(packed, none, k, n, 4)
    permuted = marlin_permute_scales(scales, k, n, GROUP)
    workspace = marlin_make_workspace_new(x.device)

    def call(w: Tensor) -> Tensor:
        y: Tensor = ops.marlin_gemm(
            x, None, w, None, permuted, None, None, none, none, none, workspace, scalar_types.uint4b8,
            size_m=m, size_n=n, size_k=k, use_fp32_reduce=True,
        )  # fmt: skip
        return y

    runs = _closures(weight, call)
    return runs, runs[0](), _expected(x, codes, scales)


def machete(m: int, n: int, k: int) -> Built:
    """W4A16 Machete, symmetric (Hopper)."""
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    x, codes, packed, scales = _random(m, n, k)
    weight = ops.machete_prepack_B(
        packed.t().contiguous().t(), a_type=x.dtype, b_type=scalar_types.uint4b8, group_scales_type=x.dtype
    )

    def call(w: Tensor) -> Tensor:
        y: Tensor = ops.machete_mm(a=x, b_q=w, b_type=scalar_types.uint4b8, b_group_scales=scales, b_group_size=GROUP)
        return y

    runs = _closures(weight, call)
    return runs, runs[0](), _expected(x, codes, scales)


def cutlass_w4a8(m: int, n: int, k: int) -> Built:
    """CUTLASS W4A8 (FP8 activations and group scales), symmetric (Hopper). Activations are quantized beforehand."""
    from vllm import _custom_ops as ops

    x, codes, packed, _ = _random(m, n, k)
    signed = torch.zeros_like(packed)
    for i in range(8):
        signed |= ((codes[i::8] - 8) & 15) << (4 * i)
    group_scales = (torch.rand(k // GROUP, n, device="cuda") * 8 + 8).to(torch.float8_e4m3fn)
    row_scales = torch.full((n, 1), 1e-3, device="cuda")
    fp8, token_scales = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    weight = ops.cutlass_encode_and_reorder_int4b(signed.t().contiguous().t())
    stored = ops.cutlass_pack_scale_fp8(group_scales.contiguous())

    def call(w: Tensor) -> Tensor:
        y: Tensor = ops.cutlass_w4a8_mm(
            a=fp8, b_q=w, b_group_scales=stored, b_group_size=GROUP, a_token_scales=token_scales,
            b_channel_scales=row_scales,
        )  # fmt: skip
        return y

    runs = _closures(weight, call)
    full = (codes - 8) * group_scales.float().repeat_interleave(GROUP, 0) * row_scales.T
    return runs, runs[0](), (fp8.float() * token_scales) @ full
