"""Zero-shot: scores that depend on their own request alone, runs that go on, errors that are paired."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comet_core.progress import SilentProgress
from comet_cuda.errors import CometError

pytest.importorskip("lm_eval", reason="zero-shot tasks need lm-eval")

import torch

from comet_core import zero_shot
from comet_core.evaluate import load_subject
from comet_core.recipe import load_recipe, recipe_from_dict, recipe_to_dict
from comet_core.results import check
from comet_core.zero_shot import Scorer, evaluate_zero_shot, harness, mean_and_error
from comet_core.zero_shot_table import zero_shot_table
from comet_core.zero_shot_tasks import load_task, parse_tasks

WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "dogs",
    "lay",
    "by",
    "doors",
    "while",
    "rain",
    "fell",
    "on",
    "roofs",
)


def sentence(start: int, words: int) -> str:
    return " ".join(WORDS[(start * 7 + i * i) % len(WORDS)] for i in range(words))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder in the hub's column layout, a few documents a task, and an empty cache."""
    rows = {
        "piqa/validation": [
            {"goal": sentence(i, 3 + i), "sol1": sentence(i, 4), "sol2": sentence(i + 1, 6), "label": i % 2}
            for i in range(7)
        ],
        "hellaswag/validation": [
            {
                "ind": i, "activity_label": "Cats", "ctx_a": sentence(i, 6) + ".", "ctx_b": "the dog",
                "ctx": "", "endings": [sentence(i + j, 3 + j) for j in range(4)], "source_id": "", "split": "val",
                "split_type": "", "label": str(i % 4),
            }
            for i in range(4)
        ],
        "lambada_openai/test": [{"text": sentence(i, 20)} for i in range(3)],
    }  # fmt: skip
    for name, found in rows.items():
        path = tmp_path / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
    monkeypatch.setenv("COMET_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COMET_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "data"


@pytest.fixture(scope="module")
def packed(put_through: Callable[..., Any], llama_config: Callable[..., Any]) -> Any:
    """Room for prompts of bytes; short pages, so that prompts fill some; large keys, so that 4 bits are felt."""
    plain = recipe_to_dict(load_recipe("w4a4kv4"))
    plain["kv_cache"] |= {"page": 16, "sinks": 2}
    factors = {f"model.layers.{i}.self_attn.{p}_proj.weight": 12.0 for i in range(2) for p in "qk"}
    return put_through(llama_config(max_position_embeddings=2048), recipe_from_dict(plain), factors)


def requests(count: int) -> list[Any]:
    pairs = [(sentence(i, 3 + 5 * i), " " + sentence(i + 1, 1 + i % 3)) for i in range(count)]
    return [SimpleNamespace(args=pair, arguments=pair) for pair in pairs]


@pytest.mark.parametrize("open_page", ["16bit", "4bit"])
def test_scores_depend_on_their_request_alone(packed: Any, open_page: str) -> None:
    """Alone and in one batch with longer ones, whose padding must enter no page and no attention."""
    asked = requests(9)
    lm = harness(load_subject(str(packed.packed), "cpu", torch.float32), open_page)
    alone = [lm.loglikelihood([one], disable_tqdm=True)[0] for one in asked]
    lm.batch_size_per_gpu = 9
    together = lm.loglikelihood(asked, disable_tqdm=True)
    for (one, greedy), (other, also_greedy) in zip(alone, together, strict=True):
        assert one == pytest.approx(other, abs=1e-4) and greedy == also_greedy


def test_kv4_acts_and_so_does_its_open_page(packed: Any) -> None:
    """Three models in one: 16-bit cache, the rule, the rule with the open page in 4 bit too."""
    asked = requests(9)
    scores = {}
    for name in ("16", "rule", "open"):
        subject = load_subject(str(packed.packed), "cpu", torch.float32)
        if name == "16":
            subject.model.set_attn_implementation("sdpa")
        lm = harness(subject, "4bit" if name == "open" else "16bit")
        scores[name] = torch.tensor([score for score, _ in lm.loglikelihood(asked, disable_tqdm=True)])
    for one, other in (("16", "rule"), ("rule", "open"), ("16", "open")):
        assert float((scores[one] - scores[other]).abs().median()) > 1e-2, (one, other)


def test_records_hold_paired_errors_and_both_metrics(packed: Any, data: Path) -> None:
    tasks = parse_tasks("piqa, hellaswag,lambada_openai,piqa")
    records = evaluate_zero_shot(packed.packed, tasks=tasks, progress=SilentProgress(), device="cpu")
    for record in records:
        check(record)
    own = {(r["task"], r["metric"]): r for r in records if r["recipe"] != "fp16"}
    base = {(r["task"], r["metric"]): r for r in records if r["recipe"] == "fp16"}
    assert set(own) == set(base)
    assert {m for t, m in own if t == "hellaswag"} == {"acc", "acc_norm"} and ("average", "acc") in own
    for key, record in own.items():
        assert record["drop"] == pytest.approx(base[key]["value"] - record["value"])
        assert 0 <= record["value"] <= 1 and record["stderr"] >= 0
    assert own["piqa", "acc"]["windows"] == 7 and own["lambada_openai", "acc"]["windows"] == 3
    assert "16-bit" in base["piqa", "acc"]["protocol"]["kv"] and not base["piqa", "acc"]["kv_quantized"]
    table = zero_shot_table(records)
    assert table.count("\n") == 3 and "hellaswag" in table.splitlines()[0]


def test_prompts_are_made_once_for_both_models_and_templates_once_for_all(
    packed: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import utils

    made: list[str] = []
    real = zero_shot.requests_of
    monkeypatch.setattr(zero_shot, "requests_of", lambda one, limit: made.append(one.name) or real(one, limit))
    monkeypatch.setattr(utils.env, "from_string", utils.env.__class__.from_string.__get__(utils.env))
    evaluate_zero_shot(packed.packed, tasks=("piqa", "hellaswag"), device="cpu", progress=SilentProgress())
    assert made == ["piqa", "hellaswag"]
    compiled, used = utils.env.from_string.cache_info().misses, utils.env.from_string.cache_info().hits
    assert compiled < 10 <= used


def test_records_of_a_task_are_known_before_the_next_is_asked(packed: Any, data: Path, monkeypatch: Any) -> None:
    """A run that is stopped in the 16-bit model's second task has given the first one's records, paired."""
    known: list[list[Any]] = []
    original = Scorer.score

    def stopping(self: Scorer, requests: Any, store: Any, progress: Any, label: str) -> None:
        if label == stop_at:
            raise KeyboardInterrupt
        original(self, requests, store, progress, label)

    monkeypatch.setattr(Scorer, "score", stopping)
    stop_at = "lambada_openai, fp16"
    run = lambda: evaluate_zero_shot(  # noqa: E731
        packed.packed, tasks=["piqa", "lambada_openai"], progress=SilentProgress(), device="cpu", known=known.append
    )
    with pytest.raises(KeyboardInterrupt):
        run()
    assert [{(r["task"], r["recipe"] == "fp16", "drop" in r) for r in given} for given in known] == [
        {("piqa", False, True), ("piqa", True, False)}
    ]
    known.clear()
    stop_at = ""
    records = run()
    assert [given[0]["task"] for given in known] == ["piqa", "lambada_openai", "average"]
    assert sorted(str(record) for given in known for record in given) == sorted(map(str, records))


@pytest.mark.parametrize(("free", "tokens"), [(0, 3532), (100 << 30, 16384), (40 << 30, 7064)])
def test_a_gpu_with_room_takes_larger_batches(monkeypatch: Any, free: int, tokens: int) -> None:
    """With 152,000 words 2 GiB are 3,532 rows of logits, a tenth of 40 GiB twice as many; a CPU stays with 2 GiB."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (free, 140 << 30))
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=152_000))
    monkeypatch.setattr(zero_shot, "load_subject", lambda *_: None)
    monkeypatch.setattr(zero_shot, "harness", lambda *_: SimpleNamespace(model=SimpleNamespace(config=config)))
    for device, wanted in (("cuda:1", tokens), ("cpu", 2048)):
        scorer = Scorer(SimpleNamespace(spec="", device=device, dtype=torch.bfloat16, open_page="16bit"))  # type: ignore[arg-type]
        assert scorer.lm is not None and scorer.tokens_a_batch == wanted
    assert asked == ["cuda:1"] and zero_shot.logit_bytes("cpu") == zero_shot.LOGIT_BYTES


def test_a_step_gives_back_what_its_logits_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing a model beside it ran out of memory once: scoring one of 3 GB had cached 106 GB."""
    given_back: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(1))
    scorer = Scorer(SimpleNamespace(device="cuda:0"))  # type: ignore[arg-type]
    monkeypatch.setattr(Scorer, "lengths", lambda self, missing: dict.fromkeys(missing, 3))
    monkeypatch.setattr(Scorer, "run", lambda self, some, longest: [(0.0, True)] * len(some))
    store = SimpleNamespace(found={}, add=lambda rows: None)
    scorer.score(requests(zero_shot.REQUESTS_A_STEP + 1), store, SilentProgress(), "")  # type: ignore[arg-type]
    assert len(given_back) == 2


def test_the_error_of_a_difference_is_paired() -> None:
    before, after = [1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0, 0.0]
    mean, error = mean_and_error([b - a for b, a in zip(before, after, strict=True)])
    assert mean == pytest.approx(0.2) and error == pytest.approx(math.sqrt(0.8 / 4 / 5))
    assert mean_and_error([0.0] * 4) == (0.0, 0.0)


def test_a_broken_run_goes_on(packed: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run scores only what the first one had not; a limit reuses the same results."""
    monkeypatch.setattr(zero_shot, "REQUESTS_A_STEP", 4)
    scored: list[int] = []
    original = Scorer.run

    def breaking(self: Scorer, asked: list[Any], longest: int) -> Any:
        if sum(scored) >= 8 and limit_reached:
            raise KeyboardInterrupt
        scored.append(len(asked))
        return original(self, asked, longest)

    monkeypatch.setattr(Scorer, "run", breaking)
    limit_reached = True
    run = lambda **more: evaluate_zero_shot(  # noqa: E731
        packed.packed, tasks=["piqa"], progress=SilentProgress(), device="cpu", compare=False, **more
    )
    with pytest.raises(KeyboardInterrupt):
        run()
    assert sum(scored) == 8
    limit_reached = False
    whole = run()
    assert sum(scored) == 14, "7 documents of two answers, each scored once"
    assert run()[0]["value"] == whole[0]["value"] and sum(scored) == 14
    assert run(limit=3)[0]["windows"] == 3 and sum(scored) == 14
    run(open_page="4bit")
    assert sum(scored) == 28, "another attention is another result"


def test_a_line_cut_short_is_scored_again(packed: Any, data: Path) -> None:
    first = evaluate_zero_shot(packed.packed, tasks=["piqa"], progress=SilentProgress(), device="cpu", compare=False)
    file = next((data.parent / "cache" / "zero_shot").rglob("*.jsonl"))
    file.write_text(file.read_text()[:-30])
    again = evaluate_zero_shot(packed.packed, tasks=["piqa"], progress=SilentProgress(), device="cpu", compare=False)
    assert [r["value"] for r in again] == [r["value"] for r in first]


def test_what_cannot_be_asked_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CometError, match="names no task"):
        parse_tasks(" , ")
    with pytest.raises(CometError, match="16bit or 4bit"):
        evaluate_zero_shot("nowhere", tasks=["piqa"], open_page="8bit", progress=SilentProgress())
    monkeypatch.setattr("comet_core.zero_shot_tasks._why_no_hub", lambda: "no network")
    with pytest.raises(CometError, match="arc_easy cannot be loaded.*no network") as error:
        load_task("arc_easy")
    assert "COMET_DATA" in error.value.hint
    monkeypatch.setenv("COMET_DATA", str(data / "missing"))
    with pytest.raises(CometError, match="no folder"):
        load_task("piqa")
