"""Channel order, 8-bit blocks and the budget that pays for them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comet_core.calibrate import _Measured, _plan_group
from comet_core.decoder import LinearGroup
from comet_core.observe import ChannelStats
from comet_core.outliers import report_outliers
from comet_core.plan import (
    PlanChoice,
    block_costs,
    block_error,
    block_grams,
    choose_permutation,
    clip_values,
    place_int8_blocks,
    search_clips,
    segments_for,
    spend_budget,
)
from comet_core.recipe import ActivationSpec, BlockSpec, load_recipe
from comet_cuda.bank_order import spread_over_banks
from comet_cuda.errors import CometError


def test_permutation_sorts_inside_each_segment() -> None:
    importance = torch.tensor([1.0, 3.0, 2.0, 9.0, 8.0, 9.0])
    assert choose_permutation(importance).tolist() == [3, 5, 4, 1, 2, 0]
    assert choose_permutation(importance, segments=2).tolist() == [1, 2, 0, 3, 5, 4]


def test_int8_blocks_stand_first_in_each_segment() -> None:
    assert place_int8_blocks(5, 2).tolist() == [8, 8, 4, 4, 4]
    assert place_int8_blocks(6, 2, segments=2).tolist() == [8, 4, 4, 8, 4, 4]


def test_costs_count_real_channels() -> None:
    assert block_costs(576, 10).tolist() == [1280, 1280, 1280, 1280, 640]


def test_tensor_parallel_widths_are_checked_by_name() -> None:
    spec = BlockSpec(tp_granularity=4)
    assert segments_for(["m.0.q_proj"], 11008, spec) == 1
    with pytest.raises(CometError, match=r"m\.0\.down_proj.*11008.*4 segments") as error:
        segments_for(["m.0.down_proj"], 11008, spec)
    assert "1, 2" in error.value.hint
    assert segments_for(["m.0.down_proj"], 13824, spec) == 4


@settings(max_examples=60, deadline=None)
@given(
    gains=st.lists(st.lists(st.floats(-0.1, 1.0), min_size=4, max_size=4), min_size=1, max_size=6),
    share=st.floats(0, 1),
    segments=st.sampled_from([1, 2]),
)
def test_budget_is_never_overspent_and_nothing_affordable_is_left(
    gains: list[list[float]], share: float, segments: int
) -> None:
    choices = [PlanChoice(torch.tensor(g, dtype=torch.float64), block_costs(512, 3), segments) for g in gains]
    counts = spend_budget(choices, 0, share)
    total = sum(int(c.cost.sum()) for c in choices)
    spent = sum(384 * n for n in counts)
    assert spent <= (1 - share) * total + 1e-6
    assert all(n % segments == 0 for n in counts)
    left = (1 - share) * total - spent
    if all(min(g) > 1e-6 for g in gains) and left >= 384 * segments:
        assert all(n == 4 for n in counts)  # positive gains everywhere: money is left only when all is bought


def test_budget_goes_where_it_helps_most() -> None:
    poor, rich = torch.tensor([0.1, 0.0, 0.0, 0.0]), torch.tensor([0.0, 5.0, 0.0, 0.0])
    choices = [PlanChoice(g.double(), block_costs(512, 1)) for g in (poor, rich)]
    assert spend_budget(choices, 0, 0.75) == [0, 2]  # the poor block before the rich one does not hide it
    assert spend_budget(choices, 0, 0.5) == [1, 2]


def test_an_impossible_share_says_what_is_possible() -> None:
    choice = PlanChoice(torch.ones(4).double(), block_costs(512, 1))
    with pytest.raises(CometError, match=r"0\.9.*0\.500"):
        spend_budget([choice], 512, 0.9)


def test_block_error_falls_with_bits_and_is_zero_for_zero_input() -> None:
    torch.manual_seed(0)
    x, weight, perm = torch.randn(50, 300), torch.randn(20, 300), torch.randperm(300).int()
    x[:, perm[128:256].long()] = 0
    spec = ActivationSpec(hadamard=False)
    grams = block_grams(weight, perm, rotate=False)
    error4, error8 = block_error(x, grams, perm, 4, spec), block_error(x, grams, perm, 8, spec)
    assert error4[1] == 0 and bool((error8 <= error4).all()) and error8[0] < 0.02 * error4[0]
    assert clip_values(torch.tensor([4, 8], dtype=torch.uint8), spec).tolist() == pytest.approx([0.9, 1.0])


def test_clips_are_those_with_the_least_output_error() -> None:
    torch.manual_seed(0)
    x, weight, perm = torch.randn(200, 256), torch.randn(20, 256), torch.arange(256).int()
    x[:, :128] = x[:, :128].sign()  # all +-1: a clip would cut every value
    spec = ActivationSpec(hadamard=False)
    grams = block_grams(weight, perm, rotate=False)
    clips = search_clips(x, grams, perm, spec)
    assert clips[0] == 1.0 and clips[1] < 1.0
    for clip in (0.7, 0.8, 0.9, 1.0):
        error = block_error(x, grams, perm, 4, spec, clip)
        best = torch.stack([block_error(x, grams, perm, 4, spec, float(c))[b] for b, c in enumerate(clips)])
        assert bool((best <= error + 1e-12).all())


def test_statistics_merge_as_if_seen_at_once() -> None:
    x = torch.randn(64, 40)
    x[3] = 0
    whole, parts = ChannelStats.of(x, 8), ChannelStats.of(x[:20], 8).merge(ChannelStats.of(x[20:], 8))
    assert torch.equal(whole.absmax, parts.absmax) and whole.tokens == parts.tokens == 64
    assert torch.allclose(whole.weighted_square_sum, parts.weighted_square_sum)
    assert torch.allclose(whole.weighted_square_sum.sum(), torch.tensor(63.0, dtype=torch.float64))  # 1 a token


def test_outlier_report_counts_channels_features_and_blocks() -> None:
    x = torch.ones(10, 512)
    x[:, 5] = 100.0
    x[:5, 300] = 50.0
    report = report_outliers("g", ChannelStats.of(x, 10), threshold=8.0)
    assert report.outlier_channels == pytest.approx(2 / 512)
    assert report.outlier_features == pytest.approx(15 / 5120)
    assert report.consistency == pytest.approx(0.75)
    assert (report.blocks_before, report.blocks_after) == (0.5, 0.25)
    assert (report.peak, report.cutoff) == (100.0, 8.0)
    dead = report_outliers("g", ChannelStats.of(torch.zeros(3, 130), 3), threshold=8.0)
    assert (dead.peak, dead.outlier_channels, dead.blocks_before) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("change", ["none", "producers", "segments", "permute", "hadamard"])
def test_only_rotated_blocks_that_a_kernel_gathers_are_ordered_for_banks(change: str) -> None:
    """Not where a producer's rows carry the order, ranks cut it, or the recipe asks for no permutation or rotation."""
    spec = load_recipe("w4a4kv4").for_linear("layers.0.up_proj")
    changes: dict[str, Any] = {
        "permute": {"blocks": replace(spec.blocks, permute=False)},
        "hadamard": {"activations": replace(spec.activations, hadamard=False)},
    }
    spec, segments = replace(spec, **changes.get(change, {})), 2 if change == "segments" else 1
    group = LinearGroup(("up_proj",), 1024, 64, ("v_proj",) if change == "producers" else ())
    perm = choose_permutation(torch.rand(1024, generator=torch.Generator().manual_seed(0)), segments)
    choice = PlanChoice(torch.zeros(8), block_costs(1024, 64), segments)
    plan = _plan_group(_Measured(0, group, ("up_proj",), spec, torch.ones(1024), {}, perm, choice, 1.0, 2)).plan
    ordered = spread_over_banks(perm, plan.block_bits) if change == "none" else perm
    assert torch.equal(plan.perm, ordered)
    assert (change == "none") == (not torch.equal(perm, ordered))
