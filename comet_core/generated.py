"""16-bit model -> windows that it writes itself, for tuning: text of exactly the distribution that is distilled.

Each window goes on from the first tokens of a training window, drawn from the model's own probabilities, all of them,
at temperature 1. The end of a text is a token like any other: another text follows it, as in the calibration's windows,
so every window is full and nothing that the model wants to say is forbidden. Windows are written in batches, each of
which is a function of the model, its prompts and its seed, and is kept in a file: whoever is killed, or tunes the same
model in another way, finds the finished ones again.

Source: Liu et al., "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models", 2023 (arXiv:2305.17888),
which lets each text start with one random token.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache, DynamicLayer

from comet_core.host_memory import total_memory
from comet_core.kv_cache import cache_argument
from comet_core.progress import Progress, Task
from comet_core.shards import read_shard, write_shard

PROMPT = 32  # tokens of real text that a window begins with: enough for its subject and language
MOST_ROWS = {"cpu": 16, "cuda": 256}  # windows that are written at once
MEMORY_SHARE = 0.25  # of all memory, for their keys, values and logits; of what is free, windows would differ by chance
ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN plans for each anew
LOGIT_COPIES = 6  # float32 rows of the vocabulary's size a window: logits, probabilities, what drawing from them takes


@torch.no_grad()
def generate_windows(
    teacher: nn.Module,
    train: Tensor,
    count: int,
    *,
    seed: int,
    model: str,
    folder: Path,
    progress: Progress,
) -> Tensor:
    """`count` windows as long as those of `train`; the same for the same arguments on the same machine.

    Args:
        teacher: the 16-bit model, on its device; from now on its own generation settings are plain sampling.
        train: int64 [windows, L], whose texts begin the new ones. seed: of the draws.
        model: digest of the teacher. folder: keeps finished batches.

    Returns:
        int64 [count, L].

    Errors:
        CometError if a batch cannot be written, or one that was written cannot be read.
    """
    from filelock import FileLock

    length = train.shape[1]
    prompts = prompts_of(train, count)
    rows = _rows_at_once(teacher, prompts[:1], length)
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    with progress.task("generate", -(-count // rows) * (length - prompts.shape[1])) as task:
        for index, part in enumerate(prompts.split(rows)):
            own_seed = (seed + index) % 2**63
            path = folder / f"generated-{_key(teacher, part, length, own_seed, model)}.safetensors"
            with FileLock(f"{path}.lock"):  # several variants of a recipe may want it at once
                if path.exists():
                    task.advance(length - prompts.shape[1])
                else:
                    windows = _written(teacher, part, length, own_seed, task)
                    write_shard(path, {"tokens": windows.to(torch.int32)}, {})
                found.append(read_shard(path)[0]["tokens"].long())
    return torch.cat(found)


def prompts_of(train: Tensor, count: int) -> Tensor:
    """What `count` windows begin with, int64 [count, P]: the first tokens of each training window; where more are
    wanted, the tokens after these, and so on, behind the token that begins all windows, if there is one (BOS)."""
    size = min(PROMPT, train.shape[1] // 2)
    number = torch.arange(count)
    first = number // len(train) * size % (train.shape[1] - size + 1)
    prompts = train[(number % len(train))[:, None], first[:, None] + torch.arange(size)]
    if len(train) > 1 and bool((train[:, 0] == train[0, 0]).all()):
        prompts[:, 0] = train[0, 0]
    return prompts


def _key(teacher: nn.Module, prompts: Tensor, length: int, seed: int, model: str) -> str:
    """Digest of all that a batch follows from."""
    parameter = next(teacher.parameters())
    rest = json.dumps([model, str(parameter.dtype), parameter.device.type, list(prompts.shape), length, seed])
    return hashlib.sha256(prompts.numpy().tobytes() + rest.encode()).hexdigest()[:16]


def _rows_at_once(teacher: nn.Module, prompt: Tensor, length: int) -> int:
    """How many windows of `length` tokens fit, from what the keys and values of one prompt [1, P] take."""
    device, config = next(teacher.parameters()).device, teacher.config.get_text_config()  # type: ignore[operator, union-attr]
    cache = _room(teacher, prompt.shape[1])
    teacher(input_ids=prompt.to(device), use_cache=True, **{cache_argument(teacher): cache})
    kept = sum(room.nbytes for layer in cache.layers if isinstance(layer, _Room) for room in layer.room)
    a_row = kept // prompt.shape[1] * length + 4 * LOGIT_COPIES * config.vocab_size
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else total_memory()
    return max(1, min(MOST_ROWS.get(device.type, MOST_ROWS["cpu"]), int(MEMORY_SHARE * memory / a_row)))


def _written(teacher: Any, prompts: Tensor, length: int, seed: int, task: Task) -> Tensor:
    """One batch, int64 [rows, length] on the CPU."""
    from transformers import GenerationConfig, StoppingCriteriaList

    device = next(teacher.parameters()).device
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    teacher.generation_config = GenerationConfig(do_sample=True, use_cache=True, max_length=length, **plain)  # no EOS

    def told(tokens: Tensor, _: object, **__: object) -> Tensor:
        task.advance()
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    with _seeded(device, seed), sdpa_kernel(ANY_LENGTH):
        written: Tensor = teacher.generate(
            prompts.to(device),
            attention_mask=torch.ones_like(prompts, device=device),
            stopping_criteria=StoppingCriteriaList([told]),
            **{cache_argument(teacher): _room(teacher, length)},
        )
    windows = written.cpu()
    if device.type == "cuda":
        del written
        torch.cuda.empty_cache()  # blocks as large as these serve nothing else
    return windows


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Draws on `device` follow `seed`; afterwards its generator is as it was."""
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _room(teacher: nn.Module, length: int) -> Cache:
    """An empty cache for `length` tokens."""
    config = teacher.config.get_text_config()  # type: ignore[operator, union-attr]
    return Cache(layers=[_Room(length) for _ in range(config.num_hidden_layers)])


class _Room(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, in memory that is taken once: transformers' own layer copies all of them at each
    token, into blocks of ever other sizes. Sliding windows are the mask's business; every key is kept."""

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length
        self.room: list[Tensor] = []  # keys, values [B, H, length, D]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """New keys and values [B, H, n, D] -> those of all tokens so far."""
        new = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.room = [x.new_empty(*x.shape[:2], self.length, x.shape[3]) for x in new]
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        for room, tensor in zip(self.room, new, strict=True):
            room[:, :, start:end] = tensor
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values
