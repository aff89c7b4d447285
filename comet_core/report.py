"""`comet report RUN`: one HTML file that tells what was run and what came out; it opens offline, on a phone too.

In: a run folder (calibration/ and packed/) and records. Out: the file, with its pictures inside, and each of its tables
as CSV and markdown when asked for. Every figure comes from the packed folder or a record; none is computed anew.
"""

import base64
import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comet_core.bench_plots import draw_speed_up
from comet_core.experts import any_expert
from comet_core.inspection import inspect_packed
from comet_core.results import Record, latest, markdown, read
from comet_core.whole_files import whole_file, write_text

TEMPLATE = "report.html.j2"
GIB = 1 << 30


@dataclass(frozen=True)
class Table:
    """A titled table of text cells."""

    name: str  # of its files
    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG and what it shows."""

    title: str
    png: bytes

    @property
    def source(self) -> str:
        """As a data address, so that the page needs no other file."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


def find_records(run: Path, extra: Sequence[Path] = ()) -> list[Record]:
    """Records of the run folder, of the folder that holds it, and of `extra` files or folders; each file once."""
    places = [file for folder in (run, run.parent) for file in sorted(folder.glob("*.jsonl"))]
    once = {place.resolve(): place for place in [*places, *extra]}
    return [record for place in once.values() for record in read(place)]


def write_report(run: Path, out: Path, records: Sequence[Record], tables: Path | None = None) -> Path:
    """Write the page to `out`, and its tables into the folder `tables` if given.

    Args:
        run: holds packed/, and calibration/ where the run made it; or is itself a packed folder.
        records: evaluations and benchmarks; those of other models are left out, except kernels'.

    Errors:
        CometError if there is no packed model, or the page cannot be written.
    """
    import jinja2

    packed = run / "packed" if (run / "packed").is_dir() else run
    found = inspect_packed(packed)
    mine = [r for r in records if r.get("model") == found["model"]]
    kernels = [r for r in records if r["kind"] == "bench" and r["op"] == "w4ax_gemm" and (r["speedup"] or 0) > 0]
    page_tables = [
        _perplexity(mine, found["recipe_digest"]),
        _zero_shot(mine),
        _serving(mine),
        _sizes(found),
        _whole_layers(found),
        _layers(found),
        _provenance(found, mine),
    ]
    page_tables = [table for table in page_tables if table.rows]
    pictures = [Picture("Output error and share of 8-bit blocks, by layer", _draw_layers(found))]
    heat_map = run / "calibration" / "outliers.png"
    if heat_map.is_file():
        title = "Channel maxima, in the model's order and permuted: after it outliers stand in the first blocks"
        pictures.append(Picture(title, heat_map.read_bytes()))
    if kernels:
        pictures.append(Picture("Speed-up of the GEMM over bf16", _drawn(kernels)))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template(TEMPLATE).render(found=found, cards=_cards(found, mine), tables=page_tables,
                                                     pictures=pictures)  # fmt: skip
    write_text(out, page)
    if tables is not None:
        _write_tables(tables, page_tables)
    return out


def _write_tables(folder: Path, tables: Sequence[Table]) -> None:
    for table in tables:
        sheet = folder / f"{table.name}.csv"
        with whole_file(sheet) as partial, partial.open("w", newline="", encoding="utf-8") as sink:
            csv.writer(sink).writerows([table.head, *table.rows])
        write_text(folder / f"{table.name}.md", markdown(table.head, table.rows) + "\n")


def _figure(value: float | None, digits: int = 2) -> str:
    return "not finite" if value is None else f"{value:,.{digits}f}" if abs(value) < 1e5 else f"{value:.2e}"


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / (1 << 20):.1f} MiB"


def _cards(found: dict[str, Any], mine: Sequence[Record]) -> list[tuple[str, str]]:
    """The few figures that stand on top."""
    cards = [
        ("4-bit share of multiply-adds", f"{found['int4_mac_fraction']:.1%}"),
        ("linears over 16 bit", f"{found['linear_bytes'] / max(found['linear_bytes_16bit'], 1):.3f}"),
        ("packed size", _size(found["bytes"])),
    ]
    own = [r for r in mine if r.get("metric") == "perplexity" and _is_own(r, found["recipe_digest"])]
    if own:
        cards.insert(0, (f"perplexity, {own[-1]['task']}", _figure(own[-1]["value"])))
    return cards


def _is_own(record: Record, digest: str) -> bool:
    return bool(record["provenance"].get("recipe_digest") == digest)


def _perplexity(mine: Sequence[Record], digest: str) -> Table:
    identity = ("task", "windows", "seq_len", "recipe", "kv_quantized", "metric")
    chosen = latest([r for r in mine if r["kind"] == "eval" and r["metric"] in ("perplexity", "kl", "top1")], identity)
    rows: dict[tuple[Any, ...], dict[str, Record]] = {}
    for r in chosen:
        rows.setdefault(tuple(r[key] for key in identity[:-1]), {})[r["metric"]] = r
    cells = []
    for metrics in sorted(rows.values(), key=_by_text):
        if (first := metrics.get("perplexity")) is None:
            continue
        cells.append(
            [
                first["recipe"] + (" (this run)" if _is_own(first, digest) else ""),
                f"{first['task']}, {first['windows']} x {first['seq_len']:,}",
                _figure(first["value"]),
                _figure(metrics["kl"]["value"], 4) if "kl" in metrics else "",
                f"{100 * (metrics['top1']['value'] or 0):.1f}%" if "top1" in metrics else "",
                "4-bit" if first["kv_quantized"] else "16-bit",
            ]
        )
    head = ["recipe", "text, windows", "perplexity", "KL to 16-bit", "top-1 as 16-bit", "KV"]
    return Table("perplexity", "Perplexity", head, cells)


def _by_text(metrics: dict[str, Record]) -> tuple[str, str, int, float]:
    """Figures of one text stand together, the lowest perplexity first."""
    r = metrics.get("perplexity") or next(iter(metrics.values()))
    return r["task"], str(r["windows"]), r["seq_len"], r["value"] if r["value"] is not None else math.inf


def _zero_shot(mine: Sequence[Record]) -> Table:
    chosen = [r for r in mine if r["kind"] == "eval" and r["metric"].startswith("acc")]
    rows = [
        [r["recipe"], f"{r['task']}, {r['metric']}{_reading(r)}", f"{100 * (r['value'] or 0):.1f}",
         f"{100 * r['stderr']:.1f}" if r.get("stderr") is not None else ""]
        for r in latest(chosen, ("recipe", "task", "metric", "kv_quantized", "kv_open_page", "limit"))
    ]  # fmt: skip
    return Table("zero-shot", "Zero-shot accuracy", ["recipe", "task, metric", "%", "standard error"], rows)


def _reading(record: Record) -> str:
    """What tells two accuracies of one recipe on one task apart."""
    first = f", first {record['limit']}" if record.get("limit") is not None else ""
    return first + (", open page in 4 bit too" if record.get("kv_open_page") == "4bit" else "")


def _serving(mine: Sequence[Record]) -> Table:
    rows = [
        [f"{r['scheme']}, {r['engine']}", f"{r['prompt_tokens']:,}/{r['output_tokens']:,}", str(r["batch"]),
         _figure(r["tokens_per_s"], 0), _figure(r["ttft_ms"], 1), _figure(r["tpot_ms"], 2), _figure(r["memory_gib"], 1)]
        for r in mine
        if r["kind"] == "e2e"
    ]  # fmt: skip
    head = ["scheme, engine", "prompt/output", "batch", "tokens/s", "first token, ms", "a token, ms", "GiB"]
    return Table("serving", "Serving", head, rows)


def _sizes(found: dict[str, Any]) -> Table:
    sixteen, other = found["linear_bytes_16bit"], found["other_bytes"]
    rows = [
        ["linears of the layers", _size(found["linear_bytes"]), _size(sixteen)],
        ["embedding, norms, head", _size(other), _size(other) if found["embedding_bits"] == 16 else ""],
    ]
    return Table("memory", "Memory of the weights", ["part", "packed", "16 bit"], rows)


def _whole_layers(found: dict[str, Any]) -> Table:
    """What packing found of each layer, read back, beside the 16-bit one; nothing where it did not look."""
    rows = [
        [row["layer"], f"{row['cosine']:.4f}", f"{row['error']:.2e}", f"{row['worst_error']:.2e} {row['worst']}"]
        for row in found["layers"]
        if row["cosine"] is not None
    ]
    head = ["layer", "cosine to 16 bit", "relative error", "largest error of a linear"]
    return Table("layers", "Every layer beside its 16-bit original", head, rows)


def _layers(found: dict[str, Any]) -> Table:
    """A row per linear; the experts of a layer share one, with their highest error."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in found["linears"]:
        kinds.setdefault(any_expert(row["linear"]), []).append(row)
    rows = []
    for name, same in kinds.items():
        errors = [row["relative_output_error"] for row in same if row["relative_output_error"] is not None]
        methods = Counter(row["method"] for row in same)
        words = same[0]["method"] if len(same) == 1 else ", ".join(f"{n} {word}" for word, n in methods.items())
        blocks = f"{sum(row['int8_blocks'] for row in same)} of {sum(map(_blocks, same))}"
        channels = f"{same[0]['in']:,} -> {same[0]['out']:,}"
        error = f"{max(errors):.2e}" if errors else ""
        rows.append([name, channels, words, blocks, error, _size(sum(row["bytes"] for row in same))])
    head = ["linear", "channels", "method", "8-bit blocks", "relative output error", "size"]
    return Table("linears", "Every packed linear", head, rows)


def _blocks(row: dict[str, Any]) -> int:
    return int(row["int4_blocks"] + row["int8_blocks"]) or len(row["block_bits"])


def _provenance(found: dict[str, Any], mine: Sequence[Record]) -> Table:
    data = found["calibration"]
    rows = [
        ["model", f"{found['model']} ({found['base']}) {found['note']}"],
        ["recipe", f"{found['recipe']}, digest {found['recipe_digest']}"],
        [
            "calibration",
            f"{data['name']} ({data['origin']}), {data['samples']} x {data['seq_len']}, seed {data['seed']}",
        ],
        ["KV cache", str(found["kv_cache"])],
        ["packed tensors", f"format {found['format_version']}, sha256 over all: {found['sha256']}"],
    ]
    for r in {str(r["provenance"].get("utc")): r for r in mine}.values():
        p = r["provenance"]
        machine = ", ".join(str(p[key]) for key in ("gpu", "cpu", "torch", "transformers") if p.get(key))
        rows.append([f"record of {p.get('utc', '')}", f"{p.get('command', '')} ({machine})"])
    return Table("provenance", "Where the figures come from", ["what", "value"], rows)


def _draw_layers(found: dict[str, Any]) -> bytes:
    """Bars of the 8-bit share and a line of the output error, linear by linear, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = found["linears"]
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(10, 5.5), sharex=True)
    errors = [row["relative_output_error"] or math.nan for row in rows]
    kinds = list(dict.fromkeys(row["linear"].rpartition(".")[2] for row in rows))
    for kind in kinds:
        places = [i for i, row in enumerate(rows) if row["linear"].endswith("." + kind)]
        upper.plot(places, [errors[i] for i in places], marker=".", linewidth=0.8, label=kind)
        shares = [rows[i]["int8_blocks"] / max(_blocks(rows[i]), 1) for i in places]
        lower.bar(places, shares, width=1.0, label=kind)
    upper.set_yscale("log")
    upper.set_ylabel("relative output error")
    upper.legend(fontsize=7, ncols=min(4, len(kinds)))
    lower.set_ylabel("share of 8-bit blocks")
    lower.set_xlabel("linear, first layer to last")
    figure.tight_layout()
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=110)
    pyplot.close(figure)
    return sink.getvalue()


def _drawn(kernels: Sequence[Record]) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return draw_speed_up(kernels, Path(folder) / "speed-up.png").read_bytes()
