"""Every kernel and every way it is compiled for a GPU family: for compiling ahead of time, and for the test of all.

Kernels compile at first use, which takes a second each; `comet doctor --build` does it beforehand.
"""

import dataclasses
import importlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from comet_cuda import w4ax_gemm_sm80
from comet_cuda.dispatch import Family, family_of
from comet_cuda.jit import Configuration, Cubin, cache_folder
from comet_cuda.tiles_sm90 import OUT_KINDS, SOURCE, Tiles, tile_table

SOURCES = Path(__file__).parent
ELSEWHERE = {"quantize_act.cu": "quantize_act_cuda", "quantize_token.cu": "quantize_token_plan"}  # not in its namesake


def sources() -> list[str]:
    """Names of the kernels' source files."""
    return sorted(path.name for path in SOURCES.glob("*.cu"))


def configurations(source: str, family: Family) -> list[Configuration]:
    """How a source is compiled on a GPU family; empty where it is not used."""
    if source == SOURCE:
        return _sm90_gemm() if family.name == "sm_90" else []
    if source == "w4ax_gemm_sm80.cu":
        return w4ax_gemm_sm80.configurations(family.name == "portable") if family.name != "sm_90" else []
    module = importlib.import_module(f"comet_cuda.{ELSEWHERE.get(source, source[:-3])}")
    return list(module.configurations(family.name))


def _sm90_gemm() -> list[Configuration]:
    """Every row of the measured tile table, with and without zero points, for every type."""
    names = {field.name for field in dataclasses.fields(Tiles)}
    tiles = {Tiles(**{key: value for key, value in row.items() if key in names}) for row in tile_table()}
    return [
        Configuration(SOURCE, tile.defines(has_zero, out), (), tile.shared_bytes(has_zero))
        for tile in sorted(tiles, key=lambda tile: tile.tokens)
        for has_zero in (False, True)
        for out in OUT_KINDS
    ]


def all_configurations(capability: tuple[int, int]) -> list[Configuration]:
    """Everything that a GPU of this compute capability may launch."""
    family = family_of(capability)
    return [configuration for source in sources() for configuration in configurations(source, family)]


def build(arch: str, wanted: list[Configuration]) -> Iterator[Cubin]:
    """Compile on all cores, or find in the cache; yields them in order as they become ready."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda configuration: configuration.compile(arch), wanted)


def clear_cache() -> tuple[int, int]:
    """Remove all compiled kernels. Returns how many files there were and their bytes."""
    count = size = 0
    for file in cache_folder().glob("*.cubin"):
        size += file.stat().st_size
        count += 1
        file.unlink(missing_ok=True)
    return count, size
