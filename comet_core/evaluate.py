"""Perplexity, KL divergence and top-1 agreement of a packed or 16-bit model, each number with its protocol.

Windows are non-overlapping and scored on their own: the mean negative log-likelihood of every token but the first of
each window, given those before it. The KV cache's 4-bit form acts inside attention (kv_cache.py), so it is part of the
number although no cache is filled.
"""

import inspect
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.calibrate import resolve_compute
from comet_core.corpus import Corpus, load_corpus, perplexity_windows, unread
from comet_core.decoder import load_sixteen
from comet_core.kv_cache import attention_name, int4_key_fraction
from comet_core.model_source import ModelSource, cut_layers, resolve_model
from comet_core.packed import is_packed, load_packed, packed_config, read_manifest
from comet_core.preflight import require_room, weights_bytes
from comet_core.progress import Progress
from comet_core.provenance import provenance
from comet_core.recipe import KVCacheSpec
from comet_core.scores import final_hidden, log_probabilities
from comet_cuda.errors import CometError

UNSEEN = 0.01  # occurrences that a token has before its first
LOGIT_ROWS = 512  # token rows whose logits are held in float32 at once
TOKENS_A_STEP = {"cpu": 2048, "cuda": 16384}  # that go through a model at once; a longer window goes alone


@dataclass(frozen=True)
class Subject:
    """A model under test. `base` is the 16-bit model it was packed from, where that can be found."""

    spec: str
    source: ModelSource | None  # None: a packed folder
    tokenizer: Any
    layers: int
    name: str
    recipe: str
    recipe_digest: str | None
    note: str
    kv_cache: KVCacheSpec
    int4_mac_fraction: float
    base: str | None
    calibration: str = "none"
    data: dict[str, Any] | None = None  # the same, as the manifest has it
    model: nn.Module = field(default_factory=nn.Module)  # empty until it is loaded


@dataclass(frozen=True)
class Planned:
    """Everything that a perplexity is made of, found and checked before any weights are read."""

    subject: Subject
    beside: ModelSource | None  # the 16-bit model to compare with
    corpus: Corpus
    tokens: Tensor  # int64 [windows, length]


@dataclass
class Scores:
    """Sums over scored tokens."""

    tokens: int = 0
    nll: float = 0.0
    base_nll: float = 0.0
    kl: float = 0.0
    agree: int = 0


def find_subject(spec: str) -> Subject:
    """A packed folder, or anything that names a 16-bit model, known but not loaded.

    Errors:
        CometError if neither is found or its files cannot be used.
    """
    if is_packed(Path(spec)) or (Path(spec) / "packing.json").is_file():
        manifest = read_manifest(Path(spec))
        return Subject(
            spec=spec,
            source=None,
            tokenizer=_tokenizer(Path(spec)),
            layers=packed_config(Path(spec)).get_text_config().num_hidden_layers,
            name=manifest.model["name"],
            recipe=manifest.recipe.name,
            recipe_digest=manifest.recipe_digest,
            note=manifest.model["note"],
            kv_cache=manifest.recipe.kv_cache,
            int4_mac_fraction=manifest.int4_mac_fraction,
            base=manifest.model["spec"],
            calibration="{name} ({origin}), {samples} x {seq_len} tokens, seed {seed}".format(**manifest.data),
            data=manifest.data,
        )
    source = resolve_model(spec)
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise CometError(f"{source.name}: random weights have no tokenizer and no perplexity", "give a real model")
    return sixteen_subject(source, tokenizer, spec)


def sixteen_subject(source: ModelSource, tokenizer: Any, spec: str = "") -> Subject:
    """A 16-bit model as a subject."""
    layers = source.config.get_text_config().num_hidden_layers
    kv = KVCacheSpec(bits=16)
    return Subject(spec, source, tokenizer, layers, source.name, "fp16", None, source.note, kv, 0.0, base=None)


def loaded(subject: Subject, device: str, dtype: torch.dtype, layers: int | None = None) -> Subject:
    """The subject with its model in memory, or with the first `layers` decoder layers of it."""
    if subject.source is None:
        packed = load_packed(Path(subject.spec), device=device, dtype=dtype, layers=layers)
        model = packed.model
        if subject.kv_cache != packed.manifest.recipe.kv_cache:
            model.set_attn_implementation(attention_name(subject.kv_cache, model.config))  # type: ignore[operator]
    else:
        source = subject.source if layers is None else cut_layers(subject.source, layers)
        model = load_sixteen(source, device, dtype)
    return replace(subject, model=model)


def load_subject(spec: str, device: str, dtype: torch.dtype, layers: int | None = None) -> Subject:
    """`find_subject` with its model, or the first `layers` of it, in memory, if that can hold the whole."""
    subject = find_subject(spec)
    require_room(subject_bytes(subject, dtype), subject.name, device)
    return loaded(subject, device, dtype, layers)


def subject_bytes(subject: Subject, dtype: torch.dtype) -> int:
    """Bytes of the model in memory, at least."""
    if subject.source is None:
        return sum(file.stat().st_size for file in Path(subject.spec).glob("*.safetensors"))
    return weights_bytes(subject.source, dtype)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CometError(
            f"{folder}: holds no tokenizer, so text cannot be read ({str(error).splitlines()[0]})",
            "a model packed from random weights has none; copy the tokenizer files into the folder otherwise",
        ) from error


@torch.no_grad()
def score_windows(model: nn.Module, base: nn.Module | None, tokens: Tensor, scores: Scores) -> None:
    """Add windows, int64 [batch, L], to `scores`."""
    hidden = final_hidden(model, tokens)
    base_hidden = final_hidden(base, tokens) if base is not None else None
    targets = tokens[:, 1:].flatten()
    for start in range(0, len(targets), LOGIT_ROWS):
        rows = slice(start, min(start + LOGIT_ROWS, len(targets)))
        log_p = log_probabilities(model, hidden[rows])
        target = targets[rows, None]
        scores.nll -= float(log_p.gather(1, target).double().sum())
        scores.tokens += len(target)
        if base is not None and base_hidden is not None:
            log_q = log_probabilities(base, base_hidden[rows])
            scores.base_nll -= float(log_q.gather(1, target).double().sum())
            scores.kl += float((log_q.exp() * (log_q - log_p)).sum(1).double().sum())
            scores.agree += int((log_p.argmax(1) == log_q.argmax(1)).sum())


def evaluate_perplexity(
    model_spec: str | Path,
    *,
    data: str,
    windows: int | None,
    seq_len: int,
    device: str = "auto",
    dtype: str = "auto",
    compare: bool = True,
    kv16: bool = False,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Measure one model on one text.

    Args:
        model_spec: packed folder, model folder, alias, GGUF file or hub id.
        data: corpus name or file. windows: how many, None for all. seq_len: tokens a window.
        device, dtype: "auto" or torch names. compare: also run the 16-bit model of a packed one. kv16: leave a packed
            model's KV cache in 16 bit.

    Returns:
        eval records: perplexity, and where compared kl (mean KL divergence from the 16-bit model to this one, nats a
        token), top1 (share of tokens with the same most likely next token) and the 16-bit model's own perplexity.

    Errors:
        CometError for models, data or windows that cannot be used.
    """
    device, compute = resolve_compute(device, dtype)
    plan = plan_perplexity(
        str(model_spec), data=data, windows=windows, seq_len=seq_len, compare=compare, kv16=kv16, progress=progress
    )
    corpus, tokens = plan.corpus, plan.tokens
    wanted = subject_bytes(plan.subject, compute)
    if plan.beside is not None:
        wanted += weights_bytes(plan.beside, compute)
    require_room(wanted, plan.subject.name + (" beside its 16-bit original" if plan.beside else ""), device)
    subject = loaded(plan.subject, device, compute)
    base = None if plan.beside is None else load_sixteen(plan.beside, device, compute)
    scores = Scores()
    with progress.task("evaluate", len(tokens)) as task:
        for batch in tokens.split(windows_a_step(device, seq_len)):
            score_windows(subject.model, base, batch.to(device), scores)
            task.advance(len(batch))
    protocol = _protocol(corpus, subject, tokens, windows, compute)
    shared = {
        "kind": "eval",
        "model": subject.name,
        "task": corpus.name,
        "windows": "all" if windows is None else len(tokens),
        "seq_len": seq_len,
    }
    own = shared | {
        "recipe": subject.recipe,
        "kv_quantized": subject.kv_cache.bits < 16,
        "int4_mac_fraction": subject.int4_mac_fraction,
        "protocol": protocol,
        "provenance": provenance(recipe_digest=subject.recipe_digest, device=device),
    }
    perplexity = _perplexity(scores.nll, scores.tokens)
    _warn_if_implausible(perplexity, tokens, subject, progress)
    records = [own | {"metric": "perplexity", "value": perplexity}]
    if plan.beside is not None:
        records.append(own | {"metric": "kl", "value": scores.kl / scores.tokens})
        records.append(own | {"metric": "top1", "value": scores.agree / scores.tokens})
        sixteen = replace(sixteen_subject(plan.beside, subject.tokenizer), note=subject.note)
        records.append(
            shared
            | {
                "recipe": "fp16",
                "kv_quantized": False,
                "int4_mac_fraction": 0.0,
                "protocol": _protocol(corpus, sixteen, tokens, windows, compute),
                "provenance": provenance(device=device),
                "metric": "perplexity",
                "value": _perplexity(scores.base_nll, scores.tokens),
            }
        )
    return records


def plan_perplexity(
    spec: str,
    *,
    data: str,
    windows: int | None,
    seq_len: int,
    compare: bool,
    kv16: bool = False,
    progress: Progress,
) -> Planned:
    """Find the model, the text, its windows and the model to compare with. Reads no weights.

    Errors:
        CometError for models, data or windows that cannot be used.
    """
    subject = find_subject(spec)
    if kv16:
        subject = replace(subject, kv_cache=KVCacheSpec(bits=16))
    corpus = _unseen(load_corpus(data, role="perplexity"), subject, progress)
    tokens = perplexity_windows(corpus, subject.tokenizer, seq_len=seq_len, windows=windows)
    return Planned(subject, find_base(subject, progress) if compare else None, corpus, tokens)


def windows_a_step(device: str, seq_len: int) -> int:
    """How many windows go through a model at once."""
    return max(1, TOKENS_A_STEP.get(device.partition(":")[0], TOKENS_A_STEP["cpu"]) // seq_len)


def _unseen(corpus: Corpus, subject: Subject, progress: Progress) -> Corpus:
    """The text without what the model was calibrated on, where that was the same text."""
    data = subject.data
    if data is None or not data["sha256"] or data["sha256"] != corpus.sha256:
        return corpus
    rest = unread(corpus, subject.tokenizer, samples=data["samples"], seq_len=data["seq_len"], seed=data["seed"])
    if rest.sha256 == corpus.sha256:
        progress.log(
            f"warning: {corpus.name}: calibration read a part of each of its documents, so the figures flatter this "
            "model; the record says so. Another text (--ppl) judges it fairly"
        )
    else:
        progress.log(f"{corpus.name}: the model was calibrated on a part of this text; scored are {rest.split}")
    return rest


def find_base(subject: Subject, progress: Progress) -> ModelSource | None:
    """The 16-bit model that a packed one was made from; None, with the reason said, where there is none to compare."""
    if subject.base is None:
        return None
    try:
        source = resolve_model(subject.base)
        whole = source.config.get_text_config().num_hidden_layers
        if whole != subject.layers:
            raise CometError(f"it has {whole} layers, this one was cut to {subject.layers}")
        return source
    except CometError as error:
        progress.log(
            f"the 16-bit model {subject.base} cannot stand beside this one, so nothing is compared ({error.message})"
        )
        return None


def _perplexity(nll: float, tokens: int) -> float:
    mean = nll / tokens
    return math.exp(mean) if mean < 700 else math.inf


def frequency_perplexity(tokens: Tensor, vocabulary: int) -> float:
    """Perplexity of the naive guess: each token is as likely as it was frequent in the text before it.

    Args:
        tokens: int64 [windows, length]; as in the model's score the first token of a window is given.
    """
    counts: dict[int, int] = {}
    nll, seen = 0.0, 0
    for window in tokens.tolist():
        for place, token in enumerate(window):
            if place:
                share = (counts.get(token, 0) + UNSEEN) / (seen + UNSEEN * vocabulary)
                nll -= math.log(share)
            counts[token] = counts.get(token, 0) + 1
            seen += 1
    return _perplexity(nll, tokens.numel() - len(tokens))


def _warn_if_implausible(perplexity: float, tokens: Tensor, subject: Subject, progress: Progress) -> None:
    vocabulary = subject.model.get_output_embeddings().out_features  # type: ignore[operator]
    naive = frequency_perplexity(tokens, vocabulary)
    if not math.isfinite(perplexity) or perplexity > vocabulary:
        progress.log(
            f"warning: perplexity {perplexity:.4g} is worse than guessing among {vocabulary} tokens; the model or the "
            "tokenizer is broken"
        )
    elif perplexity > naive:
        progress.log(
            f"warning: perplexity {perplexity:.4g} is worse than guessing each token by how often it occurred before "
            f"({naive:.4g}); the model has lost what it knew, or this text is not its language"
        )


def _protocol(
    corpus: Corpus, subject: Subject, tokens: Tensor, windows: int | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Everything that must agree before two perplexities may be compared."""
    length = tokens.shape[1]
    kv = subject.kv_cache
    bos = getattr(subject.tokenizer, "bos_token_id", None) if subject.tokenizer is not None else None
    starts_with_bos = bos is not None and bool((tokens[:, 0] == bos).all())
    return {
        "data": f"{corpus.name} {corpus.split} ({corpus.origin})",
        "sha256": corpus.sha256,
        "joined": corpus.joined,
        "windows": f"{'all' if windows is None else 'first'} {len(tokens)} of {length} tokens, not overlapping",
        "tokens_scored": len(tokens) * (length - 1),
        "bos": "each window starts with it" if starts_with_bos else "none",
        "kv": "16-bit"
        if kv.bits == 16
        else f"4-bit, keys per {kv.key_granularity}, pages of {kv.page}, {kv.sinks} sinks; "
        f"{int4_key_fraction(length, kv):.1%} of key reads in 4 bit",
        "dtype": str(dtype).removeprefix("torch."),
        "calibration": subject.calibration,
        "base": subject.note or "16-bit weights",
    }


def cache_argument(model: nn.Module) -> str:
    """What this version of transformers calls the KV cache argument of a model's forward (5.24 renamed it)."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def continue_prompt(model_spec: str | Path, prompt: str, tokens: int, device: str = "auto", dtype: str = "auto") -> str:
    """Greedy continuation of a prompt by at most `tokens` tokens, without the prompt itself."""
    from transformers import DynamicCache

    device, compute = resolve_compute(device, dtype)
    subject = load_subject(str(model_spec), device, compute)
    inputs = subject.tokenizer(prompt, return_tensors="pt").to(device)
    output = subject.model.generate(  # type: ignore[operator]
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=tokens,
        do_sample=False,
        **{cache_argument(subject.model): DynamicCache()},  # keeps every key, as pages of a 4-bit cache need
    )
    text: str = subject.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text
