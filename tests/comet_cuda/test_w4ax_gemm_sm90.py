"""The sm_90a GEMM without a GPU: its op on the CPU, its checks, how it deals tiles, what the compiler makes of it."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from comet_cuda import jit
from comet_cuda.errors import CometError
from comet_cuda.int4 import pack_nibbles
from comet_cuda.jit import INCLUDE_FOLDER
from comet_cuda.tiles_sm90 import (
    ARCH,
    OUT_KINDS,
    SHARED_LIMIT,
    SOURCE,
    Tiles,
    choose_tiles,
    make_plan,
    tile_table,
)
from comet_cuda.w4ax_gemm import w4ax_gemm_ref
from comet_cuda.w4ax_gemm_sm90 import int8_mask_words, launch, prepare_weight_sm90, w4ax_gemm_tiled
from comet_cuda.weight_layout import tile_activations_sm90

BITS = torch.tensor([8, 4, 8, 4, 4], dtype=torch.uint8)


def problem(tokens: int, rows: int, has_zero: bool) -> dict[str, Tensor | None]:
    g = torch.Generator().manual_seed(tokens * 1000 + rows)
    codes = torch.randint(-7, 8, (tokens, len(BITS), 128), generator=g, dtype=torch.int8)
    weight = torch.randint(0, 16, (rows, 128 * len(BITS)), generator=g, dtype=torch.uint8)
    return {
        "codes": codes,
        "scale": torch.rand(tokens, len(BITS), generator=g) + 0.1,
        "qweight": pack_nibbles(weight),
        "w_scale": (torch.rand(rows, len(BITS), generator=g) + 0.1).to(torch.bfloat16),
        "w_zero": torch.randint(0, 16, (rows, len(BITS)), generator=g, dtype=torch.uint8) if has_zero else None,
        "bias": torch.randn(rows, generator=g),
    }


@pytest.mark.parametrize(("tokens", "rows", "has_zero"), [(0, 64, True), (1, 8, False), (9, 130, True)])
def test_tiled_op_is_the_reference_on_tiled_operands(tokens: int, rows: int, has_zero: bool) -> None:
    p = problem(tokens, rows, has_zero)
    tiled = prepare_weight_sm90(p["qweight"], p["w_scale"], p["w_zero"], BITS)
    x, meta = tile_activations_sm90(p["codes"], p["scale"], BITS)
    y = w4ax_gemm_tiled(x, meta, tiled, tokens, p["bias"], torch.float32)
    want = w4ax_gemm_ref(
        p["codes"], p["scale"], p["qweight"], p["w_scale"], p["w_zero"], BITS, p["bias"], torch.float32
    )
    assert torch.equal(y, want) and y.shape == (tokens, rows)


def test_wrong_operands_are_named() -> None:
    p = problem(9, 64, True)
    tiled = prepare_weight_sm90(p["qweight"], p["w_scale"], p["w_zero"], BITS)
    x, meta = tile_activations_sm90(p["codes"], p["scale"], BITS)
    with pytest.raises(CometError, match="x_codes is"):
        w4ax_gemm_tiled(x[:, :1], meta, tiled, 9)
    with pytest.raises(CometError, match="x_meta is"):
        w4ax_gemm_tiled(x, meta.double(), tiled, 9)
    with pytest.raises(CometError, match="weight is"):
        launch(x, meta, tiled.records, tiled.zero_terms, None, 9, 65, (), torch.bfloat16)
    with pytest.raises(CometError, match="block_bits"):
        int8_mask_words(torch.tensor([4, 5]))


def segments(schedule: tuple[int, ...], clusters: int) -> list[list[tuple[int, int, int]]]:
    """What class Worker of tile_schedule.cuh gives each cluster: (tile, first block, last block)."""
    stream_tiles, tiles, _, _, _, blocks, each, longer = schedule
    out = []
    for cluster in range(clusters):
        unit, end = (c * each + min(c, longer) for c in (cluster, cluster + 1))
        mine = []
        while unit < end:
            tile, first = divmod(unit, blocks)
            last = min(blocks, first + end - unit)
            mine.append((tile, first, last))
            unit += last - first
        mine += [(tile, 0, blocks) for tile in range(stream_tiles + cluster, tiles, clusters)]
        out.append(mine)
    return out


@pytest.mark.parametrize("tokens", [1, 16, 64, 100, 1000, 4096])
@pytest.mark.parametrize(("rows", "channels"), [(4096, 4096), (22016, 4096), (8192, 28672), (72, 576), (8, 128)])
def test_every_unit_is_done_once_and_ranges_are_even(tokens: int, rows: int, channels: int) -> None:
    blocks = -(-channels // 128)
    plan = make_plan(choose_tiles(tokens, rows, blocks), tokens, rows, blocks, sm_count=132)
    clusters = plan.ctas // plan.tiles.cluster
    work = segments(plan.schedule, clusters)
    done = [(tile, block) for mine in work for tile, first, last in mine for block in range(first, last)]
    assert sorted(done) == [(tile, block) for tile in range(plan.schedule[1]) for block in range(blocks)]
    assert plan.ctas <= 132
    for mine in work:  # a cluster hands over at most one partial sum, and before it waits for others
        assert [first > 0 for _, first, _ in mine].count(True) <= 1
        assert not any(first > 0 for _, first, _ in mine[1:])
    if plan.schedule[0]:
        loads = [sum(last - first for _, first, last in mine) for mine in work]
        assert max(loads) - min(loads) <= 1 + blocks * (plan.schedule[1] > plan.schedule[0])


def table_variants() -> list[Tiles]:
    names = Tiles.__dataclass_fields__
    return [Tiles(**{name: value for name, value in row.items() if name in names}) for row in tile_table()]


SCHEDULE_CHECK = r"""
#include <algorithm>
#include <cstdio>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
#include "comet/tile_schedule.cuh"
using namespace comet;
int main() {
    long walked = 0;
    for (int blocks : {1, 3, 32, 86}) for (int clusters : {1, 5, 33}) for (int tiles : {1, 7, 64, 129})
    for (int stream = 0; stream <= std::min(tiles, 2 * clusters); ++stream) {
        const Schedule s{stream, tiles, tiles, 1, 8, blocks, stream * blocks / clusters, stream * blocks % clusters};
        for (int cluster = 0; cluster < clusters; ++cluster) {
            Worker worker(s, cluster, clusters);
            Segment a, b;
            int index = 0;
            for (; worker.next(a); ++index, ++walked)
                if (!find_segment(s, cluster, clusters, index, b) || a.tile != b.tile || a.first != b.first ||
                    a.last != b.last)
                    return std::printf("%d of %d: %d, blocks %d, stream %d of %d\n", cluster, clusters, index, blocks,
                                       stream, tiles), 1;
            if (find_segment(s, cluster, clusters, index, b)) return std::printf("goes on\n"), 1;
        }
    }
    std::printf("%ld segments\n", walked);
}
"""


def test_segments_by_number_are_those_of_the_walk(tmp_path: Path) -> None:
    """comet/tile_schedule.cuh, compiled for the CPU."""
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    (tmp_path / "check.cpp").write_text(SCHEDULE_CHECK)
    command = [compiler, "-O1", f"-I{INCLUDE_FOLDER}", "-o", tmp_path / "check", tmp_path / "check.cpp"]
    subprocess.run(command, check=True)
    done = subprocess.run([tmp_path / "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) > 10_000


def log_of(tiles: Tiles, has_zero: bool) -> str:
    """What the compiler says of a variant."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    assert nvrtc
    flags = jit._options(ARCH, tiles.defines(has_zero, torch.bfloat16), ())
    return jit._run_nvrtc(jit.read_sources(SOURCE), SOURCE, flags)[1]


def check_compiled(tiles: Tiles, has_zero: bool) -> None:
    log = log_of(tiles, has_zero)
    assert "wgmma" not in log and "(C75" not in log, log  # such as: wgmma instructions are serialized
    (resources,) = jit.parse_resources(log).values()
    assert resources.spill_bytes == 0 and resources.stack_bytes == 0
    assert resources.registers * tiles.threads * tiles.ctas_per_sm <= 65536
    assert tiles.shared_bytes(has_zero) <= SHARED_LIMIT
    assert (tiles.shared_bytes(has_zero) + 1024) * tiles.ctas_per_sm <= 228 * 1024


def test_a_serialized_wgmma_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arithmetic on a product's registers while it is under way: the compiler must say that it serializes."""
    sources = jit.read_sources(SOURCE)
    name = "comet/gemm_consumer_sm90.cuh"
    commit = "activation_descriptor(base));\n        wgmma_commit();\n"
    broken = sources[name].replace(commit, commit + "        p.dot[0] += 1;\n", 1)
    assert broken != sources[name]
    monkeypatch.setattr(jit, "read_sources", lambda _: sources | {name: broken})
    assert "(C75" in log_of(Tiles(64, stages=12, batch=2), True)


@pytest.mark.parametrize("tiles", table_variants(), ids=lambda tiles: f"n{tiles.tokens}x{tiles.row_tiles}")
def test_table_variants_compile_without_spills_and_fit(tiles: Tiles) -> None:
    check_compiled(tiles, has_zero=True)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", table_variants(), ids=lambda tiles: f"n{tiles.tokens}x{tiles.row_tiles}")
def test_they_do_for_symmetric_weights(tiles: Tiles) -> None:
    check_compiled(tiles, has_zero=False)


def test_last_table_row_takes_any_problem() -> None:
    assert "max_tokens" not in tile_table()[-1] and "max_weights" not in tile_table()[-1]
    assert len(OUT_KINDS) == 3
