"""A packed or 16-bit model + lm-eval's tasks -> accuracy per task, each with its paired difference from 16-bit.

lm-eval builds the prompts and judges the answers; its HFLM scores them on the model that COMET has loaded, so that the
KV cache's 4-bit form acts inside attention. Log-likelihoods are kept on disk one request at a time, under everything
that decides them, so a run that breaks goes on and a longer run reuses a shorter one. HFLM pads to the right behind a
causal mask, and no page of the KV cache ever waits for a later token: a score depends on its own request alone, up to
the float rounding of larger matrix products.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from functools import cached_property
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import torch

from comet_core.calibrate import resolve_compute
from comet_core.evaluate import Subject, find_base, find_subject, load_subject
from comet_core.kv_open_page import open_page_attention_name
from comet_core.progress import Progress
from comet_core.provenance import provenance
from comet_core.zero_shot_store import Contestant, Store, describe, request_key
from comet_core.zero_shot_tasks import PAPER_TASKS, LoadedTask, load_task
from comet_cuda.errors import CometError

REQUESTS_A_STEP = 512  # scored between two writes to disk
TOKENS_A_BATCH = {"cpu": 2048, "cuda": 16384}  # padding included; halved where a GPU has no room
LOGIT_BYTES = 2 << 30  # of one batch's float32 logits, of which two copies live at once,
GPU_SHARE = 0.1  # or so much of a GPU's free memory, if that is more
METRICS = ("acc", "acc_norm")
Key = TypeVar("Key")
Values = dict[str, dict[str, list[float]]]  # task -> metric -> one value a document


class Scorer:
    """A contestant's model in lm-eval's hands; loaded when the first request needs it."""

    def __init__(self, who: Contestant, layers: int | None = None) -> None:
        """`layers`: the first so many of the model only, to measure them."""
        self.who, self.layers = who, layers
        self.tokens_a_batch = TOKENS_A_BATCH.get(who.device.partition(":")[0], TOKENS_A_BATCH["cpu"])

    @cached_property
    def lm(self) -> Any:
        """HFLM over the loaded model."""
        subject = load_subject(self.who.spec, self.who.device, self.who.dtype, self.layers)
        lm = harness(subject, self.who.open_page)
        vocabulary = lm.model.config.get_text_config().vocab_size
        self.tokens_a_batch = min(self.tokens_a_batch, logit_bytes(self.who.device) // (4 * vocabulary))
        return lm

    def lengths(self, requests: Mapping[Key, Any]) -> dict[Key, int]:
        """Tokens of each request."""
        texts = ["".join(request.args) for request in requests.values()]
        return dict(zip(requests, map(len, self.lm.tokenizer(texts)["input_ids"]), strict=True))

    def score(self, requests: Sequence[Any], store: Store, progress: Progress, label: str) -> None:
        """Score what the store lacks, longest first, a step at a time.

        Args:
            requests: lm-eval Instances of the kind loglikelihood.
        """
        missing = missing_in(store, requests)
        if not missing:
            return
        lengths = self.lengths(missing)
        order = sorted(missing, key=lambda key: (-lengths[key], missing[key].args))
        with progress.task(label, len(order)) as task:
            for start in range(0, len(order), REQUESTS_A_STEP):
                keys = order[start : start + REQUESTS_A_STEP]
                results = self.run([missing[key] for key in keys], lengths[keys[0]] + 1)
                store.add(dict(zip(keys, results, strict=True)))
                if self.who.device.startswith("cuda"):
                    torch.cuda.empty_cache()  # logits of ever other sizes would fill the GPU, which may be shared
                task.advance(len(keys))

    def run(self, requests: list[Any], longest: int) -> list[tuple[float, bool]]:
        """One step, with half the batch where the GPU's memory does not hold it."""
        while True:
            batch = max(1, self.tokens_a_batch // longest)
            self.lm.batch_size_per_gpu = batch
            try:
                found: list[tuple[float, bool]] = self.lm.loglikelihood(requests, disable_tqdm=True)
                return found
            except torch.OutOfMemoryError:
                if batch == 1:
                    raise
                self.tokens_a_batch = batch // 2 * longest
                torch.cuda.empty_cache()


def logit_bytes(device: str) -> int:
    """What one batch's float32 logits may take: large vocabularies else make batches too small to keep a GPU busy."""
    if not device.startswith("cuda"):
        return LOGIT_BYTES
    return max(LOGIT_BYTES, int(GPU_SHARE * torch.cuda.mem_get_info(device)[0]))


def missing_in(store: Store, requests: Sequence[Any]) -> dict[str, Any]:
    """Requests that a store lacks, by their names in it."""
    return {key: r for r in requests if (key := request_key(r.args)) not in store.found}


def harness(subject: Subject, open_page: str = "16bit") -> Any:
    """lm-eval's HFLM over a loaded model; logits become float32 before any log-likelihood is taken."""
    from lm_eval.models.huggingface import HFLM

    class Harness(HFLM):  # type: ignore[misc]
        def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
            with torch.no_grad():
                logits: torch.Tensor = self.model(input_ids=inps, use_cache=False).logits
                return logits.float()

    if open_page == "4bit":
        subject.model.set_attn_implementation(open_page_attention_name(subject.kv_cache, subject.model.config))  # type: ignore[operator]
    return Harness(pretrained=subject.model, tokenizer=subject.tokenizer, batch_size=1)


def requests_of(loaded: LoadedTask, limit: int | None) -> list[Any]:
    """lm-eval's requests about the first `limit` documents of a task."""
    with redirect_stderr(StringIO()):  # lm-eval draws a bar of its own
        loaded.task.build_all_requests(limit=limit, rank=0, world_size=1)
    return list(loaded.task.instances)


def document_metrics(task: Any, requests: Sequence[Any], store: Store) -> dict[str, list[float]]:
    """What lm-eval makes of the log-likelihoods: each of METRICS the task has, per document, in their order."""
    for request in requests:
        request.resps = [store.found[request_key(request.args)]]
    task.apply_filters()
    by_document: dict[int, list[Any]] = {}
    for request in requests:
        by_document.setdefault(request.doc_id, []).append(request)
    values: dict[str, list[float]] = {}
    for _, group in sorted(by_document.items()):
        group.sort(key=lambda request: request.idx)
        answers = [next(iter(request.filtered_resps.values())) for request in group]
        for metric, value in task.process_results(group[0].doc, answers).items():
            if metric in METRICS:
                values.setdefault(metric, []).append(float(value))
    return values


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error (0 for a single value)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def load_tasks(tasks: Sequence[str], open_page: str = "16bit") -> list[LoadedTask]:
    """The tasks with their documents; no model is read. Raises CometError for what `evaluate_zero_shot` cannot use."""
    if open_page not in ("16bit", "4bit"):
        raise CometError(f"--kv-open-page {open_page} is not known", "It may be 16bit or 4bit.")
    return [load_task(name) for name in tasks]


def evaluate_zero_shot(
    model_spec: str | Path,
    *,
    tasks: Sequence[str],
    limit: int | None = None,
    open_page: str = "16bit",
    device: str = "auto",
    dtype: str = "auto",
    compare: bool = True,
    progress: Progress,
    known: Callable[[list[dict[str, Any]]], None] = lambda records: None,
) -> list[dict[str, Any]]:
    """Accuracy of one model on lm-eval's tasks, zero-shot.

    Args:
        model_spec: packed folder, model folder, alias, GGUF file or hub id.
        tasks: lm-eval's names. limit: only the first so many documents of each.
        open_page: "16bit" for the KV cache's rule, "4bit" to read the open page in 4 bit too.
        device, dtype: "auto" or torch names. compare: also the 16-bit model of a packed one, for the paired difference.
        known: is given the records of each task when the last model has answered it, and the average's at the end.

    Returns:
        eval records: per task and metric (acc; acc_norm where the task has it) value, stderr, and where compared drop
        (16-bit minus this, share of documents) with drop_stderr from per-document differences; the 16-bit model's own;
        and for two or more tasks the mean of acc over tasks as task "average".

    Errors:
        CometError for models, tasks or data that cannot be used.
    """
    loaded = load_tasks(tasks, open_page)
    device, compute = resolve_compute(device, dtype)
    who = describe(str(model_spec), open_page, device, compute)
    base = base_of(who, progress) if compare else None
    values: Values = {}
    base_values: Values = {}
    own: list[dict[str, Any]] = []
    sixteen: list[dict[str, Any]] = []

    def answered(one: LoadedTask) -> None:
        new = _records(who, one, limit, values[one.name], base_values.get(one.name))
        more = [] if base is None else _records(base, one, limit, base_values[one.name], None)
        own.extend(new)
        sixteen.extend(more)
        known([*new, *more])

    requests: dict[str, list[Any]] = {}
    _answer(who, loaded, limit, requests, progress, values, answered if base is None else lambda one: None)
    if base is not None:
        _answer(base, loaded, limit, requests, progress, base_values, answered)
    averages = _average(own, who), [] if base is None else _average(sixteen, base)
    known([*averages[0], *averages[1]])
    return [*own, *averages[0], *sixteen, *averages[1]]


def base_of(who: Contestant, progress: Progress) -> Contestant | None:
    """The 16-bit model that a contestant was packed from; None, with the reason said, where there is none."""
    if who.base is None or find_base(find_subject(who.spec), progress) is None:
        return None
    return describe(who.base, "16bit", who.device, who.dtype)


def _answer(
    who: Contestant,
    tasks: Sequence[LoadedTask],
    limit: int | None,
    asked: dict[str, list[Any]],
    progress: Progress,
    values: Values,
    answered: Callable[[LoadedTask], None],
) -> None:
    """Per task and metric one value a document, into `values`; the model leaves memory at the end. asked: requests of
    tasks, made where they lack."""
    scorer = Scorer(who)
    for loaded in tasks:
        if loaded.name not in asked:
            asked[loaded.name] = requests_of(loaded, limit)
        requests, store = asked[loaded.name], Store(who, loaded)
        scorer.score(requests, store, progress, f"{loaded.name}, {who.recipe}")
        values[loaded.name] = document_metrics(loaded.task, requests, store)
        answered(loaded)
    del scorer
    if who.device.startswith("cuda"):
        torch.cuda.empty_cache()


def _records(
    who: Contestant,
    loaded: LoadedTask,
    limit: int | None,
    values: dict[str, list[float]],
    base: dict[str, list[float]] | None,
) -> list[dict[str, Any]]:
    """Of one task."""
    shared = {
        "kind": "eval",
        "model": who.name,
        "recipe": who.recipe,
        "seq_len": 0,  # documents have their own lengths
        "kv_quantized": who.kv_cache.bits < 16,
        "kv_open_page": who.open_page if who.kv_cache.bits < 16 else "16bit",
        "int4_mac_fraction": who.int4_mac_fraction,
        "limit": limit,
        "provenance": provenance(recipe_digest=who.recipe_digest, device=who.device),
    }
    records: list[dict[str, Any]] = []
    for metric, own in values.items():
        value, error = mean_and_error(own)
        one = shared | {"task": loaded.name, "metric": metric, "windows": len(own), "value": value, "stderr": error}
        if base is not None:
            pairs = zip(base[metric], own, strict=True)
            one["drop"], one["drop_stderr"] = mean_and_error([before - after for before, after in pairs])
        records.append(one | {"protocol": protocol(who, loaded, len(own))})
    return records


def _average(records: list[dict[str, Any]], who: Contestant) -> list[dict[str, Any]]:
    """The mean over the paper's five tasks if all were run, else over all that were; tasks count alike."""
    accuracies = [r for r in records if r["metric"] == "acc"]
    chosen = [r for r in accuracies if r["task"] in PAPER_TASKS]
    chosen = chosen if len(chosen) == len(PAPER_TASKS) else accuracies
    if len(chosen) < 2:
        return []

    def mean(key: str) -> float:
        return float(sum(r[key] for r in chosen)) / len(chosen)

    def error(key: str) -> float:  # tasks are independent
        return math.sqrt(sum(r[key] ** 2 for r in chosen)) / len(chosen)

    documents = sum(r["windows"] for r in chosen)
    one = chosen[-1] | {"task": "average", "windows": documents, "value": mean("value"), "stderr": error("stderr")}
    if "drop" in chosen[0]:
        one |= {"drop": mean("drop"), "drop_stderr": error("drop_stderr")}
    names = ", ".join(r["task"] for r in chosen)
    return [one | {"protocol": chosen[0]["protocol"] | {"data": f"mean of {names}", "sha256": None}}]


def protocol(who: Contestant, loaded: LoadedTask, documents: int) -> dict[str, Any]:
    """Everything that must agree before two accuracies may be compared."""
    kv = who.kv_cache
    open_page = "also read in 4 bit, over the tokens it holds by then" if who.open_page == "4bit" else "16-bit"
    four = f"4-bit, keys per {kv.key_granularity}, pages of {kv.page}, {kv.sinks} sinks; open page {open_page}"
    return {
        "data": f"{loaded.name} ({loaded.origin})",
        "sha256": loaded.sha256,
        "harness": f"lm-eval {metadata.version('lm_eval')}, task version {loaded.version}, zero-shot",
        "documents": f"first {documents} of {loaded.documents}" if documents < loaded.documents else "all",
        "kv": "16-bit" if kv.bits == 16 else four,
        "dtype": str(who.dtype).removeprefix("torch."),
        "calibration": who.calibration,
        "base": who.note or "16-bit weights",
    }
