"""`comet inspect` and shell completion."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from comet_cli import main
from comet_core.packed import load_packed

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "packed-v1"


def comet(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command in this process."""
    done = CliRunner().invoke(main.app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def test_json_says_what_the_loaded_model_is() -> None:
    code, out, _ = comet("inspect", str(GOLDEN), "--verify", "--json")
    assert code == 0
    found = json.loads(out)
    packed = load_packed(GOLDEN)
    assert found["model"] == "golden" and found["recipe"] == "w4a4kv4" and found["verified"]
    assert found["tensors"] == len(packed.manifest.sha256)
    assert [row["linear"] for row in found["linears"]] == list(packed.manifest.linears)
    for row in found["linears"]:
        linear = packed.model.get_submodule(row["linear"])
        assert row["block_bits"] == "".join(str(int(bit)) for bit in linear.block_bits)
        assert row["bytes"] == sum(buffer.nbytes for buffer in linear.buffers())
        assert row["permutation"] == ("gathered" if linear.perm is not None else "in the producer's rows")
    assert len(found["layers"]) == 2
    outside = 2 * (2 * 64 * 128 + 128)  # embedding, head and final norm in 16 bit
    state = load_packed(GOLDEN, dtype=torch.bfloat16).model.state_dict()
    assert sum(row["bytes"] for row in found["layers"]) + outside == sum(value.nbytes for value in state.values())
    ops = {row["op"] for row in found["paths"] if row["gpu"].startswith("sm_90")}
    assert {"quantize_act", "w4ax_gemm", "kv4_append", "kv4_decode"} <= ops


@pytest.mark.parametrize("flag", [(), ("--linears",)])
def test_tables(flag: tuple[str, ...]) -> None:
    code, out, _ = comet("inspect", str(GOLDEN), *flag)
    assert code == 0
    for word in (
        "golden",
        "w4a4kv4",
        "4 bit, keys per channel",
        "sm_90 (H100, H200)",
        "e4m3",
        "not recomputed",
        "1 (blocks.tp_granularity 1)",
    ):
        assert word in out
    assert ("model.layers.1.mlp.down_proj" in out) == bool(flag)


def test_what_is_no_packed_folder_or_damaged(tmp_path: Path) -> None:
    assert comet("inspect", str(tmp_path))[0] == 2
    folder = tmp_path / "bad"
    shutil.copytree(GOLDEN, folder)
    shard = folder / "model-00002-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert comet("inspect", str(folder))[0] == 0
    code, _, err = comet("inspect", str(folder), "--verify")
    assert code == 2
    assert "sha256" in err and "hint:" in err


def completion(**variables: str) -> str:
    """What `comet` prints when a shell asks it; independent of the shell that runs the tests."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("cli", "cuda", "."))
    code = "import sys; sys.argv = ['comet']\nfrom comet_cli.main import main\nmain()"
    environment = os.environ | {"PYTHONPATH": paths} | variables
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout


@pytest.mark.parametrize(("typed", "expected"), [("comet ins", "inspect"), ("comet inspect --ver", "--verify")])
def test_bash_completes_commands_and_options(typed: str, expected: str) -> None:
    place = str(len(typed.split()) - 1)
    assert completion(_COMET_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=place).split() == [expected]


def test_completion_can_be_installed() -> None:
    assert "complete -o default" in completion(_COMET_COMPLETE="source_bash")
