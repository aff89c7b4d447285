"""What the user typed -> ModelSource: a checked 16-bit model on disk, or its shapes with random weights.

An alias, a folder, a GGUF file and a hub id all end as one thing: a config, and a reader that hands out parameters one
at a time. Nothing is unpickled, no code of a model folder is run, and every file is checked here, before any work.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comet_core.gguf_folder import gguf_to_folder, origin_note
from comet_core.model_cache import file_sha256
from comet_core.quantized_source import METHODS, QuantizedReader, packed_format
from comet_core.recipe_rules import nearest_hint
from comet_core.weight_reader import ParameterTable, RandomReader, SafetensorsReader, WeightReader, parameter_table
from comet_cuda.errors import CometError
from comet_cuda.folders import cache_dir

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = ["ModelSource", "WeightReader", "alias_names", "alias_shapes", "resolve_model"]

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # never pickles, never code
HOW_TO_GIVE = "Give a folder with config.json and safetensors, a GGUF file, or --weights random to do without."


@dataclass(frozen=True)
class ModelSource:
    """One model, ready to be read."""

    name: str  # alias, folder name or hub id: `model` in the records
    folder: Path | None  # config.json, safetensors, tokenizer; None for random weights
    config: "PretrainedConfig"  # of the text model, cut to the wanted layers
    random_seed: int | None  # of random weights
    origin: str  # folder | hub | gguf | random
    note: str  # printed with every number; "" if there is nothing to say

    @cached_property
    def parameters(self) -> ParameterTable:
        """Names and shapes of the model's parameters."""
        return parameter_table(self.config)

    @cached_property
    def _reader(self) -> SafetensorsReader | RandomReader:
        if self.folder is None:
            return RandomReader(self.parameters, self.random_seed or 0)
        form = packed_format(self.folder, _read_config(self.folder).get("quantization_config"))
        if form is not None:
            return QuantizedReader(self.folder, self.parameters, form)
        return SafetensorsReader(self.folder, self.parameters)

    def weights(self) -> WeightReader:
        """The reader of this model's parameters."""
        return self._reader

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The model's tokenizer; None for random weights.

        Raises:
            CometError: the folder has none that transformers can read.
        """
        if self.folder is None:
            return None
        from transformers import AutoTokenizer

        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # many kinds, by tokenizer family
            raise CometError(
                f"{self.folder} has no readable tokenizer: {error}",
                "Put the model's tokenizer files (tokenizer.json, tokenizer_config.json) into the folder.",
            ) from None
        return tokenizer

    def digest(self) -> str:
        """First 16 hex digits of a sha256 over the config and the weight files, or over the config and the seed."""
        content: dict[str, Any] = {"layers": self.config.num_hidden_layers}
        if isinstance(self._reader, SafetensorsReader) and self.folder is not None:
            content["config"] = _read_config(self.folder)
            content["files"] = {path.name: [path.stat().st_size, file_sha256(path)] for path in self._reader.files()}
        else:
            content |= {"config": self.config.to_dict(), "seed": self.random_seed}
        content["config"].pop("transformers_version", None)
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def _aliases() -> dict[str, dict[str, Any]]:
    import yaml

    content: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("model_aliases.yaml").read_text())
    return content


def alias_names() -> list[str]:
    """Every alias, in the file's order."""
    return list(_aliases())


def alias_shapes(alias: str) -> dict[str, Any]:
    """Shapes of an alias without any download: hidden_size, intermediate_size, num_hidden_layers,
    num_attention_heads, num_key_value_heads, head_dim, vocab_size, with `model_type` and `hub` (id or None).

    Raises:
        CometError: unknown alias; names the nearest.
    """
    if alias not in _aliases():
        raise CometError(f"no model alias is called {alias}", nearest_hint(alias, _aliases()))
    entry = _aliases()[alias]
    return {"hub": entry["hub"], "model_type": entry["model_type"], **entry["shapes"]}


def resolve_model(spec: str, *, weights: str = "real", layers: int | None = None, seed: int = 0) -> ModelSource:
    """Finds the model that `spec` names and checks its files.

    Args:
        spec: an existing folder or GGUF file, an alias, or a hub id; looked for in this order.
        weights: "real", or "random": shapes alone, for dry runs.
        layers: keep only the first so many decoder layers.
        seed: of random weights.

    Raises:
        CometError: nothing found, or a file that is missing, broken, pickled or already quantized.
    """
    if weights not in ("real", "random"):
        raise CometError(f"--weights is {weights!r}", "It must be real or random.")
    path = Path(spec).expanduser()
    source: ModelSource
    if weights == "random" and not path.is_file():
        name, config = _config_alone(spec, path)
        source = ModelSource(name, None, config, seed, "random", "")
    elif path.is_file():
        source = _from_gguf(path.stem, path)
    elif (path / "config.json").is_file() or (path.is_dir() and spec not in _aliases()):
        source = _from_folder(path.resolve().name, path, "folder", "")
    elif spec in _aliases():
        source = _from_alias(spec)
    elif spec.startswith((".", "/", "~")) or spec.endswith(".gguf") or spec.count("/") > 1:
        raise CometError(f"there is no model folder or file {spec}", HOW_TO_GIVE)
    else:
        source = _from_folder(spec, _fetch(spec, spec), "hub", "")
    if weights == "random":
        note = f"random weights, seed {seed}"
        source = dataclasses.replace(source, folder=None, random_seed=seed, origin="random", note=note)
    if layers is not None:
        source = cut_layers(source, layers)
    reader = source.weights()  # checks every file
    if isinstance(reader, SafetensorsReader) and reader.contradicts_tying():
        untied = source.config.from_dict({**source.config.to_dict(), "tie_word_embeddings": False})
        source = dataclasses.replace(source, config=untied)
        source.weights()
    return source


def _from_gguf(name: str, path: Path) -> ModelSource:
    if path.suffix != ".gguf":
        raise CometError(f"{path} is a file but no .gguf file", "Give the folder that holds the model's config.json.")
    folder = gguf_to_folder(path)
    return _from_folder(name, folder, "gguf", origin_note(folder))


def _from_folder(name: str, folder: Path, origin: str, note: str) -> ModelSource:
    config = _text_config(folder)
    form = packed_format(folder, _read_config(folder).get("quantization_config"))
    return ModelSource(name, folder, config, None, origin, form.note if form is not None else note)


def _from_alias(alias: str) -> ModelSource:
    local = cache_dir() / "models" / alias
    files = sorted(local.glob("*.gguf"))
    if len(files) > 1:
        raise CometError(f"{local} holds {len(files)} GGUF files", f"Keep one, or give its path: {files[0]}")
    if files:
        return _from_gguf(alias, files[0])
    if (local / "config.json").is_file():
        return _from_folder(alias, local, "folder", "")
    hub = alias_shapes(alias)["hub"]
    if hub is None:
        raise CometError(f"the weights of {alias} are on no public hub", HOW_TO_GIVE)
    return _from_folder(alias, _fetch(hub, alias), "hub", "")


def _fetch(hub_id: str, spec: str) -> Path:
    """The hub's snapshot of a model, fetched or from the hub's own cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except Exception as error:  # network, rights, unknown or malformed id: the hub client has a class for each
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        if spec in _aliases():
            place = cache_dir() / "models" / spec
            message = f"{spec} is not on this machine, and the hub did not give {hub_id} ({reason})"
            raise CometError(message, f"{HOW_TO_GIVE} A folder or GGUF file is also found at {place}.") from None
        hint = nearest_hint(spec, _aliases()).replace("Known:", "Aliases:")
        message = f"{spec} is no folder, file or alias, and the hub did not give it ({reason})"
        raise CometError(message, f"{HOW_TO_GIVE} {hint}") from None


def _config_alone(spec: str, path: Path) -> tuple[str, "PretrainedConfig"]:
    """Name and config for random weights; needs no weight files, and for an alias no network."""
    from transformers import AutoConfig

    if (path / "config.json").is_file():
        return path.resolve().name, _text_config(path)
    if spec in _aliases():
        entry = _aliases()[spec]
        keys = {**entry["shapes"], **entry["extras"]}
        config: PretrainedConfig = AutoConfig.for_model(entry["model_type"], **keys)
        return spec, config
    if path.is_dir():
        raise CometError(f"{path} has no config.json", HOW_TO_GIVE)
    return spec, _text_config(_fetch(spec, spec))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        hint = (
            "It is an adapter: merge it into its base model first."
            if (folder / "adapter_config.json").is_file()
            else ""
        )
        raise CometError(f"{folder} has no config.json", hint or HOW_TO_GIVE)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CometError(f"{path} is not valid JSON: {error}", "Fetch the file again.") from None
    if not isinstance(content, dict):
        raise CometError(f"{path} holds no table of keys", "Fetch the file again.")
    return content


def _text_config(folder: Path) -> "PretrainedConfig":
    """The config of the text model in a folder, refused where COMET cannot start from it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, __version__

    content = _read_config(folder)
    for part in (content, content.get("text_config")):
        if isinstance(part, dict) and part.get("quantization_config"):
            _refuse_quantized(folder, part["quantization_config"])
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = config.get_text_config(decoder=True)
    except Exception as error:  # unknown model types and values out of range raise many kinds
        raise CometError(
            f"{folder}/config.json: transformers {__version__} does not know this {content.get('model_type')!r} model: "
            f"{str(error).splitlines()[0]}",
            "Install a transformers that does. COMET never runs code that comes with a model.",
        ) from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CometError(f"{folder} is a {config.model_type} model, which writes no text by itself", HOW_TO_GIVE)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # weights are decoded when they are read
    text_config: PretrainedConfig = config
    return text_config


def _refuse_quantized(folder: Path, quantization: Any) -> None:
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
    if method in METHODS:
        return
    if method == "comet":
        raise CometError(
            f"{folder} is already packed by COMET",
            f"Evaluate it with: comet eval {folder}. calibrate and pack take the 16-bit model.",
        )
    raise CometError(
        f"{folder} is already quantized ({method})",
        f"COMET starts from 16-bit weights, or from {' and '.join(name.upper() for name in METHODS)} checkpoints: give "
        "the original model, or save a dequantized copy of this one.",
    )


def cut_layers(source: ModelSource, layers: int) -> ModelSource:
    """The same model with its first decoder layers only."""
    return dataclasses.replace(source, config=cut_config(source.config, layers))


def cut_config(config: "PretrainedConfig", layers: int) -> "PretrainedConfig":
    """The same config with its first layers only; lists with one entry a layer (layer_types) are cut too."""
    total = config.num_hidden_layers
    if not 1 <= layers <= total:
        raise CometError(f"--layers is {layers}, the model has {total}", f"Give a number from 1 to {total}.")
    values = config.to_dict()
    for key, value in values.items():
        if "layer" in key and isinstance(value, list) and len(value) == total:
            values[key] = value[:layers]
    values[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = layers
    return type(config).from_dict(values)
