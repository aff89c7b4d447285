"""What cuda/tools/bench_vllm.py stands on, without vLLM: forks with limits, shape-only folders, its command line."""

import http.server
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from comet_cuda.errors import CometError

sys.path.insert(0, str(Path(__file__).parents[2] / "cuda" / "tools"))

import bench_vllm
import vllm_forks
import vllm_perplexity
import vllm_serve
from vllm_shapes import shape_only


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_forks, "wait_for_memory", lambda: None)
    monkeypatch.setattr(vllm_forks, "_LOADED", ["no vLLM is needed here"])


def fail() -> None:
    raise ValueError("this scheme does not start")


def test_a_fork_answers_fails_alone_and_ends_at_its_limit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def slow() -> None:
        if os.fork() == 0:  # an engine of its own, which must end too
            (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    assert vllm_forks.in_a_fork("quick", 30, lambda: [1, "two"]) == [1, "two"]
    assert vllm_forks.in_a_fork("broken", 30, fail) is None
    begin = time.monotonic()
    assert vllm_forks.in_a_fork("slow", 0.5, slow) is None
    assert time.monotonic() - begin < 20
    said = capfd.readouterr()
    assert "this scheme does not start" in said.err
    assert "slow stopped at its limit" in said.out
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")
    for _ in range(100):
        if not status.exists() or "zombie" in status.read_text():
            return
        time.sleep(0.05)
    raise AssertionError("what the fork started is still running")


def test_a_folder_of_shapes_says_how_linears_are_stored(tmp_path: Path) -> None:
    from comet_core.packed import read_manifest

    plain = shape_only("llama-3-8b", "bf16", tmp_path / "bf16", layers=2)
    config = json.loads((plain / "config.json").read_text())
    assert config["num_hidden_layers"] == 2 and "quantization_config" not in config
    manifest = read_manifest(shape_only("llama-3-8b", "comet-free", tmp_path / "free", layers=2, ranks=2))
    assert len(manifest.linears) == 14 and {entry.share for entry in manifest.linears.values()} == {1}
    assert manifest.recipe.blocks.tp_granularity == 2
    integer = read_manifest(shape_only("llama-3-8b", "comet", tmp_path / "token", layers=1))
    assert {entry.share for entry in integer.linears.values()} == {0} and integer.recipe.activations.share == "token"
    split = read_manifest(shape_only("llama-3-8b", "comet", tmp_path / "split", layers=1, ranks=2)).linears
    assert split["model.layers.0.mlp.down_proj"].share == 1 and split["model.layers.0.mlp.up_proj"].share == 0
    w4a16 = json.loads((shape_only("llama-3-8b", "w4a16", tmp_path / "w4a16") / "config.json").read_text())
    scheme = w4a16["quantization_config"]["config_groups"]["group_0"]
    assert scheme["weights"]["group_size"] == 128 and scheme["input_activations"] is None
    with pytest.raises(CometError, match="no model alias is called llama-3-9b"):
        shape_only("llama-3-9b", "bf16", tmp_path / "none")


def test_the_command_line() -> None:
    job = bench_vllm.parse(["throughput", "llama-3-8b", "--schemes", "comet+kv4,fp8", "--load", "128/64,1024/512"])
    assert job.schemes == ["comet+kv4", "fp8"] and job.load == [(128, 64), (1024, 512)] and not job.compile
    assert bench_vllm.parse(["perplexity", "a", "b", "--tensor-parallel", "2"]).tensor_parallel == 2


def test_perplexities_are_compared_with_their_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save_file({"tokens": torch.zeros(2, 3, dtype=torch.int64)}, tmp_path / "t.safetensors")
    scores = {"auto": [1.0, 2.0, 3.0, 4.0], "float16": [1.0, 2.0, 3.0, 4.4]}
    monkeypatch.setattr(vllm_perplexity, "by_comet", lambda args, dtype, eager: scores[dtype])
    monkeypatch.setattr(
        vllm_perplexity,
        "by_vllm",
        lambda args, dtype: [1.1, 2.0, 3.0, 4.3],  # +0.05 and +0.15 a token
    )
    kept = []
    monkeypatch.setattr(vllm_perplexity, "record_perplexity", lambda args, way, value, beside: kept.append(beside))
    monkeypatch.setattr(vllm_perplexity, "in_a_fork", lambda name, limit, work: work())
    words = ["perplexity", "no folder", str(tmp_path / "t.safetensors"), "--also", "comet:float16,vllm:float16"]
    job = bench_vllm.parse(words)
    vllm_perplexity.perplexity(job)
    said = capfd.readouterr().out
    assert "comet 12.1825" in said
    assert "vllm 13.4637: +10.517%, standard error 5.000%; log-probabilities 0.1000 apart" in said
    assert "comet:float16 13.4637: +10.517%, standard error 10.000%; log-probabilities 0.1000 apart" in said
    assert "vllm:float16 over comet:float16: {'perplexity': 13.46" in said
    assert set(kept[0]) == {"vllm", "comet:float16", "vllm:float16"} and kept[0] == kept[1]


def test_nothing_is_started_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert vllm_forks.time_left(7) == 7
    monkeypatch.setenv("BENCH_VLLM_SECONDS", "0")
    assert vllm_forks.in_a_fork("late", vllm_forks.time_left(7), fail) is None
    said = capfd.readouterr()
    assert "late is not started" in said.out and "Traceback" not in said.err


def test_a_server_is_asked_once_and_must_say_something(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`command` is a server of our own here: ready after a while, then one answer."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def reply(self, content: object) -> None:
            text = json.dumps(content).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self.reply({})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = "" if asked["prompt"] == "silence" else f" {asked['model']}"
            self.reply({"choices": [{"text": text}], "usage": {"completion_tokens": asked["max_tokens"]}})

    def command(packed: str, port: int, options: object, *, eager: bool) -> None:
        if packed == "broken":
            raise ValueError("no such folder")
        time.sleep(0.3)
        http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()

    monkeypatch.setattr(vllm_serve, "command", command)
    monkeypatch.setattr(vllm_serve, "by_comet", lambda args: "as comet says")
    vllm_serve.serve(bench_vllm.parse(["serve", "folder", "--limit", "30"]))
    assert "'The capital of France is' -> ' folder'" in capfd.readouterr().out
    with pytest.raises(SystemExit, match="not 24 tokens of text"):
        vllm_serve.serve(bench_vllm.parse(["serve", "folder", "--limit", "30", "--prompt", "silence"]))
    with pytest.raises(SystemExit, match="the server did not answer"):
        vllm_serve.serve(bench_vllm.parse(["serve", "broken", "--limit", "30"]))
    assert "the server has ended" in capfd.readouterr().err
