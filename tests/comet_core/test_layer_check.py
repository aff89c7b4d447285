"""Each packed layer is read back and compared with the layer it was made from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from comet_core import pack_job
from comet_core.inspection import inspect_packed
from comet_core.layer_check import Likeness, check_reloaded, layer_note
from comet_core.ledger import _layer_warnings
from comet_core.packed import read_manifest
from comet_core.recipe import ChecksSpec
from comet_core.shards import read_shard
from comet_cuda.errors import CometError


def test_likeness_counts_every_token_the_same() -> None:
    torch.manual_seed(0)
    sixteen = torch.randn(50, 64)
    same = Likeness.of(sixteen, sixteen)
    assert same.cosine == pytest.approx(1) and same.error == pytest.approx(0)
    assert Likeness.of(2 * sixteen, sixteen).error == pytest.approx(1)
    turned = sixteen.clone()
    turned[:10] *= -1  # a fifth of the tokens
    found = Likeness.of(turned, sixteen)
    assert found.cosine == pytest.approx(0.6) and found.error == pytest.approx(0.8)
    sixteen[0] *= 1e4  # a sink does not hide the others
    turned[0] = sixteen[0]
    assert Likeness.of(turned, sixteen).cosine == pytest.approx(0.64, abs=1e-4)
    sixteen[1] = turned[1] = 0  # a token to which nothing is added
    assert Likeness.of(turned, sixteen).cosine == pytest.approx(0.68, abs=1e-4)


def test_a_broken_limit_is_a_warning_and_what_is_not_finite_an_error() -> None:
    torch.manual_seed(0)
    sixteen = torch.randn(50, 64)
    noisy = sixteen + torch.randn(50, 64)  # cosine 0.7, error 1
    limits = ChecksSpec(cosine=0.6, error=1.5)
    assert "warning" not in layer_note("l", noisy, sixteen, limits)
    assert "checks.cosine: 0.9" in layer_note("l", noisy, sixteen, replace(limits, cosine=0.9))["warning"]
    note = layer_note("l", noisy, sixteen, replace(limits, error=0.5))
    assert "checks.error: 0.5" in note["warning"] and "cosine" not in note["warning"]
    for which in ((noisy * torch.inf, sixteen), (noisy, sixteen * torch.nan)):
        with pytest.raises(CometError, match="layers.3: .* NaN or Inf"):
            layer_note("layers.3", *which, limits)
    check_reloaded(note, noisy, sixteen)
    with pytest.raises(CometError, match="l: read back from its shard it computes something else"):
        check_reloaded(note, sixteen, sixteen)


def test_the_manifest_tells_how_like_each_layer_is(tiny: Any) -> None:
    checks = read_manifest(tiny.packed).checks
    assert [check["layer"] for check in checks] == ["model.layers.0", "model.layers.1"]
    assert all(0.9 < check["cosine"] < 1 and 1e-4 < check["error"] < 0.2 for check in checks), checks
    assert [row["cosine"] for row in inspect_packed(tiny.packed)["layers"]] == [check["cosine"] for check in checks]


def test_limits_of_the_recipe_hold_for_linears_and_layers(tiny: Any, tmp_path: Path) -> None:
    strict = replace(tiny.recipe, checks=ChecksSpec(error=1e-6, cosine=1.0))
    warnings = tiny.pack(tmp_path / "strict", strict).warnings
    assert sum("of the output's energy" in line for line in warnings) == 14  # linears
    assert sum(line.startswith("model.layers.1: packed, it has a cosine of") for line in warnings) == 1
    assert not tiny.pack(tmp_path / "plain").warnings
    for name in ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"):
        plain, strict_ = (read_shard(tmp_path / folder / name)[0] for folder in ("plain", "strict"))
        assert all(torch.equal(plain[key], strict_[key]) for key in plain)


def test_a_naive_recipe_is_warned_of_in_a_few_lines() -> None:
    checks = [{"layer": f"l{i}", "warning": "far off"} for i in range(9)]
    assert _layer_warnings(checks[:4]) == [f"l{i}: far off" for i in range(4)]
    lines = _layer_warnings([*checks[:2], {"layer": "fine"}, *checks[2:]])
    assert len(lines) == 4 and lines[2] == "l2: far off" and lines[3].startswith("6 more layers")


def test_the_layer_that_is_judged_is_the_one_on_the_disk(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that hands out other scales than were written is found by what the layer then computes."""
    honest = pack_job.write_checked_shard

    def lying(*given: Any) -> dict[str, torch.Tensor]:
        scales = ("w_scale", "weight_base")
        return {key: 2 * value if key.endswith(scales) else value for key, value in honest(*given).items()}

    monkeypatch.setattr(pack_job, "write_checked_shard", lying)
    with pytest.raises(CometError, match=r"model\.layers\.0: read back from its shard"):
        tiny.pack(tmp_path / "out")
