"""A rehearsal of the measurement that results/measured/big.jsonl records: a narrow model of full depth."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = Path(__file__).with_name("measure.py")


def measured(record: Path, *options: str) -> dict[str, dict[str, int]]:
    """The record of one run; the script itself fails if the bound was broken."""
    shapes = ["--vocabulary", "300"]
    command = [sys.executable, str(MEASURE), *shapes, *options, "--device", "cpu", "--record", str(record)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, int]] = json.loads(record.read_text())
    return found


@pytest.mark.slow
def test_hidden_states_over_a_limit_are_not_in_memory(tmp_path: Path) -> None:
    """48 MiB of hidden states, with and without the limit."""
    sizes = ["--layers", "1", "--hidden", "128", "--intermediate", "128", "--samples", "192", "--seq-len", "512"]
    plain = ["--recipe", "w4a4-naive"]  # rounds without data, so nothing but hidden states grows with the windows
    peaks = []
    for limit in (1 << 30, 1 << 20):
        found = measured(tmp_path / f"{limit}.jsonl", *sizes, *plain, "--spill-over", str(limit))
        assert (found["bound"]["hidden_states"] == 0) == (limit == 1 << 20)
        peaks.append(found["ram_above_imports"]["calibrate"])
    assert peaks[0] - peaks[1] > 40 << 20, peaks


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_eighty_narrow_layers_stay_within_the_bound(tmp_path: Path) -> None:
    sizes = ["--layers", "80", "--hidden", "256", "--intermediate", "896", "--samples", "4", "--seq-len", "128"]
    found = measured(tmp_path / "record.jsonl", *sizes)
    assert max(found["ram_above_imports"].values()) < 120 << 20
