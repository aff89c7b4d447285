"""`comet calibrate MODEL`: model and recipe in, a calibration folder (statistics, outlier report, heat map) out."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comet_cli import console, options, runs
from comet_cli.dry_run import DryRun
from comet_cli.dry_run import dry_run as predict

if TYPE_CHECKING:
    from comet_core.calibration import Calibration
    from comet_core.model_source import ModelSource
    from comet_core.recipe import Recipe

PICTURE = "outliers.png"
Data = Annotated[
    str | None,
    typer.Option(help="Calibration text: wikitext2, c4, pydoc, a .txt or .jsonl file, a hub id.", metavar="NAME|FILE"),
]
Samples = Annotated[int | None, typer.Option(help="Calibration windows (recipe: 128).", min=1, metavar="N")]
SeqLen = Annotated[int | None, typer.Option(help="Tokens a window (recipe: 2048).", min=2, metavar="L")]
Seed = Annotated[int | None, typer.Option(help="Which windows are drawn (recipe: 0).", min=0, metavar="S")]


def calibrate(
    model: options.Model,
    recipe: options.Recipe = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result.", metavar="DIR")] = None,
    data: Data = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    seed: Seed = None,
    weights: options.Weights = "real",
    layers: options.Layers = None,
    device: options.Devices = "auto",
    dtype: options.DType = "auto",
    threads: options.Threads = None,
    dry_run: DryRun = False,
    json: options.Json = False,
) -> None:
    """Record which channels of MODEL hold outliers.

    Text is run through it; the report and a heat map show them before and after permutation.

    Example: comet calibrate smollm2-135m --samples 32 --seq-len 512
    """
    options.tidy_heap()
    flags = {"data": data, "samples": samples, "seq_len": seq_len, "seed": seed}
    source, chosen = prepare(model, recipe, weights, layers, device, **flags)
    folder = out or default_folder(source, chosen, layers) / "calibration"
    options.set_threads(threads)
    from comet_core.calibration import refuse_other

    refuse_other(folder, source, chosen)
    if dry_run:
        predict("calibrate", cutter(source, model, weights, seed), chosen, folder, device, dtype, json=json)
        return
    run(source, chosen, folder, device, dtype, json=json)


def prepare(
    model: str, recipe: str | None, weights: str, layers: int | None, device: str, **calibration: Any
) -> "tuple[ModelSource, Recipe]":
    """Resolve what was typed into a model and a recipe; cheap errors come before torch is loaded."""
    options.check_weights(weights)
    from comet_core.recipe import load_recipe, with_calibration

    chosen = with_calibration(load_recipe(recipe or options.DEFAULT_RECIPE), **calibration)
    from comet_core.model_source import resolve_model

    source = resolve_model(model, weights=weights, layers=layers, seed=calibration.get("seed") or 0)
    if source.note:
        console.talk(f"{source.name}: {source.note}")
    if recipe is None:
        from comet_core.preflight import default_recipe

        name, why = default_recipe(source, device)
        chosen = with_calibration(load_recipe(name), **calibration)
        console.talk(f"recipe: {name} ({why})")
    return source, chosen


def cutter(source: "ModelSource", model: str, weights: str, seed: int | None) -> "Callable[[int], ModelSource]":
    """Number of layers -> the model cut to them; 0 is `source` itself."""
    from comet_core.model_source import resolve_model

    return lambda layers: resolve_model(model, weights=weights, layers=layers, seed=seed or 0) if layers else source


def default_folder(source: "ModelSource", recipe: "Recipe", layers: int | None) -> Path:
    """The run folder of a resolved model."""
    return runs.run_folder(source.name, recipe.name, random=source.random_seed is not None, layers=layers)


def run(source: "ModelSource", recipe: "Recipe", folder: Path, device: str, dtype: str, *, json: bool | None) -> None:
    """Calibrate into `folder` and report as JSON, as a table, or (None) not at all; `comet pack` does the last."""
    from comet_core.calibrate import calibrate as calibrate_model
    from comet_core.outliers import ready_to_draw

    ready_to_draw()
    (folder / PICTURE).unlink(missing_ok=True)  # of an earlier calibration
    found = calibrate_model(source, recipe, folder, device=device, dtype=dtype, progress=console.progress())
    picture = draw(found, folder)
    rows = [{"layer": group.layer, **group.report} for group in found.groups]
    if json:
        result = {"kind": "calibration", "model": source.name, "recipe": recipe.name, "folder": str(folder)}
        share = {"int4_mac_fraction": found.int4_mac_fraction}
        console.data_json({**result, **share, "data": found.data, "heat_map": str(picture), "outliers": rows})
    elif json is False:
        console.table("Outliers, and the blocks that hold one before and after permutation", report(rows))
        console.data(f"4-bit share of multiply-adds: {100 * found.int4_mac_fraction:.1f}%")
    console.talk(f"calibration: {folder}\nheat map:    {picture}")


SHARES = ("outlier_features", "outlier_channels", "consistency", "blocks_before", "blocks_after")


def by_layer(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports with all experts of a layer in one row: their highest peak, their mean shares."""
    from comet_core.experts import any_expert

    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["layer"], any_expert(row["group"])), []).append(row)
    return [
        {**same[0], "group": group, "peak": max(row["peak"] for row in same)}
        | {share: sum(row[share] for row in same) / len(same) for share in SHARES}
        for (_, group), same in found.items()
    ]


def draw(found: "Calibration", folder: Path) -> Path:
    """The heat map in the calibration's folder, drawn unless it is there."""
    from comet_core.calibration import heat_map

    if not (folder / PICTURE).exists():
        heat_map(found, folder / PICTURE)
    return folder / PICTURE


def report(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Outlier reports as table rows, shares in percent."""
    return [
        {
            "layer": str(row["layer"]),
            "input of": ("experts' " if "*" in row["group"] else "") + str(row["group"]).rpartition(".")[2],
            "channels": str(row["channels"]),
            "peak / median": f"{row['peak']:,.1f}",
            **{share.replace("_", " "): f"{100 * row[share]:.2f}%" for share in SHARES},
        }
        for row in by_layer(rows)
    ]
