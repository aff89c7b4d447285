"""The paper's performance figures beside ours: "paper (A100) | here | ratio", made from records.

recipes/paper/speed.yaml says which records make which figure. `missing` lists what no record covers yet, `measure` runs
it on this GPU; the table only ever reads records, so figures measured elsewhere or earlier count as well.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from comet_core.bench_kernel import Shape, bench_kernel, paper_shapes
from comet_core.bench_serving import bench_serving
from comet_core.model_source import alias_shapes
from comet_core.progress import Progress
from comet_core.recipe import recipe_folder
from comet_core.results import Record, markdown
from comet_core.whole_files import whole_file, write_text
from comet_cuda.errors import CometError

OURS = "w4ax_gemm"


@dataclass(frozen=True)
class Figure:
    """One published figure and how it is measured here."""

    name: str
    published: float
    kernel: dict[str, Any] | None
    serving: dict[str, Any] | None
    differs: str


def load_figures(paper: Path) -> tuple[list[Figure], dict[str, Any]]:
    """Figures of speed.yaml with the values that `paper` (results/paper/speed.csv) gives them, and the kernel section.

    Errors:
        CometError if a figure's row is not in the file.
    """
    import yaml

    content = yaml.safe_load((recipe_folder() / "paper" / "speed.yaml").read_text(encoding="utf-8"))
    with paper.open(encoding="utf-8") as source:
        rows = list(csv.DictReader(source))
    figures = []
    for item in content["figures"]:
        part, what, condition, *against = item["paper"]
        found = [
            row
            for row in rows
            if (row["part"], row["what"], row["condition"]) == (part, what, condition)
            and (not against or row["against"] == against[0])
        ]
        if len(found) != 1:
            raise CometError(f"{item['name']}: {len(found)} rows of {paper} are {item['paper']}", "see speed.yaml")
        figures.append(
            Figure(
                item["name"], float(found[0]["value"]), item.get("kernel"), item.get("serving"), item.get("differs", "")
            )
        )
    return figures, content["kernel"]


def kernel_shapes(models: Sequence[str]) -> list[Shape]:
    """Distinct linears of these models."""
    found = {(shape.n, shape.k): shape for model in models for shape in paper_shapes(model)}
    return list(found.values())


def value_of(figure: Figure, records: Sequence[Record], section: dict[str, Any]) -> float | None:
    """The figure from records; None if one is missing."""
    if figure.kernel is not None:
        ratios = [
            _kernel_ratio(records, shape, m, figure.kernel.get("ablation"), section["int4_share"])
            for shape in kernel_shapes(section["models"])
            for m in figure.kernel["batches"]
        ]
        known = [ratio for ratio in ratios if ratio is not None]
        return geometric_mean(known) if known and len(known) == len(ratios) else None
    assert figure.serving is not None
    rates = [_rate(records, figure.serving, scheme) for scheme in figure.serving["schemes"]]
    return None if None in rates else rates[0] / rates[1]  # type: ignore[operator]


def _kernel_ratio(
    records: Sequence[Record], shape: Shape, m: int, ablation: str | None, int4_share: float
) -> float | None:
    """Speed-up over the baseline, or with an ablation how much slower the kernel is without it."""

    def latest(wanted: str | None) -> Record | None:
        found = [
            r
            for r in records
            if r["kind"] == "bench"
            and r["op"] == "w4ax_gemm"
            and r["path"].startswith(OURS)
            and (r["n"], r["k"], r["m"], r["ablation"]) == (shape.n, shape.k, m, wanted)
            and not r["includes_quantize"]
            and abs(r["int4_fraction"] - int4_share) < 0.06
        ]
        return found[-1] if found else None

    whole = latest(None)
    if ablation is None:
        return None if whole is None else whole["speedup"]
    without = latest(ablation)
    return None if whole is None or without is None else without["median_us"] / whole["median_us"]


def _rate(records: Sequence[Record], wanted: dict[str, Any], scheme: str) -> float | None:
    found = [
        r["tokens_per_s"]
        for r in records
        if r["kind"] == "e2e"
        and (r["model"], r["scheme"], r["engine"]) == (wanted["model"], scheme, "comet")
        and [r["prompt_tokens"], r["output_tokens"]] == wanted["load"]
        and r.get("layers") in (None, alias_shapes(wanted["model"])["num_hidden_layers"])  # whole models only
        and (r.get("batch_is_largest") if wanted["batch"] == "max" else r["batch"] == wanted["batch"])
    ]
    return found[-1] if found else None


def measure(records: Sequence[Record], paper: Path, progress: Progress) -> Iterator[Record]:
    """Run what no record covers yet, on this GPU; yields records as they come."""
    figures, section = load_figures(paper)
    lacking = [figure for figure in figures if value_of(figure, records, section) is None]
    kernels = [figure.kernel for figure in lacking if figure.kernel is not None]
    if kernels:
        batches = sorted({m for kernel in kernels for m in kernel["batches"]})
        ablations = sorted({kernel["ablation"] for kernel in kernels if "ablation" in kernel})
        yield from bench_kernel(
            kernel_shapes(section["models"]),
            batches,
            int4_share=section["int4_share"],
            ablations=ablations,
            progress=progress,
        )
    runs = {
        (wanted["model"], scheme, tuple(wanted["load"]), wanted["batch"]): None
        for wanted in (figure.serving for figure in lacking if figure.serving is not None)
        for scheme in wanted["schemes"]
        if _rate(records, wanted, scheme) is None
    }
    for model, scheme, load, batch in runs:
        yield from bench_serving(model, [scheme], [batch], [(load[0], load[1])], parts_at=(), on_skip=progress.log)


def speed_table(records: Sequence[Record], paper: Path) -> tuple[list[str], list[list[str]]]:
    """Head and rows: figure, paper, here, ratio, what differs."""
    figures, section = load_figures(paper)
    gpus = sorted({str(r["provenance"].get("gpu")) for r in records if r["kind"] in ("bench", "e2e")})
    rows = []
    for figure in figures:
        value = value_of(figure, records, section)
        rows.append(
            [
                figure.name,
                f"{figure.published:.2f}",
                "not measured" if value is None else f"{value:.2f}",
                "" if value is None else f"{value / figure.published:.2f}",
                figure.differs,
            ]
        )
    return ["figure", "paper (A100-80G)", f"here ({', '.join(gpus) or 'no GPU'})", "here / paper", "what differs"], rows


def write_speed(records: Sequence[Record], paper: Path, out: Path) -> list[Path]:
    """Write the table as markdown and CSV into the folder `out`; returns the files."""
    head, rows = speed_table(records, paper)
    page, sheet = out / "speed.md", out / "speed.csv"
    write_text(page, markdown(head, rows) + "\n")
    with whole_file(sheet) as partial, partial.open("w", newline="", encoding="utf-8") as sink:
        csv.writer(sink).writerows([head, *rows])
    return [page, sheet]
