"""The sm_90a GEMM on a GPU: exact integers, every edge of M, N and block mix, determinism, graphs, torch.compile."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "cuda" / "tools"))
import tune_gemm

from comet_cuda import w4ax_gemm_sm90 as gemm
from comet_cuda.weight_layout import tile_activations_sm90

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
]

BATCHES = [*range(18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4096]
MIXES = {
    "all INT4": tune_gemm.block_bits_for(16, 1.0),
    "all INT8": tune_gemm.block_bits_for(16, 0.0),
    "84% INT4": tune_gemm.block_bits_for(25),
    "scattered": torch.tensor([4, 8, 4, 4, 8, 8, 8, 4, 4, 4, 4, 8, 4, 8, 4, 4, 4, 8, 8], dtype=torch.uint8),
    "beyond 32 blocks": tune_gemm.block_bits_for(86),
}


def test_integers_are_exact() -> None:
    assert tune_gemm.exactness() == []


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("m", BATCHES)
def test_every_batch_and_block_mix(m: int, mix: str) -> None:
    assert tune_gemm.verify(m, 4104 if m < 1000 else 2056, MIXES[mix], None, bias=m % 2 == 1) == ""


@pytest.mark.parametrize("rows", [1, 8, 64, 100, 1023])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("has_zero", [True, False])
def test_any_rows_and_type(rows: int, dtype: torch.dtype, has_zero: bool) -> None:
    for m in (5, 70, 300):
        assert tune_gemm.verify(m, rows, MIXES["scattered"], None, dtype=dtype, has_zero=has_zero, bias=True) == ""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_weight_on_another_gpu_is_multiplied_there() -> None:
    bits = tune_gemm.block_bits_for(16)
    weight = torch.randint(0, 256, (512, 64 * 16), dtype=torch.uint8)
    scale = (torch.rand(512, 16) * 0.02 + 0.01).to(torch.bfloat16)
    x = tile_activations_sm90(*(t.cpu() for t in tune_gemm.random_activations(5, bits)), bits)
    found = []
    for device in ("cuda:0", "cuda:1"):  # the current one stays cuda:0
        tiled = gemm.prepare_weight_sm90(weight.to(device), scale.to(device), None, bits)
        found.append(gemm.w4ax_gemm_tiled(x[0].to(device), x[1].to(device), tiled, 5).cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("m", [1, 64, 300])
def test_runs_are_bit_equal_also_in_a_graph_and_compiled(m: int) -> None:
    bits = tune_gemm.block_bits_for(32)
    weight = torch.randint(0, 256, (4096, 64 * 32), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(4096, 32, device="cuda") * 0.02 + 0.01).to(torch.bfloat16)
    zero = torch.randint(0, 16, (4096, 32), dtype=torch.uint8, device="cuda")
    tiled = gemm.prepare_weight_sm90(weight, scale, zero, bits)
    x, meta = tile_activations_sm90(*tune_gemm.random_activations(m, bits), bits)

    def run() -> torch.Tensor:
        return gemm.w4ax_gemm_tiled(x, meta, tiled, m)

    y = run()
    assert all(torch.equal(run(), y) for _ in range(1000))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, y)
    compiled = torch.compile(lambda a, b: gemm.w4ax_gemm_tiled(a, b, tiled, m) * 2, fullgraph=True)
    assert torch.equal(compiled(x, meta), y * 2)
