"""`comet eval [MODEL]`: perplexity, zero-shot accuracy, a prompt continued; beside the 16-bit model, with protocol."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from comet_cli import console, options, runs
from comet_cli.dry_run import DryRun, dry_run_eval
from comet_cuda.errors import CometError

Tasks = Annotated[
    str | None,
    typer.Option(
        help="Zero-shot tasks of lm-eval: piqa, arc_easy, arc_challenge, hellaswag, winogrande, boolq, lambada_openai.",
        metavar="A,B,...",
    ),
]
OpenPage = Annotated[
    str,
    typer.Option(
        help="4bit: --tasks also reads the KV page that is being filled in 4 bit; short prompts read no other.",
        metavar="16bit|4bit",
    ),
]
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
    tasks: Tasks = None,
    limit: Annotated[
        int | None, typer.Option(help="Only the first N documents of each task.", min=1, metavar="N")
    ] = None,
    kv_open_page: OpenPage = "16bit",
    kv16: Annotated[bool, typer.Option("--kv16", help="--ppl with the KV cache left in 16 bit.")] = False,
    prompt: Prompt = None,
    tokens: Annotated[int, typer.Option(help="How many tokens --prompt adds.", min=1, metavar="N")] = 40,
    compare: Annotated[bool, typer.Option(help="Also run the 16-bit model that a packed one was made from.")] = True,
    record: Annotated[Path | None, typer.Option(help="Append the records to this .jsonl file.", metavar="FILE")] = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    threads: options.Threads = None,
    dry_run: DryRun = False,
    json: options.Json = False,
) -> None:
    """Measure what quantization costs in accuracy.

    Example: comet eval --ppl wikitext2
    """
    options.tidy_heap()
    options.check_record_file(record)
    if model is None:
        model = str(runs.last_packed())
        console.talk(f"model: {model}, the last one packed from this folder")
    if ppl is None and prompt is None and tasks is None:
        ppl = "wikitext2"
    if kv16 and ppl is None:
        raise CometError("--kv16 is about the perplexity of a text, and none is asked for", "Add --ppl wikitext2.")
    options.set_threads(threads)
    if dry_run:
        how = {"compare": compare, "kv16": kv16, "json": json}
        dry_run_eval(model, ppl, windows, seq_len, tasks, limit, kv_open_page, prompt, device, dtype, **how)
        return
    if ppl is not None:
        if tasks is not None:  # what is wrong with the second half is said before the first
            from comet_core.zero_shot import load_tasks
            from comet_core.zero_shot_tasks import parse_tasks

            load_tasks(parse_tasks(tasks), kv_open_page)
        measure(model, ppl, windows, seq_len, device, dtype, compare=compare, kv16=kv16, record=record, json=json)
    if tasks is not None:
        ask(model, tasks, limit, kv_open_page, device, dtype, compare=compare, record=record, json=json)
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
    kv16: bool,
    record: Path | None,
    json: bool,
) -> None:
    """Perplexity of `model` on `text`: records kept in a file, shown as a table or as JSON lines."""
    from comet_core.evaluate import evaluate_perplexity

    records = evaluate_perplexity(
        model,
        data=text,
        windows=windows,
        seq_len=seq_len,
        device=device,
        dtype=dtype,
        compare=compare,
        kv16=kv16,
        progress=console.progress(),
    )
    first = records[0]
    write(records, record)
    show(records, record, f"{first['model']} on {first['task']}", table_rows(records), json=json)


def ask(
    model: str,
    tasks: str,
    limit: int | None,
    open_page: str,
    device: str,
    dtype: str,
    *,
    compare: bool,
    record: Path | None,
    json: bool,
) -> None:
    """Zero-shot accuracy of `model` on lm-eval's tasks."""
    from comet_core.zero_shot import evaluate_zero_shot
    from comet_core.zero_shot_tasks import parse_tasks

    records = evaluate_zero_shot(
        model,
        tasks=parse_tasks(tasks),
        limit=limit,
        open_page=open_page,
        device=device,
        dtype=dtype,
        compare=compare,
        progress=console.progress(),
        known=lambda found: write(found, record),
    )
    show(records, record, f"{records[0]['model']}, zero-shot", task_rows(records), json=json)


def write(records: Sequence[dict[str, Any]], file: Path | None) -> None:
    """Append records to a file."""
    from comet_core.results import append

    for one in records:
        append(file or runs.RUNS / "eval.jsonl", one)


def show(
    records: Sequence[dict[str, Any]],
    file: Path | None,
    title: str,
    rows: Sequence[dict[str, str]],
    *,
    json: bool,
) -> None:
    """Records as a table or as JSON lines, and where they are kept."""
    if json:
        for one in records:
            console.data_json(one)
    else:
        console.table(title, rows)
        console.data(protocol_line(records[0]["protocol"]))
    console.talk(f"records: {file or runs.RUNS / 'eval.jsonl'}")


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


def task_rows(records: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """One row per task, recipe and metric; percent, with one standard error."""
    rows = []
    for one in records:
        kv = (
            "16-bit"
            if not one["kv_quantized"]
            else "4-bit"
            if one["kv_open_page"] == "16bit"
            else "4-bit, open page too"
        )
        drop = f"{100 * one['drop']:+.2f} +- {100 * one['drop_stderr']:.2f}" if "drop" in one else ""
        rows.append(
            {
                "task": one["task"],
                "recipe": one["recipe"],
                "metric": one["metric"],
                "%": f"{100 * one['value']:.2f} +- {100 * one['stderr']:.2f}",
                "16-bit minus this, paired": drop,
                "documents": str(one["windows"]),
                "KV": kv,
            }
        )
    return rows


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
