"""A model, a scheme and a load -> prefill and decode rates, first-token and per-token times, memory: one e2e record.

The decision: a run of 512 steps is not run step by step. Prefill is timed on the real chunks (equal chunks once), and
the decode step, a graph, at several context lengths of the run, between which its time is linear in the context; the
record says so. A batch of "max" is computed from shapes, verified, and stepped down where the allocator disagrees.

`python -m comet_core.bench_serving llama-3-8b --scheme 16-bit,W4A4KV4 --batch 64,max --load 1024/512 --record FILE`
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from comet_core.device_timing import fill_randomly, free_memory, milliseconds
from comet_core.model_source import ModelSource, resolve_model
from comet_core.packed import is_packed, read_manifest
from comet_core.provenance import provenance
from comet_core.results import Record, append
from comet_core.runner import Runner, sample, split_chunks
from comet_core.runner_model import RunnerModel, tensor_bytes
from comet_core.runner_weights import random_runner, runner_from_packed
from comet_core.serving_scheme import CHUNK, GIB, PAGE, SINKS, find_scheme, largest_batch, packed_scheme, require_fit
from comet_core.step_breakdown import summarize, trace
from comet_cuda.errors import CometError
from comet_cuda.quantize_act import TOKEN

LOADS = ((1024, 512), (128, 128))  # prompt and output tokens, as in the paper
BATCHES: tuple[int | str, ...] = (1, 2, 4, 8, 16, 64, 256, "max")
POINTS = {4: 6, 16: 4}  # contexts at which a step is timed, by the cache's bits
REPLAYS = 3  # timed steps at each, one right after the other
CHUNK_KINDS = 3  # different chunks that are timed
STEP_DOWN = 0.97  # of a batch that did not fit after all
ATTENTION_NOTES = {
    16: "decode: torch SDPA (cuDNN) over sequences of one length, a graph a context; prefill: torch FlashAttention",
    4: "comet",
}
LINEAR_NOTES = {
    "bf16": "torch (cuBLAS) bf16",
    "fp8": "FP8 e4m3, a scale a token and a row, torch._scaled_mm",
    "w4a16": (
        "at most 16 tokens: torch's _weight_int4pack_mm; more: bf16 cuBLAS on a dense matrix that all layers share, "
        "decoding not counted, so no slower than a real weight-only kernel once computation bounds it"
    ),
    "w4ax": "comet",
}


class ServingBench:
    """One model in one scheme on one device; `measure` it under as many loads as wanted."""

    def __init__(
        self,
        model: str,
        scheme: str,
        *,
        device: str = "cuda",
        seed: int = 0,
        layers: int | None = None,
        share: int = TOKEN,
        command: str | None = None,
    ) -> None:
        """Load or make the weights.

        Args:
            model: packed folder, or anything whose shapes resolve_model finds (then weights are random). A packed
                folder's own weights serve the scheme it was packed for, random ones of its shapes the others.
            scheme: a name in SCHEMES. layers: the first so many only (the record says so).
            share: of random packed weights, blocks whose activation scales are tied: 1, or 0, all of a token.
            command: what was typed, for the records; None takes this process's command line.

        Errors:
            CometError where the weights alone do not fit.
        """
        self.scheme, self.device, self.seed, self.layers = find_scheme(scheme), torch.device(device), seed, layers
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.page, self.sinks, self.digest, self.command = PAGE, SINKS, None, command
        self.share = share if self.scheme.int4_share else None
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise CometError("no CUDA GPU is here", "shapes alone need none: comet bench --roofline")
        self.model: RunnerModel
        packed = Path(model)
        if is_packed(packed):
            manifest = read_manifest(packed)
            recipe, self.digest = manifest.recipe, manifest.recipe_digest
            self.page, self.sinks = recipe.kv_cache.page, recipe.kv_cache.sinks
            if packed_scheme(manifest.recipe) == scheme:
                self.share = min((entry.share for entry in manifest.linears.values()), default=None)
                self.model = runner_from_packed(packed, self.device, self.dtype)
                return
            model = manifest.model["spec"]
        self._require_room(model)
        self.model = random_runner(model, self.scheme, self.device, self.dtype, seed=seed, layers=layers, share=share)

    def _require_room(self, model: str) -> None:
        from comet_core.llama_shape import shape_of_config

        source: ModelSource = resolve_model(model, weights="random", layers=self.layers)
        require_fit(shape_of_config(source.name, source.config), self.scheme, 1, 2, self.available())

    def available(self) -> int:
        """Bytes that this process can have, what it holds included."""
        if self.device.type != "cuda":
            return 1 << 34
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device)

    def runner(self, batch: int | str, context: int) -> Runner:
        """A runner with `batch` slots, or as many as fit.

        Errors:
            CometError that says how much a batch needs and what would fit.
        """
        free_memory()
        weights = tensor_bytes(self.model.weight_tensors())
        shape, available = self.model.shape, self.available()
        if batch == "max":
            count = largest_batch(shape, self.scheme, context, available, weights)
            if not count:
                require_fit(shape, self.scheme, 1, context, available, weights)
            while count:
                try:
                    return self._checked(count, context)
                except torch.OutOfMemoryError:
                    free_memory()
                    count = min(count - 1, int(count * STEP_DOWN))
            raise CometError(f"{shape.name} in {self.scheme.name}: not even one sequence fits", "take fewer tokens")
        require_fit(shape, self.scheme, int(batch), context, available, weights)
        try:
            return self._checked(int(batch), context)
        except torch.OutOfMemoryError as error:
            free_memory()
            free = f"{available / GIB:.1f} GiB were free"
            raise CometError(f"batch {batch} did not fit although {free}", "use --batch max") from error

    def _checked(self, batch: int, context: int) -> Runner:
        """A runner whose largest step has run once."""
        runner = Runner(
            self.model, kv_bits=self.scheme.kv_bits, batch=batch, context=context, page=self.page, sinks=self.sinks
        )
        fill_randomly(runner.cache.tensors(), self.seed)
        for slot in range(batch):
            runner.cache.reserve(slot, context)
        return runner

    def measure(self, batch: int | str, prompt_tokens: int, output_tokens: int, *, parts: bool = False) -> Record:
        """One record. `parts`: with the break-down of a decode step in the middle of the run (GPU only).

        Errors:
            CometError as in `runner`, and for fewer than two output tokens.
        """
        if prompt_tokens < 1 or output_tokens < 2:
            raise CometError(f"{prompt_tokens} prompt and {output_tokens} output tokens", "ask for at least 1 and 2")
        largest, total = batch == "max", prompt_tokens + output_tokens
        context = min(total + REPLAYS, max(total, self.model.most_positions))  # a timing may pass a short run's end
        while True:
            runner = self.runner(batch, context)
            try:
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(self.device)
                first, prefill = self._prefill(runner, prompt_tokens)
                points, steps = self._decode(runner, prompt_tokens, output_tokens)
                break
            except torch.OutOfMemoryError as error:
                if not largest or runner.batch == 1:
                    raise CometError(f"batch {runner.batch} ran out of memory", "use --batch max") from error
                batch = min(runner.batch - 1, int(runner.batch * STEP_DOWN))
                del runner
        rows, decode = runner.batch, statistics.fmean(steps) * (output_tokens - 1)
        memory = runner.memory()
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else sum(memory.values())
        memory["workspace"] = max(0, peak - sum(memory.values()))
        record = {
            "kind": "e2e",
            "model": self.model.shape.name,
            "scheme": self.scheme.name,
            "engine": "comet",
            "batch": rows,
            "batch_is_largest": largest,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "tokens_per_s": round(1000 * rows * output_tokens / (prefill + decode), 1),
            "prefill_tokens_per_s": round(1000 * rows * prompt_tokens / prefill, 1),
            "decode_tokens_per_s": round(1000 * rows * (output_tokens - 1) / decode, 1),
            "ttft_ms": round(first, 3),
            "tpot_ms": round(decode / (output_tokens - 1), 4),
            "memory_gib": round(sum(memory.values()) / GIB, 3),
            "memory": {kind: round(size / GIB, 3) for kind, size in memory.items()},
            "layers": self.model.shape.layers,
            "int4_share": self.model.int4_share(),
            "activation_share": self.share,
            "weights": self.model.note,
            "linears": LINEAR_NOTES[self.scheme.linears],
            "attention": ATTENTION_NOTES[self.scheme.kv_bits],
            "method": (
                f"static batch; prefill in chunks of {runner.chunk} tokens, equal chunks timed once, ttft_ms is the "
                f"batch's mean; decode step (CUDA graph, greedy, tokens kept on the GPU) at {len(points)} contexts,"
                f" mean of {REPLAYS} in a row, steps that complete a page counted in, integrated over the run"
            ),
            "steps": [[context, round(step, 4)] for context, step in points],
            "provenance": provenance(self.command, recipe_digest=self.digest, seed=self.seed, device=str(self.device)),
        }
        if parts and self.device.type == "cuda":
            record["step_parts"] = self.parts(runner, prompt_tokens + output_tokens // 2)
        return record

    def _prefill(self, runner: Runner, prompt_tokens: int) -> tuple[float, float]:
        """Mean time to the first token and time of the whole prefill, milliseconds."""
        batch = runner.batch
        times: dict[tuple[tuple[int, int], ...], float] = {}
        chunks = split_chunks([prompt_tokens] * batch, runner.chunk)
        total, rate, ended = 0.0, 0.0, []
        for pieces in chunks:
            kind = tuple((start, count) for _, start, count in pieces)
            tokens = sum(count for _, _, count in pieces)
            if kind not in times and len(times) < CHUNK_KINDS:
                times[kind] = self._time_chunk(runner, pieces, prompt_tokens, warm=not times)
                rate = times[kind] / tokens
            total += times.get(kind, rate * tokens)
            ended += [total] * sum(start + count == prompt_tokens for _, start, count in pieces)
        return statistics.fmean(ended), total

    def _time_chunk(
        self, runner: Runner, pieces: Sequence[tuple[int, int, int]], prompt_tokens: int, warm: bool
    ) -> float:
        count = sum(new for _, _, new in pieces)
        ids = torch.randint(0, self.model.shape.vocab, (count,), device=self.device)
        work, row, ends = runner.chunk_of(pieces), 0, []
        for _, start, new in pieces:
            row += new
            if start + new == prompt_tokens:
                ends.append(row - 1)

        def run() -> None:
            logits = runner.prefill_chunk(ids, work, ends)
            if ends:
                sample(logits, 0.0, None)

        if warm:
            run()
        return milliseconds(self.device, run, 1 if count >= CHUNK else REPLAYS)

    def _decode(self, runner: Runner, prompt: int, output: int) -> tuple[list[tuple[int, float]], list[float]]:
        """Step times at some contexts, and the time of every step of the run, milliseconds."""
        first, last = prompt, prompt + output - 2  # positions of the tokens that enter
        room = REPLAYS + 2  # a timing moves on by so many positions
        count = max(1, min(POINTS[self.scheme.kv_bits], (last - first) // room))
        wanted = [first + (last - first) * i // max(1, count - 1) for i in range(count)]
        points = []
        for position in wanted:
            at = min(self._inside_a_page(position, room), max(first, last - room))
            points.append((at + 1, self._time_step(runner, at)))
        steps = [_between(points, position + 1) for position in range(first, last + 1)]
        completing = [p for p in range(first, last + 1) if (p - self.sinks) % self.page == self.page - 1]
        if self.scheme.kv_bits == 4 and completing:  # all sequences complete a page in the same step
            middle = completing[len(completing) // 2]
            extra = max(0.0, self._time_alone(runner, middle) - self._time_alone(runner, middle - 1))
            for position in completing:
                steps[position - first] += extra
        return points, steps

    def _inside_a_page(self, position: int, room: int) -> int:
        """The position, moved on where a page would be completed within `room` steps."""
        place = (position - self.sinks) % self.page
        return position + room if place >= self.page - room else position

    def _uniform(self, position: int) -> int:
        """A 16-bit cache is read by the fastest attention of equal lengths, one graph a context."""
        return position + 1 if self.scheme.kv_bits == 16 else 0

    def _time_step(self, runner: Runner, position: int) -> float:
        """Mean of some steps in a row from this position on, every sequence alike."""
        rows, uniform = runner.batch, self._uniform(position)

        def run() -> None:
            for _ in range(REPLAYS):
                runner.step(rows, uniform=uniform)

        runner.state(rows)
        self._place(runner, position)
        runner.step(rows, uniform=uniform)
        return milliseconds(self.device, run) / REPLAYS

    def _time_alone(self, runner: Runner, position: int) -> float:
        """Median of this very step, taken some times."""
        times = []
        for _ in range(REPLAYS):
            self._place(runner, position)
            times.append(milliseconds(self.device, lambda: runner.step(runner.batch)))
        return statistics.median(times)

    def _place(self, runner: Runner, position: int) -> None:
        rows = runner.batch
        if self.device.type == "cuda":
            runner.captured(rows, uniform=self._uniform(position))
        runner.state(rows).write([1] * rows, range(rows), [position] * rows)

    def parts(self, runner: Runner, position: int) -> dict[str, Any]:
        """The break-down of one step with every sequence at this position."""
        rows, position = runner.batch, self._inside_a_page(position, 8)
        graph, state = runner.captured(rows, uniform=self._uniform(position))
        state.write([1] * rows, range(rows), [position] * rows)
        return {"context": position + 1} | summarize(trace(graph.replay))


def _between(points: Sequence[tuple[int, float]], context: int) -> float:
    """Time at a context, linear between the neighbouring points and beyond the outer ones."""
    if len(points) == 1:
        return points[0][1]
    right = next((i for i, (at, _) in enumerate(points) if at >= context and i), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (context - x0) / (x1 - x0)


def bench_serving(
    model: str,
    schemes: Sequence[str] = ("16-bit", "W4A4KV4"),
    batches: Sequence[int | str] = BATCHES,
    loads: Sequence[tuple[int, int]] = LOADS,
    *,
    device: str = "cuda",
    seed: int = 0,
    layers: int | None = None,
    share: int = TOKEN,
    command: str | None = None,
    parts_at: Sequence[int] = (64,),
    on_skip: Callable[[str], None] = lambda message: None,
) -> Iterator[Record]:
    """Records of a model under every scheme, load and batch, one by one as they are measured.

    Args:
        model: packed folder, or alias, folder or hub id for random weights. schemes: names in SCHEMES.
        batches: sizes, or "max" for as many as fit. loads: (prompt, output) tokens.
        parts_at: batches at which the record of the first load holds the break-down of a step.
        on_skip: told in one line about what does not fit. command: what was typed, for the records.

    Errors:
        CometError for names that do not exist; what does not fit is skipped.
    """
    for scheme in schemes:
        find_scheme(scheme)
    for scheme in schemes:
        free_memory()
        try:
            bench = ServingBench(model, scheme, device=device, seed=seed, layers=layers, share=share, command=command)
        except CometError as error:
            if "needs" not in error.message:
                raise
            on_skip(error.message)
            continue
        for load in loads:
            for batch in batches:
                try:
                    yield bench.measure(batch, *load, parts=load == loads[0] and batch in parts_at)
                except CometError as error:
                    on_skip(error.message)
        del bench


def main(arguments: Sequence[str]) -> int:
    """Measure, print each record as a line of JSON, and append it to --record."""
    parser = argparse.ArgumentParser("python -m comet_core.bench_serving", description=main.__doc__)
    parser.add_argument("model")
    parser.add_argument("--scheme", default="16-bit,W4A4KV4")
    parser.add_argument("--batch", default=",".join(map(str, BATCHES)), help='sizes, or "max"')
    parser.add_argument("--load", default="1024/512,128/128", help="prompt/output tokens")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--share", type=int, default=TOKEN, choices=(1, TOKEN), help="1: a scale a block; 0: a token")
    parser.add_argument("--parts-at", default="64", help="batches whose step is broken down")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args(arguments)
    try:
        for record in bench_serving(
            given.model,
            given.scheme.split(","),
            [batch if batch == "max" else int(batch) for batch in given.batch.split(",")],
            [(int(prompt), int(output)) for prompt, output in (load.split("/") for load in given.load.split(","))],
            layers=given.layers,
            share=given.share,
            command=f"python -m comet_core.bench_serving {shlex.join(arguments)}",
            parts_at=[int(batch) for batch in given.parts_at.split(",") if batch],
            on_skip=lambda message: print(f"skipped: {message}", file=sys.stderr),
        ):
            print(json.dumps(record), flush=True)
            if given.record:
                append(given.record, record)
    except CometError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
