"""A short run of the fuzz campaign; the long one is recorded in results/measured/fuzz.jsonl."""

import json
import subprocess
import sys
from pathlib import Path

CAMPAIGN = Path(__file__).with_name("campaign.py")


def test_damaged_files_load_or_are_refused_with_a_hint() -> None:
    command = [sys.executable, str(CAMPAIGN), "--count", "220"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["refused"] > 80 and summary["loaded"] > 5, "neither side of the reader was reached"
