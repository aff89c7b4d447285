"""The host's time of one eager call of each op, beside torch.add's in the same process.

    python cuda/tools/host_time.py --out results/measured/host_h200.jsonl

The time from call to return, not the kernel's: 400 calls in a row with nothing waited for, the best of nine rounds. The
direct functions skip torch's dispatcher; `torch.ops.comet.*` go through it. One token, 4,096 channels, 4,096 rows.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from comet_cuda.int4 import SYMMETRIC_ZERO
from comet_cuda.prepared_linear import ActivationFormat, prepare_linear
from comet_cuda.quantize_act import TOKEN
from comet_cuda.quantize_act_cuda import quantize_act_tiled
from comet_cuda.quantize_token import quantize_token, rms_norm_quantize_token, silu_mul_quantize_token
from comet_cuda.w4ax_gemm_integer import IntegerWeight, w4ax_gemm_integer

CHANNELS = ROWS = 4096
BLOCKS, EIGHTS = CHANNELS // 128, 5
CALLS, ROUNDS = 400, 9
EPS = 1e-5


def operations() -> dict[str, Callable[[], Any]]:
    """Name -> one call, all on the current GPU."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 1, CHANNELS, device="cuda")
    x, residual = torch.randn(2, 1, CHANNELS, device="cuda").bfloat16()
    gate_up = torch.randn(1, 2 * CHANNELS, device="cuda").bfloat16()
    norm = torch.ones(CHANNELS, device="cuda", dtype=torch.bfloat16)
    perm = torch.randperm(CHANNELS, device="cuda").int()
    clip = torch.full((BLOCKS,), 0.9, device="cuda")
    bits = torch.tensor([8] * EIGHTS + [4] * (BLOCKS - EIGHTS), dtype=torch.uint8, device="cuda")
    codes = torch.randint(0, 256, (ROWS, CHANNELS // 2), dtype=torch.uint8, device="cuda")
    scale = torch.full((ROWS, BLOCKS), 2.0**-9, dtype=torch.bfloat16, device="cuda")
    zero = torch.full((ROWS, BLOCKS), SYMMETRIC_ZERO, dtype=torch.uint8, device="cuda")
    linear = prepare_linear(codes, scale, zero, ActivationFormat(perm, bits, clip, True, TOKEN))
    weight = linear.weight
    assert isinstance(weight, IntegerWeight)
    common = (perm, EIGHTS, clip, True)
    operand = quantize_token(x, *common)
    gemm = (*operand, weight.records, weight.base, None, 1, ROWS, EIGHTS, torch.bfloat16)
    ops = torch.ops.comet
    return {
        "torch.add": lambda: torch.add(a, a, out=b),
        "quantize_token": lambda: quantize_token(x, *common),
        "rms_norm_quantize_token": lambda: rms_norm_quantize_token(x, residual, norm, EPS, *common),
        "silu_mul_quantize_token": lambda: silu_mul_quantize_token(gate_up, *common),
        "w4ax_gemm_integer": lambda: w4ax_gemm_integer(*operand, weight, 1),
        "PreparedLinear": lambda: linear(x, None),
        "quantize_act_tiled": lambda: quantize_act_tiled(x, perm, bits, clip, True),
        "torch.ops.comet.quantize_token": lambda: ops.quantize_token(x, *common),
        "torch.ops.comet.w4ax_gemm_integer": lambda: ops.w4ax_gemm_integer(*gemm),
    }


def host_microseconds(ops: dict[str, Callable[[], Any]] | None = None) -> dict[str, float]:
    """Name -> the host's time of one call. Rounds of all ops alternate, so that they meet the same machine."""
    ops = operations() if ops is None else ops
    found = dict.fromkeys(ops, float("inf"))
    for _ in range(ROUNDS):
        for name, call in ops.items():
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            found[name] = min(found[name], 1e6 * (time.perf_counter() - start) / CALLS)
    return found


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="records are appended to this file")
    args = parser.parse_args()
    provenance = {
        "command": f"python cuda/tools/host_time.py --out {args.out.name}",
        "git_sha": os.environ.get("COMET_GIT_SHA") or output_of("git", "rev-parse", "HEAD"),
        "gpu": torch.cuda.get_device_name(),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "seed": 0,
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    times = host_microseconds()
    with args.out.open("a") as out:
        for name, us in times.items():
            record = {
                "kind": "host",
                "op": name,
                "m": 1,
                "n": ROWS,
                "k": CHANNELS,
                "host_us": round(us, 2),
                "of_torch_add": round(us / times["torch.add"], 2),
                "provenance": provenance,
            }
            line = json.dumps(record)
            out.write(line + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    main()
