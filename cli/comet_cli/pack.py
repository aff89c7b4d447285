"""`comet pack MODEL`: model, calibration and recipe in, a packed Hugging Face folder out, layer by layer, resumable."""

from pathlib import Path
from typing import Annotated, Any

import typer

from comet_cli import calibrate, console, options, runs
from comet_cuda.errors import CometError


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
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Quantize MODEL into a folder of packed weights.

    Without a calibration it makes one first. Example: comet pack smollm2-135m
    """
    if calibration is not None and not calibration.is_dir():
        raise CometError(f"--calibration {calibration} is no folder", f"Make it: comet calibrate {model}")
    flags: dict[str, Any] = {"data": data, "samples": samples, "seq_len": seq_len, "seed": seed}
    source, chosen = calibrate.prepare(model, recipe, weights, layers, **flags)
    home = calibrate.default_folder(source, chosen, layers)
    torch_choice = options.use(device, dtype, threads)
    if calibration is None:
        calibration = home / "calibration"
        if (calibration / "manifest.json").exists():
            console.talk(f"calibration: {calibration}, found")
        else:
            console.talk(f"no calibration in {calibration}: calibrating first")
            calibrate.run(source, chosen, calibration, torch_choice, json=False)
    folder = out or home / "packed"
    from comet_core.pack import pack as pack_model

    info = pack_model(
        source, calibration, chosen, folder, device=torch_choice[0], dtype=torch_choice[1], progress=console.progress()
    )
    runs.remember_packed(info.folder)
    for warning in info.warnings:
        console.talk(f"warning: {warning}")
    result = {
        "model": source.name,
        "recipe": chosen.name,
        "folder": str(info.folder),
        "bytes": info.bytes,
        "int4_mac_fraction": info.int4_mac_fraction,
        "kept_rtn": info.kept_rtn,
    }
    if json:
        console.data_json({"kind": "packed", **result, "warnings": list(info.warnings)})
    else:
        shown = {
            **result,
            "size": console.human_bytes(info.bytes),
            "4-bit share": f"{100 * info.int4_mac_fraction:.1f}%",
            "kept RTN": len(info.kept_rtn) if isinstance(info.kept_rtn, list | tuple) else info.kept_rtn,
        }
        names = ("model", "recipe", "4-bit share", "kept RTN", "size", "folder")
        console.table("Packed", [{name: shown[name] for name in names}])
    console.talk("next: comet eval --ppl wikitext2")
