"""`comet demo`: the whole road on a small real model, with the public commands, ending in one table.

Each step is the command a user would type, run as a process of its own; only its JSON lines are read, and kept until
the table is printed, so that a demo that was stopped goes on. The packed model of the default recipe is made last, so
that `comet eval --ppl wikitext2` afterwards means that one.
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from comet_cli import console, fetch, runs
from comet_cli.evaluate import protocol_line
from comet_cuda.errors import CometError

MODEL = "smollm2-135m"
NAIVE, DEFAULT = "w4a4-naive", "w4a4kv4"
TITLES = {NAIVE: "W4A4KV4, no permutation or 8-bit blocks", DEFAULT: "W4A4KV4"}  # in the order they are made
NAIVE_SAMPLES = 1  # plain rounding learns nothing from calibration text: more would change no byte of its weights
HOME = runs.RUNS / "demo"
STEPS = HOME / "steps.json"  # commands that have run, and their JSON lines; gone when all have
PROMPT = "The three most common gases in the air are"
Records = list[dict[str, Any]]


def demo(
    samples: Annotated[int, typer.Option(help="Calibration windows.", min=1)] = 32,
    calibration_seq_len: Annotated[int, typer.Option(help="Tokens in each of them.", min=2)] = 512,
    windows: Annotated[int, typer.Option(help="Perplexity windows.", min=1)] = 8,
    seq_len: Annotated[int, typer.Option(help="Tokens in each of them.", min=2)] = 512,
    prompt: Annotated[str, typer.Option(help="Text that each model continues.")] = PROMPT,
) -> None:
    """Fetch a small model, quantize it, print one table.

    Example: comet demo
    """
    console.talk("8 minutes on two idle cores; stopped at any moment, the same command goes on")
    fetch.fetch(MODEL)
    measure = ["--ppl", "wikitext2", "--windows", str(windows), "--seq-len", str(seq_len), "--prompt", prompt]
    rows = []
    protocol: Any = None
    for recipe, title in TITLES.items():
        count = NAIVE_SAMPLES if recipe == NAIVE else samples
        home = HOME / f"{recipe}-{count}x{calibration_seq_len}"  # another size is another model
        calibration, packed = home / "calibration", home / "packed"
        size = ["--samples", str(count), "--seq-len", str(calibration_seq_len)]
        step("calibrate", MODEL, "--recipe", recipe, *size, "--out", str(calibration))
        step("pack", MODEL, "--recipe", recipe, "--calibration", str(calibration), "--out", str(packed))
        records = step("eval", str(packed), *measure, "--no-compare")
        protocol = first(records, "perplexity")["protocol"]
        rows.append(row(title, records, packed))
    records = step("eval", MODEL, *measure)
    rows.append(row("16-bit", records, weights_folder()))
    console.table(f"{MODEL}, {windows} windows of {seq_len:,} tokens", rows[::-1])
    console.data(protocol_line(protocol))
    STEPS.unlink()
    console.talk("next: comet eval --ppl wikitext2      (all windows, beside the 16-bit model)")


def step(*arguments: str) -> Records:
    """Run one comet command, or recall that it has run; its talk goes to our stderr, its JSON lines are the result."""
    from comet_core.whole_files import write_text

    typed = shlex.join(arguments)
    known: dict[str, Records] = json.loads(STEPS.read_text(encoding="utf-8")) if STEPS.exists() else {}
    console.talk(f"$ comet {typed}" + ("\n  done before" if typed in known else ""))
    if typed in known:
        return known[typed]
    command = [sys.executable, "-m", "comet_cli", *arguments, "--json"]
    start = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise CometError(f"comet {arguments[0]} ended with {done.returncode}", "Its own lines above say why.")
    console.talk(f"  {console.human_seconds(time.monotonic() - start)}")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    write_text(STEPS, json.dumps({**known, typed: records}))
    return records


def first(records: Records, metric: str) -> dict[str, Any]:
    """The record of one metric."""
    return next(record for record in records if record.get("metric") == metric)


def row(title: str, records: Records, folder: Path) -> dict[str, str]:
    """One line of the table."""
    perplexity = first(records, "perplexity")
    share = perplexity["int4_mac_fraction"]
    text = next(record["text"] for record in records if record["kind"] == "text")
    return {
        "scheme": title,
        "perplexity": "not finite" if perplexity["value"] is None else f"{perplexity['value']:,.2f}",
        "4-bit share": "" if share is None else f"{100 * share:.1f}%",
        "on disk": console.human_bytes(sum(file.stat().st_size for file in folder.glob("*.safetensors"))),
        "the prompt continued": " ".join(text.split()),
    }


def weights_folder() -> Path:
    """Where the 16-bit weights lie."""
    from comet_core.model_source import resolve_model

    folder = resolve_model(MODEL).folder
    if folder is None:
        raise CometError(f"{MODEL} has no folder", fetch.NO_MODEL)
    return folder
