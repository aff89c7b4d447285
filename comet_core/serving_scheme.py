"""Serving schemes, and the memory that a model takes in one: weights, KV cache and workspace, from shapes alone.

The decision: what fits is computed before anything is allocated, so an impossible request is answered by how much it
needs and what would fit. Runs verify the plan and step down where the allocator disagrees. A plan's bytes are those of
torch's allocator, which records state too; to fit, something needs room beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from comet_core.llama_shape import LlamaShape
from comet_cuda.errors import CometError

GIB = 1 << 30
BLOCK = 128  # input channels
ROW_TILE = 64  # rows of a weight record, to which a linear is padded
PAGE, SINKS = 128, 4  # of the KV cache, the default recipe's
CHUNK = 8192  # tokens of a prefill chunk
LIBRARY_BYTES = 80 << 20  # workspaces of cuBLAS and of the GEMM
RESERVE = 636 << 20  # bytes that torch's allocator does not see: loaded kernels, room between blocks


@dataclass(frozen=True)
class Scheme:
    """What is kept in how many bits."""

    name: str
    linears: str  # bf16 | fp8 | w4a16 | w4ax
    kv_bits: int  # 4 | 16
    int4_share: float = 0.0  # w4ax: least share of the activation blocks in INT4


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("16-bit", "bf16", 16),
        Scheme("W8A8", "fp8", 16),
        Scheme("W4A16KV16", "w4a16", 16),
        Scheme("W4A8KV4", "w4ax", 4),
        Scheme("W4A4KV4", "w4ax", 4, 0.84),
        Scheme("W4Ax", "w4ax", 16, 0.84),  # ablation: 4-bit linears alone
        Scheme("KV4", "bf16", 4),  # ablation: 4-bit cache alone
    )
}


def find_scheme(name: str) -> Scheme:
    """The scheme called `name`. Raises CometError with the list."""
    if name not in SCHEMES:
        raise CometError(f"no scheme is called {name}", f"Schemes: {', '.join(SCHEMES)}.")
    return SCHEMES[name]


def packed_scheme(recipe: Any) -> str:
    """The name of the scheme that a recipe's packed model runs in: W4A4KV4, W4A16KV16, ..."""
    bits = (recipe.weights.bits, recipe.activations.bits, recipe.kv_cache.bits)
    return {(4, 4, 16): "W4Ax", (16, 16, 16): "16-bit", (16, 16, 4): "KV4", (8, 8, 16): "W8A8"}.get(
        bits, "W{}A{}KV{}".format(*bits)
    )


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by kind."""

    weights: int
    kv: int
    workspace: int
    spare: int = 0  # that must be free beside them: RESERVE, and what larger prompts than these could take

    @property
    def total(self) -> int:
        """All that will be taken."""
        return self.weights + self.kv + self.workspace

    def fits(self, available: int) -> bool:
        """Whether that many bytes are enough."""
        return self.total + self.spare <= available


def _tiled_bytes(rows: int, channels: int) -> int:
    """A linear in the sm_90 layout: nibbles, scale and zero point by row and block, and the zero terms' halves."""
    tiles, blocks = -(-rows // ROW_TILE), -(-channels // BLOCK)
    return tiles * (blocks * (ROW_TILE * BLOCK // 2 + 3 * ROW_TILE) + -(-blocks // 32) * 8192)


def weight_bytes(shape: LlamaShape, scheme: Scheme) -> int:
    """Bytes of all weights."""
    total = 2 * shape.other_weights
    for rows, channels in shape.linears.values():
        each = {
            "bf16": 2 * rows * channels,
            "fp8": rows * channels + 4 * rows,
            "w4a16": rows * channels // 2 + 4 * rows * -(-channels // BLOCK),  # scale and minimum in bf16
            "w4ax": _tiled_bytes(rows, channels),
        }[scheme.linears]
        total += shape.layers * each
    return total


def kv_bytes(shape: LlamaShape, kv_bits: int, context: int, page: int = PAGE, sinks: int = SINKS) -> int:
    """Bytes of one sequence's cache with room for `context` tokens."""
    width = shape.layers * shape.kv_heads  # heads of all layers
    if kv_bits == 16:
        return 4 * width * context * shape.head_dim
    pages = -(-max(context - sinks, 0) // page)
    page_bytes = page * shape.head_dim + 4 * shape.head_dim + 4 * page  # codes; key ranges; value ranges
    return width * (pages * page_bytes + 2 * page * shape.head_dim + 4 * sinks * shape.head_dim)


def workspace_bytes(shape: LlamaShape, batch: int, tokens: int) -> int:
    """Bytes that computation takes beside weights and cache: the activations of a prefill chunk of so many tokens, and
    logits."""
    widest = 2 * shape.intermediate + shape.intermediate + 4 * shape.hidden  # gate, up, what down reads, residuals
    attention = 2 * shape.qkv_rows + 2 * shape.heads * shape.head_dim
    activations = 2 * max(tokens, batch) * (widest + attention)
    return activations * 5 // 4 + batch * shape.vocab * (2 + 4) + LIBRARY_BYTES


def memory_plan(shape: LlamaShape, scheme: Scheme, batch: int, context: int, chunk: int = CHUNK) -> MemoryPlan:
    """Bytes for `batch` sequences of at most `context` tokens."""
    kv = batch * kv_bytes(shape, scheme.kv_bits, context)
    taken, most = (workspace_bytes(shape, batch, tokens) for tokens in (min(chunk, batch * context), chunk))
    return MemoryPlan(weight_bytes(shape, scheme), kv, taken, most - taken + RESERVE)


def largest_batch(
    shape: LlamaShape, scheme: Scheme, context: int, available: int, weights: int | None = None, chunk: int = CHUNK
) -> int:
    """The most sequences that fit in `available` bytes; 0 if not even one does. `weights`: bytes, if they are known."""
    weights = weight_bytes(shape, scheme) if weights is None else weights

    def fits(batch: int) -> bool:
        return replace(memory_plan(shape, scheme, batch, context, chunk), weights=weights).fits(available)

    low, high = 0, 1
    while fits(high) and high < 1 << 20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def require_fit(
    shape: LlamaShape, scheme: Scheme, batch: int, context: int, available: int, weights: int | None = None
) -> MemoryPlan:
    """The plan of a request. Raises CometError saying how much it needs and what would fit."""
    plan = memory_plan(shape, scheme, batch, context)
    if weights is not None:
        plan = replace(plan, weights=weights)
    if plan.fits(available):
        return plan
    most = largest_batch(shape, scheme, context, available, weights)
    needs = (
        f"{shape.name} in {scheme.name} with batch {batch} and {context:,} tokens a sequence needs "
        f"{plan.total / GIB:.1f} GiB (weights {plan.weights / GIB:.1f}, KV cache {plan.kv / GIB:.1f}, workspace "
        f"{plan.workspace / GIB:.1f}) and {plan.spare / GIB:.1f} to spare; {available / GIB:.1f} GiB are free"
    )
    if most:
        raise CometError(needs, f"Batch {most} would fit (--batch max finds it).")
    others = [
        f"{other.name} {other_plan.total / GIB:.1f} GiB"
        for other in SCHEMES.values()
        if (other_plan := memory_plan(shape, other, 1, context)).fits(available)
    ]
    shorter = next((c for c in _halves(context) if largest_batch(shape, scheme, c, available, weights)), 0)
    hints = [f"Batch 1 with {shorter:,} tokens fits."] if shorter else []
    hints += [f"At batch 1 these schemes fit: {', '.join(others)}."] if others else []
    raise CometError(needs, " ".join(hints) or "Take a smaller model, or a GPU with more memory.")


def plan_serving(
    shape: LlamaShape,
    schemes: Sequence[Scheme],
    batches: Sequence[int | str],
    loads: Sequence[tuple[int, int]],
    available: int | None,
) -> list[dict[str, Any]]:
    """What each scheme, load and batch takes, from shapes alone: a row each with bytes and whether they fit.

    Args:
        batches: sizes, or "max". loads: (prompt, output) tokens. available: bytes free on the GPU; None without one,
            then nobody knows what fits, nor how many sequences "max" is.
    """
    rows = []
    for scheme in schemes:
        for prompt, output in loads:
            for asked in batches:
                context, batch = prompt + output, asked
                if asked == "max" and available is not None:
                    batch = largest_batch(shape, scheme, context, available)
                plan = None if batch == "max" else memory_plan(shape, scheme, max(1, int(batch)), context)
                fits = None if available is None or plan is None else plan.fits(available)
                size = None if plan is None else plan.total
                row = {"scheme": scheme.name, "batch": batch, "tokens": f"{prompt}/{output}", "bytes": size}
                rows.append(row | {"fits": fits})
    return rows


def _halves(context: int) -> list[int]:
    found = []
    while (context := context // 2) >= 16:
        found.append(context)
    return found
