"""Count what the integer GEMM keeps busy on a GPU, with ncu: as shipped, and with each mechanism off.

    python cuda/tools/profile_gemm.py --record results/measured/gemm_counters_h200.jsonl

For the linears of a model and some batches: the share of time that multiprocessors and tensor cores work, how unevenly
(busiest multiprocessor over the mean, less 1), and the bytes that memory moves. The tool starts itself under ncu, which
must be on PATH and may read the counters; clocks stay as they are. Every variant is compared with an exact product
first. Operands are cold, as ncu empties the caches before a launch; its times are of one launch and no benchmark.
"""

import argparse
import csv
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from comet_core.bench_kernel import INTEGER_OFF, int8_blocks, paper_shapes
from comet_core.provenance import provenance
from comet_core.results import Record, append, counters_table
from comet_cuda.errors import CometError
from comet_cuda.w4ax_gemm_integer import IntegerTiles, choose_integer_tiles

KERNEL = "w4ax_gemm_integer"
SHARE = 0.84  # of INT4 blocks: the default recipe's
PEAK = ".avg.pct_of_peak_sustained_elapsed"
METRICS = {  # what -> the counters that say it, best first: the first that this ncu knows is asked for
    "time_ns": ("gpu__time_duration.sum",),
    "cycles": ("sm__cycles_elapsed.max",),
    "active_mean": ("sm__cycles_active.avg",),
    "active_max": ("sm__cycles_active.max",),
    "sm_throughput": ("sm__throughput" + PEAK,),
    "tensor_pipe": tuple(  # all tensor instructions, or those of warpgroups alone
        name + PEAK
        for name in (
            "sm__pipe_tensor_cycles_active",
            "sm__pipe_tensor_op_gmma_cycles_active",
            "sm__pipe_tensor_op_imma_cycles_active",
            "sm__inst_executed_pipe_tensor_op_gmma",
            "sm__inst_executed_pipe_tensor",
        )
    ),
    "dram_bytes": ("dram__bytes.sum", "dram__bytes_read.sum"),
}


@dataclass(frozen=True)
class Launch:
    """One launch that is counted."""

    m: int
    n: int
    k: int
    names: tuple[str, ...]
    ablation: str | None
    tiles: IntegerTiles

    @property
    def int8_blocks(self) -> int:
        return int8_blocks(-(-self.k // 128), SHARE)


def launches(model: str, batches: Sequence[int], ablations: Sequence[str]) -> Iterator[Launch]:
    """Every linear of `model`, batch and variant, in the order of their launches."""
    for shape, m in product(paper_shapes(model), batches):
        shipped = choose_integer_tiles(m, shape.n, -(-shape.k // 128))
        for name in (None, *ablations):
            tiles = replace(shipped, **INTEGER_OFF[name]) if name else shipped
            yield Launch(m, shape.n, shape.k, shape.names, name, tiles)


def choose_metrics(listed: str) -> dict[str, str]:
    """Of METRICS those that `ncu --query-metrics` lists: what -> counter. Raises CometError where one has none."""
    known = set(re.findall(r"^\s*(\w+__\w+)", listed, re.MULTILINE))
    chosen = {what: next((n for n in names if n.split(".")[0] in known), "") for what, names in METRICS.items()}
    if lacking := [what for what, name in chosen.items() if not name]:
        raise CometError(
            f"ncu lists no counter for {', '.join(lacking)}, and {len(known)} others", "see ncu --query-metrics"
        )
    return chosen


def parse_counters(text: str, chosen: dict[str, str]) -> list[dict[str, float]]:
    """What ncu prints with --csv --page raw --print-units base -> what -> number, one dictionary a launch.

    Errors:
        CometError where another kernel was counted, or a counter has no number.
    """
    found = []
    for row in csv.DictReader(io.StringIO("\n".join(line for line in text.splitlines() if line.startswith('"')))):
        if not row["ID"]:  # the line of units
            continue
        if KERNEL not in row["Kernel Name"]:
            raise CometError(f"ncu counted {row['Kernel Name']}", "only the GEMM should be launched meanwhile")
        numbers = {}
        for what, name in chosen.items():
            try:
                numbers[what] = float((row.get(name) or "").replace(",", ""))
            except ValueError:
                raise CometError(f"launch {row['ID']}: ncu says {row.get(name)!r} of {name}") from None
        found.append(numbers)
    return found


def record_of(launch: Launch, counted: dict[str, float], chosen: dict[str, str], common: Record) -> Record:
    """The record of one launch; its further keys are COUNTERS of comet_core/results.py."""
    blocks = -(-launch.k // 128)
    return common | {
        "m": launch.m, "n": launch.n, "k": launch.k, "shape_names": list(launch.names),
        "int4_fraction": 1 - launch.int8_blocks / blocks, "ablation": launch.ablation,
        "median_us": round(counted["time_ns"] / 1e3, 3),
        "sm_active": round(counted["active_mean"] / counted["cycles"], 4),
        "sm_throughput": round(counted["sm_throughput"] / 100, 4),
        "tensor_pipe": round(counted["tensor_pipe"] / 100, 4),
        "imbalance": round(counted["active_max"] / counted["active_mean"] - 1, 4),
        "dram_bytes": int(counted["dram_bytes"]),
        "tiles": asdict(launch.tiles), "counters": chosen,
    }  # fmt: skip


def common_of(command: str, device: str) -> Record:
    """What all records of a run have in common."""
    return {
        "kind": "bench", "op": "w4ax_gemm counters", "arch": "sm_90a", "path": KERNEL, "weight_symmetry": "asymmetric",
        "includes_quantize": False, "baseline": None, "baseline_us": None, "speedup": None, "bound_fraction": None,
        "share": 0, "provenance": provenance(command, seed=0, device=device),
    }  # fmt: skip


def run_child(wanted: Sequence[Launch]) -> None:
    """Under ncu: check each variant, then launch each once while ncu counts."""
    from integer_variants import IntegerProblem

    torch.manual_seed(0)
    groups: dict[tuple[int, int, int], list[Launch]] = {}
    for launch in wanted:
        groups.setdefault((launch.m, launch.n, launch.k), []).append(launch)
    for (m, n, k), found in groups.items():
        problem = IntegerProblem(m, n, k, found[0].int8_blocks, sets=1)
        for launch in found:
            if wrong := problem.problem(launch.tiles):
                raise SystemExit(f"M = {m}, {n}x{k}, {launch.ablation or 'shipped'}, {launch.tiles}: {wrong}")
        runs = [problem.launcher(problem.sets[0], launch.tiles, pdl=False) for launch in found]
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for run in runs:
            run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        print(f"{m} x {n} x {k}: {len(found)} launches are right and counted", flush=True)


def count(launches: int, arguments: Sequence[str]) -> tuple[list[dict[str, float]], dict[str, str]]:
    """Run this program with `arguments` under ncu: numbers of so many launches, and the counters' names.

    Errors:
        CometError without ncu, where it fails (its own words go to the terminal), or where launches are missing.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CometError("ncu is not on PATH", "install NVIDIA Nsight Compute, or add its folder to PATH")
    chosen = choose_metrics(subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True).stdout)
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/counters.ncu-rep"
        collect = [
            ncu, "--clock-control", "none", "--profile-from-start", "off", "--kernel-name", KERNEL,
            "--metrics", ",".join(chosen.values()), "--export", report, sys.executable, __file__, "--child", *arguments,
        ]  # fmt: skip
        if status := subprocess.run(collect).returncode:
            raise CometError(f"ncu ended with status {status}", "see what it says above; it may need to run as root")
        show = [ncu, "--import", report, "--csv", "--page", "raw", "--print-units", "base"]
        told = subprocess.run(show, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    counted = parse_counters(told.stdout, chosen)
    if len(counted) != launches:
        raise CometError(f"ncu counted {len(counted)} of {launches} launches", (told.stdout + told.stderr)[-500:])
    return counted, chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", help="whose linears (recipes/paper/shapes.yaml)")
    parser.add_argument("--batch", default="16,64,256,1024", help="batch sizes, separated by commas")
    parser.add_argument("--ablation", default=",".join(INTEGER_OFF), help="mechanisms turned off, one at a time")
    parser.add_argument("--record", type=Path, help="append the records to this .jsonl file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    ablations = [name for name in args.ablation.split(",") if name]
    if unknown := {*ablations} - {*INTEGER_OFF}:
        raise CometError(f"no ablation {', '.join(sorted(unknown))}", f"there are {', '.join(INTEGER_OFF)}")
    wanted = list(launches(args.model, [int(m) for m in args.batch.split(",")], ablations))
    if args.child:
        run_child(wanted)
        return
    with ThreadPoolExecutor() as pool:  # compile beforehand, several at once
        list(pool.map(lambda tiles: tiles.kernel(torch.bfloat16), {launch.tiles for launch in wanted}))
    options = [f"--model={args.model}", f"--batch={args.batch}", f"--ablation={args.ablation}"]
    counted, chosen = count(len(wanted), options)
    common = common_of(" ".join(["python cuda/tools/profile_gemm.py", *options]), "cuda")
    records = [record_of(launch, numbers, chosen, common) for launch, numbers in zip(wanted, counted, strict=True)]
    if args.record:
        for record in records:
            append(args.record, record)
    print(counters_table(records))


if __name__ == "__main__":
    try:
        main()
    except CometError as error:
        raise SystemExit(f"error: {error}") from None
