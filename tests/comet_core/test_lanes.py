"""Windows that are shared by several devices: calibrate gives the same bytes, pack the same up to a float32 sum.

Here every device is the CPU; the test marked gpu takes two GPUs, and its body is rehearsed on one CPU.
"""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comet_core import calibrate as calibrate_module
from comet_core import hidden as hidden_module
from comet_core import quantize_group
from comet_core.calibrate import calibrate
from comet_core.hidden import HiddenStates
from comet_core.lanes import Copies, Lanes, copied
from comet_core.layer_check import Likeness
from comet_core.linear import W4AxLinear
from comet_core.pack import pack
from comet_core.packed import load_packed, read_manifest
from comet_core.progress import SilentProgress
from comet_cuda.errors import CometError

CPU = torch.device("cpu")


def lanes(count: int) -> Lanes:
    return Lanes((CPU,) * count)


def test_work_is_shared_in_turns_and_comes_back_in_order() -> None:
    meeting = threading.Barrier(3, timeout=20)  # passed only if three work at once

    def work(item: int) -> int:
        assert not torch.is_grad_enabled()
        meeting.wait()
        return 10 * item

    assert list(lanes(3).map(work, range(6))) == [0, 10, 20, 30, 40, 50]
    assert list(lanes(1).map(lambda item: 10 * item, range(3))) == [0, 10, 20]

    def fail(item: int) -> int:
        raise CometError(f"item {item} cannot be")

    with pytest.raises(CometError, match="item 0"):
        list(lanes(2).map(fail, range(4)))


def test_a_lane_keeps_its_thread() -> None:
    three = lanes(3)
    threads = [list(three.map(lambda _: threading.current_thread(), range(6))) for _ in range(2)]
    assert threads[0] == threads[1] and threads[0][:3] == threads[0][3:] and len(set(threads[0])) == 3


@pytest.mark.parametrize("limit", [1 << 30, 0])
def test_hidden_states_live_with_their_lane(tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hidden_module.TOKENS_A_STEP, "cpu", 14)
    values = torch.randn(5, 7, 3)
    states = HiddenStates((5, 7, 3), dtype=torch.float32, device=(CPU, CPU), limit=limit, spill_folder=tmp_path)
    assert states.ranges() == [(0, 2), (2, 4), (4, 5)] and [states.lane(start) for start in (0, 2, 4)] == [0, 1, 0]
    for start, stop in states.ranges():
        states.write(start, stop, values[start:stop])
    for other in (states, states.copy()):
        assert torch.equal(torch.cat([other.read(*span) for span in other.ranges()]), values)


def test_a_copy_follows_what_is_replaced_and_holds_tensors_of_its_own() -> None:
    layer = nn.Sequential(nn.Linear(128, 4), nn.Linear(4, 128))
    copies = Copies(lanes(2), layer)
    copies.refresh()
    first, second = copies.on(0), copies.on(1)
    assert first is layer and torch.equal(second[0].weight, layer[0].weight)  # type: ignore[index]
    assert second[0].weight.data_ptr() != layer[0].weight.data_ptr()  # type: ignore[index]
    tensors = {
        "qweight": torch.randint(0, 255, (4, 64), dtype=torch.uint8), "w_scale": torch.rand(4, 1).bfloat16(),
        "block_bits": torch.full((1,), 4, dtype=torch.uint8), "act_clip": torch.ones(1),
    }  # fmt: skip
    layer[0] = W4AxLinear(128, 4, tensors, hadamard=False)
    layer[0]._prepared = threading.Lock()  # type: ignore[assignment]  # what it made for its GPU, which cannot be copied
    kept = second[1]  # type: ignore[index]
    copies.refresh()
    assert isinstance(second[0], W4AxLinear) and second[1] is kept  # type: ignore[index]
    assert torch.equal(second[0].qweight, tensors["qweight"]) and second[0]._prepared is None  # type: ignore[index]
    assert copied(layer[0], CPU).qweight.data_ptr() != tensors["qweight"].data_ptr()


@pytest.mark.parametrize(
    ("asked", "found"),
    [("auto", ["cuda"]), ("cuda", ["cuda"]), ("cuda:1", ["cuda:1"]), ("cuda:1, cuda:0", ["cuda:1", "cuda:0"])],
)
def test_several_gpus_work_only_where_they_are_named(
    asked: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(calibrate_module.torch, "empty", lambda *_, device: None)
    lanes, dtype = calibrate_module.resolve_lanes(asked, "auto")
    assert list(map(str, lanes.devices)) == found and dtype == torch.bfloat16


def test_one_gpu_by_two_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(calibrate_module.torch, "empty", lambda *_, device: None)
    with pytest.raises(CometError, match="cannot share work"):
        calibrate_module.resolve_lanes("cuda,cuda:0", "auto")


@pytest.mark.parametrize("asked", ["cpu,cpu", "cpu,cuda:0", "cpu,", "cuda:0,cuda:0"])
def test_devices_that_cannot_share_are_refused(asked: str, tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(CometError, match=r"device='[a-z:0,]*' cannot"):
        calibrate(tiny.source, tiny.recipe, tmp_path / "out", device=asked, progress=SilentProgress())
    assert not (tmp_path / "out").exists()


def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 32 tokens go one by one, so that lanes have something to share."""
    monkeypatch.setitem(hidden_module.TOKENS_A_STEP, "cpu", 32)


def seven(made: Any, **weights: Any) -> Any:
    recipe = replace(made.recipe, calibration=replace(made.recipe.calibration, samples=7))
    return replace(recipe, weights=replace(recipe.weights, holdout=0.25, **weights))


def test_calibrations_are_the_same_bytes(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_steps(monkeypatch)
    used: set[int] = set()
    honest = calibrate_module._pass

    def noting(copies: Copies, *rest: Any) -> Any:
        used.add(rest[2].lane(rest[-1][0]))
        return honest(copies, *rest)

    monkeypatch.setattr(calibrate_module, "_pass", noting)
    for name, shared in (("one", lanes(1)), ("many", lanes(3))):
        used.clear()
        calibrate(tiny.source, seven(tiny), tmp_path / name, device="cpu", progress=SilentProgress(), lanes=shared)
        assert used == set(range(len(shared)))
    one, many = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("one", "many"))
    assert one == many and one


@pytest.mark.parametrize("weights", [{}, {"target": "sixteen", "inputs": "quantized"}])
def test_moments_differ_by_rounding_only(
    tiny: Any, tmp_path: Path, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with as many lanes as before packing gives the same bytes."""
    small_steps(monkeypatch)
    recipe = seven(tiny, **weights)
    calibrate(tiny.source, recipe, tmp_path / "calibration", device="cpu", progress=SilentProgress())
    moments: dict[str, list[list[Tensor]]] = {}
    honest = quantize_group._moments

    def noting(*given: Any) -> Any:
        found = honest(*given)
        both = [sums for sums in found if sums is not None]
        moments[folder].append([t.clone() for sums in both for t in (sums.hessian, sums.gap) if t is not None])
        return found

    monkeypatch.setattr(quantize_group, "_moments", noting)
    for folder, count in (("one", 1), ("three", 3), ("again", 3)):
        moments[folder] = []
        pack(tiny.source, tmp_path / "calibration", None, tmp_path / folder, device="cpu", progress=SilentProgress(),
             lanes=lanes(count))  # fmt: skip
    first = 4  # the groups of the first layer: after it the packed models differ by what rounded the other way
    for one, three in zip(moments["one"][:1], moments["three"][:1], strict=True):
        assert len(one) == len(three) == (4 if weights else 2)
        for mine, other in zip(one, three, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6 * float(mine.abs().max()))
    assert len(moments["one"]) == 2 * first
    files = [{f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("three", "again")]
    assert files[0] == files[1]
    models = [load_packed(tmp_path / name).model for name in ("one", "three")]
    tokens = torch.arange(48)[None] % 251
    with torch.no_grad():
        logits = [model(input_ids=tokens, use_cache=False).logits[0].float() for model in models]
    assert Likeness.of(*logits).cosine > 0.98


def test_a_mixture_of_experts_is_shared_too(
    put_through: Any, llama_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import MixtralConfig

    small_steps(monkeypatch)
    shapes = llama_config().to_dict()
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = MixtralConfig(**{key: shapes[key] for key in keys}, intermediate_size=128, num_local_experts=2,
                           num_experts_per_tok=1, bos_token_id=None, eos_token_id=256)  # fmt: skip
    made = put_through(config)
    recipe = seven(made, target="sixteen")
    for name, count in (("one", 1), ("two", 2)):
        options: Any = {"device": "cpu", "progress": SilentProgress(), "lanes": lanes(count)}
        calibrate(made.source, recipe, tmp_path / name / "calibration", **options)
        pack(made.source, tmp_path / name / "calibration", None, tmp_path / name / "packed", **options)
    one, two = (read_manifest(tmp_path / name / "packed") for name in ("one", "two"))
    assert [c["cosine"] for c in one.checks] == pytest.approx([c["cosine"] for c in two.checks], abs=2e-3)
    assert one.linears == two.linears


def test_an_unfinished_packing_goes_on_with_as_many_devices(tiny: Any, tmp_path: Path) -> None:
    """Another number would leave layers of both in one folder, which nobody could make again."""
    out = tmp_path / "out"
    options: Any = {"device": "cpu", "progress": SilentProgress()}
    pack(tiny.source, tiny.calibration, None, out, lanes=lanes(2), **options)
    job = {"devices": 2}
    from comet_core.pack_job import PackJob

    found = PackJob(tiny.source, _calibration(tiny), tiny.recipe, tmp_path / "marker", "cpu", torch.float32,
                    SilentProgress(), lanes=lanes(2))  # fmt: skip
    found.begin()
    marker = json.loads((tmp_path / "marker" / "packing.json").read_text())
    assert marker | job == marker
    with pytest.raises(CometError, match="unfinished packing of another"):
        pack(tiny.source, tiny.calibration, None, tmp_path / "marker", **options)


def _calibration(made: Any) -> Any:
    from comet_core.calibration import load_calibration

    return load_calibration(made.calibration)


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    ("one", "two"),
    [
        pytest.param({"device": "cpu"}, {"device": "cpu", "lanes": lanes(2)}, id="rehearsed on a CPU"),
        pytest.param({"device": "cuda"}, {"device": "cuda:0,cuda:1"}, marks=[pytest.mark.gpu, TWO], id="two GPUs"),
    ],
)
def test_two_devices_calibrate_the_same_bytes_and_pack_as_well(
    tiny: Any, tmp_path: Path, one: dict[str, Any], two: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(hidden_module.TOKENS_A_STEP, device, 512)  # so that either device has two ranges
    recipe = replace(tiny.recipe, calibration=replace(tiny.recipe.calibration, samples=16, seq_len=128))
    for name, options in (("one", one), ("two", two)):
        options = options | {"progress": SilentProgress()}
        calibrate(tiny.source, recipe, tmp_path / name / "calibration", **options)
        pack(tiny.source, tmp_path / "one" / "calibration", None, tmp_path / name / "packed", **options)
    if two["device"] != "cpu":
        assert len(Lanes.of(two["device"])) == 2 and torch.cuda.max_memory_allocated(1) > 0
    files = [{f.name: f.read_bytes() for f in (tmp_path / name / "calibration").iterdir()} for name in ("one", "two")]
    assert files[0] == files[1] and files[0]
    checks = [[c["cosine"] for c in read_manifest(tmp_path / name / "packed").checks] for name in ("one", "two")]
    assert checks[0] == pytest.approx(checks[1], abs=2e-3) and min(checks[0]) > 0.9
