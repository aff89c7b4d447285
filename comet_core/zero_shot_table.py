"""Zero-shot records -> a table: one row per model, recipe and reading of the KV cache, a column per task.

Figures are accuracies in percent (acc, the metric of the paper's table 2; acc_norm stays in the records), with the
paired drop from 16-bit and its standard error behind the average.
"""

import json
from collections.abc import Iterable
from typing import Any

from comet_core.results import SIXTEEN_BIT, latest, markdown
from comet_core.zero_shot_tasks import LOCAL_TASKS

ROW = ("model", "limit", "recipe", "kv_quantized", "kv_open_page")


def zero_shot_table(records: Iterable[dict[str, Any]]) -> str:
    """Markdown. 16-bit comes first within a model, then by falling average; below stands what each base model is."""
    chosen = [r for r in records if r["kind"] == "eval" and r["metric"] == "acc" and "kv_open_page" in r]
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for record in latest(chosen, (*ROW, "task")):
        rows.setdefault(json.dumps([record[key] for key in ROW]), {})[record["task"]] = record
    columns = [task for task in LOCAL_TASKS if any(task in row for row in rows.values())]
    columns += sorted({task for row in rows.values() for task in row} - {*columns, "average"})
    lines, notes = [], []
    for row in sorted(rows.values(), key=_place):
        head = next(iter(row.values()))
        note = f"{head['model']}: {head['protocol']['base']}."
        if head["protocol"]["base"] != SIXTEEN_BIT and note not in notes:
            notes.append(note)
        average = row.get("average")
        documents = "all" if head["limit"] is None else f"first {head['limit']}"
        lines.append(
            [
                head["model"],
                head["recipe"],
                _cache(head),
                documents,
                *(f"{100 * row[task]['value']:.1f}" if task in row else "" for task in columns),
                "" if average is None else f"{100 * average['value']:.2f}",
                "" if average is None or "drop" not in average else _with_error(average),
            ]
        )
    header = ["model", "recipe", "KV", "documents", *columns, "average", "drop from 16-bit, paired"]
    return "\n\n".join([markdown(header, lines), *notes])


def _place(row: dict[str, dict[str, Any]]) -> tuple[Any, ...]:
    head = next(iter(row.values()))
    average = row["average"]["value"] if "average" in row else 0.0
    return head["model"], str(head["limit"]), head["recipe"] != "fp16", -average


def _cache(record: dict[str, Any]) -> str:
    if not record["kv_quantized"]:
        return "16-bit"
    return "4-bit" if record["kv_open_page"] == "16bit" else "4-bit, open page too"


def _with_error(record: dict[str, Any]) -> str:
    return f"{100 * record['drop']:.2f} ± {100 * record['drop_stderr']:.2f}"
