"""Peak memory of calibrate and pack on a model of many layers stays within what a few of its parts need.

The bound, above what a process holds after its imports and a first run of a tiny model: two layers in the type of the
computation, the largest shard, two Hessians of the widest group, the hidden states, and a fixed allowance. The model
is two and a half times the bound. Allocations from 256 KiB up go back to the system when they are freed
(MALLOC_MMAP_THRESHOLD_), because what counts here is what the program holds, not what the C library keeps for later.
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY, SAMPLES, SEQ_LEN = 12, 512, 1408, 4096, 8, 16
MIB = 1 << 20
ALLOWANCE = 8 * MIB  # modules, plans, buffers of the libraries, temporaries of one group's quantization

SCRIPT = """
import dataclasses, json, pathlib, sys
import torch
from transformers import LlamaConfig
from comet_core.calibrate import calibrate
from comet_core.model_source import resolve_model
from comet_core.pack import pack
from comet_core.progress import SilentProgress
from comet_core.recipe import load_recipe, recipe_from_dict, recipe_to_dict

torch.set_num_threads(1)
layers, hidden, intermediate, vocabulary, samples, seq_len = json.loads(sys.argv[2])

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

def forget_peak():
    open("/proc/self/clear_refs", "w").write("5")

def run(home, layers, hidden, intermediate, vocabulary):
    LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, tie_word_embeddings=False,
    ).save_pretrained(home / "model")
    source = resolve_model(str(home / "model"), weights="random")
    plain = recipe_to_dict(load_recipe("w4a4kv4"))
    plain["calibration"] |= {"samples": samples, "seq_len": seq_len}
    plain["weights"] |= {"clip_search": False}  # twenty times the work, nothing of size to hold
    plain["overrides"] = [  # GPTQ in the first and the last layer; the same by rounding, for time, in those between
        {"match": f"model.layers.{i}.*", "weights": {"method": "rtn"}} for i in range(1, layers - 1)
    ]
    forget_peak()
    calibrate(source, recipe_from_dict(plain), home / "calibration", device="cpu", progress=SilentProgress())
    calibrated = status("VmHWM")
    forget_peak()
    pack(source, home / "calibration", None, home / "packed", device="cpu", progress=SilentProgress())
    return calibrated, status("VmHWM")

home = pathlib.Path(sys.argv[1])
run(home / "tiny", 2, 128, 256, 257)
before = status("VmRSS")
print(json.dumps([peak - before for peak in run(home / "deep", layers, hidden, intermediate, vocabulary)]))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc/self/clear_refs")
def test_calibrate_and_pack_hold_two_layers_a_shard_and_two_hessians(tmp_path: Path) -> None:
    sizes = json.dumps([LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY, SAMPLES, SEQ_LEN])
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), sizes],
        env=os.environ
        | {"MALLOC_MMAP_THRESHOLD_": "262144", "PYTHONPATH": os.pathsep.join(map(str, (root / "cuda", root)))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    calibrated, packed = json.loads(done.stdout.splitlines()[-1])
    layer = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)  # float32
    non_layers = 2 * 2 * VOCABULARY * HIDDEN  # embedding and lm_head in 16 bit, the largest shard
    assert max(file.stat().st_size for file in (tmp_path / "deep" / "packed").iterdir()) < 1.1 * non_layers
    hessian = 4 * INTERMEDIATE * INTERMEDIATE
    bound = 2 * layer + non_layers + 2 * hessian + 4 * SAMPLES * SEQ_LEN * HIDDEN + ALLOWANCE
    assert LAYERS * layer > 2.5 * bound, "a model that fits into the bound would show nothing"
    peaks = f"calibrate {calibrated / MIB:.1f}, pack {packed / MIB:.1f}, bound {bound / MIB:.1f} MiB"
    print(peaks)
    assert max(calibrated, packed) <= bound, peaks


def test_hidden_states_over_the_limit_live_in_a_file_that_nothing_leaves_behind(tmp_path: Path) -> None:
    import torch

    from comet_core.hidden import HiddenStates

    cpu, values = torch.device("cpu"), torch.randn(5, 7, 3)
    spilled = HiddenStates((5, 7, 3), dtype=torch.float32, device=cpu, limit=0, spill_folder=tmp_path)
    assert spilled.spilled
    assert not list(tmp_path.iterdir())
    for start, stop in spilled.ranges():
        spilled.write(start, stop, values[start:stop])
    assert torch.equal(spilled.read(0, 5), values)
    assert torch.equal(spilled.copy().read(1, 4), values[1:4])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc/self/clear_refs")
def test_spilled_hidden_states_take_no_memory(tmp_path: Path) -> None:
    import torch

    from comet_core.hidden import HiddenStates
    from comet_core.host_memory import forget_peak, peak_memory

    part = torch.ones(8, 64, 2048)  # 4 MiB
    peaks = []
    for limit in (1 << 30, 0):
        held = forget_peak()
        states = HiddenStates((256, 64, 2048), dtype=part.dtype, device=part.device, limit=limit, spill_folder=tmp_path)
        for start in range(0, 256, 8):
            states.write(start, start + 8, part)
        assert float(states.read(0, 8).sum()) == part.numel()
        peaks.append(peak_memory() - held)
        del states
    assert peaks[0] > 120 * MIB and peaks[1] < 20 * MIB, peaks


def test_a_disk_that_is_too_small_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from comet_core.hidden import HiddenStates
    from comet_cuda.errors import CometError

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CometError, match="GiB for the hidden states cannot be reserved"):
        HiddenStates((5, 7, 3), dtype=torch.float32, device=torch.device("cpu"), limit=0, spill_folder=tmp_path)
    assert not list(tmp_path.iterdir())
