"""Where results lie if no folder is given: runs/<model>-<recipe>/{calibration,packed} below the working folder.

runs/last.json remembers the packed folder that was written last: `comet eval --ppl wikitext2` means that one.
"""

import json
from pathlib import Path

from comet_cuda.errors import CometError

RUNS = Path("runs")
LAST = RUNS / "last.json"


def run_folder(model: str, recipe: str, *, random: bool = False, layers: int | None = None) -> Path:
    """The folder of one model under one recipe. A model that is not the real whole one gets a folder of its own."""
    parts = [model.replace("/", "--")]
    if random and "random" not in model:
        parts.append("random")
    if layers is not None:
        parts.append(f"{layers}layers")
    return RUNS / "-".join([*parts, recipe])


def remember_packed(folder: Path) -> None:
    """Note `folder` as the packed model that was written last."""
    from comet_core.whole_files import write_text

    write_text(LAST, json.dumps({"packed": str(folder)}) + "\n")


def last_packed() -> Path:
    """The packed folder that was written last from this working folder."""
    hint = "Give a model, or pack one first: comet pack smollm2-135m"
    try:
        folder = Path(json.loads(LAST.read_text(encoding="utf-8"))["packed"])
    except OSError:
        raise CometError("no model given, and none has been packed from this folder yet", hint) from None
    except (ValueError, KeyError, TypeError):
        raise CometError(f"{LAST} cannot be read", f"Remove it. {hint}") from None
    if not folder.is_dir():
        raise CometError(f"the last packed model, {folder}, is gone", hint)
    return folder
