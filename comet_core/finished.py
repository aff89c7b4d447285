"""Output folder + job -> may `pack` write there? What another job finished is never erased, and nothing is made twice.

A finished folder names its model, recipe, calibration and version of COMET in its manifest. Only the very same job
replaces it, and only where it would become another one: packed by another version, or no longer whole.
"""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from comet_core.calibration import Calibration
from comet_core.ledger import PackedInfo, summary_of
from comet_core.packed import MANIFEST, STARTED, Manifest, is_packed, manifest_of
from comet_core.provenance import comet_version
from comet_core.recipe import Recipe, TuningSpec, digest
from comet_core.whole_files import cannot_write
from comet_cuda.errors import CometError

REMEDY = "choose another folder with --out, or remove this one"
UNFINISHED = "holds the unfinished packing of another model, recipe or calibration"


@dataclass(frozen=True)
class Asked:
    """What is to be packed. Before calibrating, what only a calibration knows is None, and not compared."""

    recipe: Recipe  # with the calibration that is used; its name and description do not count
    name: str  # of the model
    model: str | None  # digest; of a transformed model, what it became
    data: dict[str, Any] | None  # of the calibration
    calibration: str | None = None  # sha256 of its tokens and plans


def asked_of(found: Calibration, recipe: Recipe) -> Asked:
    """Packing this calibration by this recipe."""
    recipe = replace(recipe, calibration=found.recipe.calibration)
    return Asked(recipe, found.model["name"], found.model["digest"], found.data, found.sha256())


def draft_folder(out: Path) -> Path:
    """Where a model that is packed into `out` stands before it is tuned."""
    return out.parent / f".{out.name}.untuned"


def look_into(out: Path, asked: Asked) -> tuple[PackedInfo | None, str]:
    """What stands in `out`, and in the draft beside it if the recipe tunes.

    Returns:
        the summary of the finished folder, if it is the very outcome that is asked for and that is sure; else None. And
        why a finished folder of the same job is to be made anew, in words; "" where there is none.

    Errors:
        CometError if a folder holds something else, which then stays as it is.
    """
    try:
        info, why = _look_into(out, asked)
        if info is None and asked.recipe.tuning.epochs:
            _look_into(draft_folder(out), replace(asked, recipe=replace(asked.recipe, tuning=TuningSpec())))
    except OSError as error:
        raise cannot_write(out, error) from error
    return info, why


def _look_into(out: Path, asked: Asked) -> tuple[PackedInfo | None, str]:
    if not out.is_dir():
        return None, ""
    if (out / STARTED).exists():
        _check_started(out, asked)
        return None, ""
    if not (out / MANIFEST).exists():
        if any(file.name != f"{STARTED}.tmp" for file in out.iterdir()):
            raise CometError(f"{out}: is not empty and holds no packed model", "choose another folder with --out")
        return None, ""
    try:
        manifest = manifest_of(out)
    except CometError as error:
        raise CometError(error.message, REMEDY) from error
    version, made = comet_version(), manifest.made.get("version")
    own = version is not None and made == version
    if wrong := _differences(manifest, asked, own):
        raise CometError(
            f"{out}: holds the finished packing of {manifest.model['name']} by recipe {manifest.recipe.name}, not what "
            f"is asked for ({asked.name} by recipe {asked.recipe.name}); they differ in {', '.join(wrong)}",
            REMEDY,
        )
    if not own:
        unknown = "of an unknown version"
        return None, f"was packed by COMET {made or unknown}, this is COMET {version or unknown}"
    if not is_packed(out):
        return None, "is not whole"
    if asked.model is None or asked.data is None:
        return None, ""
    try:
        return summary_of(out), ""
    except CometError as error:
        return None, f"is damaged ({error.message})"


def _differences(manifest: Manifest, asked: Asked, own: bool) -> list[str]:
    """Where the manifest and the job differ: the model, sections of the recipe, the calibration's text or plans. Plans
    count only if this version packed the folder: another may make others of the same text."""
    here, there = asked.recipe, manifest.recipe
    digest_here = asked.model or manifest.model["digest"]
    other_model = digest_here != manifest.model["digest"] or (
        asked.model is None and asked.name != manifest.model["name"]
    )
    sections = [field.name for field in fields(here) if field.name not in ("name", "description")]
    wrong = ["model"] * other_model + [name for name in sections if getattr(here, name) != getattr(there, name)]
    if "calibration" not in wrong and not other_model:
        known = asked.calibration if own else None
        if (asked.data or manifest.data) != manifest.data:
            wrong.append("the calibration's text")
        elif known is not None and known != manifest.made.get("calibration"):
            wrong.append("the calibration's plans")
    return wrong


def _check_started(out: Path, asked: Asked) -> None:
    """Raise CometError if the marker of an unfinished packing is surely another job's; PackJob compares all of it."""
    try:
        job = dict(json.loads((out / STARTED).read_text(encoding="utf-8")))
    except ValueError as error:
        raise CometError(f"{out / STARTED}: cannot be understood", "remove the folder and pack again") from error
    known = {"recipe": digest(asked.recipe), "model": asked.model, "calibration": asked.calibration}
    if any(value is not None and job.get(key) != value for key, value in known.items()):
        raise CometError(f"{out}: {UNFINISHED}", REMEDY)
