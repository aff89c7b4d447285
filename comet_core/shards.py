"""Shards of a packed folder, which exist under their names only when complete, and reading them back.

What is read comes from strangers: an index may name only files of its own folder, a shard must be
whole, and whatever is wrong is an error that names the file.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from comet_core.calibration import BROKEN
from comet_core.decoder import all_finite
from comet_core.whole_files import whole_file
from comet_cuda.errors import CometError

INDEX = "model.safetensors.index.json"
DTYPE = {  # what a packed folder holds, in the format's words
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
DAMAGED = "the folder is damaged; pack the model again"


def shard_name(index: int, count: int) -> str:
    """File name of shard `index` (from 0) of `count`."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes in row-major order."""
    return hashlib.sha256(_bytes_of(tensor)).hexdigest()


def write_shard(path: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Write one shard under its final name when it is complete; `notes` go into its metadata as JSON."""
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise CometError(
                f"{name}: holds NaN or Inf after quantization", "use --dtype float32, or `skip` this linear"
            )
    with whole_file(path) as partial, partial.open("wb") as file:
        _write_safetensors(file, tensors, {"comet": json.dumps(notes, sort_keys=True), "format": "pt"})


def write_checked_shard(path: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> dict[str, Tensor]:
    """`write_shard`, then the file read back and compared: a disk that lies is found now, not by the model's users.
    Returns what was read."""
    write_shard(path, tensors, notes)
    found, _ = read_shard(path)
    wrong = sorted(name for name in tensors if name not in found or not torch.equal(found[name], tensors[name].cpu()))
    if wrong:
        path.unlink()
        raise CometError(
            f"{path}: {wrong[0]} is not what was written", "the disk or the memory is failing; choose another --out"
        )
    return found


def _write_safetensors(file: BinaryIO, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """The safetensors format, written here because the library orders its metadata by chance, and the same shard must
    have the same bytes: u64 header length, JSON header padded with spaces, then the tensors' bytes one after another.
    Widest types come first, so that every tensor is aligned. One tensor at a time is copied, and only if it must be.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(_bytes_of(tensors[name]))


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes in row-major order, without a copy where it lies so in the computer's memory."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return flat.numpy().data


def read_shard(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and notes of one shard.

    Errors:
        CometError naming the file if it is cut short or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            notes = dict(json.loads((file.metadata() or {}).get("comet", "{}")))
            return {name: file.get_tensor(name) for name in file.keys()}, notes  # noqa: SIM118 - not a dict
    except (*BROKEN, SafetensorError) as error:
        raise CometError(f"{path}: cannot be read ({error})", DAMAGED) from error


def shard_names(path: Path) -> list[str]:
    """Names of a shard's tensors, from its header alone. Errors as in `read_shard`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (*BROKEN, SafetensorError) as error:
        raise CometError(f"{path}: cannot be read ({error})", DAMAGED) from error


def shard_files(folder: Path) -> list[Path]:
    """The shards that the index names, each a file inside the folder (or of the hub cache that the folder is in).

    Errors:
        CometError naming the index or the shard.
    """
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except BROKEN as error:
        raise CometError(f"{folder / INDEX}: cannot be read ({type(error).__name__}: {error})", DAMAGED) from error
    return [_inside(folder, name) for name in names]


def _inside(folder: Path, name: object) -> Path:
    """The file `name` of the folder; refused if it leads elsewhere."""
    outside = CometError(
        f"{folder / INDEX}: names the shard {name!r}, which is no safetensors file inside the folder", DAMAGED
    )
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise outside
    root = folder.resolve()
    homes = [root]
    if root.parent.name == "snapshots":  # the hub's cache: snapshots/<revision>/<file> is a link into blobs/
        homes.append(root.parent.parent / "blobs")
    try:
        if not any((folder / name).resolve().is_relative_to(home) for home in homes):
            raise outside
        if not (folder / name).is_file():
            raise CometError(f"{folder / name}: this shard is missing", DAMAGED)
    except (OSError, ValueError, RuntimeError) as error:  # names too long, with zero bytes, links in a circle
        raise outside from error
    return folder / name
