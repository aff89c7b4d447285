"""A model's config -> the parameters it must have, and readers that hand them out one at a time under those names.

The names are those of the transformers model's own state_dict with its experts taken apart (experts.py), whatever the
files use, so that later code can put a tensor into the model without knowing where it came from. Every parameter's
presence, shape and dtype is checked when the reader is made: minutes before the first layer, not hours after.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from comet_core.safetensors_files import FLOAT_DTYPES, StoredTensor, find_tensors, load_tensor, same_bytes, wrong_dtype
from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

# Where a text model sits inside the files of a larger one, and the prefix that it has alone.
NESTED_PREFIXES = ("language_model.", "model.language_model.", "text_model.", "model.text_model.", "module.")
MOST_LAYERS = 2000  # a config that claims more is damaged, and building it would take for ever
RANDOM_STD = 0.02  # of random weights; the initializer_range of most of these models


class WeightReader(Protocol):
    """Hands out a model's parameters by name."""

    def names(self) -> list[str]:
        """The keys of the model's state_dict, tied ones absent, in the model's order."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one parameter, without reading it."""

    def load(self, name: str) -> "Tensor":
        """One parameter: CPU, stored dtype."""


@dataclass(frozen=True)
class ParameterTable:
    """What a config's model consists of."""

    shapes: dict[str, tuple[int, ...]]  # by state_dict key, tied ones absent
    tied: dict[str, str]  # tied key -> the key whose tensor it shares
    norms: frozenset[str]  # weights of normalization modules
    base_prefix: str  # name of the inner model, usually "model"
    file_names: Callable[[str], str] | None = None  # name in the files -> key, where the model has experts


def parameter_table(config: "PretrainedConfig") -> ParameterTable:
    """Builds the model without memory (meta device), its experts taken apart, and lists its parameters.

    Raises:
        CometError: transformers cannot build a causal LM from this config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from comet_core.experts import file_names, layer_experts, separate_experts

    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if not isinstance(layers, int) or not 0 <= layers <= MOST_LAYERS:
        raise CometError(
            f"num_hidden_layers is {str(layers)[:40]} in this {config.model_type} config",
            f"check config.json; models of up to {MOST_LAYERS} layers are read",
        )
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            separate_experts(model)
    except Exception as error:  # whatever a model's constructor raises on odd values
        raise CometError(
            f"no causal language model can be built from this {config.model_type} config: {error}",
            "Check config.json, or whether the installed transformers knows this model type.",
        ) from None
    state = model.state_dict()
    tied = {k: v for k, v in model.all_tied_weights_keys.items() if k in state} if config.tie_word_embeddings else {}
    norms = frozenset(f"{name}.weight" for name, module in model.named_modules() if "Norm" in type(module).__name__)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name not in tied}
    names = file_names(model) if layer_experts(model) else None
    return ParameterTable(shapes, tied, norms & set(shapes), model.base_model_prefix, names)


def _separated(stored: Mapping[str, StoredTensor], file_names: Callable[[str], str]) -> dict[str, StoredTensor]:
    """The stored tensors under the names of a model whose experts are separate; a stack becomes its slices."""
    from comet_core.experts import STACKS

    found = {}
    for name, tensor in stored.items():
        key = file_names(name)
        owner, _, leaf = key.rpartition(".")
        parts = STACKS.get(leaf, ())
        if not parts or len(tensor.shape) != 3 or tensor.shape[1] % len(parts) or not tensor.nbytes:
            found[key] = tensor
            continue
        count, rows, columns = tensor.shape
        nbytes = tensor.nbytes // (count * len(parts))
        for number, (index, part) in enumerate(product(range(count), parts)):
            begin, shape = tensor.begin + number * nbytes, (rows // len(parts), columns)
            found[f"{owner}.{index}.{part}.weight"] = StoredTensor(tensor.file, tensor.dtype, shape, begin, nbytes)
    return found


def _renamed(stored: Mapping[str, StoredTensor], table: ParameterTable) -> dict[str, StoredTensor]:
    """The stored tensors under state_dict keys: the prefix rule that covers most of them."""
    if table.file_names is not None:
        stored = _separated(stored, table.file_names)
    wanted = {**table.shapes, **table.tied}
    base = f"{table.base_prefix}."
    rules = [("", ""), ("", base), (base, "")]
    rules += [(prefix, add) for prefix in NESTED_PREFIXES for add in ("", base)]
    best: dict[str, StoredTensor] = {}
    for strip, add in rules:
        found = {}
        for name, tensor in stored.items():
            key = add + name.removeprefix(strip) if name.startswith(strip) else ""
            if key in wanted:
                found[key] = tensor
            elif name in wanted:
                found.setdefault(name, tensor)
        if len(found) > len(best):
            best = found
    return best


class SafetensorsReader:
    """Parameters of a model folder, read from its safetensors files one at a time."""

    def __init__(self, folder: Path, table: ParameterTable, stored: Mapping[str, StoredTensor] | None = None) -> None:
        """Checks that every parameter is there with the right shape and a float dtype.

        Args:
            stored: what the folder holds, if the caller has looked already.

        Raises:
            CometError: names the file or the parameter that is wrong.
        """
        stored = _renamed(find_tensors(folder) if stored is None else stored, table)
        missing = [name for name in table.shapes if name not in stored]
        if missing:
            raise CometError(
                f"{folder} lacks {len(missing)} of the {len(table.shapes)} parameters, for example {missing[0]}",
                "The files do not belong to this config.json, or this family's files arrange the weights in another "
                "way than transformers does in memory, which COMET cannot read yet.",
            )
        for name, shape in table.shapes.items():
            if stored[name].shape != shape:
                raise CometError(
                    f"{stored[name].file}: {name} has shape {stored[name].shape}, config.json implies {shape}",
                    "The files do not belong to this config.json: fetch both from the same place.",
                )
            if stored[name].dtype not in FLOAT_DTYPES:
                raise wrong_dtype(name, stored[name])
        self._stored = {name: stored[name] for name in table.shapes}
        self._untied = [
            name
            for name, source in table.tied.items()
            if name in stored and not same_bytes(stored[name], stored[source])
        ]

    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def load(self, name: str) -> "Tensor":
        return load_tensor(name, self._stored[name])

    def files(self) -> list[Path]:
        """The shards that are read, sorted."""
        return sorted({tensor.file for tensor in self._stored.values()})

    def contradicts_tying(self) -> bool:
        """True if the config ties two parameters of which the files hold different values."""
        return bool(self._untied)


class RandomReader:
    """Parameters drawn from (seed, name), so that each is the same in any order of reading.

    Norm weights are 1, everything else is normal with standard deviation 0.02. bfloat16, whose range no depth of
    random layers leaves.
    """

    def __init__(self, table: ParameterTable, seed: int) -> None:
        self._table = table
        self._seed = seed

    def names(self) -> list[str]:
        return list(self._table.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._table.shapes[name]

    def load(self, name: str) -> "Tensor":
        import torch

        shape = self._table.shapes[name]
        if name in self._table.norms:
            return torch.ones(shape, dtype=torch.bfloat16)
        key = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, RANDOM_STD, generator=generator)
