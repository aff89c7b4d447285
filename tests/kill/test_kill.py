"""A short run of the kill campaign; the long one is recorded in results/measured/kills.jsonl."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).with_name("campaign.py")


def outcomes(*options: str) -> dict[str, int]:
    """What happened in one run of the campaign, which fails if anything unforeseen did."""
    done = subprocess.run([sys.executable, str(CAMPAIGN), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])["outcomes"]
    return found


def test_the_campaign_knows_a_part_from_something_else() -> None:
    spec = importlib.util.spec_from_file_location("campaign", CAMPAIGN)
    assert spec is not None and spec.loader is not None
    campaign = importlib.util.module_from_spec(spec)
    sys.modules["campaign"] = campaign  # dataclasses look it up
    spec.loader.exec_module(campaign)
    whole = [{"a": 1}, {"b": 2}, {"c": 3}]
    for fine in ([], whole[:2], whole, whole[:1] + whole, whole + whole[:2], whole * 2):
        assert campaign.part_of(fine, whole), fine
    for wrong in (whole[1:], whole[:1] + whole[2:], [*whole, {"d": 4}], [{}]):
        assert not campaign.part_of(wrong, whole), wrong
    assert campaign.part_of({"x": b"1"}, {"x": b"1", "y": b"2"}) and not campaign.part_of({"x": b"2"}, {"x": b"1"})


def test_commands_that_are_stopped_go_on_or_say_what_to_do() -> None:
    commands = ("calibrate", "pack", "export", "eval")
    found = outcomes("--stops", "2", "--seed", "1", *(word for name in commands for word in ("--command", name)))
    assert found["finished with the same bytes"] >= len(commands)
    assert sum(count for what, count in found.items() if what.endswith("stopped")) >= 2 * len(commands) - 1, found


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_command_stopped_often() -> None:
    found = outcomes("--stops", "20", "--seed", "2")
    assert sum(count for what, count in found.items() if what.endswith("stopped")) > 100, found
