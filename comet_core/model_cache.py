"""COMET's own folder on this machine: fetched and converted models, and digests of large files.

Users' folders are only read. What is derived from them lies here, under a key that names its content, and a digest is
computed again when the file's size or time of change differs.
"""

import hashlib
import json
import os
from pathlib import Path

from comet_cuda.folders import cache_dir


def file_sha256(path: Path) -> str:
    """sha256 (64 hex digits) of a file's bytes; remembered in the cache by path, size and time of change."""
    resolved = path.resolve()
    state = resolved.stat()
    key = hashlib.sha256(str(resolved).encode()).hexdigest()[:32]
    note = cache_dir() / "digests" / f"{key}.json"
    identity = [str(resolved), state.st_size, state.st_mtime_ns]
    try:
        remembered = json.loads(note.read_text())
        if remembered["file"] == identity:
            return str(remembered["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there or damaged: computed again
    with resolved.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    note.parent.mkdir(parents=True, exist_ok=True)
    partial = note.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps({"file": identity, "sha256": digest}))
    partial.replace(note)
    return digest
