"""Windows that the 16-bit model writes: whose text they begin with, that they are its own, and that none is lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comet_core import generated, pack, screen
from comet_core.decoder import load_sixteen
from comet_core.generated import generate_windows, prompts_of
from comet_core.progress import SilentProgress
from comet_core.recipe import TuningSpec, digest, load_recipe, recipe_from_dict, recipe_to_dict
from comet_core.tune import split_windows
from comet_cuda.errors import CometError

END = 256  # of a text, in the tiny model's vocabulary
LENGTH = 32


class Told(SilentProgress):
    """Notes the total, and at each step whether cuDNN may be asked."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator["Told"]:
        self.total, self.plans = total, list[bool]()
        yield self

    def advance(self, steps: int = 1) -> None:
        self.plans += [torch.backends.cuda.cudnn_sdp_enabled()] * steps


@pytest.fixture(scope="module")
def teacher(tiny: Any) -> Any:
    return load_sixteen(tiny.source, "cpu", torch.float32)


@pytest.fixture
def train() -> Tensor:
    return torch.randint(END, (3, LENGTH), generator=torch.Generator().manual_seed(5))


def write(teacher: Any, train: Tensor, count: int, folder: Path, seed: int = 0) -> Tensor:
    return generate_windows(teacher, train, count, seed=seed, model="tiny", folder=folder, progress=SilentProgress())


def test_prompts_are_ever_other_tokens_of_all_windows(train: Tensor) -> None:
    """LENGTH / 2 each here; the third round begins again."""
    prompts = prompts_of(train, 8)
    halves = [half for first in (0, 16, 15) for half in train[:, first : first + 16]]
    assert torch.equal(prompts[:6], torch.stack(halves[:6]))
    assert prompts.shape == (8, 16)
    long = torch.arange(4 * 100).view(4, 100)
    assert torch.equal(prompts_of(long, 5)[4], long[0, 32:64])
    long[:, 0] = 7  # BOS
    assert torch.equal(prompts_of(long, 5)[4], torch.cat([torch.tensor([7]), long[0, 33:64]]))


def test_windows_are_full_the_same_for_a_seed_and_leave_no_trace(teacher: Any, train: Tensor, tmp_path: Path) -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    first = write(teacher, train, 40, tmp_path / "a")
    assert torch.equal(torch.rand(4), wanted), "the caller draws as if nothing had been"
    torch.rand(100)
    assert torch.equal(write(teacher, train, 40, tmp_path / "b"), first)
    other = write(teacher, train, 40, tmp_path / "c", seed=1)
    assert first.shape == (40, LENGTH) and first.dtype == torch.int64
    assert torch.equal(first[:, :16], prompts_of(train, 40)) and torch.equal(other[:, :16], first[:, :16])
    assert (first[:, 16:] != other[:, 16:]).float().mean() > 0.8
    ends = (first[:, 16:-1] == END).nonzero()
    assert len(ends), "no text ended: choose another seed"
    assert all(first[row, 17 + at] != END for row, at in ends.tolist()), "another text follows"


def test_every_token_is_told_and_none_waits_for_a_plan(
    teacher: Any, train: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of cuDNN, which makes one for each length of the keys."""
    monkeypatch.setitem(generated.MOST_ROWS, "cpu", 2)
    told = Told()
    generate_windows(teacher, train, 3, seed=0, model="tiny", folder=tmp_path, progress=told)
    assert (told.total, told.plans) == (32, [False] * 32)
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("sliding", [False, True])
def test_they_are_what_transformers_draws(llama_config: Any, tmp_path: Path, train: Tensor, *, sliding: bool) -> None:
    """With its own cache and the same seed, also where a layer reads eight tokens back only."""
    from transformers import AutoModelForCausalLM, GenerationConfig, MistralConfig

    config = llama_config()
    if sliding:
        shapes = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
        config = MistralConfig(**shapes | {"sliding_window": 8})
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # few likely tokens: what an error in keys or positions would move
    ours = write(model, train, 3, tmp_path)
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, max_length=LENGTH)
    torch.manual_seed(0)
    assert torch.equal(ours, model.generate(train[:, :16]))


def test_finished_batches_are_found_again(
    teacher: Any, train: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run after a crash, and by one that wants more."""
    monkeypatch.setitem(generated.MOST_ROWS, "cpu", 2)
    written, left, seeds = generated._written, [None], set()

    def dies(*arguments: Any) -> Tensor:
        if not left:
            raise RuntimeError("killed")
        left.pop()
        seeds.add(arguments[3])
        return written(*arguments)

    monkeypatch.setattr(generated, "_written", dies)
    with pytest.raises(RuntimeError, match="killed"):
        write(teacher, train, 4, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    left.append(None)
    four = write(teacher, train, 4, tmp_path)
    left.append(None)
    assert torch.equal(write(teacher, train, 5, tmp_path)[:4], four)
    assert len(seeds) == 3, "each batch draws anew"
    with pytest.raises(RuntimeError, match="killed"):
        write(teacher, train + 1, 2, tmp_path)


def test_no_more_are_written_at_once_than_memory_holds(
    teacher: Any, train: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys_and_values = 2 * 2 * 64 * 4 * LENGTH  # two layers, 64 channels of float32
    a_row = keys_and_values + 4 * generated.LOGIT_COPIES * 257
    monkeypatch.setattr(generated, "total_memory", lambda: int(5.5 * a_row / generated.MEMORY_SHARE))
    with torch.no_grad():
        assert generated._rows_at_once(teacher, train[:1, :16], LENGTH) == 5
        monkeypatch.setattr(generated, "total_memory", lambda: 1 << 40)
        assert generated._rows_at_once(teacher, train[:1, :16], LENGTH) == generated.MOST_ROWS["cpu"]


def test_windows_that_judge_are_kept_apart() -> None:
    windows = torch.arange(16)[:, None]
    train, judge = split_windows(windows, 0.125)
    assert judge.flatten().tolist() == [7, 15] and sorted(torch.cat([train, judge]).flatten().tolist()) == [*range(16)]
    for both in (split_windows(windows[:7], 0.125), split_windows(windows, 0.0)):
        assert all(torch.equal(part, both[0]) for part in both) and len(both[0])


def test_generated_windows_join_those_that_teach_alone(
    put_through: Any, llama_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two windows one judges. The folder that keeps them is the draft's, unless another is given."""
    recipe = load_recipe("w4a4kv4")
    made = put_through(llama_config(), recipe)
    seen, tune = [], pack.tune

    def spied(model: Any, teacher: Any, train: Tensor, judge: Tensor, **how: Any) -> Any:
        draft = pack.draft_folder(tmp_path / "packed")
        seen.append((train, judge, len(list(draft.glob("generated-*.safetensors")))))
        return tune(model, teacher, train, judge, **how)

    monkeypatch.setattr(pack, "tune", spied)
    tokens = pack.load_calibration(made.calibration).tokens
    plain = recipe_to_dict(recipe) | {"tuning": {"epochs": 1, "windows": 1, "generated": 5}}
    plain["weights"] = plain["weights"] | {"holdout": 0.5}
    how: Any = {"device": "cpu", "progress": SilentProgress()}
    for folder in (None, tmp_path / "kept"):
        pack.pack(made.source, made.calibration, recipe_from_dict(plain), tmp_path / "packed", generated=folder, **how)
    assert seen[0][2] == 1 and seen[1][2] == 0 and len(list((tmp_path / "kept").glob("*.safetensors"))) == 1
    assert not pack.draft_folder(tmp_path / "packed").exists()
    for train, judge, _ in seen:
        assert torch.equal(judge, tokens[1:]) and torch.equal(train[:1], tokens[:1])
        assert torch.equal(train[1:, :16], prompts_of(tokens[:1], 5))


def test_variants_share_what_was_written(tiny: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(tiny.source.folder)
    lines = [
        f"  {name}: {{calibration: {{data: {folder}/text.txt}}, tuning: {{epochs: 1, generated: 3, windows: {step}}}}}"
        for name, step in (("one", 1), ("two", 2))
    ]
    (tmp_path / "a.yaml").write_text("\n".join(["base: w4a4kv4", "variants:", *lines]))
    arguments = [str(tmp_path / "a.yaml"), "--model", folder, "--data", f"{folder}/text.txt", "--seq-len", "64",
                 "--samples", "2", "--sample-len", "32", "--record", str(tmp_path / "r.jsonl"),
                 "--keep", str(tmp_path / "keep"), "--device", "cpu"]  # fmt: skip
    assert screen.main(arguments) == 0, capfd.readouterr().err
    (file,) = (tmp_path / "keep" / "g").glob("*.safetensors")
    assert generated.read_shard(file)[0]["tokens"].shape == (3, 32)


def test_a_recipe_says_how_many() -> None:
    with pytest.raises(CometError, match="tuning.generated is 3, but epochs 0"):
        TuningSpec(generated=3)
    with pytest.raises(CometError, match="tuning.generated is -1"):
        TuningSpec(epochs=1, generated=-1)
    plain = load_recipe("w4a4kv4-tuned")
    more = recipe_from_dict(recipe_to_dict(plain) | {"tuning": {"epochs": 1, "generated": 8}})
    none = recipe_from_dict(recipe_to_dict(plain) | {"tuning": {"epochs": 1}})
    assert digest(more) != digest(none)
