"""`comet eval [MODEL]`: perplexity beside the 16-bit model's, a prompt continued; every number with its protocol."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from comet_cli import console, options, runs
from comet_cuda.errors import CometError

Prompt = Annotated[str | None, typer.Option(help="Continue this text.", metavar="TEXT")]


def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(help="A packed folder or any model; the last packed one if not given.", metavar="PACKED|MODEL"),
    ] = None,
    ppl: Annotated[
        str | None,
        typer.Option(help="Perplexity on this text: wikitext2, c4, pydoc, a file, a hub id.", metavar="NAME|FILE"),
    ] = None,
    windows: Annotated[int | None, typer.Option(help="Only the first N windows.", min=1, metavar="N")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens a window.", min=2, metavar="L")] = 2048,
    prompt: Prompt = None,
    tokens: Annotated[int, typer.Option(help="How many tokens --prompt adds.", min=1, metavar="N")] = 40,
    compare: Annotated[bool, typer.Option(help="Also run the 16-bit model that a packed one was made from.")] = True,
    record: Annotated[Path | None, typer.Option(help="Append the records to this .jsonl file.", metavar="FILE")] = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Measure what quantization costs.

    Example: comet eval --ppl wikitext2
    """
    if record is not None and record.suffix != ".jsonl":
        raise CometError(f"--record {record}: records go to a file that ends in .jsonl", f"--record {record}.jsonl")
    if model is None:
        model = str(runs.last_packed())
        console.talk(f"model: {model}, the last one packed from this folder")
    if ppl is None and prompt is None:
        ppl = "wikitext2"
    options.set_threads(threads)
    if ppl is not None:
        measure(model, ppl, windows, seq_len, device, dtype, compare=compare, record=record, json=json)
    if prompt is not None:
        from comet_core.evaluate import continue_prompt

        text = continue_prompt(model, prompt, tokens, device, dtype)
        if json:
            console.data_json({"kind": "text", "model": model, "prompt": prompt, "text": text})
        else:
            console.data(f"{prompt}{text}")


def measure(
    model: str,
    text: str,
    windows: int | None,
    seq_len: int,
    device: str,
    dtype: str,
    *,
    compare: bool,
    record: Path | None,
    json: bool,
) -> None:
    """Perplexity of `model` on `text`: records kept in a file, shown as a table or as JSON lines."""
    from comet_core.evaluate import evaluate_perplexity
    from comet_core.results import append

    records = evaluate_perplexity(
        model,
        data=text,
        windows=windows,
        seq_len=seq_len,
        device=device,
        dtype=dtype,
        compare=compare,
        progress=console.progress(),
    )
    file = record or runs.RUNS / "eval.jsonl"
    for one in records:
        append(file, one)
    if json:
        for one in records:
            console.data_json(one)
    else:
        first = records[0]
        console.table(f"{first['model']} on {first['task']}", table_rows(records))
        console.data(protocol_line(first["protocol"]))
    console.talk(f"records: {file}")


def table_rows(records: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """One row per recipe and KV choice, in the order of the records, a column for each metric."""
    rows: dict[tuple[str, bool], dict[str, str]] = {}
    for one in records:
        blank = {"recipe": one["recipe"], "perplexity": "", "KL": "", "top-1": "", "4-bit share": "", "KV": ""}
        row = rows.setdefault((one["recipe"], one["kv_quantized"]), blank)
        row["KV"] = "4-bit" if one["kv_quantized"] else "16-bit"
        if one["int4_mac_fraction"] is not None:
            row["4-bit share"] = f"{100 * one['int4_mac_fraction']:.1f}%"
        name, shown = SHOWN[one["metric"]]
        row[name] = "not finite" if one["value"] is None else shown.format(one["value"])
    return list(rows.values())


SHOWN = {  # metric -> column and format
    "perplexity": ("perplexity", "{:,.3f}"),
    "kl": ("KL", "{:.5f}"),
    "top1": ("top-1", "{:.2%}"),
}


def protocol_line(protocol: Any) -> str:
    """How the number was made, on one line."""
    if isinstance(protocol, dict):
        return "protocol: " + "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in protocol.items())
    return f"protocol: {protocol}"
