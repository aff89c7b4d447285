"""Calibrates and packs a large random checkpoint, cut to few layers, and says what each layer took.

    PYTHONPATH=cuda:cli:. python tests/big/measure.py --model llama-3-70b --layers 2 --vocabulary 8192 [--record FILE]

Two processes: one writes the checkpoint (config.json, one safetensors shard a layer, an index, as the hub has them),
the other calibrates and packs it from disk and watches its own memory. The bound that it is held to, above what the
process holds after its imports: two layers in the type of the computation, the largest shard, two Hessians of the
widest group and the hidden states. On a GPU the same bound counts the GPU's memory.
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
        self.peaks: dict[str, int] = {}
        self.step, self.began = "start", time.perf_counter()

    @contextmanager
    def task(self, description: str, total: int) -> Iterator["Watch"]:
        self.look(description)
        self.times[description] = [time.perf_counter()]
        yield self
        self.look(f"after {description}")

    def advance(self, steps: int = 1) -> None:
        self.times[self.step].append(time.perf_counter())

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

    from comet_core.calibrate import calibrate, resolve_compute
    from comet_core.hidden import DEFAULT_LIMIT
    from comet_core.host_memory import forget_peak
    from comet_core.model_source import ModelSource, resolve_model
    from comet_core.pack import pack
    from comet_core.recipe import load_recipe, with_calibration

    device, dtype = resolve_compute(device, "auto")
    on_gpu = device.startswith("cuda")
    torch.zeros(1, device=device)

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
            torch.cuda.reset_peak_memory_stats()
        if command == "calibrate":
            calibrate(source, recipe, home / "calibration", **options)
        else:
            info = pack(source, home / "calibration", None, home / "packed", **options)
        if on_gpu:
            torch.cuda.synchronize()
            gpu_peaks[command] = torch.cuda.max_memory_allocated()
    watch.look("done")
    config = source.config
    size = torch.empty(0, dtype=dtype).itemsize
    layer = [n for n in source.parameters.shapes if ".layers.0." in n]
    layer_bytes = size * sum(torch.Size(source.parameters.shapes[n]).numel() for n in layer)
    hidden = size * samples * seq_len * config.hidden_size
    parts = {
        "two_layers": 2 * layer_bytes,
        "shard": max(file.stat().st_size for file in (home / "model").glob("*.safetensors")),
        "two_hessians": 2 * 4 * max(config.intermediate_size, config.hidden_size) ** 2,
        "hidden_states": hidden if hidden <= limit else 0,
        "allowance": ALLOWANCE,
    }
    layers = config.num_hidden_layers
    packing = watch.times["pack"]  # the last unit is what is outside the layers
    return {
        "layers": layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocabulary": config.vocab_size,
        "samples": samples,
        "seq_len": seq_len,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "calibrate_s_a_layer": (watch.times["calibrate"][-1] - watch.times["calibrate"][0]) / layers,
        "pack_s_by_layer": [end - start for start, end in itertools.pairwise(packing[:-1])],
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
    parser.add_argument("--hidden", type=int, help="another hidden size: a narrow model of full depth, a rehearsal")
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--heads", type=int, nargs=2, help="query and KV heads, with --hidden")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--recipe", default="w4a4kv4")
    parser.add_argument("--spill-over", type=int, default=8 << 30, help="bytes of hidden states that stay in memory")
    parser.add_argument("--folder", type=Path, help="where the checkpoint lies or will lie")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        from comet_core.host_memory import give_back_freed

        give_back_freed()
        found = run_and_watch(args.measure, args.samples, args.seq_len, args.device, args.recipe, args.spill_over)
        print(json.dumps(found))
        return 0
    with tempfile.TemporaryDirectory(prefix="comet-big-") as scratch:
        return _measured(args, args.folder or Path(scratch), Path(scratch))


def _measured(args: argparse.Namespace, folder: Path, home: Path) -> int:
    from comet_core.provenance import provenance
    from comet_core.results import append

    start = time.perf_counter()
    if not (folder / "model" / INDEX).exists():
        shapes = {"hidden_size": args.hidden, "intermediate_size": args.intermediate}
        if args.heads:
            shapes |= {"num_attention_heads": args.heads[0], "num_key_value_heads": args.heads[1]}
            shapes["head_dim"] = args.hidden // args.heads[0]
        (folder / "model").mkdir(parents=True)
        make_checkpoint(folder / "model", args.model, args.layers, args.vocabulary,
                        **{key: value for key, value in shapes.items() if value})  # fmt: skip
        print(f"checkpoint written in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    if folder != home:
        (home / "model").symlink_to(folder.resolve() / "model")
    command = [sys.executable, *sys.argv, "--measure", str(home)]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.returncode
    found = json.loads(done.stdout.splitlines()[-1])
    bound = sum(found["bound"].values())
    peak = max((found["gpu_peaks"] or found["ram_above_imports"]).values())
    seconds = [round(value, 2) for value in found["pack_s_by_layer"]]
    mib = {step: peak >> 20 for step, peak in found["ram_above_imports"].items()}
    print(
        f"{args.model}, {found['layers']} layers of {found['hidden_size']}/{found['intermediate_size']}, "
        f"{args.samples} x {args.seq_len}, {found['device']} {found['dtype']}: "
        f"calibrate {found['calibrate_s_a_layer']:.2f} s a layer, pack {seconds[:4]} s; "
        f"RAM above imports, MiB: {mib}; GPU MiB: { {k: v >> 20 for k, v in found['gpu_peaks'].items()} }; "
        f"bound {bound >> 20} MiB; {time.perf_counter() - start:.1f} s in all",
        flush=True,
    )
    if args.record:
        typed = shlex.join(["python", "tests/big/measure.py", *sys.argv[1:]])
        append(args.record, {"kind": "big", "model": args.model, "recipe": args.recipe, **found,
                             "provenance": provenance(typed, device=found["device"])})  # fmt: skip
    return int(peak > bound)


if __name__ == "__main__":
    raise SystemExit(main())
