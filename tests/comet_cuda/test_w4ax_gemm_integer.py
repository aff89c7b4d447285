"""The GEMM for integer scales: layouts and op on the CPU, and on an sm_90 GPU every edge, exactly."""

import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "cuda" / "tools"))
import integer_variants
import tune_gemm

from comet_cuda import w4ax_gemm_integer as gemm
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import int8_group
from comet_cuda.quantize_token_ref import MOST_CHANNELS
from comet_cuda.tiles_sm90 import SHARED_LIMIT
from comet_cuda.w4ax_gemm import w4ax_gemm_ref
from comet_cuda.w4ax_gemm_sm90 import Workspace
from comet_cuda.weight_layout import tile_activations_integer_sm90, untile_activations_integer_sm90
from tests.comet_cuda.test_gemm_producers import place_of, walk

on_sm90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
)


def canonical(tokens: int, rows: int, blocks: int, eights: int) -> dict[str, torch.Tensor]:
    """Codes and scales that obey the constraints: small multiples of one power of two, so that all sums are exact."""
    g = torch.Generator().manual_seed(tokens * 1000 + rows)
    exponent = torch.tensor([3 - min(int8_group(b), 3) for b in range(eights)], dtype=torch.int32)
    multiple = torch.randint(1, 19, (tokens, blocks), generator=g, dtype=torch.int32)
    multiple[:, :eights] = 2**exponent
    codes = torch.randint(-7, 8, (tokens, blocks, 128), generator=g, dtype=torch.int8)
    codes[:, :eights] = torch.randint(-127, 128, (tokens, eights, 128), generator=g, dtype=torch.int8)
    zero = torch.randint(0, 16, (rows, blocks), generator=g, dtype=torch.uint8)
    most = 127 // torch.maximum(zero, 15 - zero).int()
    base = 2.0 ** torch.randint(-9, -5, (rows,), generator=g)
    w_multiple = (torch.rand(rows, blocks, generator=g) * most).int() + 1
    return {
        "codes": codes,
        "multiple": multiple,
        "token_scale": 2.0 ** torch.randint(-6, 2, (tokens,), generator=g),
        "qweight": torch.randint(0, 256, (rows, 64 * blocks), generator=g, dtype=torch.uint8),
        "w_scale": (base[:, None] * torch.minimum(w_multiple, most)).to(torch.bfloat16),
        "w_zero": zero,
        "base": base,
        "bits": torch.tensor([8] * eights + [4] * (blocks - eights), dtype=torch.uint8),
    }


@pytest.mark.parametrize(("tokens", "rows", "blocks", "eights"), [(1, 8, 1, 0), (9, 130, 5, 2), (16, 64, 9, 9)])
def test_the_op_is_the_canonical_product(tokens: int, rows: int, blocks: int, eights: int) -> None:
    p = canonical(tokens, rows, blocks, eights)
    x = tile_activations_integer_sm90(p["codes"], p["multiple"], p["token_scale"], eights)
    weight = gemm.prepare_weight_integer(p["qweight"], p["w_scale"], p["w_zero"], p["bits"])
    bias = torch.randn(rows)
    y = gemm.w4ax_gemm_integer(*x, weight, tokens, bias, torch.float32)
    scale = p["multiple"] * p["token_scale"][:, None]
    want = w4ax_gemm_ref(p["codes"], scale, p["qweight"], p["w_scale"], p["w_zero"], p["bits"], bias, torch.float32)
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6 * float(want.abs().max()))
    carried = untile_activations_integer_sm90(x[0], x[1], tokens, eights)
    assert torch.equal(carried, p["codes"].int() * p["multiple"][..., None])


def test_scales_that_are_no_multiples_are_refused() -> None:
    p = canonical(1, 8, 3, 1)
    p["w_scale"][3, 1] *= 1.03125
    with pytest.raises(CometError, match="row 3"):
        gemm.prepare_weight_integer(p["qweight"], p["w_scale"], p["w_zero"], p["bits"])


def test_weights_beyond_8_bits_are_refused() -> None:
    p = canonical(1, 8, 3, 1)
    p["w_zero"][2], p["w_scale"][2] = 0, p["base"][2] * torch.tensor([9.0, 4.0, 7.0])  # 9 * 15 > 127
    with pytest.raises(CometError, match="row 2"):
        gemm.prepare_weight_integer(p["qweight"], p["w_scale"], p["w_zero"], p["bits"])


def test_inputs_whose_sums_could_leave_32_bits_are_refused() -> None:
    blocks = MOST_CHANNELS // 128 + 1
    scale, bits = torch.ones(1, blocks, dtype=torch.bfloat16), torch.full((blocks,), 4, dtype=torch.uint8)
    with pytest.raises(CometError, match="49280 channels"):
        gemm.prepare_weight_integer(torch.zeros(1, 64 * blocks, dtype=torch.uint8), scale, None, bits)


def test_int8_blocks_must_come_first() -> None:
    p = canonical(1, 8, 3, 1)
    with pytest.raises(CometError, match="8-bit blocks first"):
        gemm.prepare_weight_integer(p["qweight"], p["w_scale"], p["w_zero"], p["bits"].flip(0))


def test_every_row_of_the_table_fits() -> None:
    for configuration in gemm.configurations("sm_90"):
        assert configuration.shared_bytes <= SHARED_LIMIT
    for tokens in (1, 8, 9, 16, 32, 64, 65, 256, 1000, 4096):
        for rows, blocks in ((8, 1), (64, 1), (4096, 32), (6145, 3), (57344, 64), (8192, 224), (151936, 12)):
            for sms in (78, 114, 132, 144):
                tiles = gemm.choose_integer_tiles(tokens, rows, blocks, sms)
                plan = tiles.plan(tokens, rows, blocks, blocks // 6, sms)
                assert plan.partial_floats <= Workspace.FLOATS
                assert plan.flags <= Workspace.FLAGS


SHAPES = [*tune_gemm.SHAPES, (576, 576), (896, 4864), (4864, 896), (1536, 8960), (2048, 2048), (151936, 1536)]
BATCHES = (1, 8, 16, 17, 32, 33, 48, 64, 65, 96, 128, 160, 192, 256, 257, 300, 320, 384, 512, 1024, 4096)


def test_every_row_is_chosen_for_some_problem() -> None:
    left = list(gemm.integer_table())
    for m in BATCHES:
        for n, k in SHAPES:
            tiles = gemm.choose_integer_tiles(m, n, k // 128)
            holds = [row for row in left if row["min_tokens"] <= m <= row.get("max_tokens", m)]
            left = [row for row in left if row not in holds or gemm.tiles_of(row) != tiles]
    assert not left


def test_choices_are_as_measured() -> None:
    """Some of those that results/LOG.md names, and other tiles where fewer multiprocessors hold fewer clusters."""

    def chosen(m: int, n: int, k: int, sms: int = 132) -> tuple[int, int, int]:
        tiles = gemm.choose_integer_tiles(m, n, k // 128, sms)
        return tiles.tokens, tiles.row_wgs, tiles.split

    assert chosen(64, 4096, 4096) == (64, 2, 3) and chosen(64, 5120, 5120) == (64, 3, 4)
    assert chosen(256, 4096, 4096) == (128, 2, 2) and chosen(256, 8192, 8192) == (256, 2, 2)
    assert chosen(256, 57344, 8192)[2] == 1 and chosen(4096, 4096, 4096)[2] == 1
    assert chosen(64, 4096, 4096, 78) == (64, 3, 3)  # 22 tiles, not 32: 23 clusters of three find room


@pytest.mark.parametrize(("rows", "blocks"), [(4096, 32), (896, 7), (57344, 64)])
def test_each_number_of_tokens_has_tiles_for_as_many(rows: int, blocks: int) -> None:
    """Up to 128 one tile holds all tokens, so weights are read once, and no more than half of it is padding."""
    for m in range(1, 129):
        assert m <= gemm.choose_integer_tiles(m, rows, blocks).tile_tokens < 2 * max(m, 8), m


def test_plans_deal_each_block_of_each_tile_once() -> None:
    random, kinds = Random(1), Counter[str]()
    for _ in range(400):
        m, n, blocks = random.randint(1, 600), random.choice((1, 64, 520, 1023, 4100, 9000)), random.randint(1, 60)
        eights, sms = random.choice((0, 1, blocks // 6, blocks)), random.choice((16, 78, 114, 132))
        tiles = gemm.choose_integer_tiles(m, n, blocks, sms)
        schedule, ctas = (plan := tiles.plan(m, n, blocks, eights, sms)).schedule, plan.ctas
        count = -(-n // (64 * tiles.row_wgs)) * -(-m // tiles.tile_tokens)
        dealt = Counter(turn for cta in range(ctas) for turn in walk(schedule, cta, ctas))
        assert len(dealt) == dealt.total() == count * blocks, (m, n, blocks, eights, sms)
        places = {place_of(schedule, tile) for tile in range(count)}
        assert places == {(row, token) for row in range(schedule[2]) for token in range(schedule[3])}
        kinds["split" if tiles.split > 1 else "stream" if schedule[0] else "whole"] += 1
    assert min(kinds[kind] for kind in ("split", "stream", "whole")) > 40, kinds


RUNS = [(1, 4096, 4096), (64, 4096, 4096), (300, 4096, 4096), (1, 64, 16384), (64, 64, 16384)]
GRAPHS = [(3, 1024, 2048), (200, 1024, 2048), (3, 64, 16384)]


@pytest.mark.parametrize("problems", [RUNS, GRAPHS])
def test_repeated_runs_meet_shared_tiles_and_streamed_ones(problems: list[tuple[int, int, int]]) -> None:
    """Streamed ones alone leave flags in the workspace, which the next run finds."""
    chosen = [gemm.choose_integer_tiles(m, n, k // 128) for m, n, k in problems]
    assert any(tiles.split > 1 for tiles in chosen) and any(tiles.stream for tiles in chosen)


@pytest.mark.gpu
@on_sm90
def test_every_edge_on_the_table_s_kernels() -> None:
    assert list(integer_variants.integer_problems(None)) == []


VARIANTS = list(
    dict.fromkeys(
        [
            *map(gemm.tiles_of, gemm.integer_table()),
            *(tiles for m in (1, 16, 32, 64, 128, 256, 1024) for tiles in integer_variants.integer_candidates(m)),
        ]
    )
)


@pytest.mark.gpu
@on_sm90
@pytest.mark.parametrize("tiles", VARIANTS, ids=tune_gemm.short)
def test_every_variant_is_right(tiles: gemm.IntegerTiles) -> None:
    """Those of tiles_sm90.json, and others before any of them may enter it."""
    assert list(integer_variants.integer_problems(tiles)) == []


@pytest.mark.gpu
@on_sm90
@pytest.mark.parametrize(("m", "n", "k"), RUNS)
def test_a_thousand_runs_are_bit_equal(m: int, n: int, k: int) -> None:
    assert integer_variants.IntegerProblem(m, n, k, 5, 1).problem(None, 1000) == ""


@pytest.mark.gpu
@on_sm90
@pytest.mark.parametrize(("m", "n", "k"), GRAPHS)
def test_graphs_and_torch_compile(m: int, n: int, k: int) -> None:
    problem = integer_variants.IntegerProblem(m, n, k, 3, 1)
    operands = (problem.x, problem.words, problem.scale)
    weight = gemm.IntegerWeight(problem.sets[0], problem.base, n, 3)
    want = gemm.w4ax_gemm_integer(*operands, weight, m)
    compiled = torch.compile(lambda x, w, s: gemm.w4ax_gemm_integer(x, w, s, weight, m) * 1, fullgraph=True)
    assert torch.equal(compiled(*operands), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gemm.w4ax_gemm_integer(*operands, weight, m)
    for _ in range(3):  # what a replay leaves in the workspace is the next one's
        y.zero_()
        graph.replay()
        assert torch.equal(y, want)
