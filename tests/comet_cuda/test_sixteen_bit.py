"""The 16-bit and FP8 ops between linears: references against plain torch; on a GPU, kernels against references."""

import pytest
import torch

from comet_cuda.sixteen_bit import FP8_MAX, rms_norm_ref, rope_append_16_ref, silu_mul_ref, to_fp8

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_references_are_what_torch_computes() -> None:
    x, residual, weight = normal(5, 96), normal(5, 96, seed=1), normal(96, seed=2)
    out, scale, summed = rms_norm_ref(x, residual, weight, 1e-5, False)
    torch.testing.assert_close(summed, x + residual)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x + residual, (96,), weight, 1e-5))
    assert scale.shape == (0, 1)
    product, _ = silu_mul_ref(normal(3, 64), False)
    gate, up = normal(3, 64).chunk(2, 1)
    torch.testing.assert_close(product, torch.nn.functional.silu(gate) * up)


def test_fp8_keeps_the_largest_value_and_zeros() -> None:
    x = normal(4, 64) * 1000
    x[2] = 0
    codes, scale = to_fp8(x)
    back = codes.float() * scale
    torch.testing.assert_close(back.abs().amax(1), x.abs().amax(1))
    assert scale[2] == 1 and not back[2].any()
    assert ((back - x).abs() <= x.abs() / 16 + scale * FP8_MAX * 2**-17).all()  # 3 mantissa bits; subnormals


def appended(by_group: bool, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    heads, kv_heads, dim = 6, 2, 64
    angle = torch.arange(9.0)[:, None] * torch.linspace(1, 0.01, dim // 2)
    arguments = [
        normal(3, (heads + 2 * kv_heads) * dim).to(dtype),
        normal(dim, seed=1).to(dtype),
        normal(dim, seed=2).to(dtype),
    ]
    cache = [torch.zeros(20, kv_heads, dim, dtype=dtype, device=device) for _ in range(2)]
    index = [torch.tensor([0, 8, 3], dtype=torch.int32), torch.tensor([5, 19, 0], dtype=torch.int32)]
    op = rope_append_16_ref if device == "cpu" else torch.ops.comet.rope_append_16
    moved = [tensor.to(device) for tensor in arguments]
    q = op(
        *moved, 1e-6, angle.cos().to(device), angle.sin().to(device), *[i.to(device) for i in index], *cache, by_group
    )
    return [q.cpu().float(), *[tensor.cpu().float() for tensor in cache]]


def test_queries_by_group_are_the_same_queries() -> None:
    plain, grouped = appended(False)[0], appended(True)[0].view(3, 3, 2, 64)
    for head in range(6):
        assert torch.equal(plain[:, head], grouped[:, head % 3, head // 3])


def test_only_named_rows_are_written() -> None:
    _, keys, values = appended(False)
    assert (
        keys.any(2).any(1).nonzero().flatten().tolist()
        == values.any(2).any(1).nonzero().flatten().tolist()
        == [0, 5, 19]
    )


@gpu
@needs_gpu
@pytest.mark.parametrize("by_group", [False, True])
def test_rope_kernel_agrees(by_group: bool) -> None:
    for found, wanted in zip(
        appended(by_group, "cuda", torch.bfloat16), appended(by_group, "cpu", torch.bfloat16), strict=True
    ):
        torch.testing.assert_close(found, wanted, atol=2**-7, rtol=2**-7)  # one step of bf16


@gpu
@needs_gpu
@pytest.mark.parametrize(("rows", "channels"), [(1, 576), (7, 4096), (3, 14336), (2, 28672)])
@pytest.mark.parametrize("fp8", [False, True])
def test_row_kernels_agree(rows: int, channels: int, fp8: bool) -> None:
    x, residual, weight = (
        normal(*size, seed=seed).bfloat16() for seed, size in enumerate([(rows, channels)] * 2 + [(channels,)])
    )
    pairs = [
        (
            torch.ops.comet.silu_mul(torch.cat((x, residual), 1).cuda(), fp8),
            silu_mul_ref(torch.cat((x, residual), 1), fp8),
        )
    ]
    pairs.append(
        (
            torch.ops.comet.rms_norm(x.cuda(), residual.cuda(), weight.cuda(), 1e-5, fp8),
            rms_norm_ref(x, residual, weight, 1e-5, fp8),
        )
    )
    for found, wanted in pairs:
        assert found[0].dtype == wanted[0].dtype
        a, b = found[0].cpu().float(), wanted[0].float()
        if fp8:
            a, b = a * found[1].cpu(), b * wanted[1]
        assert (a - b).norm() / b.norm() < (5e-3 if fp8 else 2e-3)  # roundings that fall the other way
