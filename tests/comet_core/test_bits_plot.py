"""Perplexity against bits: what a scheme's bits are, and which records may stand in one picture."""

from pathlib import Path
from typing import Any

import pytest

from comet_core.bits_plot import bits_plot, bits_table, operand_bits, rows
from comet_core.recipe import load_recipe


def record(recipe: str, value: float | None, **changes: Any) -> dict[str, Any]:
    one = {
        "kind": "eval", "model": "m", "task": "wikitext2", "seq_len": 2048, "windows": 40, "recipe": recipe,
        "metric": "perplexity", "value": value, "kv_quantized": True, "int4_mac_fraction": 0.84,
    }  # fmt: skip
    return one | changes


@pytest.mark.parametrize(
    ("recipe", "fraction", "bits"),
    [("fp16", 0.0, 16), ("w4a16-rtn", 0.0, 10), ("w8a8", 0.0, 8), ("qoq-g128", 0.0, 6), ("w4a4-naive", 1.0, 4),
     ("fmpq-paper", 0.84, 4.32)],
)  # fmt: skip
def test_bits_of_the_schemes(recipe: str, fraction: float, bits: float) -> None:
    assert operand_bits(load_recipe(recipe), fraction) == pytest.approx(bits)


def test_only_equal_protocols_are_compared_and_the_later_record_counts(tmp_path: Path) -> None:
    records = [
        record("fp16", 10.0, kv_quantized=False, int4_mac_fraction=0.0),
        record("fmpq-paper", 99.0),
        record("fmpq-paper", 12.0),
        record("fmpq-paper", 13.0, protocol={"engine": "vLLM"}),
        record("w4a4-naive", 30.0, windows="all"),  # its 16-bit figure is not there
        record("w4a8kv4", None),
        record("an-experiment", 11.0),
        record("fp16", 0.9, metric="top1"),
    ]
    assert [(r["recipe"], r["value"]) for r in rows(records)] == [("fp16", 10.0), ("fmpq-paper", 12.0)]
    assert "+20.0%" in bits_table(records) and "4.32" in bits_table(records)
    assert bits_plot(records, tmp_path / "bits.png") and (tmp_path / "bits.png").stat().st_size > 2000
    assert not bits_plot(records[:1], tmp_path / "none.png") and not (tmp_path / "none.png").exists()
