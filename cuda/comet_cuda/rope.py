"""rope: rotary embedding (half-split, as Llama has it) and per-head RMSNorm (Qwen3) on the fused output of q, k and v.

In: qkv [N, (Hq + 2 H) * D], all q heads, then all k heads, then all v heads. `rope_qk_` rotates q and k in place, for
prefill; `rope_append` also writes the cache, for decode, in one kernel. The arithmetic is float32 with one rounding to
qkv's type at the end (the norm's output is rounded to it too, before its weight, as transformers does).
"""

import torch
from torch import Tensor

from comet_cuda.kv4_append import CACHE_SCHEMA, KV4Pages, kv4_append_ref
from comet_cuda.kv4_append_cuda import rope_append_gpu, rope_qk_gpu
from comet_cuda.library import LIBRARY, define_op


def split_heads(qkv: Tensor, q_heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [N, (Hq + 2 H) * D] -> views q [N, Hq, D], k [N, H, D], v [N, H, D]."""
    heads = qkv.view(qkv.shape[0], q_heads + 2 * kv_heads, -1)
    return heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads], heads[:, q_heads + kv_heads :]


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the head's channels -> float32."""
    if weight is None:
        return x.float()
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (weight * y.to(x.dtype)).to(x.dtype).float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x f32 [N, heads, D]; cos, sin f32 [N, 1, R / 2]. Channels from R on are left as they are."""
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), dim=-1)


def rope_qk_ref(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    q_heads: int,
    kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotate q and k inside qkv, in place.

    Args:
        qkv: 16-bit [N, (Hq + 2 H) * D], contiguous.
        cos, sin: float32 [positions, R / 2], R <= D rotated channels; row t belongs to position t.
        position: int [N], each token's position.
        q_heads, kv_heads: Hq, H.
        q_weight, k_weight: qkv's type [D], RMSNorm before the rotation, or None.
        eps: the norm's.
    """
    q, k, _ = split_heads(qkv, q_heads, kv_heads)
    rows = position.long().clamp(min=0)
    c, s = cos[rows][:, None], sin[rows][:, None]
    for heads, weight in ((q, q_weight), (k, k_weight)):
        heads.copy_(_rotate(_norm(heads, weight, eps), c, s))


def rope_append_ref(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot: Tensor,
    position: Tensor,
    page_table: Tensor,
    cache: KV4Pages,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """One token of each of N sequences: rotate, append k and v, return q.

    Args:
        qkv, cos, sin, position, q_weight, k_weight, eps: as in `rope_qk_`; qkv is only read.
        slot, page_table, cache: as in kv4_append; no slot stands twice in one call.

    Returns:
        q, rotated, qkv's type [N, Hq, D].
    """
    kv_heads = cache.kv_heads
    q_heads = qkv.shape[1] // cache.head_dim - 2 * kv_heads
    rotated = qkv.clone()
    rope_qk_ref(rotated, cos, sin, position, q_heads, kv_heads, q_weight, k_weight, eps)
    q, k, v = split_heads(rotated, q_heads, kv_heads)
    kv4_append_ref(k, v, slot, position, page_table, cache)
    return q.contiguous()


def _append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot: Tensor,
    position: Tensor,
    page_table: Tensor,
    *cache_and_norm: Tensor | float | None,
) -> Tensor:
    cache, norm = KV4Pages(*cache_and_norm[:9]), cache_and_norm[9:]  # type: ignore[arg-type]
    return rope_append_ref(qkv, cos, sin, slot, position, page_table, cache, *norm)  # type: ignore[arg-type]


def _append_fake(
    qkv: Tensor, cos: Tensor, sin: Tensor, slot: Tensor, position: Tensor, page_table: Tensor, *rest: Tensor
) -> Tensor:
    heads, dim = rest[0].shape[1], rest[6].shape[3]
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // dim - 2 * heads, dim)


def _qk_fake(*_: object) -> None:
    return None


_NORM = "Tensor? q_weight, Tensor? k_weight, float eps"
define_op(
    "rope_append(Tensor qkv, Tensor cos, Tensor sin, Tensor slot, Tensor position, Tensor page_table,"
    f" {CACHE_SCHEMA}, {_NORM}) -> Tensor",
    _append,
    _append_fake,
)
define_op(
    f"rope_qk_(Tensor(a!) qkv, Tensor cos, Tensor sin, Tensor position, int q_heads, int kv_heads, {_NORM}) -> ()",
    rope_qk_ref,
    _qk_fake,
)

LIBRARY.impl("rope_append", rope_append_gpu, "CUDA")
LIBRARY.impl("rope_qk_", rope_qk_gpu, "CUDA")


def rope_qk_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    q_heads: int,
    kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """The op behind `rope_qk_ref`."""
    torch.ops.comet.rope_qk_(qkv, cos, sin, position, q_heads, kv_heads, q_weight, k_weight, eps)


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot: Tensor,
    position: Tensor,
    page_table: Tensor,
    cache: KV4Pages,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The op behind `rope_append_ref`."""
    out: Tensor = torch.ops.comet.rope_append(
        qkv, cos, sin, slot, position, page_table, *cache.tensors, q_weight, k_weight, eps
    )
    return out
