"""Splitting packed linears over ranks: the parts add up to the whole, and what does not split is refused by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from comet_core.integrations.tensor_parallel import check_row_parallel, common_entry, local_permutation, local_shapes
from comet_core.linear import W4AxLinear
from comet_core.packed import LinearEntry, load_packed
from comet_core.recipe import load_recipe
from comet_cuda.errors import CometError
from comet_cuda.prepared_linear import prepare_linear
from comet_cuda.quantize_act import TOKEN
from comet_cuda.w4ax_gemm_integer import IntegerWeight

if TYPE_CHECKING:
    from conftest import Packed

ENTRY = LinearEntry(1024, 512, 4, False, True, False)


@pytest.fixture(scope="module")
def wide(put_through: Callable[..., "Packed"], llama_config: Callable[..., Any]) -> Any:
    """A Llama whose permutations stay inside halves: o_proj gathers, down_proj's producer carries them."""
    recipe = load_recipe("w4a4kv4")
    recipe = replace(recipe, blocks=replace(recipe.blocks, tp_granularity=2))
    config = llama_config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    return load_packed(put_through(config, recipe).packed)


def part(linear: W4AxLinear, entry: LinearEntry, rank: int, *, row_parallel: bool) -> W4AxLinear:
    """What one of two ranks holds of a linear."""
    rows, width = entry.out_features, entry.in_features
    rows, width = (rows, width // 2) if row_parallel else (rows // 2, width)
    tensors = {}
    for leaf, (dtype, shape, row_axis, input_axis) in local_shapes(entry, rows, width).items():
        whole = getattr(linear, leaf)
        axis = input_axis if row_parallel else row_axis
        tensors[leaf] = whole if axis is None else whole.chunk(2, axis)[rank].contiguous()
        assert (tensors[leaf].dtype, tuple(tensors[leaf].shape)) == (dtype, shape)
    if row_parallel and "perm" in tensors:
        tensors["perm"] = local_permutation("o_proj", tensors["perm"], rank)
    return W4AxLinear(width, rows, tensors, entry.hadamard, entry.share)


@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj"])
def test_row_parallel_parts_add_up(wide: Any, name: str) -> None:
    linear = wide.model.model.layers[0].get_submodule(name)
    entry = wide.manifest.linears[f"model.layers.0.{name}"]
    assert entry.folded == (name == "mlp.down_proj")
    check_row_parallel(name, entry, 2, wide.manifest.recipe.blocks.tp_granularity)
    x = torch.randn(7, entry.in_features)
    parts = [part(linear, entry, rank, row_parallel=True)(x.chunk(2, 1)[rank].contiguous()) for rank in range(2)]
    assert torch.allclose(parts[0] + parts[1], linear(x), atol=1e-5)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.up_proj"])
def test_column_parallel_parts_stand_side_by_side(wide: Any, name: str) -> None:
    linear = wide.model.model.layers[0].get_submodule(name)
    entry = wide.manifest.linears[f"model.layers.0.{name}"]
    x = torch.randn(7, entry.in_features)
    parts = [part(linear, entry, rank, row_parallel=False)(x) for rank in range(2)]
    assert torch.equal(torch.cat(parts, 1), linear(x))


def test_what_does_not_split_is_refused() -> None:
    check_row_parallel("o", ENTRY, 1, 1)
    check_row_parallel("o", ENTRY, 4, 4)
    check_row_parallel("o", replace(ENTRY, folded=True), 8, 1)
    with pytest.raises(CometError, match="crosses the channels of 2 ranks") as caught:
        check_row_parallel("o", ENTRY, 2, 1)
    assert "tp_granularity: 2" in caught.value.hint
    with pytest.raises(CometError, match="do not split into 16 parts of whole 128-channel blocks") as caught:
        check_row_parallel("o", ENTRY, 16, 16)
    assert "1, 2, 4, 8 " in caught.value.hint
    with pytest.raises(CometError, match="leaves the channels of rank 1"):
        local_permutation("o", torch.tensor([2, 0], dtype=torch.int32), 1)


def test_fused_linears_must_be_packed_alike() -> None:
    names = ["a.q_proj", "a.k_proj"]
    alike = dict.fromkeys(names, ENTRY)
    assert common_entry("a.qkv_proj", names, alike) == ENTRY
    assert common_entry("a.qkv_proj", names, {}) is None
    for other in ({}, {"a.k_proj": replace(ENTRY, hadamard=False)}):
        with pytest.raises(CometError, match="not packed alike"):
            common_entry("a.qkv_proj", names, {"a.q_proj": ENTRY} | other)


def test_ranks_of_integer_scales_choose_a_token_s_scale_from_their_own_channels(
    put_through: Callable[..., "Packed"], llama_config: Callable[..., Any]
) -> None:
    config = llama_config(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    packed = load_packed(put_through(config, "w4a4kv4").packed)
    layer, entries = packed.model.model.layers[0], packed.manifest.linears
    x = torch.randn(7, 256)
    q, entry = layer.self_attn.q_proj, entries["model.layers.0.self_attn.q_proj"]
    assert entry.share == TOKEN
    parts = [part(q, entry, rank, row_parallel=False)(x) for rank in range(2)]
    assert torch.equal(torch.cat(parts, 1), q(x))  # rows carry their bases along
    down, entry = layer.mlp.down_proj, entries["model.layers.0.mlp.down_proj"]
    assert entry.share == TOKEN and entry.folded
    check_row_parallel("down_proj", entry, 2, 1)
    x = torch.randn(7, 1024)
    x[:, :512] *= 3
    halves = [part(down, entry, rank, row_parallel=True) for rank in range(2)]
    found = sum(half(x.chunk(2, 1)[rank].contiguous()) for rank, half in enumerate(halves))
    want = down(x)
    assert not torch.equal(found, want)
    assert float((found - want).norm() / want.norm()) < 0.1  # both are 4-bit roundings of one product
    for half in halves:
        on_hopper = prepare_linear(half.qweight, half.w_scale, half.w_zero, half.inputs, "sm_90")
        assert isinstance(on_hopper.weight, IntegerWeight)
