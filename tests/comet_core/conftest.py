"""Tiny models on disk for the tests of calibrate, pack and load: random weights, a byte tokenizer, one text."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from comet_core.model_source import ModelSource
    from comet_core.recipe import Recipe

TEXT = "the cat sat on the mat and the dog lay by the door, while rain fell on the roof of the old house. "
VOCABULARY = 257  # bytes and one end token


@dataclass(frozen=True)
class Packed:
    """One model on its way: source, calibration folder, packed folder."""

    source: "ModelSource"
    recipe: "Recipe"
    calibration: Path
    packed: Path

    def pack(self, out: Path, recipe: "Recipe | None" = None, progress: Any = None) -> Any:
        """Pack the same calibration again."""
        from comet_core.pack import pack
        from comet_core.progress import SilentProgress

        return pack(self.source, self.calibration, recipe, out, device="cpu", progress=progress or SilentProgress())


def llama(**changes: Any) -> Any:
    """Config of a Llama of two narrow layers."""
    from transformers import LlamaConfig

    shapes = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256,
        "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None,
    }  # fmt: skip
    return LlamaConfig(**(shapes | changes))


def save_model(
    folder: Path,
    config: Any,
    factors: dict[str, float] | None = None,
    change: Callable[[Any], None] | None = None,
    **how: Any,
) -> Path:
    """A float32 model whose norms are not all ones, so nothing is stored exactly by luck; with tokenizer and text.

    Args:
        factors: by parameter name, what its random values are multiplied by. change: does more to the model.
        how: options of save_pretrained.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            parameter.mul_((factors or {}).get(name, 1.0))
        if change is not None:
            change(model)
    model.save_pretrained(folder, **how)
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "<eos>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT * 30)
    return folder


def short(recipe: "Recipe", folder: Path | None = None) -> "Recipe":
    """The recipe with 2 x 32 calibration tokens, of the folder's text if one is given."""
    data = {} if folder is None else {"data": str(folder / "text.txt")}
    return replace(recipe, calibration=replace(recipe.calibration, samples=2, seq_len=32, **data))


def through(source: "ModelSource", recipe: "Recipe", home: Path) -> Packed:
    """Calibrate and pack."""
    from comet_core.calibrate import calibrate
    from comet_core.progress import SilentProgress

    made = Packed(source, recipe, home / "calibration", home / "packed")
    calibrate(source, recipe, made.calibration, device="cpu", progress=SilentProgress())
    made.pack(made.packed)
    return made


@pytest.fixture(scope="session")
def put_through(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Packed]:
    """(config, recipe or its name, options of `save_model`) -> a saved random model, calibrated and packed."""
    from comet_core.model_source import resolve_model
    from comet_core.recipe import load_recipe

    def run(config: Any, recipe: Any = "w4a4kv4", factors: dict[str, float] | None = None, **how: Any) -> Packed:
        home = tmp_path_factory.mktemp("tiny")
        folder = save_model(home / "model", config, factors, **how)
        recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
        return through(resolve_model(str(folder)), short(recipe, folder), home)

    return run


@pytest.fixture(scope="session")
def llama_config() -> Callable[..., Any]:
    """`llama`, for test files, which cannot import this one."""
    return llama


@pytest.fixture(scope="session")
def tiny(put_through: Callable[..., Packed]) -> Packed:
    """The Llama of two layers, packed with the default recipe. Tests copy its folders before they harm them."""
    return put_through(llama())
