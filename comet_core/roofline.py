"""Shapes -> arithmetic intensity and attainable rate of each part of a decode step, and memory by context. No GPU.

A part's time is at least the larger of bytes over memory rate and operations over peak; its intensity is operations a
byte. The decision: bytes are those that must move once (weights, cache, inputs, outputs), so a figure is a bound.
"""

from dataclasses import dataclass
from typing import Any

from comet_core.llama_shape import LlamaShape, shape_of_alias
from comet_core.serving_scheme import GIB, SCHEMES, Scheme, kv_bytes, weight_bytes
from comet_cuda.errors import CometError

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True)
class Gpu:
    """Rates of one GPU: what it reaches (measured), or its data sheet's."""

    name: str
    terabytes: float  # a second
    tera_ops: dict[str, float]  # a second, by what the linears multiply
    source: str


GPUS = {
    "H200": Gpu(
        "H200",
        4.3,
        {"bf16": 790.0, "fp8": 1540.0, "w4ax": 1540.0},
        "as measured, without a record",
    ),
    "A100": Gpu("A100 80 GB", 2.039, {"bf16": 312.0, "fp8": 624.0, "w4ax": 1248.0}, "data sheet; fp8 stands for INT8"),
}


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`. Raises CometError with the list."""
    if name not in GPUS:
        raise CometError(f"no rates are known of a GPU called {name}", f"Known: {', '.join(GPUS)}.")
    return GPUS[name]


def _row(part: str, batch: int, scheme: str, operations: float, moved: float, peak: float, gpu: Gpu) -> dict[str, Any]:
    attainable = min(peak, operations / moved * gpu.terabytes)  # T operations a second
    return {
        "part": part,
        "batch": batch,
        "scheme": scheme,
        "operations": operations,
        "bytes": moved,
        "intensity": operations / moved,
        "attainable_tera": attainable,
        "share_of_peak": attainable / peak,
        "bound": "compute" if attainable == peak else "memory",
        "microseconds": operations / attainable / 1e6,
    }


def linear_row(shape: LlamaShape, part: str, scheme: Scheme, batch: int, gpu: Gpu) -> dict[str, Any]:
    """One layer's qkv, o or mlp (gate, up and down) for `batch` tokens."""
    names = ("gate_up", "down") if part == "mlp" else (part,)
    weight = {"bf16": 2.0, "fp8": 1.0, "w4a16": 0.5 + 4 / 128, "w4ax": 0.5 + 3 / 128}[scheme.linears]
    activation = {"bf16": 2.0, "fp8": 1.0, "w4a16": 2.0, "w4ax": 1.0}[scheme.linears]
    operations = moved = 0.0
    for rows, channels in (shape.linears[name] for name in names):
        operations += 2.0 * rows * channels * batch
        moved += weight * rows * channels + batch * (activation * channels + 2.0 * rows)
    peak = gpu.tera_ops["bf16" if scheme.linears == "w4a16" else scheme.linears]
    return _row(part, batch, scheme.name, operations, moved, peak, gpu)


def attention_row(shape: LlamaShape, kv_bits: int, batch: int, context: int, gpu: Gpu) -> dict[str, Any]:
    """One layer's decode attention: one new token a sequence over `context` cached ones, in bf16 products."""
    operations = 4.0 * batch * context * shape.heads * shape.head_dim
    cached = batch * kv_bytes(shape, kv_bits, context) / shape.layers
    moved = cached + batch * 2.0 * (shape.qkv_rows + shape.heads * shape.head_dim)
    return _row("attention", batch, f"KV{kv_bits}", operations, moved, gpu.tera_ops["bf16"], gpu)


def memory_rows(shape: LlamaShape, contexts: tuple[int, ...] = CONTEXTS) -> list[dict[str, Any]]:
    """Weights and KV cache of one sequence by scheme and context, and the cache's share of the two."""
    rows = []
    for context in contexts:
        for scheme in SCHEMES.values():
            weights = 2 * (shape.linear_weights + shape.other_weights)
            weights = weights if scheme.linears == "bf16" else weight_bytes(shape, scheme)
            kv = kv_bytes(shape, scheme.kv_bits, context)
            rows.append(
                {
                    "context": context,
                    "scheme": scheme.name,
                    "weights_gib": weights / GIB,
                    "kv_gib": kv / GIB,
                    "kv_share": kv / (kv + weights),
                }
            )
    return rows


def roofline(
    model: str = "llama-3-8b",
    batches: tuple[int, ...] = BATCHES,
    context: int = 1280,
    schemes: tuple[str, ...] = ("16-bit", "W4A4KV4"),
    gpu: str = "H200",
) -> dict[str, Any]:
    """Where each part of a decode step stands on the roofline, and memory by context.

    Args:
        model: alias. batches: sequences. context: cached tokens of each. schemes: names. gpu: a name in GPUS.

    Returns:
        model, gpu, terabytes, context, `parts` (rows of linear_row and attention_row, of one layer), `memory`
        (rows of memory_rows).

    Errors:
        CometError for an unknown model, scheme or GPU.
    """
    shape, card = shape_of_alias(model), find_gpu(gpu)
    unknown = [name for name in schemes if name not in SCHEMES]
    if unknown:
        raise CometError(f"no scheme is called {unknown[0]}", f"Schemes: {', '.join(SCHEMES)}.")
    parts = []
    for batch in batches:
        for part in ("qkv", "o", "mlp"):
            parts += [linear_row(shape, part, SCHEMES[name], batch, card) for name in schemes]
        parts += [attention_row(shape, bits, batch, context, card) for bits in (16, 4)]
    return {
        "model": model,
        "gpu": card.name,
        "gpu_rates": card.source,
        "terabytes": card.terabytes,
        "context": context,
        "parts": parts,
        "memory": memory_rows(shape),
    }
