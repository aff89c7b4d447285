"""vLLM plugin: `vllm serve PACKED` (entry point vllm.general_plugins -> `register`).

vLLM reads config.json, finds quant_method comet and asks the config below for a method per linear. Which linears are
packed, and how, stands in the manifest. Embeddings, norms and lm_head are 16 bit and vLLM's own. The KV cache is
vLLM's own too, in 16 bit unless the user chooses another with --kv-cache-dtype (vllm_cache.py says what that means) or
COMET's with --attention-backend CUSTOM (vllm_kv4.py).
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from comet_core.experts import expert_of
from comet_core.integrations.tensor_parallel import common_entry
from comet_core.packed import MANIFEST, Manifest, read_manifest
from comet_cuda.errors import CometError

METHOD = "comet"
KV4_BACKEND = "comet_core.integrations.vllm_kv4.KV4Backend"
logger = init_logger(__name__)


def register() -> None:
    """Tell vLLM of COMET's format. Called by vLLM in each of its processes, perhaps more than once."""
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(CometConfig)
    if not AttentionBackendEnum.CUSTOM.is_overridden():  # else another plugin has taken the one name that vLLM leaves
        register_backend(AttentionBackendEnum.CUSTOM, KV4_BACKEND)


class CometConfig(QuantizationConfig):  # type: ignore[misc]
    """`quantization_config` of a packed folder, and its manifest once vLLM has said where the folder is."""

    def __init__(self) -> None:
        super().__init__()
        self.manifest: Manifest | None = None
        self._warned = False

    def get_name(self) -> str:
        """quant_method."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """What the model may compute in."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability 8.0."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """config.json holds all that vLLM itself reads."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CometConfig":
        """config: `quantization_config` of config.json."""
        return cls()

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the manifest of the folder or hub id `model_name`."""
        folder = Path(model_name)
        if not folder.is_dir():
            from huggingface_hub import hf_hub_download

            folder = Path(hf_hub_download(model_name, MANIFEST, revision=revision)).parent
            hf_hub_download(model_name, "config.json", revision=revision)
        self.manifest = read_manifest(folder)
        recipe = self.manifest.recipe
        if self.manifest.embedding_bits == 8 or any(e.weight_bits == 8 for e in self.manifest.linears.values()):
            raise CometError(f"{model_name}: vLLM cannot serve 8-bit weights or embeddings", "pack them in 4 or 16 bit")
        if any(expert_of(name) for name in self.manifest.linears):
            raise CometError(f"{model_name}: vLLM cannot serve packed experts yet", "open it with transformers")
        if recipe.activations.bits == 16:
            raise CometError(
                f"{model_name}: its activations are 16 bit, for which vLLM has faster kernels of its own",
                f"comet export {model_name}, and serve the folder that it writes",
            )

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of one module: packed linears ours, other linears 16 bit, everything else vLLM's default."""
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        from comet_core.integrations.vllm_kv4 import KV4Attention, adopt
        from comet_core.integrations.vllm_linear import CometLinearMethod

        if self.manifest is None:
            raise CometError(f"{prefix}: vLLM has not said where the packed folder is", "this vLLM is too old or new")
        if isinstance(getattr(layer, "impl", None), KV4Attention):
            adopt(layer, self.manifest.recipe.kv_cache)
        if not isinstance(layer, LinearBase):
            return None
        self._warn_of_cache(self.manifest)
        owner, _, leaf = prefix.rpartition(".")
        members = [f"{owner}.{name}" for name in self.packed_modules_mapping.get(leaf, [])]
        if not any(name in self.manifest.linears for name in members):
            members = [prefix]  # stored as it runs
        entry = common_entry(prefix, members, self.manifest.linears)
        if entry is None:
            return UnquantizedLinearMethod()
        return CometLinearMethod(entry, self.manifest.recipe.blocks.tp_granularity)

    def _warn_of_cache(self, manifest: Manifest) -> None:
        """Say once what vLLM's KV cache means for this model."""
        from vllm.config import get_current_vllm_config

        from comet_core.integrations.vllm_cache import cache_warning

        if not self._warned:
            config = get_current_vllm_config()
            dtype, backend = str(config.cache_config.cache_dtype), config.attention_config.backend
            ours = getattr(backend, "name", "") == "CUSTOM"
            if words := cache_warning(dtype, manifest.recipe.kv_cache.bits, manifest.sha256, ours=ours):
                logger.warning(words)
        self._warned = True
