"""Memory and roofline from shapes alone: known totals, bounds in the right places, and no torch."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from comet_core.llama_shape import shape_of_alias
from comet_core.roofline import roofline
from comet_core.serving_scheme import GIB, SCHEMES, kv_bytes, largest_batch, memory_plan, require_fit
from comet_cuda.errors import CometError


@pytest.mark.parametrize(("model", "share"), [("llama-2-7b", 0.84), ("llama-3-8b", 0.52)])
def test_the_cache_rules_memory_at_long_context(model: str, share: float) -> None:
    rows = roofline(model)["memory"]
    found = next(r for r in rows if r["context"] == 131072 and r["scheme"] == "16-bit")
    assert round(found["kv_share"], 2) == share


def test_parameters_add_up() -> None:
    shape = shape_of_alias("llama-2-7b")
    assert shape.linear_weights + shape.other_weights == 6_738_415_616  # the model card's count
    assert shape_of_alias("llama-3-8b").linear_weights + shape_of_alias("llama-3-8b").other_weights == 8_030_261_248


def test_four_bit_cache_is_at_most_0_28_of_16_bit() -> None:
    shape, context = shape_of_alias("llama-3-8b"), 4 + 128 * 1000
    open_page = shape.layers * shape.kv_heads * (2 * 128 * 128 + 4 * 4 * 128)
    assert (kv_bytes(shape, 4, context) - open_page) / kv_bytes(shape, 16, context - 4) <= 0.28


def test_small_batches_are_bound_by_memory_and_large_ones_by_computation() -> None:
    parts = roofline("llama-3-8b", batches=(1, 256))["parts"]
    by = {(r["part"], r["batch"], r["scheme"]): r for r in parts}
    assert by["mlp", 1, "16-bit"]["bound"] == "memory"
    assert by["mlp", 256, "16-bit"]["bound"] == "compute"
    # attention reads each key once, whatever the batch: its intensity stays, 4-bit keys raise it
    one, many = by["attention", 1, "KV16"], by["attention", 256, "KV16"]
    assert one["intensity"] == pytest.approx(many["intensity"])
    assert by["attention", 256, "KV4"]["microseconds"] < 0.5 * many["microseconds"]
    assert by["mlp", 1, "W4A4KV4"]["microseconds"] < 0.3 * by["mlp", 1, "16-bit"]["microseconds"]


def test_the_largest_batch_fits_and_the_next_one_does_not() -> None:
    shape, scheme = shape_of_alias("llama-3-8b"), SCHEMES["W4A4KV4"]
    batch = largest_batch(shape, scheme, 1536, 80 * GIB)
    most, more = (memory_plan(shape, scheme, count, 1536) for count in (batch, batch + 1))
    assert most.fits(80 * GIB) and not more.fits(80 * GIB)
    assert most.total + most.spare <= 80 * GIB < more.total + more.spare
    require_fit(shape, scheme, batch, 1536, 80 * GIB)


RECORDS = Path(__file__).resolve().parents[2] / "results" / "measured"


def test_plans_are_within_a_quarter_of_what_was_taken() -> None:
    """Of every serving run that was recorded, 8B and 70B in seven schemes, and of the one of a small model."""
    rows = [json.loads(line) for line in (RECORDS / "serving_h200.jsonl").read_text().splitlines()]
    runs = [r for r in rows if r["kind"] == "e2e" and r["engine"] == "comet" and r["scheme"] in SCHEMES]
    found = []
    for r in runs:
        shape = replace(shape_of_alias(r["model"]), layers=r["layers"])
        plan = memory_plan(shape, SCHEMES[r["scheme"]], r["batch"], r["prompt_tokens"] + r["output_tokens"])
        found.append(plan.total / GIB / r["memory_gib"])
        assert found[-1] == pytest.approx(1, abs=0.25), r
    checks = [json.loads(line) for line in (RECORDS / "preflight.jsonl").read_text().splitlines()]
    for r in (r for r in checks if r["case"] == "bench"):
        for scheme, took in r["took"].items():
            plan = memory_plan(shape_of_alias(r["model"]), SCHEMES[scheme], 64, 256 + 64)
            found.append(plan.total / GIB / sum(took.values()))
            assert found[-1] == pytest.approx(1, abs=0.25), r
    assert len(found) > 60 and {r["model"] for r in runs} >= {"llama-3-8b", "llama-3-70b"}
    assert 0.97 < sum(found) / len(found) < 1.1, "neither too much nor too little"


def test_an_impossible_request_says_what_is_needed_and_what_fits() -> None:
    shape = shape_of_alias("llama-3-70b")
    with pytest.raises(CometError) as caught:
        require_fit(shape, SCHEMES["16-bit"], 64, 1536, 80 * GIB)
    assert f"needs {memory_plan(shape, SCHEMES['16-bit'], 64, 1536).total / GIB:.1f} GiB" in caught.value.message
    assert "80.0 GiB are free" in caught.value.message
    assert "W4A4KV4 " in caught.value.hint and "16-bit" not in caught.value.hint
    with pytest.raises(CometError) as caught:
        require_fit(shape, SCHEMES["W4A4KV4"], 5000, 1536, 139 * GIB)
    assert "would fit" in caught.value.hint


@pytest.mark.parametrize("arguments", [{"model": "opt-13b"}, {"gpu": "none"}, {"schemes": ("W1A1",)}])
def test_unknown_names_are_refused_with_what_there_is(arguments: dict) -> None:
    with pytest.raises(CometError) as caught:
        roofline(**arguments)
    assert caught.value.hint


def test_it_needs_no_torch() -> None:
    code = "import sys; from comet_core.roofline import roofline; roofline(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
