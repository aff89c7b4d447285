"""A packed linear in a GPU's layout, traced by torch.compile as vLLM does: in one graph, for any number of tokens."""

import pytest
import torch

from comet_cuda.prepared_linear import ActivationFormat, prepare_linear
from comet_cuda.quantize_act import TOKEN

CHANNELS, ROWS, BLOCKS = 512, 256, 4


@pytest.mark.parametrize("share", [1, TOKEN])
@pytest.mark.parametrize("layout", ["sm_90", "sm_80"])
def test_it_is_traced_whole_and_once(layout: str, share: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    bits = torch.tensor([8, 4, 4, 4], dtype=torch.uint8)
    perm = torch.randperm(CHANNELS, dtype=torch.int32)
    inputs = ActivationFormat(perm, bits, torch.full((BLOCKS,), 0.9), True, share)
    codes = torch.randint(0, 256, (ROWS, CHANNELS // 2), dtype=torch.uint8)
    scale, zero = (
        torch.full((ROWS, BLOCKS), 0.01, dtype=torch.bfloat16),
        torch.full((ROWS, BLOCKS), 8, dtype=torch.uint8),
    )
    linear = prepare_linear(codes, scale, zero, inputs, layout)
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    traced = torch.compile(lambda x: linear(x, None), backend=keep, fullgraph=True, dynamic=True)
    for tokens in (3, 17, 64):
        x = torch.randn(tokens, CHANNELS, dtype=torch.bfloat16)
        assert torch.equal(traced(x), linear(x, None))
    assert len(graphs) == 1
    assert linear(torch.empty(0, CHANNELS, dtype=torch.bfloat16), torch.ones(ROWS)).shape == (0, ROWS)
