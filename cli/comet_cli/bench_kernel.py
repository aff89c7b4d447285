"""`comet bench kernel`: the W4Ax GEMM beside bf16 cuBLAS and other kernels; records, a table, pictures."""

from pathlib import Path
from typing import Annotated

import typer

from comet_cli import console, options
from comet_cli.bench import batch_sizes, require_gpu
from comet_cli.doctor import op_paths
from comet_cli.dry_run import JustCheck, has_integer_scales, show
from comet_cuda.errors import CometError

BATCHES = "1,16,64,256,1024,4096"


def kernel(
    shape: Annotated[
        str, typer.Option(help="A model whose linears are measured, or all.", metavar="MODEL|all")
    ] = "llama-7b",
    n: Annotated[int | None, typer.Option("--n", help="Out-channels of one linear, with --k.", min=1)] = None,
    k: Annotated[int | None, typer.Option("--k", help="In-channels of one linear, with --n.", min=1)] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.", metavar="M,M,...")] = BATCHES,
    recipe: Annotated[
        str, typer.Option(help="Whose format is measured.", metavar="NAME|FILE")
    ] = options.DEFAULT_RECIPE,
    peer: Annotated[
        str, typer.Option(help="Further kernels, separated by commas, or all.", metavar="NAME,...|all")
    ] = "cublas_fp8",
    ablation: Annotated[
        str, typer.Option(help="Also with one mechanism off: pipeline, schedule, conversion.", metavar="NAME,...")
    ] = "",
    record: Annotated[Path | None, typer.Option(help="Append the records to this .jsonl file.", metavar="FILE")] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Draw speed-up and roofline into this folder.", metavar="DIR")
    ] = None,
    dry_run: JustCheck = False,
    json: options.Json = False,
) -> None:
    """Time the GEMM of linear layers beside other kernels.

    Example: comet bench kernel --shape llama-3-8b --batch 1,16,256
    """
    batches = batch_sizes(batch)
    options.check_record_file(record)
    if (n is None) != (k is None):
        raise CometError("--n and --k belong together", "For example --n 4096 --k 11008.")
    if not dry_run:
        require_gpu()
    from comet_core.bench_kernel import Shape, bench_kernel, check_asked, paper_shapes, summarize
    from comet_core.bench_peers import BASELINE, PEERS
    from comet_core.results import append

    shapes = [Shape(n, k)] if n and k else paper_shapes(None if shape == "all" else shape)
    peers = [name for name in PEERS if name != BASELINE] if peer == "all" else [p for p in peer.split(",") if p]
    ablations = [name for name in ablation.split(",") if name]
    if dry_run:
        chosen = check_asked(recipe, peers, ablations)
        lacking = {name: PEERS[name].missing() for name in peers}
        rows = {
            "linears": f"{len(shapes)} shapes, N x K from {min(s.n * s.k for s in shapes):,} weights",
            "batches": ", ".join(map(str, batches)),
            "format": f"of recipe {chosen.name}",
            "beside it": ", ".join([BASELINE, *(name for name, why in lacking.items() if not why)]),
            "left out": "; ".join(f"{name}: {why}" for name, why in lacking.items() if why) or "nothing",
            "timings": str(len(shapes) * len(batches) * (3 + len(ablations) + len(peers))),
        }
        paths = op_paths(integer=has_integer_scales(chosen))
        show("bench kernel", rows, None, {"paths": paths}, {"What would be timed here": paths}, json=json)
        require_gpu()
        return
    records = []
    for found in bench_kernel(
        shapes, batches, recipe=recipe, peers=peers, ablations=ablations, progress=console.progress()
    ):
        records.append(found)
        if record is not None:
            append(record, found)
        if json:
            console.data_json(found)
    if not json:
        console.table(f"over {BASELINE}, geometric means; cold weights, CUDA graphs", summarize(records))
    if plots is not None:
        from comet_core.bench_plots import draw_roofline, draw_speed_up

        plots.mkdir(parents=True, exist_ok=True)
        for path in (draw_speed_up(records, plots / "speed-up.png"), draw_roofline(records, plots / "roofline.png")):
            console.talk(f"drew {path}")
