"""The report page: self-contained, escaped, every record's figure in it; rendered by Chromium where there is one."""

import csv
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from comet_core.report import find_records, write_report
from comet_core.results import Record, append
from comet_cuda.errors import CometError

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def record(recipe: str, metric: str, value: float, digest: str | None = None) -> Record:
    return {
        "kind": "eval", "model": "golden", "recipe": recipe, "task": "wikitext2", "metric": metric, "value": value,
        "windows": "all", "seq_len": 2048, "kv_quantized": recipe != "fp16", "int4_mac_fraction": 0.84,
        "protocol": {}, "provenance": {"recipe_digest": digest, "utc": "2026-01-02T03:04:05+00:00", "command": "<b>&"},
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    home = tmp_path / "runs" / "golden-w4a4kv4"
    shutil.copytree(GOLDEN / "packed-v3", home / "packed")
    digest = json.loads((home / "packed" / "comet.json").read_text())["recipe_digest"]
    append(home.parent / "eval.jsonl", record("fp16", "perplexity", 12.3456))
    append(home.parent / "eval.jsonl", record("w4a4kv4", "perplexity", 23.4567, digest))
    append(home / "mine.jsonl", record("w4a4kv4", "kl", 0.3456, digest))
    append(home / "mine.jsonl", record("other", "perplexity", 99.0) | {"model": "another"})
    accuracy = record("w4a4kv4", "acc", 0.654, digest) | {"task": "piqa", "limit": 20}
    for reading in ("16bit", "4bit"):
        append(home / "mine.jsonl", accuracy | {"kv_open_page": reading})
    kernel = dict.fromkeys(("m", "n", "k"), 8) | dict.fromkeys(("arch", "path"), "w4ax_gemm_sm90")
    kernel |= dict.fromkeys(("ablation", "baseline", "baseline_us", "speedup", "bound_fraction", "weight_symmetry"))
    kernel |= {"int4_fraction": 1.0, "includes_quantize": False, "median_us": 1.0, "provenance": {}}
    append(home / "mine.jsonl", {"kind": "bench", "op": "w4ax_gemm"} | kernel)  # a kernel without a baseline
    return home


def test_the_page_holds_every_figure_and_needs_nothing_else(run: Path) -> None:
    page = write_report(run, run / "report.html", find_records(run), run / "tables").read_text()
    for figure in ("12.35", "23.46", "0.3456", "w4a4kv4 (this run)", "perplexity, wikitext2"):
        assert figure in page, figure
    assert "99.00" not in page, "another model's record"
    assert "<b>&" not in page and "&lt;b&gt;&amp;" in page
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert addresses and all(address.startswith("data:image/png;base64,") for address in addresses)
    assert not re.search(r"https?://", page)
    rows = list(csv.reader((run / "tables" / "perplexity.csv").open()))
    assert rows[0][2] == "perplexity" and [row[2] for row in rows[1:]] == ["12.35", "23.46"]
    assert "| w4a4kv4 (this run) |" in (run / "tables" / "perplexity.md").read_text()
    shots = [row[1] for row in csv.reader((run / "tables" / "zero-shot.csv").open())]
    assert shots[1:] == ["piqa, acc, first 20", "piqa, acc, first 20, open page in 4 bit too"]
    assert sum(1 for _ in (run / "tables" / "linears.csv").open()) == 15


def test_a_folder_without_a_packed_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CometError, match="no packed model"):
        write_report(tmp_path, tmp_path / "report.html", [])
    assert not (tmp_path / "report.html").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1200, 390])
def test_chromium_draws_it_without_sideways_scrolling(run: Path, tmp_path: Path, width: int) -> None:
    page = write_report(run, run / "report.html", find_records(run))
    probe = tmp_path / "probe.html"
    script = (
        "<script>document.title = `${document.documentElement.scrollWidth} ${innerWidth} ${document.images.length}`;"
    )
    probe.write_text(page.read_text().replace("</body>", f"{script}</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
             f"--window-size={width},900"]  # fmt: skip
    shot = tmp_path / "shot.png"

    def chromium(what: str) -> str:
        command = [str(CHROMIUM), *flags, what, probe.as_uri()]
        return subprocess.run(command, check=True, capture_output=True, timeout=90).stdout.decode()

    chromium(f"--screenshot={shot}")
    assert struct.unpack(">II", shot.read_bytes()[16:24]) == (width, 900)
    found = re.search(r"<title>(\d+) (\d+) (\d+)</title>", chromium("--dump-dom"))
    assert found, "the page's script did not run"
    wide, inner, images = map(int, found.groups())
    assert wide <= inner and images == 1
