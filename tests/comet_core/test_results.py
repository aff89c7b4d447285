"""Records survive crashes and concurrent writers; tables come from records alone."""

import json
import math
import multiprocessing
import re
import sys
from pathlib import Path

import pytest

from comet_core import results, tables
from comet_core.provenance import provenance
from comet_cuda.errors import CometError

ROOT = Path(__file__).resolve().parents[2]


def eval_record(**changes: object) -> results.Record:
    record: results.Record = {
        "kind": "eval",
        "model": "smollm2-135m",
        "recipe": "w4a4kv4",
        "task": "wikitext2",
        "metric": "perplexity",
        "value": 28.5,
        "windows": 8,
        "seq_len": 2048,
        "kv_quantized": True,
        "int4_mac_fraction": 0.845,
        "protocol": {"base": "dequantized from a 4-bit GGUF file"},
        "provenance": {},
    }
    return {**record, **changes}


def test_a_file_that_cannot_be_written_is_an_error_with_the_record_in_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CometError, match="cannot be written") as caught:
        results.append(tmp_path / "file" / "records.jsonl", eval_record())
    assert json.loads(caught.value.hint.partition("The record is: ")[2]) == eval_record()


def append_many(path: Path, name: str) -> None:
    for _ in range(50):
        results.append(path, eval_record(model=name))


def test_append_and_read_give_back_the_record(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    results.append(path, eval_record())
    results.append(path, eval_record(metric="kl", value=0.25, extra="kept"))
    assert results.read(path) == [eval_record(), eval_record(metric="kl", value=0.25, extra="kept")]
    assert results.read(path.parent) == results.read(path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_becomes_null(tmp_path: Path, value: float) -> None:
    path = tmp_path / "records.jsonl"
    results.append(path, eval_record(value=value, protocol={"base": "", "shares": [value, 1.0]}))
    (record,) = results.read(path)
    assert record["value"] is None
    assert record["protocol"]["shares"] == [None, 1.0]
    assert "not finite" in results.eval_table([record])


def test_a_record_lacking_a_key_is_refused(tmp_path: Path) -> None:
    record = eval_record()
    del record["seq_len"]
    with pytest.raises(CometError, match="without seq_len"):
        results.append(tmp_path / "records.jsonl", record)
    with pytest.raises(CometError, match="kind 'evil'"):
        results.append(tmp_path / "records.jsonl", {"kind": "evil"})
    assert not (tmp_path / "records.jsonl").exists()


def test_a_line_cut_short_is_named_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(eval_record()) + '\n{"kind": "ev')
    results.append(path, eval_record(value=1.0))
    with pytest.raises(CometError, match=re.escape(f"{path}:2: not JSON")):
        results.read(path)
    assert json.loads(path.read_text().splitlines()[2])["value"] == 1.0


BROKEN = ["[1]", "7", '{"kind": "eval"}', '{"kind": ["eval"]}', pytest.param("[" * 100_000, id="deep")]


@pytest.mark.parametrize("line", BROKEN)
def test_lines_that_are_no_records_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(CometError, match=re.escape(f"{path}:1:")):
        results.read(path)


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    start = multiprocessing.get_context("fork" if "torch" not in sys.modules else "spawn")
    writers = [start.Process(target=append_many, args=(path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(record["model"] for record in results.read(path)) == ["a"] * 50 + ["b"] * 50


def test_eval_table_puts_16_bit_first_and_takes_the_latest() -> None:
    table = results.eval_table(
        [
            eval_record(value=99.0),
            eval_record(recipe="w4a4-naive", value=160.0),
            eval_record(recipe="fp16", value=21.77, kv_quantized=False, int4_mac_fraction=None),
            eval_record(),
            eval_record(metric="kl", value=0.1234),
            eval_record(metric="top1", value=0.876),
            eval_record(kv_quantized=False, value=27.9),
            eval_record(kv_quantized=False, metric="kl", value=0.09),
            eval_record(recipe="w4a16", kv_quantized=False, value=24.1),
        ]
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    assert [row[1] for row in rows[2:]] == ["fp16", "w4a16", "w4a4kv4", "w4a4-naive"]
    assert rows[2][3:] == ["21.77", "", "", "", "16-bit", ""]
    assert rows[3][3:] == ["24.10", "", "", "84.5%", "16-bit", ""]
    assert rows[4][3:] == ["28.50", "0.1234", "87.6%", "84.5%", "4-bit", "27.90"]
    assert rows[5][-1] == "", "another recipe's cache is not its own"
    assert table.count("dequantized from a 4-bit GGUF file") == 1


def test_the_readme_shows_the_longest_text_and_vllm_apart() -> None:
    short = [eval_record(windows=windows, value=20.0 + windows) for windows in (4, 40)]
    beside = {"engine": "vLLM 1", "beside_comet": {"vllm": {"standard_error": 0.001}}}
    pair = [
        eval_record(windows=16, value=25.0, protocol={"engine": "comet"}),
        eval_record(windows=16, value=25.5, protocol=beside),
    ]
    shown = tables.accuracy_table([*short, *pair, eval_record(recipe="w4a4kv4+try", windows=40)])
    assert "40 x" in shown and "| 60.00 |" in shown and len(shown.split("\n\n")[0].splitlines()) == 3
    assert "all x" in tables.accuracy_table([*short, eval_record(windows="all")])
    (row,) = tables.vllm_table([*short, *pair]).splitlines()[2:]
    assert [cell.strip() for cell in row.strip("|").split("|")][4:] == ["25.00", "25.50", "+2.00% ± 0.10%"]


def bench_record() -> results.Record:
    return {
        "kind": "bench", "op": "w4ax_gemm", "arch": "sm_90a", "path": "p", "m": 4, "n": 128, "k": 128,
        "int4_fraction": 0.84, "weight_symmetry": "asymmetric", "ablation": None, "includes_quantize": False,
        "median_us": 1.0, "baseline": "cublas_bf16", "baseline_us": 2.0, "speedup": 9.0, "bound_fraction": 0.5,
        "provenance": {"gpu": "G"},
    }  # fmt: skip


def test_gemm_table_is_a_geometric_mean_of_the_latest_and_shows_losses() -> None:
    record = bench_record()
    shapes = [record, record | {"speedup": 2.0}, record | {"n": 256, "speedup": 0.5}, record | {"op": "other"}]
    (row,) = results.gemm_table(shapes).splitlines()[2:]
    assert [cell.strip() for cell in row.split("|")][4:8] == ["4", "2", "1.00", "0.50 to 2.00"]
    table = results.gemm_table(record | {"m": m, "includes_quantize": q} for m in (16, 1) for q in (False, True))
    order = [[cell.strip() for cell in line.split("|")][3:5] for line in table.splitlines()[2:]]
    assert order == [[what, m] for m in ("1", "16") for what in ("GEMM alone", "with quantize_act")]


def test_the_ablation_table_pairs_launches_of_one_commit() -> None:
    counts = dict.fromkeys(results.COUNTERS, 0.5) | {"op": "w4ax_gemm counters", "median_us": 9.0}
    found = []
    for n, slow in ((128, 2.0), (256, 8.0)):
        shipped = bench_record() | {"path": "w4ax_gemm_integer", "n": n, "provenance": {"gpu": "G", "git": "old"}}
        ablated = shipped | {"ablation": "pipeline", "median_us": slow}
        later = shipped | {"median_us": 0.25, "provenance": {"gpu": "G", "git": "new"}}
        behind = shipped | {"includes_quantize": True, "median_us": 3.0}
        found += [ablated | counts, shipped | counts, shipped, ablated, later, behind]
    first, second = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in tables.ablation_table(found).splitlines()[2:]
    )  # fmt: skip
    assert first[1:5] == ["shipped", "4", "2", ""] and second[1:5] == ["pipeline off", "4", "2", "4.00"]
    assert second[5:] == ["50%"] * 4
    assert "pipeline" not in tables.TABLES["gemm"](found), "ablations have a table of their own"


def test_what_a_runner_says_stands_apart_from_accuracy() -> None:
    pair = {"task": "runner cuda against cpu", "windows": 4, "protocol": {"kv_bits": 4}}
    metrics = {"perplexity": 29.5, "reference_perplexity": 29.0, "kl": 0.25, "top1": 0.75}
    found = [eval_record(**pair, metric=metric, value=value) for metric, value in metrics.items()]
    (row,) = tables.real_text_table([*found, eval_record()]).splitlines()[2:]
    assert [cell.strip() for cell in row.strip("|").split("|")][3:] == ["29.50", "29.00", "0.250", "75.0%"]
    assert tables.TABLES["eval"]([*found, eval_record()]) == tables.TABLES["eval"]([eval_record()])


def test_layers_stand_beside_each_other_in_a_table_of_their_own() -> None:
    pair = {"task": "layers of runner cuda bfloat16 beside cpu float32", "windows": 1, "protocol": {"kv_bits": 4}}
    parts = ("attention_prefill", "attention_decode", "mlp_prefill", "mlp_decode")
    values = {
        f"layer_error_{of}_{part}": 0.01 * i + (of == "max") for i, part in enumerate(parts) for of in ("median", "max")
    }
    found = [eval_record(**pair, metric=metric, value=value) for metric, value in values.items()]
    found[-1]["value"] = None
    words, table = tables.layer_errors_table([*found, eval_record()]).split("\n\n")
    (row,) = cells(table)
    assert words == tables.LAYERS
    assert row[1:3] == ["runner cuda bfloat16 beside cpu float32", "1 x 2,048"]
    assert row[3:] == ["0.00% / 100.00%", "1.00% / 101.00%", "2.00% / 102.00%", "3.00% / not a number"]
    for name, table in tables.TABLES.items():
        assert name == "layer-errors" or table([*found, eval_record()]) == table([eval_record()]), name
    assert tables.layer_errors_table([eval_record()]) == ""


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_kernels_of_others_stand_beside_those_of_their_run() -> None:
    """Where others ran, COMET's times are those of that run, and no other table's; weights of two kinds stand apart."""

    def timed(path: str, command: str, **changes: object) -> results.Record:
        where = {"gpu": "G", "git": "c", "command": command}
        return bench_record() | {"path": path, "provenance": where} | changes

    ours = "w4ax_gemm_integer"
    beside = [
        timed(ours, "peers", speedup=2.0), timed(ours, "peers", n=256, speedup=8.0),
        timed(ours, "peers", speedup=1.5, weight_symmetry="symmetric"),
        timed(ours, "peers", m=64, includes_quantize=True, speedup=1.25),
        timed("marlin", "peers", weight_symmetry="g128", speedup=0.5),
        timed("marlin", "peers", weight_symmetry="g128", m=64, speedup=None),
    ]  # fmt: skip
    alone = [timed(ours, "all", speedup=3.0), eval_record()]
    found = cells(tables.peer_table([*beside, *alone]))
    assert found == [
        [ours, "asymmetric", "2", "4.00", ""],
        [ours, "symmetric", "1", "1.50", ""],
        [f"{ours} with quantize_act", "asymmetric", "1", "", "1.25"],
        ["marlin", "g128", "1", "0.50", ""],
    ]
    assert tables.without_peers([*beside, *alone]) == alone
    (row,) = cells(tables.TABLES["gemm"]([*beside, *alone]))
    assert row[0].startswith(ours) and row[5] == "3.00"
    assert tables.peer_table(alone) == "*No records yet.*"


def test_long_context_pairs_the_two_caches_of_a_model() -> None:
    def said(task: str, bits: int, value: float, length: int = 8192) -> results.Record:
        return eval_record(task=task, value=value, seq_len=length, protocol={"kv_bits": bits})

    found = [
        said("long context", 16, 9.0), said("long context", 4, 12.25), said("long context", 16, 12.125),
        said("passkey", 16, 1.0), said("passkey", 4, 0.98), said("passkey", 16, 0.5, length=4096), eval_record(),
    ]  # fmt: skip
    assert cells(tables.long_table(found)) == [
        ["smollm2-135m, w4a4kv4", "long context, 8 x 8,192", "12.125", "12.250"],
        ["smollm2-135m, w4a4kv4", "passkey, 8 x 8,192", "100%", "98%"],
    ]  # at 4,096 one cache alone was asked


def test_the_attention_table_says_when_there_was_no_baseline() -> None:
    record = bench_record() | {
        "op": "kv4_append+kv4_decode",
        "batch": 64,
        "context": 4096,
        "q_heads": 32,
        "kv_heads": 8,
    }
    record |= {"head_dim": 128, "bound_fraction": 0.67, "speedup": None, "baseline": None, "median_us": 76.4}
    faster = record | {"context": 16384, "speedup": 2.5, "baseline": "cudnn"}
    first, second = results.attention_table([record, faster, bench_record()]).splitlines()[2:]
    assert "| 76.4 | 67% | no baseline in this run |" in first and "2.50 x cudnn" in second


def test_fill_replaces_only_what_stands_between_markers() -> None:
    text = "before\n<!-- table: eval -->\nold\n<!-- end: eval -->\nafter\n"
    filled = tables.fill(text, [eval_record()])
    assert filled.startswith("before\n<!-- table: eval -->\n\n| model |")
    assert filled.endswith("<!-- end: eval -->\nafter\n")
    assert "old" not in filled
    assert tables.fill(filled, [eval_record()]) == filled
    with pytest.raises(CometError, match="no table named sales"):
        tables.fill("<!-- table: sales -->", [])


def test_main_writes_tables_and_reports_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- table: eval -->\n<!-- end: eval -->\n")
    results.append(tmp_path / "results" / "measured" / "eval.jsonl", eval_record())
    assert tables.main([str(page)]) == 0
    assert "28.50" in page.read_text()
    page.write_text("<!-- table: nothing -->\n")
    assert tables.main([str(page)]) == 2
    assert "error: no table named nothing" in capsys.readouterr().err


def test_provenance_names_code_machine_and_moment_without_local_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/bin/comet", "eval", str(Path.cwd() / "runs" / "a b"), f"{Path.home()}/m"])
    found = provenance(recipe_digest="abc", seed=7)
    assert found["command"] == "comet eval 'runs/a b' ~/m"
    assert (found["recipe_digest"], found["seed"], found["device"], found["gpu"]) == ("abc", 7, "cpu", None)
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", found["git"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["utc"])
    assert found["torch"] and found["transformers"] and found["cpu"] and found["threads"] >= 1


@pytest.mark.parametrize("page", ["README.md", "results/README.md"])
def test_tables_are_the_generated_ones(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    records = results.read(ROOT / "results" / "measured")
    assert "<!-- table: " in text
    assert tables.fill(text, records) == text, "run: make tables"


def test_paper_tables_are_whole() -> None:
    for name, rows, columns in (("table1_perplexity.csv", 9, 13), ("table2_zeroshot.csv", 10, 9)):
        head, *body = (ROOT / "results" / "paper" / name).read_text().splitlines()
        assert len(body) == rows
        assert {len(line.split(",")) for line in [head, *body]} == {columns}
    for line in (ROOT / "results" / "paper" / "table2_zeroshot.csv").read_text().splitlines()[1:]:
        *scores, average = map(float, line.split(",")[3:])
        assert abs(sum(scores) / 5 - average) < 0.11, line  # each figure is rounded to one digit
