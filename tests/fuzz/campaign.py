"""Feeds damaged files to everything that reads files, and counts what comes back.

    PYTHONPATH=cuda:cli:. python tests/fuzz/campaign.py --count 10000 --seed 1 [--record FILE.jsonl]

An input may load, or be refused by CometError with a hint. Anything else - another exception, more than LIMIT seconds,
memory beyond the allowance - is a failure: its seed is printed, and the same seed makes the same input again.
"""

import argparse
import collections
import json
import logging
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from mutations import mutate_bytes, mutate_json, mutate_safetensors, mutate_tree  # noqa: E402

LIMIT = 20  # seconds an input may take
ALLOWANCE = 3 << 30  # bytes of address space above what is there at the start


class Hang(BaseException):
    """An input took longer than LIMIT."""


class Targets:
    """One reader per name: damages a copy of a good file and reads it."""

    def __init__(self, home: Path) -> None:
        from transformers import LlamaConfig

        from comet_core.calibrate import calibrate
        from comet_core.model_source import resolve_model
        from comet_core.progress import SilentProgress
        from comet_core.recipe import load_recipe, with_calibration

        self.home = home
        self.packed = home / "packed"
        shutil.copytree(ROOT / "tests" / "golden" / "packed-v3", self.packed)
        config = LlamaConfig(
            vocab_size=64, hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64,
        )  # fmt: skip
        config.save_pretrained(home / "random")
        source = resolve_model(str(home / "random"), weights="random")
        recipe = with_calibration(load_recipe("w4a4kv4"), samples=2, seq_len=16)
        self.calibration = home / "calibration"
        calibrate(source, recipe, self.calibration, device="cpu", progress=SilentProgress())
        self.model = home / "model"
        self._save_model(source)
        self.scratch = home / "scratch"
        self.all: dict[str, Callable[[random.Random], None]] = {
            name.removeprefix("read_"): getattr(self, name) for name in dir(self) if name.startswith("read_")
        }

    def _save_model(self, source: Any) -> None:
        """Two safetensors shards with an index, as the hub has them."""
        from safetensors.torch import save_file

        self.model.mkdir()
        shutil.copy(self.home / "random" / "config.json", self.model)
        reader = source.weights()
        names = reader.names()
        weight_map = {}
        for number, part in enumerate((names[::2], names[1::2]), 1):
            file = f"model-{number:05}-of-00002.safetensors"
            save_file({name: reader.load(name) for name in part}, self.model / file)
            weight_map |= dict.fromkeys(part, file)
        (self.model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def _copy(self, folder: Path, file: str, change: Callable[[bytes], bytes]) -> Path:
        """A folder with hard links to the good files, and a damaged copy of one of them."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        for path in folder.iterdir():
            if path.is_file() and path.name != file:
                (self.scratch / path.name).hardlink_to(path)
        (self.scratch / file).write_bytes(change((folder / file).read_bytes()))
        return self.scratch

    def _packed(self, file: str, change: Callable[[bytes], bytes], rng: random.Random) -> None:
        from comet_core.inspection import inspect_packed
        from comet_core.packed import load_packed

        folder = self._copy(self.packed, file, change)
        if rng.random() < 0.2:
            inspect_packed(folder)
        else:
            load_packed(folder, verify=rng.random() < 0.3)

    def read_manifest(self, rng: random.Random) -> None:
        self._packed("comet.json", lambda data: mutate_json(data.decode(), rng), rng)

    def read_config(self, rng: random.Random) -> None:
        self._packed("config.json", lambda data: mutate_json(data.decode(), rng), rng)

    def read_packed_index(self, rng: random.Random) -> None:
        self._packed("model.safetensors.index.json", lambda data: mutate_json(data.decode(), rng), rng)

    def read_shard(self, rng: random.Random) -> None:
        file = f"model-0000{rng.randint(1, 3)}-of-00003.safetensors"
        self._packed(file, lambda data: mutate_safetensors(data, rng), rng)

    def _source(self, file: str, change: Callable[[bytes], bytes]) -> None:
        from comet_core.model_source import resolve_model

        reader = resolve_model(str(self._copy(self.model, file, change))).weights()
        for name in reader.names():
            reader.load(name)

    def read_model_config(self, rng: random.Random) -> None:
        self._source("config.json", lambda data: mutate_json(data.decode(), rng))

    def read_model_index(self, rng: random.Random) -> None:
        self._source("model.safetensors.index.json", lambda data: mutate_json(data.decode(), rng))

    def read_model_shard(self, rng: random.Random) -> None:
        self._source(f"model-0000{rng.randint(1, 2)}-of-00002.safetensors", lambda data: mutate_safetensors(data, rng))

    def read_calibration(self, rng: random.Random) -> None:
        from comet_core.calibration import load_calibration

        load_calibration(self._copy(self.calibration, "calibration.json", lambda data: mutate_json(data.decode(), rng)))

    def read_statistics(self, rng: random.Random) -> None:
        from comet_core.calibration import load_calibration

        load_calibration(self._copy(self.calibration, "statistics.safetensors", lambda d: mutate_safetensors(d, rng)))

    def read_recipe(self, rng: random.Random) -> None:
        import yaml

        from comet_core.recipe import load_recipe

        name = rng.choice(sorted((ROOT / "recipes").glob("*.yaml")))
        text = name.read_text()
        file = self.home / "recipe.yaml"
        if rng.random() < 0.4:
            file.write_bytes(mutate_bytes(text.encode(), rng))
        else:
            file.write_text(yaml.safe_dump(mutate_tree(yaml.safe_load(text), rng)), encoding="utf-8", errors="replace")
        load_recipe(str(file))

    def read_records(self, rng: random.Random) -> None:
        from comet_core.results import eval_table, gemm_table, read

        source = rng.choice(sorted((ROOT / "results" / "measured").glob("*.jsonl")))
        lines = source.read_text().splitlines()[:4]
        file = self.home / "records.jsonl"
        if rng.random() < 0.4:
            file.write_bytes(mutate_bytes("\n".join(lines).encode(), rng))
        else:
            file.write_bytes(b"\n".join(mutate_json(line, rng) for line in lines))
        records = read(file)
        eval_table(records)
        gemm_table(records)


def run(count: int, seed: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Feed `count` inputs; returns what happened, failures with their seeds."""
    from comet_cuda.errors import CometError

    def alarm(_: int, __: FrameType | None) -> None:
        raise Hang

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    outcomes: collections.Counter[str] = collections.Counter()
    failures: list[dict[str, Any]] = []
    slowest = 0.0
    with tempfile.TemporaryDirectory() as home:
        targets = Targets(Path(home))
        names = sorted(targets.all)
        signal.signal(signal.SIGALRM, alarm)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + ALLOWANCE, resource.getrlimit(resource.RLIMIT_AS)[1]))
        try:
            for number in range(count):
                one = f"{seed}-{number}"
                name = names[number % len(names)]
                start = time.perf_counter()
                signal.alarm(LIMIT)
                try:
                    targets.all[name](random.Random(one))
                    outcomes["loaded"] += 1
                except CometError as error:
                    outcomes["refused"] += 1
                    if not error.hint:
                        failures.append({"input": one, "reader": name, "what": f"no hint: {error.message[:200]}"})
                except BaseException as error:  # a Hang, MemoryError, or whatever was not foreseen
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    what = f"{type(error).__name__}: {str(error)[:160]} ({Path(where.filename).name}:{where.lineno})"
                    failures.append({"input": one, "reader": name, "what": what})
                    log(f"{name} {one}: {what}")
                finally:
                    signal.alarm(0)
                slowest = max(slowest, time.perf_counter() - start)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_AS)[1]))
            logging.disable(logging.NOTSET)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {"inputs": count, "seed": seed, "readers": names, **outcomes, "failures": failures,
            "slowest_s": round(slowest, 2), "peak_rss_mib": peak}  # fmt: skip


def main() -> int:
    """Run, print, record; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    found = run(args.count, args.seed, print)
    print(json.dumps(found | {"failures": len(found["failures"])}))
    if args.record:
        from comet_core.provenance import provenance

        command = f"python tests/fuzz/campaign.py --count {args.count} --seed {args.seed}"
        line = json.dumps({"kind": "fuzz", **found, "provenance": provenance(command, seed=args.seed)})
        with args.record.open("a", encoding="utf-8") as sink:
            sink.write(line + "\n")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
