"""COMET's 4-bit KV cache inside vLLM: `vllm serve PACKED --attention-backend CUSTOM --no-enable-prefix-caching`.

vLLM's scheduler, block tables and memory accounting stay as they are. A block of vLLM (here: a slab, kv4_slabs.py) is
some pages of one sequence and room for its open page and sinks, so that chunked prefill, preemption and requests that
wait a step need nothing from us. Appending belongs to attention here, as in kv4_prefill.

What cannot be right is refused when the model is built: prefix caching (the open page and the sinks of a sequence lie
in its first slab, which must be its own), speculative decoding (a rejected token may have closed a page), sliding
windows, layers that share a cache, context parallelism, transfer of caches to other servers.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import FullAttentionSpec

from comet_core.integrations.kv4_slabs import PageTable, SlabFormat
from comet_core.recipe import KVCacheSpec
from comet_cuda.errors import CometError
from comet_cuda.kv4_append import KV4Pages, kv4_append
from comet_cuda.kv4_append_cuda import HEAD_DIMS, PAGES, kv4_append_gpu
from comet_cuda.kv4_decode import kv4_decode
from comet_cuda.kv4_decode_cuda import kv4_decode_gpu
from comet_cuda.kv4_prefill import kv4_prefill

SLAB_TOKENS = 512  # --block-size if none is given; larger ones waste less on long sequences and more on short ones
FLAGS = "--attention-backend CUSTOM --no-enable-prefix-caching"


@dataclass(frozen=True, kw_only=True)
class KV4Spec(FullAttentionSpec):  # type: ignore[misc]
    """What vLLM must know of a layer's cache: that a block takes `slab.nbytes` bytes, whatever is in it."""

    slab: SlabFormat | None = None

    @property
    def _bytes(self) -> int:
        assert self.slab is not None and self.slab.tokens == self.block_size
        return self.slab.nbytes

    real_page_size_bytes = unpadded_page_size_bytes = state_content_size_bytes = _bytes
    num_heads = property(lambda self: 1)  # newer versions shape a layer's memory [blocks, heads, states, bytes]

    def get_num_kernel_states(self, kernel_block_size: int) -> int:
        """One piece of memory a block."""
        return 1

    @classmethod
    def merge(cls, specs: "list[KV4Spec]") -> "KV4Spec":
        """The specification of layers that share block tables."""
        if any(spec.slab != specs[0].slab for spec in specs):
            raise CometError("layers of different shapes", f"serve this model without {FLAGS}")
        merged: KV4Spec = replace(super().merge(specs), slab=specs[0].slab)
        return merged


@dataclass
class KV4Metadata(AttentionMetadata):  # type: ignore[misc]
    """A batch, the same for all layers: first `decodes` rows of one token, then sequences of more."""

    table: Tensor  # int32 [slots, pages a sequence]
    slot: Tensor  # int32 [R]
    length: Tensor  # int32 [R], tokens of each sequence with the new ones
    position: Tensor  # int32 [R], of each sequence's first new token
    decodes: int
    longest: int  # no sequence is longer
    starts: Tensor | None = None  # int32 [R - decodes + 1], first new token of each of the others
    most_new: int = 0  # tokens of one of them


class KV4Builder(AttentionMetadataBuilder[KV4Metadata]):  # type: ignore[misc]
    """From vLLM's description of a batch to the indices of the KV4 ops. Asks the GPU nothing; buffers stay in place,
    since the CUDA graphs of decode batches read them."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: KV4Spec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        self._context = vllm_config.model_config.max_model_len
        rows = vllm_config.scheduler_config.max_num_seqs
        self._buffers = torch.zeros(3, rows, dtype=torch.int32, device=device)
        self._table: PageTable | None = None

    def _page_table(self) -> PageTable:
        """Made when the first batch comes: how many slabs there are is known by then."""
        slabs = self.vllm_config.cache_config.num_gpu_blocks
        if self._table is None or self._table.slabs != slabs:
            slab = self.kv_cache_spec.slab
            self._table = PageTable(slabs, -(-self._context // slab.tokens), slab.pages, self.device)
        return self._table

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KV4Metadata:
        """The indices of one step."""
        batch, table = common_attn_metadata, self._page_table()
        decodes, prefills, decoded, _ = split_decodes_and_prefills(batch, decode_threshold=1)
        rows = batch.num_reqs
        length, starts = batch.seq_lens[:rows], batch.query_start_loc[: rows + 1]
        self._buffers[0, :rows] = table.enter(batch.block_table_tensor[:rows], length)
        self._buffers[1, :rows] = length
        self._buffers[2, :rows] = length - starts.diff() if prefills else length - 1
        slot, length, position = self._buffers[:, :rows].unbind()
        pages = table.pages_by_slot
        if not prefills:  # a graph that is captured now must serve longer sequences
            return KV4Metadata(pages, slot, length, position, decodes, self._context)
        first = starts[decodes:] - decoded
        return KV4Metadata(
            pages, slot, length, position, decodes, batch.max_seq_len, first.contiguous(), batch.max_query_len
        )


class KV4Backend(AttentionBackend):  # type: ignore[misc]
    """The classes above and below, and what they take."""

    @staticmethod
    def get_name() -> str:
        """vLLM's name for backends from elsewhere."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> "type[KV4Attention]":
        """What a layer runs."""
        return KV4Attention

    @staticmethod
    def get_builder_cls() -> type[KV4Builder]:
        """What prepares a batch."""
        return KV4Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Whole slabs."""
        return [MultipleOf(SLAB_TOKENS)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """A layer's memory: as many bytes a block as its KV4Spec says."""
        return (num_blocks, -1)

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """A layer's memory in one piece (newer versions ask)."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBHNC,)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Of the kernels."""
        return list(HEAD_DIMS)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Slabs are not to be moved."""
        return False


class KV4Attention(AttentionImpl[KV4Metadata]):  # type: ignore[misc]
    """Attention of one layer. `adopt` says what the recipe wants before the first batch comes."""

    supports_dcp: ClassVar[bool] = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.softcap = kv_cache_dtype, logits_soft_cap or 0.0
        self.slab: SlabFormat | None = None
        self._cache: tuple[int, KV4Pages] | None = None
        config = get_current_vllm_config()
        quantization = config.quant_config.get_name() if config.quant_config is not None else "none"
        refused = {
            f"a model that COMET has not packed ({quantization})": quantization != "comet",
            "a sliding window": sliding_window is not None,
            "ALiBi": alibi_slopes is not None,
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "layers that share their cache": kv_sharing_target_layer_name is not None,
            "attention sinks of the model": others.get("sinks") is not None,
            "speculative decoding": config.speculative_config is not None,
            f"--kv-cache-dtype {kv_cache_dtype}": kv_cache_dtype not in ("auto", "bfloat16", "float16"),
        }
        if why := [name for name, found in refused.items() if found]:
            raise CometError(f"COMET's KV cache in vLLM does not take {', '.join(why)}", f"serve without {FLAGS}")
        if config.cache_config.enable_prefix_caching:
            raise CometError("COMET's KV cache in vLLM cannot share prefixes", "add --no-enable-prefix-caching")

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KV4Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Append the new tokens and attend; query [N, Hq, D], key and value [N, H, D] -> output [N, Hq, D]."""
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        m, cache = attn_metadata, self._pages(kv_cache)
        n = m.decodes
        if n:
            tokens = (key[:n], value[:n], m.slot[:n], m.position[:n], m.table)
            asked = (query[:n], m.slot[:n], m.length[:n], m.table)
            how = (self.scale, 0, self.softcap, m.longest)
            if key.is_cuda:  # one launch appends where no sequence has two tokens, and no copy of the answers
                kv4_append_gpu(*tokens, *cache.tensors, max_new=1)
                kv4_decode_gpu(*asked, cache.tensors, *how, out=output[:n])
            else:
                kv4_append(*tokens, cache)
                output[:n] = kv4_decode(*asked, cache, *how)
        if m.starts is not None:
            new = (query[n:], key[n:], value[n:])
            where = (m.starts, m.slot[n:], m.position[n:], m.table)
            output[n:] = kv4_prefill(*new, *where, cache, self.scale, 0, self.softcap, m.most_new)
        return output

    def _pages(self, memory: Tensor) -> KV4Pages:
        """The cache that lies in a layer's memory."""
        if self._cache is None or self._cache[0] != memory.data_ptr():
            assert self.slab is not None
            self._cache = memory.data_ptr(), self.slab.cut(memory.view(torch.uint8))
        return self._cache[1]


def adopt(layer: Any, spec: KVCacheSpec) -> None:
    """Let an attention layer of vLLM, built with this backend, keep its cache as the recipe says.

    Errors:
        CometError if the recipe's cache is not one that the KV4 ops keep.
    """
    if spec.bits != 4 or spec.key_granularity != "channel":
        raise CometError(
            f"{layer.layer_name}: the recipe's KV cache has {spec.bits} bits, keys per {spec.key_granularity}",
            f"{FLAGS} is for 4 bits with keys per channel; serve without it",
        )
    layer.get_kv_cache_spec = partial(_kv_cache_spec, layer, spec)


def _kv_cache_spec(layer: Any, spec: KVCacheSpec, config: VllmConfig) -> KV4Spec:
    """In place of `Attention.get_kv_cache_spec`, which knows vLLM's own formats only."""
    tokens, heads, dim = config.cache_config.block_size, layer.num_kv_heads, layer.head_size
    if spec.page not in PAGES or tokens % spec.page or spec.sinks > spec.page:
        raise CometError(
            f"{layer.layer_name}: pages of {spec.page} tokens, {spec.sinks} sinks, --block-size {tokens}",
            f"pages may have {PAGES} tokens, and --block-size must be a multiple of {SLAB_TOKENS}",
        )
    slab = SlabFormat(heads, dim, spec.page, tokens // spec.page, spec.sinks, config.model_config.dtype)
    layer.impl.slab = slab
    return KV4Spec(block_size=tokens, num_kv_heads=heads, head_size=dim, dtype=torch.uint8, slab=slab)
