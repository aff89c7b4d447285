"""Files of a packed folder: shards and texts that exist under their names only when complete, and reading them back.

Written beside the final name, flushed to the disk, then renamed: a process that is killed at any moment leaves a file
whole or absent. What is read comes from strangers: an index may name only files of its own folder, a shard must be
whole, and whatever is wrong is an error that names the file.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comet_core.calibration import BROKEN
from comet_cuda.errors import CometError

INDEX = "model.safetensors.index.json"
DAMAGED = "the folder is damaged; pack the model again"


def shard_name(index: int, count: int) -> str:
    """File name of shard `index` (from 0) of `count`."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes in row-major order."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor Inf, looked at in pieces so that no mask of its size is made."""
    if not tensor.is_floating_point():
        return True
    return all(bool(torch.isfinite(part).all()) for part in tensor.detach().flatten().split(1 << 20))


def write_atomic(path: Path, content: str) -> None:
    """Write a text file so that it exists under its name only when complete."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _cannot_write(path, partial, error) from error
    partial.rename(path)


def write_shard(path: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Write one shard under its final name when it is complete; `notes` go into its metadata as JSON."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise CometError(
                f"{name}: holds NaN or Inf after quantization", "use --dtype float32, or `skip` this linear"
            )
    partial = path.with_name(path.name + ".tmp")
    try:
        metadata = {"format": "pt", "comet": json.dumps(notes, sort_keys=True)}
        save_file(_own_storage(tensors), partial, metadata=metadata)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        raise _cannot_write(path, partial, error) from error
    partial.rename(path)


def _own_storage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by name on the CPU, those that share memory with others copied: the format holds no aliases."""
    seen: set[int] = set()
    own = {}
    for name, tensor in sorted(tensors.items()):
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != value.nbytes:
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        own[name] = value
    return own


def _cannot_write(path: Path, partial: Path, error: Exception) -> CometError:
    partial.unlink(missing_ok=True)
    return CometError(f"{path}: cannot be written ({error})", "free disk space and start the same command again")


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
