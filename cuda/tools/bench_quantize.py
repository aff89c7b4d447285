"""Time quantize_act on a GPU, cold and in a graph, and write one record a case.

    python cuda/tools/bench_quantize.py --out results/measured/quantize_h200.jsonl

Every case is first compared with the reference (integers equal; fused forms as the tests demand). The baseline is an
elementwise kernel (torch.neg) that moves the same number of bytes; the bound is those bytes at its rate on 1 GB.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from comet_cuda.affine import num_blocks
from comet_cuda.bank_order import spread_over_banks
from comet_cuda.quantize_act_cuda import quantize_act_tiled, quantize_act_tiled_ref
from comet_cuda.quantize_fused import (
    rms_norm_quantize,
    rms_norm_quantize_ref,
    silu_mul_quantize,
    silu_mul_quantize_ref,
)
from comet_cuda.quantize_token import quantize_token, rms_norm_quantize_token, silu_mul_quantize_token
from comet_cuda.quantize_token_ref import (
    quantize_token_ref,
    rms_norm_quantize_token_ref,
    silu_mul_quantize_token_ref,
)
from comet_cuda.timing import copies_for_cold_l2, median_microseconds
from comet_cuda.weight_layout import untile_activations_sm90

SHAPES = [
    (1, 4096), (16, 4096), (64, 4096), (256, 4096), (1024, 4096), (4096, 4096), (2048, 8192), (4096, 8192),
    (8192, 8192), (64, 11008), (4096, 11008), (4096, 14336), (1, 28672), (2048, 28672),
]  # fmt: skip
FUSED_SHAPES = [(1, 4096), (64, 4096), (256, 4096), (4096, 4096), (2048, 8192), (1, 14336), (64, 14336), (4096, 14336)]
INT4_SHARE = 0.84
TOKEN = 0  # as a share: all scales of a token are multiples of one (quantize_token.py)
SEED = 0
BASE = "sm_90 layout, bf16, Hadamard"
UNORDERED = "channels in order of importance alone"  # not for banks (bank_order.py)


class Case:
    """One shape and variant: inputs, the kernel, its reference and the bytes that it must move."""

    def __init__(self, m: int, k: int, variant: str, copies: int = 1, share: int = 1) -> None:
        blocks = num_blocks(k)
        self.m, self.k, self.variant, self.share = m, k, variant, share
        self.bits = torch.full((blocks,), 4, dtype=torch.uint8)
        self.bits[: round((1 - INT4_SHARE) * blocks)] = 8
        self.bits = self.bits.cuda()
        self.clip = torch.full((blocks,), 0.9, device="cuda")
        self.perm = None
        if variant not in ("no gather", "silu_mul"):
            self.perm = torch.randperm(k, device="cuda").to(torch.int32)
            if variant != UNORDERED:
                self.perm = spread_over_banks(self.perm, self.bits)
        self.hadamard = variant != "no hadamard"
        width = 2 * k if variant == "silu_mul" else k
        self.inputs = [torch.randn(m, width, device="cuda").bfloat16() for _ in range(copies)]
        self.residual = torch.randn(m, k, device="cuda").bfloat16() if variant == "rms_norm" else None
        self.weight = torch.rand(k, device="cuda").bfloat16()
        elements = {"rms_norm": 3, "silu_mul": 2}.get(variant, 1)  # 16-bit ones read or written for each code
        self.eights = int((self.bits == 8).sum())
        meta = m * blocks * 8 if share != TOKEN else m * 4 * (1 + self.eights)
        self.bytes = m * k * (2 * elements + 1) + meta + (0 if self.perm is None else 4 * k)

    def call(self, kernel: bool, x: Tensor) -> tuple[Tensor, ...]:
        if self.share == TOKEN:
            return self.call_token(kernel, x)
        common = (self.perm, self.bits, self.clip, self.hadamard, "sm_90", self.share)
        if self.variant == "rms_norm":
            norm = rms_norm_quantize if kernel else rms_norm_quantize_ref
            return norm(x, self.residual, self.weight, 1e-5, *common)
        if self.variant == "silu_mul":
            return (silu_mul_quantize if kernel else silu_mul_quantize_ref)(x, *common)
        return (quantize_act_tiled if kernel else quantize_act_tiled_ref)(x, *common)

    def call_token(self, kernel: bool, x: Tensor) -> tuple[Tensor, ...]:
        common = (self.perm, self.eights, self.clip, self.hadamard)
        if self.variant == "rms_norm":
            norm = rms_norm_quantize_token if kernel else rms_norm_quantize_token_ref
            return norm(x, self.residual, self.weight, 1e-5, *common)
        if self.variant == "silu_mul":
            return (silu_mul_quantize_token if kernel else silu_mul_quantize_token_ref)(x, *common)
        return (quantize_token if kernel else quantize_token_ref)(x, *common)

    def check_token(self, got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        whole = self.m // 8  # atoms without padding tokens
        parts = [(each[0][:, :whole], each[1][:, :whole], each[2]) for each in (got, expected)]
        if self.variant in ("rms_norm", "silu_mul"):  # which may round a value, and so a token's scale, the other way
            off = (parts[0][0].int() - parts[1][0].int()) != 0
            assert not off.numel() or off.float().mean() < 0.01
            return
        assert all(torch.equal(mine, wanted) for mine, wanted in zip(*parts, strict=True))

    def check(self) -> None:
        got, expected = self.call(True, self.inputs[0]), self.call(False, self.inputs[0])
        if self.share == TOKEN:
            self.check_token(got, expected)
            return
        tokens = [untile_activations_sm90(*each[:2], self.m, self.bits) for each in (got, expected)]
        if self.variant not in ("rms_norm", "silu_mul"):
            assert all(torch.equal(mine, wanted) for mine, wanted in zip(*tokens, strict=True))
            return
        off = (tokens[0][0].int() - tokens[1][0].int()).abs()
        assert off.max() <= 1 and (off > 0).float().mean() <= 1e-4 + 4 / off.numel()


def op_name(variant: str, share: int) -> str:
    fused = variant + "_" if variant in ("rms_norm", "silu_mul") else ""
    if share == TOKEN:
        return f"{fused}quantize_token"
    return f"{fused}quantize" if fused else "quantize_act_tiled"


def time_case(m: int, k: int, variant: str, share: int) -> tuple[Case, float]:
    case = Case(m, k, variant, share=share)
    case.check()
    case = Case(m, k, variant, copies_for_cold_l2(case.bytes), share)

    def launch(x: Tensor) -> Callable[[], Any]:
        return lambda: case.call(True, x)

    return case, median_microseconds([launch(x) for x in case.inputs])


def time_copy(size: int) -> float:
    """Microseconds of torch.neg, a plain elementwise kernel, that reads and writes `size` bytes in total."""
    floats = -(-size // 8)
    buffers = [torch.randn(floats, device="cuda") for _ in range(copies_for_cold_l2(size) + 1)]

    def launch(i: int) -> Callable[[], Any]:
        return lambda: torch.neg(buffers[i - 1], out=buffers[i])

    return median_microseconds([launch(i) for i in range(1, len(buffers))])


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="records are appended to this file")
    parser.add_argument("--git-sha", default="", help="commit of the code, where there is no git")
    parser.add_argument("--token-only", action="store_true", help="time one scale a token, and what it stands beside")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    provenance = {
        "command": f"python cuda/tools/bench_quantize.py --out {args.out.name}",
        "git_sha": args.git_sha or os.environ.get("COMET_GIT_SHA") or output_of("git", "rev-parse", "HEAD"),
        "gpu": torch.cuda.get_device_name(),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "seed": SEED,
    }
    rate = (1 << 30) / time_copy(1 << 30)  # bytes a microsecond
    print(f"torch.neg over 1 GB: {rate / 1e6:.2f} TB/s")
    cases = [(m, k, variant, 1) for m, k in SHAPES for variant in ("", "no hadamard", "no gather")]
    cases += [(m, k, variant, TOKEN) for m, k in SHAPES for variant in ("", UNORDERED, "no gather")]
    cases += [
        (m, k, variant, share) for m, k in FUSED_SHAPES for variant in ("rms_norm", "silu_mul") for share in (1, TOKEN)
    ]
    if args.token_only:
        timed = {(m, k, variant) for m, k, variant, share in cases if share == TOKEN}
        cases = [case for case in cases if case[:3] in timed]
    with args.out.open("a") as out:
        for m, k, variant, share in cases:
            case, us = time_case(m, k, variant, share)
            copy = time_copy(case.bytes)
            major, minor = torch.cuda.get_device_capability()
            record = {
                "kind": "bench",
                "op": op_name(variant, share),
                "arch": f"sm_{major}{minor}",
                "path": f"quantize_{'act' if share else 'token'}, {BASE}"
                + ("" if case.perm is None else " and gather"),
                "m": m,
                "n": None,
                "k": k,
                "int4_fraction": INT4_SHARE,
                "weight_symmetry": None,
                "share": share,
                "ablation": variant if variant.startswith("no ") else None,
                "includes_quantize": True,
                "median_us": round(us, 3),
                "baseline": "torch.neg over the same bytes",
                "baseline_us": round(copy, 3),
                "speedup": round(copy / us, 4),
                "bound_fraction": round(case.bytes / rate / us, 4),
                "bytes": case.bytes,
                "provenance": provenance | {"utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")},
            }
            out.write(json.dumps(record) + "\n")
            speed = f"{us:8.2f} us {case.bytes / us / 1e6:5.2f} TB/s, torch.neg {copy:8.2f} us"
            print(f"M={m:5} K={k:5} {variant or 'all':15} share {share or 'token'} {speed}", flush=True)


if __name__ == "__main__":
    main()
