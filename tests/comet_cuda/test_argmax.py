"""argmax_rows: the first of the largest values, on the reference and, on a GPU, the kernel again and again."""

import pytest
import torch

from comet_cuda.argmax import argmax_rows, argmax_rows_ref

CASES = [(1, 8), (3, 50), (64, 32000), (5, 128256), (257, 4096)]


@pytest.mark.parametrize(("rows", "columns"), CASES[:3])
def test_the_first_of_equals_wins(rows: int, columns: int) -> None:
    logits = torch.randint(-3, 3, (rows, columns), generator=torch.Generator().manual_seed(0)).float()
    found = argmax_rows(logits)
    for row in range(rows):
        assert found[row] == logits[row].tolist().index(max(logits[row].tolist()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("rows", "columns"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_agrees_and_cleans_up(rows: int, columns: int, dtype: torch.dtype) -> None:
    for seed in range(3):
        logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
        logits[0] = -torch.inf
        logits[0, columns // 2] = -5.0
        assert torch.equal(argmax_rows(logits.cuda()).cpu(), argmax_rows_ref(logits))
