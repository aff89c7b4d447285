"""Screening of recipe variants: the shipped ablation file, what it measures, and going on after a cut."""

from pathlib import Path
from typing import Any

import pytest

from comet_core.recipe import digest
from comet_core.results import read
from comet_core.screen import _chosen, main, variants
from comet_cuda.errors import CometError

RESULTS = Path(__file__).resolve().parents[2] / "results"
ABLATIONS = RESULTS / "ablations.yaml"


def test_the_shipped_ablations_differ_from_each_other_and_from_the_base() -> None:
    recipes = variants(ABLATIONS).values()
    assert len(recipes) > 20
    assert all(recipe.name.startswith("w4a4kv4+") for recipe in recipes)
    assert len({digest(recipe) for recipe in recipes}) == len(recipes)


def test_baselines_bear_the_names_of_their_recipes_and_share_one_cache() -> None:
    recipes = {recipe.name: recipe for recipe in variants(RESULTS / "baselines.yaml").values()}
    assert {"w4a4kv4", "w4a4kv4-tuned", "fmpq-paper", "atom", "quarot", "qoq-g128"} <= recipes.keys()
    ours = recipes["w4a4kv4"].kv_cache
    shared = ("fmpq-paper+our-kv", "fp16+kv", "atom", "quarot", "quarot-local", "qoq-g128", "w4a4-naive")
    assert all(recipes[name].kv_cache == ours for name in shared)
    assert recipes["fmpq-paper"].kv_cache != ours


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("variants: {a: {}}", "no ablation file"),
        ("base: w4a4kv4\nvariants: [3]", "no ablation file"),
        ("base: w4a4kv4\nvariants: {a: {weights: {bits: 5}}}", "a: recipe: weights.bits is 5"),
        ("base: w4a4kv9\nvariants: {a: {}}", "no recipe is called w4a4kv9"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(CometError) as caught:
        variants(tmp_path / "wrong.yaml")
    assert named in caught.value.message


def test_variants_are_called_by_both_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    recipes = variants(RESULTS / "baselines.yaml")
    assert [recipe.name for recipe in _chosen(recipes, "qoq-g128,fmpq,our-kv")] == [
        "fmpq-paper", "fmpq-paper+our-kv", "qoq-g128"]  # fmt: skip
    assert _chosen(recipes, "qoq,nobody") == [recipes["qoq"]]
    assert "no variant is called nobody" in capsys.readouterr().err


def test_variants_are_measured_once(tiny: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(tiny.source.folder)
    text = f"{folder}/text.txt"
    data = {"plain": text, "broken": "none"}
    lines = [f"  {name}: {{calibration: {{data: {value}}}}}" for name, value in data.items()]
    (tmp_path / "a.yaml").write_text("\n".join(["base: w4a4kv4", "variants:", *lines]))
    arguments = [str(tmp_path / "a.yaml"), "--model", folder, "--data", text, "--seq-len", "64", "--samples", "2",
                 "--sample-len", "32", "--record", str(tmp_path / "r.jsonl"), "--jobs", "2"]  # fmt: skip
    assert main(arguments) == 1, "one variant fails"
    shown = capfd.readouterr()
    assert "w4a4kv4+plain  perplexity" in shown.out and "w4a4kv4+broken" in shown.err
    assert [(r["recipe"], r["metric"]) for r in read(tmp_path / "r.jsonl")] == [("w4a4kv4+plain", "perplexity")]
    assert main([*arguments, "--only", "plain"]) == 0
    assert "1 variants, 0 to measure" in capfd.readouterr().out
    assert len(read(tmp_path / "r.jsonl")) == 1
