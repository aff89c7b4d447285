"""The packed folders of every format_version load for ever and mean what they meant, but for scales of quads."""

import json
from pathlib import Path

import pytest
import torch

from comet_core.packed import FORMAT_VERSION, load_packed
from comet_core.shards import tensor_sha256
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import TOKEN

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


REFUSED = 2  # its linears have scales that quads of blocks share


def test_a_folder_with_scales_of_quads_is_refused_in_words() -> None:
    with pytest.raises(CometError, match=r"packed-v2.*activations.share 4 is no longer supported") as caught:
        load_packed(GOLDEN / f"packed-v{REFUSED}")
    assert "pack again" in caught.value.hint


@pytest.mark.parametrize("version", sorted({*range(1, FORMAT_VERSION + 1)} - {REFUSED}))
def test_a_golden_folder_means_what_it_meant(version: int) -> None:
    torch.set_num_threads(1)
    expected = json.loads((GOLDEN / f"packed-v{version}.json").read_text())
    packed = load_packed(GOLDEN / f"packed-v{version}", verify=True)
    state = packed.model.state_dict()
    found = {name: tensor_sha256(state[name]) for name in expected["sha256_of_integers"]}
    assert found == expected["sha256_of_integers"]
    assert sum(name.endswith("qweight") for name in found) == len(packed.manifest.linears) == 14
    with torch.no_grad():
        logits = packed.model(input_ids=torch.tensor(expected["tokens"]), use_cache=False).logits[0, -3:]
    torch.testing.assert_close(logits, torch.tensor(expected["last_logits"]), rtol=1e-4, atol=1e-4)
    assert {entry.share for entry in packed.manifest.linears.values()} == {1: {1}, 3: {1, TOKEN}}[version]
    assert float(logits.std()) > 0.02, "logits near zero would agree with anything"


def test_every_format_version_has_its_golden_folder() -> None:
    versions = {json.loads(path.read_text())["format_version"] for path in GOLDEN.glob("packed-v*/comet.json")}
    assert versions == set(range(1, FORMAT_VERSION + 1))
