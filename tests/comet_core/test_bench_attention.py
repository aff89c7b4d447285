"""Decode attention as `comet bench` measures it: which cases, what a record says, what does not fit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comet_cli import bench_serving
from comet_core import bench_attention
from comet_core.results import check


def record(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    case = SimpleNamespace(batch=4, context=512, q_heads=8, kv_heads=2, dim=64, bytes=43_000_000, tokens=1500)
    times = {"sdpa flash": 30.0, "sdpa cudnn": 25.0}
    return bench_attention.record_of(case, 12.5, times, 0.001, {"command": ""})  # type: ignore[arg-type]


def test_a_record_compares_with_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = record(monkeypatch)
    check(found)
    assert found["speedup"] == 2.0 and "cudnn" in found["baseline"] and found["bound_fraction"] == 0.8
    row = bench_attention.row_of(found)
    assert (row["q/kv heads"], row["TB/s"], row["over 16 bit"]) == ("8/2", "3.44", "2.00")


def test_the_models_heads_and_the_loads_contexts_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, kept, one = [], [], record(monkeypatch)

    def measured(heads: Any, batches: Any, contexts: Any) -> Any:
        asked.append((heads, batches, contexts))
        if batches == [64]:
            raise torch.OutOfMemoryError
        yield one

    monkeypatch.setattr(bench_attention, "bench_attention", measured)
    bench_serving.attention("llama-3-8b", [64, 4], [(1024, 512), (100, 28)], kept.append, json=False)
    assert asked == [([(32, 8, 128)], [batch], [256, 1536]) for batch in (64, 4)] and kept == [one]
    said = capsys.readouterr()
    assert "batch 64" in said.err and "do not fit" in said.err and "2.00" in said.out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_it_runs() -> None:
    found = list(bench_attention.bench_attention([(4, 2, 64)], [2], [256, 512], command=""))
    for one in found:
        check(one)
    assert [one["context"] for one in found] == [256, 512] and all(one["relative_error"] < 2.2e-3 for one in found)
