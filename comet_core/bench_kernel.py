"""`comet bench kernel`: the W4Ax GEMM of one linear layer, alone and with quantize_act, beside other kernels.

In: shapes [N, K] and batch sizes M. Out: one record per shape, M, baseline and variant. Every time is the median over
replays of a CUDA graph on cold operands (comet_cuda/timing.py), baselines are timed in the same run, and nothing is
recorded whose output was not compared with the reference first, and found bit-equal in a second run.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from comet_core.bench_peers import BASELINE, PEERS
from comet_core.plan import SHARES
from comet_core.progress import Progress
from comet_core.provenance import provenance
from comet_core.recipe import Recipe, load_recipe, recipe_folder
from comet_core.results import Record
from comet_cuda.affine import BLOCK, num_blocks
from comet_cuda.bank_order import spread_over_banks
from comet_cuda.dispatch import device_arch
from comet_cuda.errors import CometError
from comet_cuda.prepared_linear import ActivationFormat, PreparedLinear, prepare_linear
from comet_cuda.quantize_act import TOKEN, quantize_act_ref
from comet_cuda.timing import copies_for_cold_l2, median_microseconds
from comet_cuda.w4ax_gemm import w4ax_gemm_ref
from comet_cuda.w4ax_gemm_integer import IntegerWeight, choose_integer_tiles
from comet_cuda.w4ax_gemm_integer import launch as launch_integer
from comet_cuda.w4ax_gemm_sm90 import TiledWeight, choose_tiles, sm_count
from comet_cuda.w4ax_gemm_sm90 import launch as launch_sm90

SMALLEST = 1 << 24  # N * K of the shapes that count in means
CHECKED_ROWS = 2048  # output channels that are compared with the reference
TOLERANCE = 4e-3  # relative norm of the difference: the rounding of a bfloat16 output
# Measured rates, for the bound: bytes a second of a large copy, operations a second of the best FP8 or INT8 GEMM.
PEAKS = {"NVIDIA H200": (4.3e12, 1.54e15)}
ABLATIONS = {
    "pipeline": "one stage: loading, expanding and multiplying a block follow each other",
    "schedule": "whole tiles, a cta from first block to last: no split along K, no work for idle multiprocessors",
    "conversion": "nibbles are widened one by one, not four a word at once (w4ax_gemm_integer alone has this switch)",
}
# What each turns off, as fields of a kernel's tiles.
INTEGER_OFF: dict[str, dict[str, int]] = {
    "pipeline": {"stages": 1, "batch": 1},
    "schedule": {"stream": 0, "split": 1},
    "conversion": {"one_by_one": 1},
}
SM90_OFF: dict[str, dict[str, int]] = {
    "pipeline": {"stages": 1, "batch": 1, "flight": 1},
    "schedule": {"stream": False},
}


@dataclass(frozen=True)
class Shape:
    """One linear: N out-channels, K in-channels, and the models and linears that have it."""

    n: int
    k: int
    names: tuple[str, ...] = ()


def paper_shapes(model: str | None = None) -> list[Shape]:
    """Distinct shapes of recipes/paper/shapes.yaml, of one model or of all with N * K >= 2^24.

    Errors:
        CometError if the file has no such model.
    """
    import yaml

    models: dict[str, dict[str, list[int]]] = yaml.safe_load((recipe_folder() / "paper" / "shapes.yaml").read_text())
    if model is not None and model not in models:
        raise CometError(f"no shapes of {model}", f"there are {', '.join(models)}; or give --n and --k")
    names: dict[tuple[int, int], list[str]] = {}
    for name, linears in models.items():
        for linear, (n, k) in linears.items():
            if model in (None, name):
                names.setdefault((n, k), []).append(f"{name} {linear}")
    shapes = [Shape(n, k, tuple(found)) for (n, k), found in names.items()]
    return shapes if model is not None else [shape for shape in shapes if shape.n * shape.k >= SMALLEST]


def int8_blocks(blocks: int, int4_mac_fraction: float) -> int:
    """8-bit blocks of a linear with NB blocks in which at least this share of the multiply-adds is W4A4."""
    return math.floor((1 - int4_mac_fraction) * blocks + 1e-9)


@dataclass
class Case:
    """One linear with random packed weights on a GPU, in as many copies as keep the L2 cold."""

    shape: Shape
    recipe: Recipe
    device: str
    bits: Tensor = field(init=False)  # uint8 [NB]
    canonical: tuple[Tensor, Tensor, Tensor | None] = field(init=False)  # qweight, w_scale, w_zero
    linears: list[PreparedLinear] = field(init=False)

    def __post_init__(self) -> None:
        n, k, a = self.shape.n, self.shape.k, self.recipe.activations
        blocks = num_blocks(k)
        torch.manual_seed(n + k)
        self.bits = torch.full((blocks,), a.bits, dtype=torch.uint8)
        if a.bits == 4 and self.recipe.blocks.rule != "none":
            self.bits[: int8_blocks(blocks, self.recipe.blocks.int4_mac_fraction)] = 8
        bits = self.bits.to(self.device)
        share = SHARES[a.share] if bool((self.bits == 4).any()) else 1  # as `comet calibrate` decides it
        perm = None
        if self.recipe.blocks.permute:  # as a calibration of random importance orders them
            perm = torch.randperm(k, device=self.device).int()
            perm = spread_over_banks(perm, bits) if a.hadamard else perm
        clip = torch.where(bits == 4, a.clip, 1.0).float()
        rotated = a.hadamard and bool((self.bits == 4).any())
        inputs = ActivationFormat(perm, bits, clip, rotated, share)
        self.canonical = random_weights(n, blocks, self.recipe.weights.symmetric, share, self.device)
        first = prepare_linear(*self.canonical, inputs)
        copies = copies_for_cold_l2(first.weight.records.numel())
        self.linears = [first] + [_copy(first) for _ in range(copies - 1)]

    @property
    def inputs(self) -> ActivationFormat:
        """The format of the activations."""
        return self.linears[0].inputs

    def expected(self, x: Tensor) -> Tensor:
        """float32 [M, up to CHECKED_ROWS]: what the references make of x [M, K]."""
        f = self.inputs
        codes, scale = quantize_act_ref(x, f.perm, f.block_bits, f.clip, f.hadamard, f.share)
        rows = slice(0, CHECKED_ROWS)
        qweight, w_scale, w_zero = (None if t is None else t[rows] for t in self.canonical)
        assert qweight is not None and w_scale is not None
        return w4ax_gemm_ref(codes, scale, qweight, w_scale, w_zero, f.block_bits, None, torch.float32)

    def check(self, y: Tensor, want: Tensor, again: Tensor) -> None:
        """Raise CometError unless y [M, N] is `want` (see `expected`) but for rounding, and `again`, bit by bit."""
        what = f"w4ax_gemm {self.shape.n}x{self.shape.k}, M = {len(y)}"
        error = float((y[:, : want.shape[1]].float() - want).norm() / want.norm())
        if not error < TOLERANCE:
            raise CometError(
                f"{what}: relative error {error:.2g} to the reference",
                "nothing was recorded; please report this GPU and driver",
            )
        if not torch.equal(y, again):
            raise CometError(f"{what}: two runs differ", "nothing was recorded; please report this")

    def bound_us(self, m: int) -> float | None:
        """The larger of bytes over the copy rate and operations over the tensor-core rate; None on other GPUs."""
        peaks = PEAKS.get(torch.cuda.get_device_name(self.device))
        if peaks is None:
            return None
        moved = self.linears[0].weight.records.numel() + m * (self.shape.k + 8 * len(self.bits)) + 2 * m * self.shape.n
        return 1e6 * max(moved / peaks[0], 2.0 * m * self.shape.n * self.shape.k / peaks[1])


def random_weights(
    rows: int, blocks: int, symmetric: bool, share: int, device: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Canonical weights for timing: qweight uint8 [N, 64 * NB], w_scale bf16 [N, NB], w_zero uint8 [N, NB] or None."""
    qweight = torch.randint(0, 256, (rows, BLOCK // 2 * blocks), dtype=torch.uint8, device=device)
    zero = None if symmetric else torch.randint(0, 16, (rows, blocks), dtype=torch.uint8, device=device)
    if share == TOKEN:  # multiples of one number that every zero point allows
        scale = torch.randint(4, 9, (rows, blocks), device=device) * 2.0**-9
    else:
        scale = torch.rand(rows, blocks, device=device) * 0.02 + 0.01
    return qweight, scale.to(torch.bfloat16), zero


def _path(linear: PreparedLinear) -> str:
    """The kernel's name in records."""
    kind = "integer" if isinstance(linear.weight, IntegerWeight) else linear.layout.replace("_", "")
    return f"w4ax_gemm_{kind}"


def _copy(linear: PreparedLinear) -> PreparedLinear:
    weight = linear.weight
    return replace(linear, weight=replace(weight, records=weight.records.clone()))


def _ablated(linear: PreparedLinear, m: int, ablation: str) -> Callable[..., Tensor]:
    """The GEMM of a quantized operand with one mechanism off. Raises CometError where a path has no such switch."""
    w = linear.weight
    if isinstance(w, IntegerWeight):
        chosen = choose_integer_tiles(m, w.rows, w.records.shape[1], sm_count(w.records.get_device()))
        tiles = replace(chosen, **INTEGER_OFF[ablation])
        return lambda codes, multiples, scale: launch_integer(
            codes, multiples, scale, w.records, w.base, None, m, w.rows, w.int8_blocks, torch.bfloat16, tiles
        )
    if not isinstance(w, TiledWeight) or ablation not in SM90_OFF:
        raise CometError(f"--ablation {ablation}: {_path(linear)} has no such switch", "leave it out")
    changed = replace(choose_tiles(m, w.rows, w.records.shape[1]), **SM90_OFF[ablation])  # type: ignore[arg-type]
    return lambda codes, meta: launch_sm90(
        codes, meta, w.records, w.zero_terms, None, m, w.rows, w.int8_mask, torch.bfloat16, changed
    )


def _runs(case: Case, x: Tensor, what: str, ablation: str | None) -> list[Callable[[], Tensor]]:
    """One closure per copy of the weights."""
    m = len(x)
    if what == "with quantize_act":
        return [(lambda linear=linear: linear(x, None)) for linear in case.linears]  # type: ignore[misc]
    operand = case.linears[0].quantize(x)
    if ablation is not None:
        parts = [_ablated(linear, m, ablation) for linear in case.linears]
        return [(lambda part=part: part(*operand)) for part in parts]  # type: ignore[misc]
    return [
        (lambda linear=linear: linear.multiply(operand, m, None, torch.bfloat16))  # type: ignore[misc]
        for linear in case.linears
    ]


def check_asked(recipe: str, peers: Sequence[str], ablations: Sequence[str]) -> Recipe:
    """The recipe to measure. Raises CometError for an unknown name, or weights that are not 4 bit."""
    for name in {*peers} - {*PEERS} | {*ablations} - {*ABLATIONS}:
        raise CometError(f"{name} is not known", f"kernels: {', '.join(PEERS)}; ablations: {', '.join(ABLATIONS)}")
    chosen = load_recipe(recipe)
    if chosen.weights.bits != 4 or chosen.activations.bits == 16:
        raise CometError(
            f"recipe {chosen.name} has no W4Ax GEMM", "choose one with 4-bit weights and 4- or 8-bit activations"
        )
    return chosen


def bench_kernel(
    shapes: Sequence[Shape],
    batches: Sequence[int],
    *,
    recipe: str = "w4a4kv4",
    int4_share: float | None = None,
    peers: Sequence[str] = (),
    ablations: Sequence[str] = (),
    device: str = "cuda",
    progress: Progress,
    command: str | None = None,
) -> Iterator[Record]:
    """Measure each shape at each batch size; yields records as they come.

    Args:
        shapes, batches: what to measure. recipe: whose format the weights and activations have.
        int4_share: least share of INT4 blocks, instead of the recipe's.
        peers: names of PEERS beside bf16 cuBLAS, which is always timed. ablations: names of ABLATIONS.

    Errors:
        CometError for an unknown name, weights that are not 4 bit, or an output that differs from the reference.
    """
    chosen = check_asked(recipe, peers, ablations)
    if int4_share is not None:
        chosen = replace(chosen, blocks=replace(chosen.blocks, int4_mac_fraction=int4_share))
    missing = {name: reason for name in peers if (reason := PEERS[name].missing())}
    for name, reason in missing.items():
        progress.log(f"{name} is left out: {reason}")
    with progress.task("bench kernel", len(shapes) * len(batches)) as task:
        for shape in shapes:
            case = Case(shape, chosen, device)
            for m in batches:
                yield from _measure(case, m, [p for p in peers if p not in missing], ablations, progress, command)
                task.advance()
            del case


def _measure(
    case: Case, m: int, peers: Sequence[str], ablations: Sequence[str], progress: Progress, command: str | None
) -> Iterator[Record]:
    n, k = case.shape.n, case.shape.k
    x = torch.randn(m, k, dtype=torch.bfloat16, device=case.device)
    baseline_us = _time_peer(BASELINE, m, n, k, progress)
    assert baseline_us is not None
    common = {
        "kind": "bench",
        "op": "w4ax_gemm",
        "arch": device_arch(torch.cuda.current_device()),
        "m": m,
        "n": n,
        "k": k,
        "int4_fraction": float((case.bits == 4).float().mean()),
        "weight_symmetry": "symmetric" if case.canonical[2] is None else "asymmetric",
        "share": case.inputs.share,
        "baseline": BASELINE,
        "baseline_us": round(baseline_us, 3),
        "shape_names": list(case.shape.names),
        "provenance": provenance(command, seed=0, device=case.device),
    }
    variants: list[tuple[str, str | None]] = [("GEMM alone", None), ("with quantize_act", None)]
    variants += [("GEMM alone", ablation) for ablation in ablations]
    bound = case.bound_us(m)
    want, whole = case.expected(x), None
    for what, ablation in variants:
        runs = _runs(case, x, what, ablation)
        y = runs[0]()
        case.check(y, want, runs[0]())
        whole = y if whole is None else whole
        if ablation and isinstance(case.linears[0].weight, IntegerWeight) and not torch.equal(y, whole):
            raise CometError(f"w4ax_gemm {n}x{k}, M = {m}: not the same bits with {ablation} off", "please report this")
        us = median_microseconds(runs)
        yield common | {
            "path": _path(case.linears[0]),
            "ablation": ablation,
            "includes_quantize": what == "with quantize_act",
            "median_us": round(us, 3),
            "speedup": round(baseline_us / us, 4),
            "bound_fraction": None if bound is None else round(bound / us, 4),
        }
    for name in peers:
        us_or_none = _time_peer(name, m, n, k, progress)
        if us_or_none is not None:
            yield common | {
                "path": name,
                "int4_fraction": 0.0,
                "weight_symmetry": PEERS[name].weights,
                "share": None,
                "ablation": None,
                "includes_quantize": False,
                "median_us": round(us_or_none, 3),
                "speedup": round(baseline_us / us_or_none, 4),
                "bound_fraction": None if bound is None else round(bound / us_or_none, 4),
            }


def _time_peer(name: str, m: int, n: int, k: int, progress: Progress) -> float | None:
    """Microseconds of a peer, after its output was checked; None, with the reason said, where it cannot run."""
    peer = PEERS[name]
    try:
        runs, y, want = peer.build(m, n, k)
        error = float((y.float() - want).norm() / want.norm())
    except (RuntimeError, ValueError, ImportError, AttributeError, TypeError, AssertionError, OSError) as problem:
        progress.log(f"{name}, M = {m}, {n}x{k}: {type(problem).__name__} {str(problem).partition(chr(10))[0]}")
        return None
    if not error < peer.tolerance:
        progress.log(f"{name}, M = {m}, {n}x{k}: relative error {error:.2g}, not recorded")
        return None
    return median_microseconds(runs)


def summarize(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Geometric mean of the speed-up over the baseline, one row per path, variant and batch size."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        key = (record["path"], record["ablation"], record["includes_quantize"], record["m"])
        groups.setdefault(key, []).append(record)
    rows = []
    for (path, ablation, quantize, m), found in groups.items():
        ratios = [record["speedup"] for record in found]
        rows.append(
            {
                "kernel": path + (f", {ablation} off" if ablation else "") + (" + quantize_act" if quantize else ""),
                "M": m,
                "shapes": len(found),
                "speed-up": f"{geometric_mean(ratios):.2f}",
                "smallest": f"{min(ratios):.2f}",
                "largest": f"{max(ratios):.2f}",
                "us, mean": f"{sum(record['median_us'] for record in found) / len(found):.1f}",
            }
        )
    return rows
