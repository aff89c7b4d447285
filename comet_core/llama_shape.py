"""LlamaShape: the sizes of a Llama-like decoder, from an alias or a config. All that memory and speed depend on.

No torch here: `comet bench --roofline` and memory plans are arithmetic on these numbers.
"""

from dataclasses import dataclass
from typing import Any

from comet_core.model_source import alias_shapes
from comet_cuda.errors import CometError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # model_type of the decoders that the runner computes


@dataclass(frozen=True)
class LlamaShape:
    """RMSNorm, rotary grouped-query attention, SiLU-gated MLP, each with a residual. Sizes in channels."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False  # lm_head is the embedding

    @property
    def qkv_rows(self) -> int:
        """Rows of q, k and v together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(rows, in-channels) of the four linears that a layer runs: those that share an input are one."""
        return {
            "qkv": (self.qkv_rows, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def linear_weights(self) -> int:
        """Weights in the linears of all layers."""
        return self.layers * sum(rows * channels for rows, channels in self.linears.values())

    @property
    def other_weights(self) -> int:
        """Embedding, lm_head and norms: 16 bit in every scheme."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return tables + self.hidden * (2 * self.layers + 1)


def shape_of_alias(alias: str) -> LlamaShape:
    """The shape of a model alias, without any download.

    Errors:
        CometError for an unknown alias, or one that is not Llama-like.
    """
    found = alias_shapes(alias)
    _require_family(alias, found["model_type"])
    return _shape(alias, found, bool(found.get("tie_word_embeddings", False)))


def shape_of_config(name: str, config: Any) -> LlamaShape:
    """The shape of a transformers config. Errors as above."""
    _require_family(name, config.model_type)
    sizes = config.to_dict()
    sizes["head_dim"] = getattr(config, "head_dim", None) or sizes["hidden_size"] // sizes["num_attention_heads"]
    sizes["num_key_value_heads"] = sizes.get("num_key_value_heads") or sizes["num_attention_heads"]
    return _shape(name, sizes, bool(getattr(config, "tie_word_embeddings", False)))


def _shape(name: str, sizes: dict[str, Any], tied: bool) -> LlamaShape:
    return LlamaShape(
        name=name,
        hidden=sizes["hidden_size"],
        intermediate=sizes["intermediate_size"],
        layers=sizes["num_hidden_layers"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        vocab=sizes["vocab_size"],
        tied=tied,
    )


def _require_family(name: str, model_type: str) -> None:
    if model_type not in FAMILIES:
        raise CometError(
            f"{name}: the runner does not compute {model_type} models",
            f"it runs {', '.join(FAMILIES)}; evaluate others with comet eval",
        )
