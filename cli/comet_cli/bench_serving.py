"""What `comet bench --batch N` measures: the model's linears and decode attention as kernels, then serving end to end,
each as a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comet_cli import console
from comet_cli.doctor import op_paths
from comet_cli.dry_run import show
from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from comet_core.llama_shape import LlamaShape
    from comet_core.serving_scheme import Scheme


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
    from comet_core.step_breakdown import table

    names = [one.name for one in schemes_of(scheme)]  # an unknown one is an error before minutes of kernels
    found = []

    def keep(one: dict[str, Any]) -> None:
        found.append(one)
        if record is not None:
            append(record, one)
        if json:
            console.data_json(one)

    numbers = [size for size in batches if isinstance(size, int)]
    kernels(model, numbers, keep, json=json)
    attention(model, numbers, loads, keep, json=json)
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


def schemes_of(text: str) -> "list[Scheme]":
    """ "16-bit,W4A4KV4" or "all" -> schemes."""
    from comet_core.serving_scheme import SCHEMES, find_scheme

    return [find_scheme(name.strip()) for name in text.split(",")] if text != "all" else list(SCHEMES.values())


def check(
    model: str,
    batches: Sequence[int | str],
    scheme: str,
    loads: Sequence[tuple[int, int]],
    layers: int | None,
    *,
    json: bool,
) -> None:
    """Print what would be measured, and the GPU memory that it needs beside what is free where a GPU is here.

    Errors:
        CometError where this GPU could run none of it.
    """
    import torch

    from comet_core.serving_scheme import plan_serving

    shape = model_shape(model, layers)
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    plans = plan_serving(shape, schemes_of(scheme), batches, loads, free)
    rows = [
        {
            "scheme": one["scheme"],
            "tokens": one["tokens"],
            "batch": str(one["batch"]),
            "GPU memory": console.human_bytes(one["bytes"]) if one["bytes"] else "as much as is free",
            "here": {None: "no GPU", True: "fits", False: "does not fit"}[one["fits"]],
        }
        for one in plans
    ]
    facts = {
        "model": f"{shape.name}, {shape.layers} layers",
        "GPU": "none" if free is None else f"{torch.cuda.get_device_name()}, {console.human_bytes(free)} are free",
    }
    paths = op_paths()
    tables = {"Memory, from shapes": rows, "What would run it here": paths}
    show("bench", facts, None, {"plans": plans, "paths": paths}, tables, json=json)
    if free is not None and not any(one["fits"] for one in plans):
        raise CometError(
            f"{shape.name}: nothing of this fits in the {console.human_bytes(free)} that are free on the GPU",
            "take a smaller --batch or --load, another --scheme, or fewer --layers",
        )


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


def attention(model: str, batches: Sequence[int], loads: Sequence[tuple[int, int]], keep: Any, *, json: bool) -> None:
    """Decode attention with the model's heads over the loads' contexts, where the GPU kernels take them."""
    import torch

    from comet_core.bench_attention import PAGE, bench_attention, row_of
    from comet_cuda.kv4_append_cuda import HEAD_DIMS

    shape = model_shape(model, None)
    if shape.head_dim not in HEAD_DIMS:
        console.talk(f"attention: heads of {shape.head_dim} channels have no 4-bit kernel, so only serving is measured")
        return
    contexts = sorted({max(2 * PAGE, prompt + output) for prompt, output in loads})
    rows = []
    for batch in batches:
        try:
            for one in bench_attention([(shape.heads, shape.kv_heads, shape.head_dim)], [batch], contexts):
                keep(one)
                rows.append(row_of(one))
        except torch.OutOfMemoryError:
            console.talk(f"attention, batch {batch}: its keys and values in 4 and in 16 bit do not fit at once")
    if not json and rows:
        console.table("Decode attention over the 4-bit cache, beside the best one in 16 bit", rows)


def model_shape(model: str, layers: int | None) -> "LlamaShape":
    """Sizes of a packed folder or of any model, from its configuration alone."""
    from comet_core.llama_shape import shape_of_config
    from comet_core.model_source import resolve_model
    from comet_core.packed import is_packed, packed_config

    if is_packed(Path(model)):
        return shape_of_config(model, packed_config(Path(model)))
    source = resolve_model(model, weights="random", layers=layers)
    return shape_of_config(source.name, source.config)


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
