"""Where COMET keeps what it made from other things: converted models, digests, compiled kernels."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """$COMET_CACHE_DIR, or ~/.cache/comet."""
    return Path(os.environ.get("COMET_CACHE_DIR") or Path.home() / ".cache" / "comet")
