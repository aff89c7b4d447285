"""SmolLM2-135M on all windows, as results/measured/eval.jsonl states it: minutes on a GPU, hours on a CPU."""

import os
from pathlib import Path

import pytest

from comet_core.progress import SilentProgress
from comet_cuda.folders import cache_dir

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0),
    pytest.mark.skipif("COMET_DATA" not in os.environ, reason="needs WikiText-2 and C4 in COMET_DATA"),
    pytest.mark.skipif(
        not (cache_dir() / "models" / "smollm2-135m").is_dir(), reason="needs the model: `comet demo` fetches it"
    ),
]
WINDOWS = None  # all


def perplexity(model: str | Path, recipe: str) -> float:
    """Of one recipe, float32, 2,048-token windows of WikiText-2 test."""
    from comet_core.evaluate import evaluate_perplexity

    records = evaluate_perplexity(
        model,
        data="wikitext2",
        windows=WINDOWS,
        seq_len=2048,
        dtype="float32",
        compare=False,
        progress=SilentProgress(),
    )
    return next(r["value"] for r in records if (r["recipe"], r["metric"]) == (recipe, "perplexity"))


def test_sixteen_bit() -> None:
    assert perplexity("smollm2-135m", "fp16") == pytest.approx(21.610, rel=0.005)


@pytest.mark.parametrize(("recipe", "low", "high"), [("w4a4kv4", 21.6, 31.0), ("w4a4-naive", 100.0, 1000.0)])
def test_packed(tmp_path: Path, recipe: str, low: float, high: float) -> None:
    from comet_core.calibrate import calibrate
    from comet_core.model_source import resolve_model
    from comet_core.pack import pack
    from comet_core.recipe import load_recipe

    source, progress = resolve_model("smollm2-135m"), SilentProgress()
    found = calibrate(source, load_recipe(recipe), tmp_path / "calibration", dtype="float32", progress=progress)
    assert found.int4_mac_fraction >= 0.84
    pack(source, tmp_path / "calibration", None, tmp_path / "packed", dtype="float32", progress=progress)
    assert low < perplexity(tmp_path / "packed", recipe) <= high
