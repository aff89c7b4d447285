"""gptq_block: the kernel against the reference, on a GPU, and everywhere else by the emulator."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from comet_cuda.gptq_block import gptq_block, gptq_block_gpu, gptq_block_ref
from comet_cuda.weight_grid import choose_base, choose_grid, most_multiple

_spec = importlib.util.spec_from_file_location("emulated", Path(__file__).with_name("emulated.py"))
assert _spec is not None and _spec.loader is not None
emulated = importlib.util.module_from_spec(_spec)
sys.modules["emulated"] = emulated
_spec.loader.exec_module(emulated)

KINDS = [(4, False, True), (4, False, False), (4, True, True), (8, True, True)]  # bits, symmetric, search
OTHER_GRIDS = 0.02  # share of rows in which two ranges tie, so that the order of a sum decides
OTHER_CODES = 0.002  # share of codes in the others: one that ties moves those after it


def problem(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of weights (as a part of wider ones), factor, importance."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, 200, generator=generator) * 0.02
    wide[:, 60] *= 9
    if rows > 3:
        wide[3] = 0
    mixed = torch.randn(400, 128, generator=generator) @ torch.randn(128, 128, generator=generator)
    inverse = torch.linalg.inv(mixed.T @ mixed / 400 + 3 * torch.eye(128))
    upper = torch.linalg.cholesky(inverse, upper=True)
    return wide[:, 40:168], upper, upper.diagonal().square().reciprocal()


def check(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], block: Tensor) -> None:
    codes, errors, scale, zero = (x.cpu() for x in found)
    same = (scale == wanted[2]) & (zero == wanted[3])
    assert float((~same).float().mean()) <= OTHER_GRIDS
    assert codes.dtype == torch.int8 and codes.shape == block.shape == errors.shape
    different = codes[same] != wanted[0][same]
    assert float(different.float().mean()) <= OTHER_CODES
    rows = ~different.any(1)
    assert torch.allclose(errors[same][rows], wanted[1][same][rows], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_by_emulation(kind: tuple[int, bool, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated.emulate(monkeypatch, tmp_path)
    block, factor, importance = problem(5)
    wanted = gptq_block_ref(block, factor, importance, *kind)
    check(gptq_block_gpu(block, factor, importance, *kind), wanted, block)
    grid = choose_grid(block, torch.ones(128), kind[0], kind[1], search=False)
    given = (grid.scale * 1.5, grid.zero)
    wanted = gptq_block_ref(block, factor, importance, *kind, *given)
    found = gptq_block_gpu(block, factor, importance, *kind, *given)
    assert torch.equal(found[2], given[0]) and torch.equal(found[3], given[1])
    check(found, wanted, block)
    check_multiples(block, factor, importance, kind)


def check_multiples(block: Tensor, factor: Tensor, importance: Tensor, kind: tuple[int, bool, bool]) -> None:
    """The same with scales that are multiples of a base a row, of which some are so small that the most is 15 of it."""
    bits, symmetric, search = kind
    if bits != 4:
        return
    base = choose_base(block.cpu()[:, None], symmetric) * torch.where(torch.arange(len(block)) % 2 == 0, 1.0, 0.5)
    wanted = gptq_block_ref(block.cpu(), factor.cpu(), importance.cpu(), bits, symmetric, search, base=base)
    found = gptq_block_gpu(block, factor, importance, bits, symmetric, search, base=base.to(block.device))
    check(found, wanted, block.cpu())
    multiple = found[2].cpu() / base
    assert torch.equal(multiple, multiple.round()) and 5 < multiple.max() <= 15 and multiple.min() >= 1
    assert bool((multiple <= most_multiple(found[3].cpu())).all())


def test_the_outcome_is_gptq_by_its_definition() -> None:
    """Written out row by row in double precision: a column's error over U_ii leaves through row i of U."""
    block, factor, importance = problem(6)
    codes, errors, scale, zero = gptq_block(block, factor, importance, 4, False, True)
    for row in range(6):
        rest = block[row].double()
        for i in range(128):
            value = float((codes[row, i] - zero[row]) * scale[row])
            nearest = min(max(round(float(rest[i] / scale[row])) + int(zero[row]), 0), 15)
            assert abs(nearest - int(codes[row, i])) <= (1 if abs(float(rest[i] / scale[row]) % 1 - 0.5) < 1e-3 else 0)
            error = (rest[i] - value) / factor[i, i].double()
            assert float(error) == pytest.approx(float(errors[row, i]), rel=1e-3, abs=1e-4)
            rest = rest - error * factor[i].double()


def test_ops_trace_without_data() -> None:
    block, factor = torch.empty(7, 128, device="meta"), torch.empty(128, 128, device="meta")
    codes, errors, scale, zero = gptq_block(block, factor, factor[0], 4, False, True)
    assert (codes.shape, codes.dtype, errors.shape, scale.shape, zero.shape) == (
        (7, 128), torch.int8, (7, 128), (7,), (7,),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 17, 1536, 17920])
def test_the_kernel_on_a_gpu(kind: tuple[int, bool, bool], rows: int) -> None:
    block, factor, importance = problem(rows)
    wanted = gptq_block_ref(block, factor, importance, *kind)
    found = gptq_block(block.cuda(), factor.cuda().T.contiguous().T, importance.cuda(), *kind)
    check(found, wanted, block)
    given = (wanted[2], wanted[3])
    found = gptq_block(block.cuda(), factor.cuda(), importance.cuda(), *kind, *(x.cuda() for x in given))
    check(found, gptq_block_ref(block, factor, importance, *kind, *given), block)
    check_multiples(block.cuda(), factor.cuda(), importance.cuda(), kind)
