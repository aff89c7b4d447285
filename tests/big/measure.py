"""Calibrates and packs a large random checkpoint, cut to few layers, and says what each layer took.

    PYTHONPATH=cuda:cli:. python tests/big/measure.py --model llama-3-70b --layers 2 --vocabulary 8192 [--record FILE]
    PYTHONPATH=cuda:cli:. python tests/big/measure.py --layers 2 --hidden 256 512 1024  # growth with the width

Two processes: one writes the checkpoint (config.json, one safetensors shard a layer, an index, as the hub has them),
the other calibrates and packs it from disk and watches its own memory. The bound that it is held to, above what the
process holds after its imports (and, on a GPU, a first tiny run): two layers in the type of the computation, the
largest shard, two Hessians of the widest group, the hidden states and, on a CPU, what packing remembers of a layer's
outputs (up to 1 GiB). The same bound holds for RAM where a GPU computes; what the GPU held is reported beside it.
"""

import argparse
import dataclasses
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ALLOWANCE = 64 << 20  # bytes: modules, plans, what libraries hold
INDEX = "model.safetensors.index.json"


def make_checkpoint(folder: Path, model: str, layers: int, vocabulary: int, **shapes: int) -> None:
    """A random checkpoint of an alias's shape: normal weights, each drawn from its name."""
    from transformers import AutoConfig

    from comet_core.model_source import resolve_model
    from comet_core.shards import shard_name, write_shard

    source = resolve_model(model, weights="random", layers=layers)
    settings = source.config.to_dict() | {"vocab_size": vocabulary, "num_hidden_layers": layers} | shapes
    AutoConfig.for_model(**settings).save_pretrained(folder)
    reader = resolve_model(str(folder), weights="random").weights()
    shards: dict[int, list[str]] = {}
    for name in reader.names():
        parts = name.split(".")
        shards.setdefault(int(parts[parts.index("layers") + 1]) if "layers" in parts else layers, []).append(name)
    weight_map = {}
    with ThreadPoolExecutor() as pool:
        for index, names in shards.items():
            file = folder / shard_name(index, layers + 1)
            write_shard(file, dict(zip(names, pool.map(reader.load, names), strict=True)), {})
            weight_map |= dict.fromkeys(names, file.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


class Watch:
    """A Progress that keeps, for each step of a command, when its units ended and the peaks of memory until then."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.cpu_times: dict[str, list[float]] = {}  # the same on the clock of this process
        self.peaks: dict[str, int] = {}
        self.step, self.began = "start", time.perf_counter()

    @contextmanager
    def task(self, description: str, total: int) -> Iterator["Watch"]:
        self.look(description)
        self.times[description], self.cpu_times[description] = [time.perf_counter()], [time.process_time()]
        yield self
        self.look(f"after {description}")

    def advance(self, steps: int = 1) -> None:
        self.times[self.step].append(time.perf_counter())
        self.cpu_times[self.step].append(time.process_time())

    def look(self, following: str) -> None:
        """The step that ran ends here."""
        from comet_core.host_memory import forget_peak, peak_memory

        self.peaks[self.step] = max(self.peaks.get(self.step, 0), peak_memory())
        forget_peak()
        self.step = following

    def log(self, message: str) -> None:
        pass


def run_and_watch(home: Path, samples: int, seq_len: int, device: str, recipe_name: str, limit: int) -> dict[str, Any]:
    """Calibrate and pack home/model; times and peaks."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401 - part of what is there before

    from comet_core.calibrate import calibrate, resolve_lanes
    from comet_core.hidden import DEFAULT_LIMIT
    from comet_core.host_memory import forget_peak
    from comet_core.model_source import ModelSource, resolve_model
    from comet_core.pack import pack
    from comet_core.recipe import load_recipe, with_calibration
    from comet_core.windows import MEMO_BYTES

    lanes, dtype = resolve_lanes(device, "auto")
    on_gpu = lanes.devices[0].type == "cuda"
    for one in lanes.devices:
        torch.zeros(1, device=one)

    class Untokenized(ModelSource):
        """Calibrated on random tokens, as random weights are."""

        def tokenizer(self) -> None:
            return None

    found = resolve_model(str(home / "model"))
    source = Untokenized(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})
    recipe = with_calibration(load_recipe(recipe_name), samples=samples, seq_len=seq_len)
    watch = Watch()
    held = forget_peak()
    gpu_peaks = {}
    options: Any = {"device": device, "progress": watch, "limit_share": limit / DEFAULT_LIMIT}
    for command in ("calibrate", "pack"):
        if on_gpu:
            for one in lanes.devices:
                torch.cuda.reset_peak_memory_stats(one)
        if command == "calibrate":
            calibrate(source, recipe, home / "calibration", **options)
        else:
            info = pack(source, home / "calibration", None, home / "packed", **options)
        if on_gpu:
            torch.cuda.synchronize()
            gpu_peaks[command] = max(map(torch.cuda.max_memory_allocated, lanes.devices))
    watch.look("done")
    config = source.config
    size = torch.empty(0, dtype=dtype).itemsize
    layer = [n for n in source.parameters.shapes if ".layers.0." in n]
    layer_bytes = size * sum(torch.Size(source.parameters.shapes[n]).numel() for n in layer)
    hidden = size * samples * seq_len * config.hidden_size
    memo = MEMO_BYTES * limit // DEFAULT_LIMIT
    outputs = sum(source.parameters.shapes[n][0] for n in layer if len(source.parameters.shapes[n]) == 2)
    parts = {
        "two_layers": 2 * layer_bytes,
        "shard": max(file.stat().st_size for file in (home / "model").glob("*.safetensors")),
        "two_hessians": 2 * 4 * max(config.intermediate_size, config.hidden_size) ** 2,
        "hidden_states": hidden if hidden <= limit else 0,
        "remembered_outputs": 0 if on_gpu else min(memo, size * samples * seq_len * outputs),
        "allowance": ALLOWANCE,
    }
    layers = config.num_hidden_layers
    packing, on_cpu = watch.times["pack"], watch.cpu_times["pack"]  # the last unit is what is outside the layers
    calibrating, cpu_calibrating = watch.times["calibrate"], watch.cpu_times["calibrate"]
    return {
        "layers": layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocabulary": config.vocab_size,
        "samples": samples,
        "seq_len": seq_len,
        "device": ",".join(map(str, lanes.devices)),
        "dtype": str(dtype).removeprefix("torch."),
        "calibrate_s_a_layer": (calibrating[-1] - calibrating[0]) / layers,
        "pack_s_by_layer": [end - start for start, end in itertools.pairwise(packing[:-1])],
        "calibrate_cpu_s_a_layer": (cpu_calibrating[-1] - cpu_calibrating[0]) / layers,
        "pack_cpu_s_by_layer": [end - start for start, end in itertools.pairwise(on_cpu[:-1])],
        "gpus": len(lanes) if on_gpu else 0,
        "ram_above_imports": {step: max(0, peak - held) for step, peak in watch.peaks.items()},
        "imports": held,
        "gpu_peaks": gpu_peaks,
        "bound": parts,
        "kept_rtn": len(info.kept_rtn),
        "packed_bytes": info.bytes,
    }


def main() -> int:
    """Make, measure, print, record; 1 if the bound was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--hidden", type=int, nargs="+", help="other hidden sizes, each measured; heads of 64")
    parser.add_argument("--intermediate", type=int, help="with --hidden; left out: three and a half times as many")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--recipe", default="w4a4kv4")
    parser.add_argument("--spill-over", type=int, default=8 << 30, help="bytes of hidden states that stay in memory")
    parser.add_argument("--folder", type=Path, help="where the checkpoint lies or will lie")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--measure", type=Path, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        from comet_core.host_memory import give_back_freed

        give_back_freed()
        if args.device != "cpu":  # what a first run on a GPU loads is no more part of a layer than the imports are
            with tempfile.TemporaryDirectory(prefix="comet-big-") as warm:
                make_checkpoint(Path(warm) / "model", args.model, 2, 256, **_shapes(512, None))
                windows = 256 if "," in args.device else 2  # of which every GPU gets some
                run_and_watch(Path(warm), windows, 256, args.device, args.recipe, args.spill_over)
        for home in args.measure:
            found = run_and_watch(home, args.samples, args.seq_len, args.device, args.recipe, args.spill_over)
            print(json.dumps(found), flush=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="comet-big-") as scratch:
        homes = [_prepared(args, width, Path(scratch)) for width in args.hidden or [0]]
        command = [sys.executable, *sys.argv, "--measure", *map(str, homes)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        broken = [_report(args, json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
        return done.returncode or int(any(broken))


def _prepared(args: argparse.Namespace, hidden: int, scratch: Path) -> Path:
    """A working folder whose `model` is a checkpoint of that hidden size (0: the alias's own), kept in args.folder."""
    home, start = scratch / str(hidden), time.perf_counter()
    folder = (args.folder or scratch) / (str(hidden) if hidden else "")
    if not (folder / "model" / INDEX).exists():
        shapes = _shapes(hidden, args.intermediate) if hidden else {}
        (folder / "model").mkdir(parents=True)
        make_checkpoint(folder / "model", args.model, args.layers, args.vocabulary, **shapes)
        print(f"checkpoint written in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    if folder != home:
        home.mkdir(exist_ok=True)
        (home / "model").symlink_to(folder.resolve() / "model")
    return home


def _shapes(hidden: int, intermediate: int | None) -> dict[str, int]:
    """Of another width; heads of 64."""
    return {
        "hidden_size": hidden, "intermediate_size": intermediate or hidden * 7 // 2 // 128 * 128,
        "num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 512), "head_dim": 64,
    }  # fmt: skip


def _report(args: argparse.Namespace, found: dict[str, Any]) -> bool:
    """Print and record what one run took; whether it broke its bound."""
    import torch  # noqa: F401 - by which provenance finds the GPU

    from comet_core.provenance import provenance
    from comet_core.results import append

    bound = sum(found["bound"].values())
    peak = max(found["ram_above_imports"].values())
    seconds = [round(value, 2) for value in found["pack_s_by_layer"]]
    mib = {step: peak >> 20 for step, peak in found["ram_above_imports"].items()}
    print(
        f"{args.model}, {found['layers']} layers of {found['hidden_size']}/{found['intermediate_size']}, "
        f"{args.samples} x {args.seq_len}, {found['device']} {found['dtype']}: "
        f"calibrate {found['calibrate_s_a_layer']:.2f} s a layer ({found['calibrate_cpu_s_a_layer']:.2f} on the CPU), "
        f"pack {seconds[:4]} s ({[round(value, 2) for value in found['pack_cpu_s_by_layer'][:4]]}); "
        f"RAM above imports, MiB: {mib}; GPU MiB: { {k: v >> 20 for k, v in found['gpu_peaks'].items()} }; "
        f"bound {bound >> 20} MiB",
        flush=True,
    )
    if args.record:
        typed = shlex.join(["python", "tests/big/measure.py", *sys.argv[1:]])
        append(args.record, {"kind": "big", "model": args.model, "recipe": args.recipe, **found,
                             "provenance": provenance(typed, device=found["device"].partition(",")[0])})  # fmt: skip
    return peak > bound


if __name__ == "__main__":
    raise SystemExit(main())
