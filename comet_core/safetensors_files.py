"""A folder of safetensors shards -> where each tensor lies, every claim of the files checked before a byte is used.

Headers and indexes come from strangers. A header must fit its file, its tensors must fill the data part without holes
or overlaps, and an index may only name files of its own folder. A tensor is read with one plain read of its bytes, so
memory holds that tensor and nothing else, and a file that shrinks meanwhile is an error instead of a bus error.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPE_BYTES = {
    **dict.fromkeys(["F64", "I64", "U64"], 8),
    **dict.fromkeys(["F32", "I32", "U32"], 4),
    **dict.fromkeys(["F16", "BF16", "I16", "U16"], 2),
    **dict.fromkeys(["F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"], 1),
}
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # torch's names

FETCH_AGAIN = "Fetch the file again: the download or copy was probably cut short."


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of one file."""

    file: Path
    dtype: str  # the format's word, for example BF16
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    nbytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor that the file holds, by name.

    Raises:
        CometError: the file cannot be read, is cut short, or its header contradicts itself or the file's size.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
                raise CometError(
                    f"{path} is not a whole safetensors file: {size} bytes, header of {header_bytes}", FETCH_AGAIN
                )
            raw = file.read(header_bytes)
    except OSError as error:
        raise CometError(f"cannot read {path}: {error.strerror}", "Check the path and its permissions.") from None
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: _stored_tensor(path, 8 + header_bytes, entry) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CometError(f"{path} has a broken safetensors header: {error}", FETCH_AGAIN) from None
    end = 8 + header_bytes
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if tensor.begin != end:
            raise CometError(f"{path}: {name} starts at byte {tensor.begin}, expected {end}", FETCH_AGAIN)
        end += tensor.nbytes
    if end != size:
        raise CometError(f"{path} has {size} bytes, its header says {end}", FETCH_AGAIN)
    return tensors


def _stored_tensor(path: Path, data_start: int, entry: dict[str, Any]) -> StoredTensor:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"shape {shape}, offsets {begin} to {end}")
    if entry["dtype"] not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {entry['dtype']}")
    nbytes = math.prod(shape) * DTYPE_BYTES[entry["dtype"]]
    if end - begin != nbytes:
        raise ValueError(f"shape {shape} of {entry['dtype']} needs {nbytes} bytes, the offsets span {end - begin}")
    return StoredTensor(path, entry["dtype"], shape, data_start + begin, nbytes)


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder: model.safetensors, or the shards that its index names.

    Raises:
        CometError: no safetensors files, a missing or broken shard, or an index that leaves the folder.
    """
    if (folder / SINGLE_FILE).is_file():
        return read_header(folder / SINGLE_FILE)
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        raise _no_safetensors(folder)
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(index.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CometError(f"{index_path} is not a safetensors index: {error!r}", FETCH_AGAIN) from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CometError(
                f"{index_path} names the shard {shard!r}, which is no safetensors file of this folder",
                "Do not use this folder unless you trust where it comes from; fetch the model again.",
            )
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CometError(
            f"{folder} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:4])}", FETCH_AGAIN
        )
    found: dict[str, StoredTensor] = {}
    for shard in shards:
        found.update({name: t for name, t in read_header(folder / shard).items() if index.get(name) == shard})
    absent = sorted(set(index) - set(found))
    if absent:
        raise CometError(f"{index_path} names {absent[0]} in {index[absent[0]]}, which does not hold it", FETCH_AGAIN)
    return found


def _no_safetensors(folder: Path) -> CometError:
    pickled = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    if pickled:
        return CometError(
            f"{folder} holds its weights as pickled files only ({pickled[0]})",
            "COMET never unpickles: loading such a file can run any code. Convert it once, in a place you trust, with "
            "transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder).",
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return CometError(
            f"{folder} has {others[0]} but neither {SINGLE_FILE} nor {INDEX_FILE}",
            "A single file must be called model.safetensors; shards need their index. Fetch the missing file.",
        )
    return CometError(f"{folder} holds no weights", f"It needs {SINGLE_FILE}, or {INDEX_FILE} with its shards.")


def load_tensor(name: str, stored: StoredTensor) -> "Tensor":
    """Reads one tensor into memory of its own: CPU, stored dtype and shape. The memory is torch's, because products
    of operands that are not aligned as torch aligns them may round in another way from run to run.

    Raises:
        CometError: not a 16- or 32-bit float, or the file changed since its header was read.
    """
    if stored.dtype not in FLOAT_DTYPES:
        raise wrong_dtype(name, stored)
    return _read(stored, FLOAT_DTYPES[stored.dtype])


def load_integers(name: str, stored: StoredTensor) -> "Tensor":
    """`load_tensor` for int32 tensors (words of packed codes, group indices)."""
    if stored.dtype != "I32":
        raise CometError(f"{stored.file}: {name} is stored as {stored.dtype}, not I32", FETCH_AGAIN)
    return _read(stored, "int32")


def _read(stored: StoredTensor, kind: str) -> "Tensor":
    import torch

    dtype: torch.dtype = getattr(torch, kind)
    if stored.nbytes == 0:
        return torch.empty(stored.shape, dtype=dtype)
    tensor = torch.empty(stored.shape, dtype=dtype)
    with stored.file.open("rb") as file:
        file.seek(stored.begin)
        if file.readinto(tensor.view(-1).view(torch.uint8).numpy().data) != stored.nbytes:
            raise CometError(f"{stored.file} became shorter while it was read", FETCH_AGAIN)
    return tensor


def wrong_dtype(name: str, stored: StoredTensor) -> CometError:
    """The error for a weight that is no plain float."""
    return CometError(
        f"{stored.file}: {name} is stored as {stored.dtype}",
        "COMET starts from 16- or 32-bit weights: give the original model, not a quantized one.",
    )


def same_bytes(a: StoredTensor, b: StoredTensor, chunk: int = 1 << 22) -> bool:
    """Whether two stored tensors are equal bit for bit; reads `chunk` bytes of each at a time."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with a.file.open("rb") as file_a, b.file.open("rb") as file_b:
        file_a.seek(a.begin)
        file_b.seek(b.begin)
        for start in range(0, a.nbytes, chunk):
            count = min(chunk, a.nbytes - start)
            if file_a.read(count) != file_b.read(count):
                return False
    return True
