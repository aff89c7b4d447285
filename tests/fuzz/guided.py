"""The same readers, fed by a fuzzer that looks at which lines of COMET an input reaches (atheris, where it runs).

    pip install atheris
    PYTHONPATH=cuda:cli:. python tests/fuzz/guided.py --seconds 600

In: the good files of `campaign.py`'s readers as first inputs. Out: the fuzzer's own account; an input that is answered
by anything but a loaded object or a CometError with a hint ends the run, and stays behind as `crash-*`. The campaign's
damage knows JSON and safetensors; libFuzzer knows nothing but bytes and what they reached, so it gives whole files, and
the first byte says which reader gets one.
"""

import argparse
import logging
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["comet_core", "comet_cuda"]):
    import campaign

    from comet_core import calibration, inspection, model_source, packed, recipe, results  # noqa: F401
from comet_cuda.errors import CometError


def readers(targets: campaign.Targets) -> list[tuple[Path, Any]]:
    """Pairs of a good file and what reads a folder that holds these bytes in its place."""
    packed_folder, source, found = targets.packed, targets.model, targets.calibration
    chosen = random.Random(0)
    of_packed = ["comet.json", "config.json", "model.safetensors.index.json", "model-00001-of-00003.safetensors"]
    of_source = ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    pairs = [(packed_folder / n, lambda b, n=n: targets._packed(n, lambda _: b, chosen)) for n in of_packed]
    pairs += [(source / n, lambda b, n=n: targets._source(n, lambda _: b)) for n in of_source]
    for name in ("calibration.json", "statistics.safetensors"):
        pairs.append(
            (found / name, lambda b, n=name: calibration.load_calibration(targets._copy(found, n, lambda _: b)))
        )
    pairs.append(
        (campaign.ROOT / "recipes" / "w4a4kv4.yaml", lambda b: _file(targets, "r.yaml", b, recipe.load_recipe))
    )
    records = campaign.ROOT / "results" / "measured" / "kv_cache.jsonl"
    return [*pairs, (records, lambda b: _file(targets, "r.jsonl", b, lambda name: results.read(Path(name))))]


def _file(targets: campaign.Targets, name: str, content: bytes, read: Any) -> None:
    (targets.home / name).write_bytes(content)
    read(str(targets.home / name))


def main() -> None:
    """Hand over to libFuzzer, which ends the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    home = Path(tempfile.mkdtemp(prefix="comet-guided-"))
    pairs = readers(campaign.Targets(home))
    (home / "first").mkdir()
    for number, (file, _) in enumerate(pairs):
        (home / "first" / str(number)).write_bytes(bytes([number]) + file.read_bytes())

    def one(data: bytes) -> None:
        if not data:
            return
        try:
            pairs[data[0] % len(pairs)][1](data[1:])
        except CometError as error:
            assert error.hint, f"no hint: {error.message}"

    flags = [
        f"-max_total_time={args.seconds}",
        "-timeout=20",
        "-rss_limit_mb=4096",
        "-max_len=131072",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *flags, str(home / "first")], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
