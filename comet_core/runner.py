"""Prompts in, tokens out: prefill in chunks over several sequences, decode as one CUDA graph a batch size, refill.

In: a RunnerModel and how much to hold (slots, tokens a slot). The decision: the host decides only who runs; tokens,
slots, positions and lengths live on the device and the graph moves them on by itself, so a step that changes nobody is
one graph launch. A batch between two bucket sizes is padded with rows of slot -1, which write nothing.

It measures throughput and answers prompts; serving users is vLLM's job.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from comet_core.paged_cache import Cache, Chunk, Step, make_cache
from comet_core.runner_model import RunnerModel, tensor_bytes
from comet_core.serving_scheme import CHUNK, PAGE, SINKS
from comet_cuda.argmax import argmax_rows
from comet_cuda.errors import CometError

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # sequences in a captured step


def split_chunks(lengths: Sequence[int], chunk: int) -> list[list[tuple[int, int, int]]]:
    """Prompts of these lengths -> chunks of at most `chunk` tokens: lists of (prompt, first token, tokens).

    Prompts come in order, and one that does not fit goes on in the next chunk.
    """
    chunks: list[list[tuple[int, int, int]]] = [[]]
    room = chunk
    for prompt, length in enumerate(lengths):
        start = 0
        while start < length:
            if not room:
                chunks.append([])
                room = chunk
            count = min(room, length - start)
            chunks[-1].append((prompt, start, count))
            start, room = start + count, room - count
    return [pieces for pieces in chunks if pieces]


def sample(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Logits [B, V] -> int64 [B]: the largest at temperature 0, else drawn from softmax(logits / temperature)."""
    if temperature == 0:
        return argmax_rows(logits)
    noise = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).exponential_(generator=generator)
    return (logits.float() / temperature - noise.log()).argmax(-1)  # the Gumbel trick


@dataclass
class BatchState:
    """What a decode step reads and moves on: one row a sequence."""

    tokens: Tensor  # int64 [B], each sequence's newest token, not yet in the cache
    slot: Tensor  # int32 [B], -1 in padding rows
    places: Tensor  # int32 [2, B], `position` and `length`, which a step moves on together

    @staticmethod
    def empty(rows: int, device: torch.device) -> "BatchState":
        """Padding rows only."""
        zeros = torch.zeros(rows, dtype=torch.int32, device=device)
        return BatchState(
            torch.zeros(rows, dtype=torch.int64, device=device), zeros - 1, torch.stack((zeros, zeros + 1))
        )

    @property
    def position(self) -> Tensor:
        """int32 [B], of the newest token."""
        return self.places[0]

    @property
    def length(self) -> Tensor:
        """int32 [B], position + 1."""
        return self.places[1]

    def write(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> None:
        """Put these sequences into the first rows; the rest is padding."""
        rest = len(self.slot) - len(slots)
        self.tokens.copy_(torch.tensor([*tokens, *[0] * rest]))
        self.slot.copy_(torch.tensor([*slots, *[-1] * rest]))
        self.position.copy_(torch.tensor([*positions, *[0] * rest]))
        self.length.copy_(self.position + 1)


@dataclass
class _Sequence:
    """One prompt that is being answered."""

    index: int
    prompt: Sequence[int]
    answer: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the newest token, which is not in the cache yet."""
        return len(self.prompt) + len(self.answer) - 1


class Runner:
    """A model, a cache and captured steps."""

    def __init__(
        self,
        model: RunnerModel,
        *,
        kv_bits: int,
        batch: int,
        context: int,
        page: int = PAGE,
        sinks: int = SINKS,
        chunk: int = CHUNK,
        seed: int = 0,
    ) -> None:
        """Allocate the cache.

        Args:
            kv_bits: 4 or 16. batch: slots. context: most tokens of a sequence, prompt and answer. page, sinks: of a
                4-bit cache. chunk: most tokens of a prefill step. seed: of sampling.

        Errors:
            CometError for a context beyond the model's positions; torch.OutOfMemoryError.
        """
        if batch < 1 or context < 2 or chunk < 1:
            raise CometError(
                f"batch {batch}, context {context}, chunk {chunk}",
                "each must be positive, and a sequence has at least two tokens",
            )
        self.model, self.batch, self.context, self.chunk = model, batch, context, chunk
        rotary = model.rotary(min(context, model.most_positions))
        self.cache: Cache = make_cache(
            kv_bits,
            model.shape,
            rotary,
            batch,
            context,
            page=page,
            sinks=sinks,
            dtype=model.dtype,
            device=model.device,
        )
        self.generator = torch.Generator(model.device).manual_seed(seed)
        self._graphs: dict[tuple[int, float, int], tuple[torch.cuda.CUDAGraph, BatchState]] = {}
        self._states: dict[int, BatchState] = {}
        self._pool: Any = None  # memory that the graphs share
        self._warm_up: Any = None  # the stream of first steps: one, since a stream has a workspace

    def memory(self) -> dict[str, int]:
        """Bytes of weights and KV cache."""
        return {"weights": tensor_bytes(self.model.weight_tensors()), "kv": tensor_bytes(self.cache.tensors())}

    # --- prefill

    def chunk_of(self, pieces: Sequence[tuple[int, int, int]]) -> Chunk:
        """(slot, first position, new tokens) of each sequence -> the tensors of a chunk."""
        slots, positions, counts = zip(*pieces, strict=True)

        def on_device(values: Tensor) -> Tensor:
            return values.to(self.model.device, torch.int32)

        count = torch.tensor(counts)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), count.cumsum(0)))
        row = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(count)
        return Chunk(
            slot=on_device(torch.tensor(slots)),
            position=on_device(torch.tensor(positions)),
            starts=on_device(starts),
            token_slot=on_device(torch.tensor(slots).repeat_interleave(count)),
            token_position=on_device(torch.tensor(positions).repeat_interleave(count) + row),
            pieces=tuple(pieces),
        )

    @torch.no_grad()
    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """(slot, tokens) of new sequences -> 16-bit logits [prompts, V] after the last token of each.

        The slots must be reserved in the cache.
        """
        lengths = [len(tokens) for _, tokens in prompts]
        found: dict[int, Tensor] = {}
        for pieces in split_chunks(lengths, self.chunk):
            ids = [token for i, start, count in pieces for token in prompts[i][1][start : start + count]]
            work = self.chunk_of([(prompts[i][0], start, count) for i, start, count in pieces])
            ends, row = [], 0
            for i, start, count in pieces:
                row += count
                if start + count == lengths[i]:
                    ends.append((i, row - 1))
            logits = self.prefill_chunk(torch.tensor(ids, device=self.model.device), work, [row for _, row in ends])
            found |= {i: logits[n] for n, (i, _) in enumerate(ends)}
        return torch.stack([found[i] for i in range(len(prompts))])

    @torch.no_grad()
    def prefill_chunk(self, tokens: Tensor, work: Chunk, rows: Sequence[int]) -> Tensor:
        """One chunk: int64 [N] tokens; returns the logits of these rows of it, [len(rows), V]."""
        x, residual = self.model.hidden(tokens, work, self.cache)
        wanted = torch.tensor(rows, dtype=torch.int64, device=x.device)
        return self.model.logits(x[wanted], None if residual is None else residual[wanted])

    # --- decode

    @torch.no_grad()
    def decode_logits(self, state: BatchState, uniform: int = 0) -> Tensor:
        """16-bit logits [B, V] after each row's newest token, which enters the cache. `uniform`: see Step."""
        work = Step(state.slot, state.position, state.length, self.context, uniform)
        return self.model.logits(*self.model.hidden(state.tokens, work, self.cache))

    @torch.no_grad()
    def _advance(self, state: BatchState, temperature: float, uniform: int = 0) -> None:
        """One step of every row: the newest token enters the cache, the next one takes its place."""
        state.tokens.copy_(sample(self.decode_logits(state, uniform), temperature, self.generator))
        state.places.add_(1)

    def bucket(self, sequences: int) -> int:
        """Rows of the step that serves so many sequences."""
        return min((size for size in (*BUCKETS, self.batch) if sequences <= size), default=sequences)

    def captured(
        self, rows: int, temperature: float = 0.0, uniform: int = 0
    ) -> tuple[torch.cuda.CUDAGraph, BatchState]:
        """The graph of one step of `rows` rows and the state it works on; captured at first use."""
        key = (rows, temperature, uniform)
        if key not in self._graphs:
            state = self.state(rows)
            state.write((), (), ())
            stream = self._warm_up = self._warm_up or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._advance(
                    state, temperature, uniform
                )  # compiles and allocates outside the capture; padding rows only
            torch.cuda.current_stream().wait_stream(stream)
            state.write((), (), ())
            graph = torch.cuda.CUDAGraph()
            if temperature:
                graph.register_generator_state(self.generator)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool):
                self._advance(state, temperature, uniform)
            self._graphs[key] = (graph, state)
        return self._graphs[key]

    def state(self, rows: int) -> BatchState:
        """The state of steps of `rows` rows."""
        if rows not in self._states:
            self._states[rows] = BatchState.empty(rows, self.model.device)
        return self._states[rows]

    def step(self, rows: int, temperature: float = 0.0, uniform: int = 0) -> BatchState:
        """Advance the state of `rows` rows by one token, and return it."""
        if self.model.device.type != "cuda":
            self._advance(self.state(rows), temperature, uniform)
            return self.state(rows)
        graph, state = self.captured(rows, temperature, uniform)
        graph.replay()
        return state

    # --- prompts

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        stop: Sequence[int] = (),
    ) -> list[list[int]]:
        """Continue each prompt. A slot that becomes free takes the next waiting prompt at once.

        Args:
            prompts: token ids. max_new_tokens: most tokens of an answer. temperature: 0 takes the likeliest token.
            stop: an answer ends with the first of these, which is kept.

        Errors:
            CometError for an empty prompt, a token outside the vocabulary, or more tokens than a slot holds.
        """
        self._check(prompts, max_new_tokens, temperature)
        waiting = deque(_Sequence(i, prompt) for i, prompt in enumerate(prompts))
        running: dict[int, _Sequence] = {}  # by slot
        answers: list[list[int]] = [[] for _ in prompts]
        state: BatchState | None = None  # None: the rows must be written anew

        def note(slot: int, token: int) -> None:
            sequence = running[slot]
            sequence.answer.append(token)
            if token in stop or len(sequence.answer) == max_new_tokens:
                answers[sequence.index] = sequence.answer
                self.cache.release(slot)
                del running[slot]

        while waiting or running:
            admitted = self._admit(waiting, running, max_new_tokens)
            if admitted:
                state = None
                logits = self.prefill([(slot, running[slot].prompt) for slot in admitted])
                for slot, token in zip(admitted, sample(logits, temperature, self.generator).tolist(), strict=True):
                    note(slot, token)
                continue
            slots = sorted(running)
            rows = self.bucket(len(slots))
            if state is None:
                if self.model.device.type == "cuda":
                    self.captured(rows, temperature)
                state = self.state(rows)
                newest = [running[slot].answer[-1] for slot in slots]
                state.write(newest, slots, [running[slot].position for slot in slots])
            self.step(rows, temperature)
            for slot, token in zip(slots, state.tokens[: len(slots)].tolist(), strict=True):
                note(slot, token)
            if len(running) < len(slots):
                state = None
        return answers

    def _admit(self, waiting: deque[_Sequence], running: dict[int, _Sequence], max_new_tokens: int) -> list[int]:
        """Give free slots to waiting prompts, as far as the cache has room; returns the slots."""
        admitted = []
        for slot in range(self.batch):
            if not waiting:
                break
            if slot not in running and self.cache.reserve(slot, len(waiting[0].prompt) + max_new_tokens):
                running[slot] = waiting.popleft()
                admitted.append(slot)
        return admitted

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float) -> None:
        if max_new_tokens < 1 or temperature < 0:
            raise CometError(
                f"max_new_tokens is {max_new_tokens}, temperature {temperature}",
                "ask for at least one token, and a temperature of 0 or more",
            )
        vocabulary = self.model.shape.vocab
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise CometError(f"prompt {index} is empty", "give at least one token")
            if not all(0 <= token < vocabulary for token in prompt):
                raise CometError(
                    f"prompt {index} holds a token outside 0 .. {vocabulary - 1}", "use this model's tokenizer"
                )
            if len(prompt) + max_new_tokens > self.context:
                raise CometError(
                    f"prompt {index} has {len(prompt)} tokens and may get {max_new_tokens} more; a slot holds "
                    f"{self.context}",
                    "make the runner with a larger context, or ask for less",
                )
