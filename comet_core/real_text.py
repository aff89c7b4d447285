"""Real text through the runner: a packed model on a GPU against the CPU reference, long context, and passkeys.

In: a packed folder, or any 16-bit model. Out: eval records. The decision: three questions, each with its own yardstick.
(1) Does the GPU compute what the references compute? The packed Hugging Face model on the CPU is the reference: of the
same model on the GPU with every float operation around the packed linears rounded once (`rounded_rows`), where the two
must agree to the bit; of it as it is, and of the runner in 16 bit. How far the reference in 16 bit and in float32 are
apart says what rounding alone does to a model whose activations have 4 bits. Layers, which do not drift apart, are
compared one by one (`layer_text`). (2) What does the 4-bit cache cost at 8,192 tokens? (3) Is a passkey in a long text
found again? Both are answered by the same weights with a 16-bit cache beside.

    python -m comet_core.real_text PACKED --record results/measured/real_text.jsonl
"""

import argparse
import functools
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.corpus import load_corpus, perplexity_windows
from comet_core.evaluate import Subject, find_subject
from comet_core.layer_text import by_layer, compare_layers, layer_metrics
from comet_core.linear import W4AxLinear, has_kernel
from comet_core.packed import load_packed
from comet_core.provenance import provenance
from comet_core.results import Record, append
from comet_core.rounded_once import rounded_once
from comet_core.runner import BatchState, Runner
from comet_core.runner_model import RunnerModel
from comet_core.runner_weights import runner_from_packed, runner_from_source
from comet_core.scores import final_hidden, log_probabilities
from comet_core.serving_scheme import PAGE, SINKS
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import TOKEN

ROWS = 512  # token rows whose log-probabilities are held in float32 at once
DECODED = 64  # of a compared window, its last tokens, which go through decode steps
SENTENCE = "The pass key is {key}. Remember it: {key} is the pass key."
QUESTION = "\n\nThe pass key that was hidden in the text above is"
DIGITS, ANSWER = 5, 12  # of a key; tokens that an answer may take
AT_ONCE = 1 << 19  # tokens of prompts whose cache is held at once
# Norm of the error over that of the result, for kernels that add floats: output rounding, 2^-17 of a zero point's part.
WITHIN = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-5}


@dataclass
class Against:
    """Sums over tokens of what one model says against another."""

    tokens: int = 0
    nll: float = 0.0
    its_nll: float = 0.0  # of the reference
    kl: float = 0.0
    agree: int = 0
    same: int = 0  # tokens whose log-probabilities are all the reference's, bit for bit

    def add(self, log_p: Tensor, log_q: Tensor, targets: Tensor) -> None:
        """log_p, of the reference log_q: f32 [n, V]. targets: int64 [n]."""
        self.tokens += len(targets)
        self.nll -= float(log_p.gather(1, targets[:, None]).double().sum())
        self.its_nll -= float(log_q.gather(1, targets[:, None]).double().sum())
        self.kl += float((log_q.exp() * (log_q - log_p)).sum(1).double().sum())
        self.agree += int((log_p.argmax(1) == log_q.argmax(1)).sum())
        self.same += int((log_p == log_q).all(1).sum())

    def values(self) -> dict[str, float]:
        """Metric -> value."""
        return {
            "perplexity": math.exp(self.nll / self.tokens),
            "reference_perplexity": math.exp(self.its_nll / self.tokens),
            "kl": self.kl / self.tokens,
            "top1": self.agree / self.tokens,
            "same_bits": self.same / self.tokens,
        }


def runner_rows(runner: Runner, tokens: Tensor, decoded: int) -> Iterator[Tensor]:
    """f32 log-probabilities [n, V] after each token of one window but its last, a few rows at a time, in order.

    Args:
        tokens: int64 [L] on any device. decoded: the last so many are given one by one, as decode does.
    """
    device, prompt = runner.model.device, len(tokens) - 1 - decoded
    if not runner.cache.reserve(0, len(tokens)):
        raise CometError(f"a window of {len(tokens)} tokens for a slot of {runner.context}", "make a larger runner")
    try:
        for start in range(0, prompt, runner.chunk):
            count = min(runner.chunk, prompt - start)
            work = runner.chunk_of([(0, start, count)])
            with torch.no_grad():
                x, residual = runner.model.hidden(tokens[start : start + count].to(device), work, runner.cache)
            for row in range(0, count, ROWS):
                rest = None if residual is None else residual[row : row + ROWS]
                yield torch.log_softmax(runner.model.logits(x[row : row + ROWS], rest).float(), -1)
        state = BatchState.empty(1, device)
        for place in range(prompt, len(tokens) - 1):
            state.write([int(tokens[place])], (0,), [place])
            yield torch.log_softmax(runner.decode_logits(state).float(), -1)
    finally:
        runner.cache.release(0)


def reference_rows(folder: Path, windows: Tensor, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """What the packed Hugging Face model says: f32 log-probabilities [L - 1, V] of each window [L], on the CPU."""
    return _rows(load_packed(folder, device=device, dtype=dtype).model, windows, device)


def _rows(model: nn.Module, windows: Tensor, device: str) -> list[Tensor]:
    with torch.no_grad():
        return [log_probabilities(model, final_hidden(model, window[None].to(device))).cpu() for window in windows]


def rounded_rows(folder: Path, windows: Tensor, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """`reference_rows` by operations whose results are the same bits on every device (`rounded_once`).

    Packed linears whose kernels and references are equal bit by bit are those kernels on a GPU (compute capability 9.0,
    integer scales), those references on a CPU. Other kernels add floats in an order of their own: they run, must be
    within `WITHIN` of the product of their dequantized operands, and the model goes on with that product.

    Errors:
        CometError naming a linear that is farther away.
    """
    model = load_packed(folder, device=device, dtype=dtype).model
    linears = {name: part for name, part in model.named_modules() if isinstance(part, W4AxLinear) and has_kernel(part)}
    near = dict(linears)
    for name, part in linears.items():
        if part.share == TOKEN and part.prepared("sm_90" if device == "cpu" else None).layout == "sm_90":
            del near[name]
    with rounded_once(as_they_are=linears.values()):
        for name, part in near.items():
            part.register_forward_hook(functools.partial(_dequantized, name))
        return _rows(model, windows, device)


def _dequantized(name: str, linear: W4AxLinear, args: tuple[Tensor], y: Tensor) -> Tensor:
    """A forward hook: what stands for y in the model, if y is near it."""
    wanted = linear.fake_quantized(args[0])
    error = float((y.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))
    if not error <= WITHIN[y.dtype]:
        raise CometError(
            f"{name}: its kernel's result is {error:.1e} of its norm away from the product of its dequantized operands",
            f"{WITHIN[y.dtype]:.0e} is what rounding explains: please report it",
        )
    return wanted


def compare(runner: Runner | None, windows: Tensor, wanted: Sequence[Tensor], found: Sequence[Tensor] = ()) -> Against:
    """A runner, or what another reference `found`, against the reference."""
    sums = Against()
    for index, window in enumerate(windows):
        at = 0
        rows = iter(found[index].split(ROWS)) if runner is None else runner_rows(runner, window, DECODED)
        for log_p in rows:
            log_q = wanted[index][at : at + len(log_p)].to(log_p.device)
            sums.add(log_p, log_q, window[at + 1 : at + 1 + len(log_p)].to(log_p.device))
            at += len(log_p)
        if at != len(window) - 1:
            raise RuntimeError(f"{at} rows of {len(window) - 1}")
    return sums


def runner_model(spec: str, device: str, dtype: torch.dtype) -> RunnerModel:
    """A packed folder's or a 16-bit model's weights in the runner."""
    subject = find_subject(spec)
    if subject.source is None:
        return runner_from_packed(Path(spec), device, dtype)
    return runner_from_source(subject.source, device, dtype)


def perplexity(model: RunnerModel, windows: Tensor, kv_bits: int) -> float:
    """Of the runner with this cache, windows on their own, their last tokens decoded."""
    runner = Runner(model, kv_bits=kv_bits, batch=1, context=windows.shape[1], page=PAGE, sinks=SINKS)
    nll = 0.0
    for window in windows:
        at = 0
        for log_p in runner_rows(runner, window, DECODED):
            targets = window[at + 1 : at + 1 + len(log_p), None].to(log_p.device)
            nll -= float(log_p.gather(1, targets).double().sum())
            at += len(log_p)
    return math.exp(nll / (windows.numel() - len(windows)))


# --- passkeys


def passkey_prompts(
    tokenizer: Any, text: Sequence[int], length: int, depths: int, seeds: int
) -> list[tuple[list[int], str]]:
    """(prompt, key): a stretch of the text of another place for each seed, the sentence at each depth, the question.

    Args:
        text: token ids, at least `length`. depths: places from the beginning to the end, evenly.
    """

    def ids(words: str) -> list[int]:
        found: list[int] = tokenizer(words, add_special_tokens=False)["input_ids"]
        return found

    prompts = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        key = "".join(map(str, torch.randint(0, 10, (DIGITS,), generator=generator).tolist()))
        inside, end = ids(f"\n\n{SENTENCE.format(key=key)}\n\n"), ids(QUESTION)
        room = length - len(inside) - len(end) - ANSWER
        if room < 1 or room > len(text):
            raise CometError(f"passkeys in prompts of {length} tokens, from {len(text)}", "take another length or text")
        start = int(torch.randint(0, len(text) - room + 1, (1,), generator=generator))
        filler = list(text[start : start + room])
        for depth in range(depths):
            at = room * depth // max(1, depths - 1)
            prompts.append(([*filler[:at], *inside, *filler[at:], *end], key))
    return prompts


def passkeys_found(
    model: RunnerModel, tokenizer: Any, prompts: Sequence[tuple[list[int], str]], kv_bits: int
) -> list[bool]:
    """Whether the first number of each answer is the key."""
    context = max(len(prompt) for prompt, _ in prompts) + ANSWER
    batch = max(1, min(len(prompts), AT_ONCE // context))
    runner = Runner(model, kv_bits=kv_bits, batch=batch, context=context, page=PAGE, sinks=SINKS)
    answers = runner.generate([prompt for prompt, _ in prompts], max_new_tokens=ANSWER)
    said = [re.search(r"\d+", tokenizer.decode(answer)) for answer in answers]
    return [word is not None and word[0] == key for word, (_, key) in zip(said, prompts, strict=True)]


# --- records


def records_of(
    subject: Subject, metrics: dict[str, float], windows: int, length: int, protocol: dict[str, Any], device: str
) -> Iterator[Record]:
    """eval records, one a metric."""
    for metric, value in metrics.items():
        yield {
            "kind": "eval", "model": subject.name, "recipe": subject.recipe, "task": str(protocol["task"]),
            "metric": metric, "value": value, "windows": windows, "seq_len": length,
            "kv_quantized": protocol["kv_bits"] == 4, "int4_mac_fraction": subject.int4_mac_fraction,
            "protocol": protocol, "provenance": provenance(recipe_digest=subject.recipe_digest, device=device),
        }  # fmt: skip


def run(given: argparse.Namespace) -> Iterator[Record]:
    """The records that were asked for, one by one."""
    subject, device = find_subject(given.model), given.device
    kinds = [getattr(torch, name) for name in given.dtype.split(",")]
    corpus = load_corpus(given.data, role="perplexity")

    def text(length: int, windows: int | None) -> Tensor:
        return perplexity_windows(corpus, subject.tokenizer, seq_len=length, windows=windows)

    def records(metrics: dict[str, float], windows: int, length: int, **protocol: Any) -> Iterator[Record]:
        return records_of(subject, metrics, windows, length, {"data": corpus.name} | protocol, device)

    if given.windows and subject.source is None:
        windows, folder = text(given.seq_len, given.windows), Path(given.model)
        exact = reference_rows(folder, windows, torch.float32)
        on_device = compare(None, windows, exact, reference_rows(folder, windows, torch.float32, device))
        task = f"model {device} float32 against cpu float32"
        yield from records(on_device.values(), len(windows), given.seq_len, task=task, kv_bits=4)
        for dtype in dict.fromkeys((torch.float32, *kinds)):
            name = str(dtype).removeprefix("torch.")
            both = [rounded_rows(folder, windows, dtype, where) for where in ("cpu", device)]
            task = f"model {device} {name}, sums rounded once, against cpu {name} likewise"
            sums = compare(None, windows, *both)
            yield from records(sums.values(), len(windows), given.seq_len, task=task, kv_bits=4)
        for dtype in kinds:
            name = str(dtype).removeprefix("torch.")
            runner = Runner(runner_from_packed(folder, device, dtype), kv_bits=4, batch=1, context=given.seq_len)
            rounded = reference_rows(folder, windows, dtype)
            for task, sums in (
                (f"runner {device} {name} against cpu {name}", compare(runner, windows, rounded)),
                (f"runner {device} {name} against cpu float32", compare(runner, windows, exact)),
                (f"cpu {name} against cpu float32", compare(None, windows, exact, rounded)),
            ):
                yield from records(sums.values(), len(windows), given.seq_len, task=task, kv_bits=4, decoded=DECODED)
            for task, errors in compare_layers(folder, runner, windows[:1], DECODED):
                layers = by_layer(errors, DECODED)
                said: dict[str, Any] = {"task": task, "kv_bits": 4, "decoded": DECODED, "by_layer": layers}
                yield from records(layer_metrics(layers), len(errors), given.seq_len, **said)
    if not given.long and not given.seeds:
        return
    model = runner_model(given.model, device, kinds[0])
    if given.long:
        windows = text(given.long, given.long_windows)
        for kv_bits in (16, 4):
            value = {"perplexity": perplexity(model, windows, kv_bits)}
            yield from records(value, len(windows), given.long, task="long context", kv_bits=kv_bits, decoded=DECODED)
    if given.seeds:
        ids = text(1024, None).flatten().tolist()
        for length in map(int, given.passkey.split(",")):
            prompts = passkey_prompts(subject.tokenizer, ids, length, given.depths, given.seeds)
            for kv_bits in (16, 4):
                right = passkeys_found(model, subject.tokenizer, prompts, kv_bits)
                by_depth = [sum(right[depth :: given.depths]) / given.seeds for depth in range(given.depths)]
                value = {"found": sum(right) / len(right)}
                yield from records(value, len(prompts), length, task="passkey", kv_bits=kv_bits, by_depth=by_depth)


def main(arguments: Sequence[str]) -> int:
    """Print each record's gist and append the record to --record."""
    parser = argparse.ArgumentParser("python -m comet_core.real_text", description=main.__doc__)
    parser.add_argument("model", help="packed folder; with --windows 0 also a 16-bit model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16,float16", help="of the runner; the first also for long texts")
    parser.add_argument("--data", default="wikitext2")
    parser.add_argument("--windows", type=int, default=4, help="compared with the CPU reference; 0: none")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--long", type=int, default=8192, help="tokens of long windows; 0: none")
    parser.add_argument("--long-windows", type=int, default=16)
    parser.add_argument("--passkey", default="2048,4096,8192", help="tokens of passkey prompts")
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=20, help="0: no passkeys")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args(arguments)
    try:
        for record in run(given):
            protocol = record["protocol"]
            print(json.dumps({key: record[key] for key in ("model", "recipe", "metric", "value", "windows", "seq_len")}
                             | {key: protocol[key] for key in ("task", "kv_bits")}), flush=True)  # fmt: skip
            if given.record:
                append(given.record, record)
    except CometError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
