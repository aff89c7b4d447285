"""A GGUF file -> a 16-bit safetensors folder with config and tokenizer, written once into the cache.

transformers reads the file and dequantizes it; everything after that reads one format. The folder's name holds the
file's sha256, it appears by one rename, and a lock makes a second process wait instead of working twice.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comet_core.gguf_tokenizer import check_saved_bos, gguf_tokenizer
from comet_core.model_cache import file_sha256
from comet_cuda.errors import CometError
from comet_cuda.folders import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ORIGIN_FILE = "comet_origin.json"  # what the folder was made from
FORMAT_VERSION = 2  # of the converted folder; 2: the tokenizer is what the file says, whatever transformers reads it


def gguf_to_folder(path: Path) -> Path:
    """Converts the file, or finds the folder of an earlier conversion.

    The whole model passes through memory once, in 16 bit (float16 where every value is finite in it, else bfloat16).

    Raises:
        CometError: no GGUF file, cut short, of an architecture that transformers cannot read, or with values that are
            not finite.
    """
    from filelock import FileLock

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CometError(f"{path} is not a GGUF file", "Fetch it again, or give a model folder.")
    parent = cache_dir() / "converted"
    parent.mkdir(parents=True, exist_ok=True)
    target = parent / f"{path.stem}-{file_sha256(path)[:16]}-v{FORMAT_VERSION}"
    if target.is_dir():
        return target
    with FileLock(f"{target}.lock"):
        if target.is_dir():  # another process made it meanwhile
            return target
        for leftover in parent.glob(f"{target.name}.partial-*"):  # of a process that was killed
            shutil.rmtree(leftover)
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=parent))
        try:
            _convert(path, partial)
            partial.chmod(0o755)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def origin_note(folder: Path) -> str:
    """The sentence that goes with every number from a converted folder; empty if the GGUF file was not quantized."""
    return str(json.loads((folder / ORIGIN_FILE).read_text())["note"])


@contextmanager
def _header_read_once() -> Iterator[None]:
    """Lets every reader of the same file inside share one parsed header.

    Reading a vocabulary of 50,000 to 260,000 entries takes seconds, and transformers does it anew for the config, the
    weights and the tokenizer. Where it imports the reader in another way, this changes nothing.
    """
    import gguf

    module: Any = gguf
    original = module.GGUFReader
    module.GGUFReader = lru_cache(maxsize=1)(original)
    try:
        yield
    finally:
        module.GGUFReader = original


def _convert(path: Path, folder: Path) -> None:
    try:
        with _header_read_once():
            scheme = _scheme(path)
            model = _load(path)
            tokenizer, wants_bos = gguf_tokenizer(path)
    except CometError:
        raise
    except Exception as error:  # the readers raise many kinds on damaged or unknown files
        raise CometError(
            f"{path} cannot be read: {type(error).__name__}: {error}",
            "Fetch it again if it may be cut short; else give the model as a folder of safetensors.",
        ) from None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder, max_shard_size="2GB")
    tokenizer.save_pretrained(folder)
    if wants_bos is not None:
        check_saved_bos(path, folder, wants_bos)
    bits = re.search(r"Q(\d)", scheme)
    note = f"dequantized from a {bits[1]}-bit GGUF file ({scheme})" if bits else ""
    origin: dict[str, Any] = {"file": path.name, "sha256": file_sha256(path), "scheme": scheme, "note": note}
    (folder / ORIGIN_FILE).write_text(json.dumps(origin, indent=2) + "\n")


def _scheme(path: Path) -> str:
    """The file's own word for its number format, for example Q4_K_M or F16."""
    import gguf

    reader = gguf.GGUFReader(str(path))  # a text, as transformers gives it, so that the parsed header is shared
    field = reader.get_field("general.file_type")
    if field is not None:
        return gguf.LlamaFileType(field.contents()).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    sizes: dict[str, int] = {}
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    return max(sizes, key=lambda name: sizes[name])


def _load(path: Path) -> "PreTrainedModel":
    """The dequantized model, in the first 16-bit type that holds all of its values."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"gguf_file": path.name}
    if hasattr(transformers, "GgufConfig"):  # earlier versions always dequantize
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    not_finite = ""
    for dtype in (torch.float16, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **options)
        bad = [name for name, value in model.named_parameters() if not torch.isfinite(value).all()]
        if not bad:
            return model
        not_finite = bad[0]
        del model
    raise CometError(f"{path}: {not_finite} holds values that are not finite", "Fetch the file again.")
