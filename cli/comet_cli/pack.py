"""`comet pack MODEL`: model, calibration and recipe in, a packed Hugging Face folder out, layer by layer, resumable."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comet_cli import calibrate, console, export, options, runs
from comet_cli.dry_run import DryRun
from comet_cli.dry_run import dry_run as predict
from comet_cli.dry_run import show as show_dry_run
from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from comet_core.calibration import Calibration
    from comet_core.ledger import PackedInfo
    from comet_core.model_source import ModelSource
    from comet_core.recipe import Recipe

WEIGHT_ONLY = "w4a16"  # the recipe for other programs
ALREADY = "already packed; remove the folder to pack it anew"
NONE = "no finished calibration here"


def pack(
    model: options.Model,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration folder; found or made if not given.", metavar="DIR")
    ] = None,
    recipe: options.Recipe = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the packed model.", metavar="DIR")] = None,
    data: calibrate.Data = None,
    samples: calibrate.Samples = None,
    seq_len: calibrate.SeqLen = None,
    seed: calibrate.Seed = None,
    weights: options.Weights = "real",
    layers: options.Layers = None,
    device: options.Devices = "auto",
    dtype: options.DType = "auto",
    threads: options.Threads = None,
    format: Annotated[
        str, typer.Option(help="comet; or compressed-tensors, written beside it for stock transformers and vLLM.")
    ] = "comet",
    dry_run: DryRun = False,
    json: options.Json = False,
) -> None:
    """Quantize MODEL into a folder of packed weights.

    Without a calibration it makes one first. What is packed already is not packed again.

    Example: comet pack smollm2-135m
    """
    if format not in ("comet", *export.FORMATS):
        raise CometError(f"--format {format} is not known", f"It may be comet or {' or '.join(export.FORMATS)}.")
    if format != "comet" and recipe is None and calibration is None:
        recipe = WEIGHT_ONLY
        console.talk(f"recipe: {WEIGHT_ONLY}, which {format} keeps as it is")
    options.tidy_heap()
    flags: dict[str, Any] = {"data": data, "samples": samples, "seq_len": seq_len, "seed": seed}
    given = calibration is not None
    if given and any(value is not None for value in flags.values()):
        raise CometError(
            "--calibration and --data, --samples, --seq-len or --seed exclude each other",
            "Leave out --calibration to calibrate anew.",
        )
    named = recipe or (options.DEFAULT_RECIPE if given else None)  # a calibration knows its recipe
    source, chosen = calibrate.prepare(model, named, weights, layers, device, **flags)
    options.set_threads(threads)
    from comet_core.calibration import load_calibration, refuse_other
    from comet_core.integrations.compressed_tensors import check_recipe
    from comet_core.integrations.compressed_tensors import export as write
    from comet_core.pack import pack as pack_model
    from comet_core.preflight import packed_bytes, packing_disk, require_disk

    if calibration is not None and recipe is None:
        chosen = load_calibration(calibration).recipe
    home = calibrate.default_folder(source, chosen, layers)
    folder, other = out or home / "packed", format != "comet"
    if other:
        check_recipe(chosen, export.beside(folder))
    reason = ""
    if calibration is None:
        calibration = home / "calibration"
        found, reason = look(calibration, source, chosen, flags)
        if reason not in ("", NONE):  # another's stays
            calibration = folder.with_name(f"{folder.name}-calibration")
            found, _ = look(calibration, source, chosen, flags)
            console.talk(f"{home / 'calibration'}: {reason}, so the one taken is {calibration}")
    else:
        found = load_calibration(calibration)
    info = packed_already(folder, source, chosen, found)
    if found is None:
        refuse_other(calibration, source, chosen)
    if dry_run and info is not None:
        rows = {"model": source.name, "recipe": chosen.name, "folder": f"{folder}, {ALREADY}"}
        show_dry_run("pack", rows | ({"left": f"{format} beside it"} if other else {}), None, {}, {}, json=json)
        return
    if dry_run:
        cut = calibrate.cutter(source, model, weights, seed)
        then = (lambda made: write(made, export.beside(made))) if other else (lambda made: None)
        predict("pack", cut, chosen, folder, device, dtype, then, json=json)
        return
    if info is not None:
        console.talk(f"{folder}: {ALREADY}")
    else:
        there = sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
        wanted = packing_disk(source, chosen) + (packed_bytes(source, chosen) if other else 0)  # much the same again
        require_disk(folder, wanted - there, "the packed model" + (f" and {format} beside it" if other else ""))
        if found is None:
            console.talk(f"{calibration}: {reason or NONE}, so calibrating first")
            calibrate.run(source, chosen, calibration, device, dtype, json=None)
        elif not given:
            console.talk(f"calibration: {calibration}, found")
            calibrate.draw(found, calibration)
        info = pack_model(source, calibration, chosen, folder, device=device, dtype=dtype, progress=console.progress())
    runs.remember_packed(info.folder)
    for warning in info.warnings:
        console.talk(f"warning: {warning}")
    if json:
        console.data_json({"kind": "packed", "model": source.name, "recipe": chosen.name, **asdict(info)})
    else:
        ratio = f"{info.linear_bytes / info.linear_bytes_16bit:.3f}" if info.linear_bytes_16bit else ""
        row = {
            "model": source.name,
            "recipe": chosen.name,
            "4-bit share": f"{100 * info.int4_mac_fraction:.1f}%",
            "linears kept RTN": str(len(info.kept_rtn)),
            "linears / 16-bit": ratio,
            "size": console.human_bytes(info.bytes),
            "folder": str(info.folder),
        }
        console.table("Packed", [row])
    if other:
        export.show(write(info.folder, export.beside(folder)), info.folder, 16, json=json)
    console.talk("next: comet eval --ppl wikitext2")


def packed_already(
    folder: Path, source: "ModelSource", recipe: "Recipe", found: "Calibration | None"
) -> "PackedInfo | None":
    """The summary of what `folder` holds, if it is what would be packed; CometError if it is something else, which is
    known before anything is calibrated."""
    from comet_core.calibrate import calibration_tokens
    from comet_core.calibration import is_of
    from comet_core.finished import Asked, asked_of, look_into
    from comet_core.packed import is_packed
    from comet_core.recipe import TransformSpec

    if found is not None:
        if not is_of(found.model, source, recipe):  # of the --calibration that was given: pack says so
            return None
        return look_into(folder, asked_of(found, recipe))[0]
    model = source.digest() if recipe.transform == TransformSpec() else None
    asked = Asked(recipe, source.name, model, None)
    info, _ = look_into(folder, asked)
    if is_packed(folder):  # it may be the same: the text decides
        info, _ = look_into(folder, replace(asked, data=calibration_tokens(source, recipe)[1]))
    return info


def look(
    folder: Path, source: "ModelSource", recipe: "Recipe", flags: dict[str, Any]
) -> "tuple[Calibration | None, str]":
    """The calibration in a folder, if it is one of those that are asked for; else None, and why not."""
    from comet_core.calibration import calibrate_alike, is_of, load_calibration

    try:
        found = load_calibration(folder)
    except CometError:
        return None, NONE
    if not is_of(found.model, source, recipe):
        return None, "this calibration is of another model"
    if not calibrate_alike(recipe, found.recipe):
        return None, "this calibration is by another recipe of this name"
    if any(value is not None for value in flags.values()) and found.recipe.calibration != recipe.calibration:
        return None, "this calibration has other data, samples, length or seed"
    return found, ""
