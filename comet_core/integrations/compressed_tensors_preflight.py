"""What an export to compressed-tensors will take, before it starts: the first layer and the last shard, exported.

Layers are alike, the last shard holds embeddings and head: time and disk of the whole follow from these two.
"""

import tempfile
import time
from pathlib import Path

from comet_core.host_memory import forget_peak, peak_memory
from comet_core.integrations.compressed_tensors import Exported, export_shards, refuse
from comet_core.packed import read_manifest
from comet_core.preflight import Estimate
from comet_core.shards import shard_files


def rehearse_export(
    folder: Path, *, activations: int, requantize: bool, contiguous: bool, symmetric: bool
) -> tuple[Estimate, Exported]:
    """What `export` with these arguments takes, by exporting the first layer and the last shard into a temporary
    folder; and what that export says, its linears those of one layer.

    Errors:
        CometError as `export`.
    """
    manifest, shards = read_manifest(folder), shard_files(folder)
    refuse(manifest, requantize, activations)
    done, seconds, disk = Exported(folder), 0.0, 0
    forget_peak()
    for shard, count in ((shards[0], len(shards) - 1), (shards[-1], 1)):
        with tempfile.TemporaryDirectory(prefix="comet-rehearsal-") as name:
            start = time.perf_counter()
            into = Path(name)
            how = {"contiguous": contiguous, "symmetric": symmetric}
            one = export_shards(folder, manifest, into, activations, [shard], **how)
            seconds += count * (time.perf_counter() - start)
            disk += count * (into / shard.name).stat().st_size
        done = one if shard is shards[0] else done
    return Estimate(seconds, peak_memory(), 0, disk), done
