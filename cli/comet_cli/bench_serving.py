"""What `comet bench --batch N` measures: the model's linears as kernels, then serving end to end, each as a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comet_cli import console
from comet_cuda.errors import CometError


def measure(
    model: str,
    batches: Sequence[int | str],
    scheme: str,
    loads: Sequence[tuple[int, int]],
    layers: int | None,
    record: Path | None,
    plots: Path | None,
    *,
    json: bool,
) -> None:
    """Print and record kernels and serving of `model`."""
    from comet_core.bench_serving import bench_serving
    from comet_core.results import append
    from comet_core.serving_report import draw_step_parts, draw_throughput
    from comet_core.serving_scheme import SCHEMES, find_scheme
    from comet_core.step_breakdown import table

    names = list(SCHEMES) if scheme == "all" else [name.strip() for name in scheme.split(",")]
    for name in names:
        find_scheme(name)  # an unknown one is an error before minutes of kernels
    found = []

    def keep(one: dict[str, Any]) -> None:
        found.append(one)
        if record is not None:
            append(record, one)
        if json:
            console.data_json(one)

    kernels(model, [size for size in batches if isinstance(size, int)], keep, json=json)
    serving = []
    for one in bench_serving(model, names, batches, loads, layers=layers, parts_at=batches, on_skip=console.talk):  # type: ignore[arg-type]
        serving.append(one)
        keep(one)
        console.talk(f"{one['scheme']}, batch {one['batch']}: {one['tokens_per_s']:,.0f} output tokens/s")
    if not serving:
        raise CometError("nothing could be measured", "the lines above say why; a smaller --batch or --load may fit")
    if not json:
        console.table("Serving: random prompts, static batches", rows_of(serving))
        for one in serving:
            if "step_parts" in one:
                console.data(f"\none decode step, {one['scheme']}, batch {one['batch']}, by kernel:")
                console.data(table(one["step_parts"]))
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for load in loads:
            name = f"throughput-{load[0]}-{load[1]}.png"
            console.talk(f"drew {draw_throughput(serving, serving[0]['model'], load, plots / name)}")
        if any("step_parts" in one for one in serving):
            console.talk(f"drew {draw_step_parts(serving, plots / 'step.png')}")


def kernels(model: str, batches: Sequence[int], keep: Any, *, json: bool) -> None:
    """The GEMM of the model's linears, where the paper's shapes know the model and the batch is a number."""
    from comet_core.bench_kernel import bench_kernel, paper_shapes, summarize

    try:
        shapes = paper_shapes(model)
    except CometError:
        console.talk(f"kernels: recipes/paper/shapes.yaml does not know {model}, so only serving is measured")
        return
    records = []
    for one in bench_kernel(shapes, batches, peers=["cublas_fp8"], progress=console.progress()):
        records.append(one)
        keep(one)
    if not json and records:
        console.table("GEMM over bf16 cuBLAS, cold weights", summarize(records))


def rows_of(records: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Serving records as table rows; ratios are to 16 bit under the same load."""

    def load_of(one: dict[str, Any]) -> tuple[Any, ...]:
        return one["prompt_tokens"], one["output_tokens"], one["batch"]

    base = {load_of(one): one for one in records if one["scheme"] == "16-bit"}
    rows = []
    for one in records:
        same = base.get(load_of(one))
        memory = ", ".join(f"{kind} {size:.1f}" for kind, size in one["memory"].items())
        rows.append(
            {
                "scheme": one["scheme"],
                "batch": f"{one['batch']}" + (", most that fit" if one["batch_is_largest"] else ""),
                "tokens": f"{one['prompt_tokens']}/{one['output_tokens']}",
                "output tokens/s": f"{one['tokens_per_s']:,.0f}",
                "over 16-bit": f"{one['tokens_per_s'] / same['tokens_per_s']:.2f}" if same else "",
                "prefill tokens/s": f"{one['prefill_tokens_per_s']:,.0f}",
                "decode tokens/s": f"{one['decode_tokens_per_s']:,.0f}",
                "first token, ms": f"{one['ttft_ms']:,.1f}",
                "a token, ms": f"{one['tpot_ms']:.2f}",
                "GiB": memory,
            }
        )
    return rows
