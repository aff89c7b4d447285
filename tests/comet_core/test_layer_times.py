"""The table of what a layer takes."""

from typing import Any

from comet_core.layer_times import layer_table


def big(hidden: int, **changes: Any) -> Any:
    return {
        "kind": "big", "model": "llama-3-70b", "recipe": "w4a4kv4", "layers": 2, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "samples": 4, "seq_len": 512, "device": "cpu", "gpu_peaks": {},
        "calibrate_s_a_layer": 1.0, "pack_s_by_layer": [9.0, 5.0], "ram_above_imports": {"pack": 50 << 20},
        "bound": {"two_layers": 60 << 20, "shard": 20 << 20}, "provenance": {"threads": 1, "gpu": None},
    } | changes  # fmt: skip


def test_a_row_per_width_and_machine() -> None:
    gpu = {"device": "cuda", "gpu_peaks": {"calibrate": 1 << 30, "pack": 3 << 30}, "provenance": {"gpu": "NVIDIA X"}}
    records = [
        big(512, calibrate_cpu_s_a_layer=0.5, pack_cpu_s_by_layer=[3.0, 4.9]),
        big(256),
        big(256, pack_s_by_layer=[7.0, 6.0, 8.0]),  # later, so it counts
        big(8192, gpus=1, **gpu),
        big(8192, gpus=2, **gpu),
        {"kind": "eval"},
    ]
    lines = layer_table(records).splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| 256 / 768", "| 512 / 1,536", *["| 8,192 / 24,576"] * 2]
    assert "| 7.00 | 50 of 80 |" in lines[0] and "CPU, 1 thread |" in lines[0]
    assert "| 1.00 (0.50 of computing) | 5.00 (3.00 of computing) |" in lines[1]
    assert "| NVIDIA X |" in lines[2] and "| 2 x NVIDIA X |" in lines[3] and lines[3].endswith("| 3.0 |")
