"""What the integer GEMM's two producers bring to the ring of stages, and in which order, followed on a CPU.

The header is compiled by g++ with copies and barriers that write down what was asked; the lanes of the activations'
warp run one after the other, the one that goes on last. Consumers are taken to empty a stage as soon as somebody waits.
"""

import ctypes
import re
import shutil
from pathlib import Path

import pytest
import torch

from comet_cuda.jit import SOURCE_FOLDER
from comet_cuda.w4ax_gemm_integer import RECORD, IntegerTiles
from comet_cuda.weight_layout import ROW_TILE, token_atoms
from tests.comet_cuda.emulated import compiled

STUBS = """
#include <algorithm>
#include <cstdio>
#include <vector>
#define __device__
#define __forceinline__ inline
using std::max; using std::min;
// what: 0 codes, 1 multiples, 2 weights, 3 a wait (from: its parity)
struct Event { long long what, lane, stage, from, bytes; };
static std::vector<Event> events;
static int lane_now;
static const char *base[3];
namespace comet {
inline void wait_for_previous() {}
inline unsigned long long l2_evict_first() { return 0; }
inline unsigned long long l2_evict_last() { return 0; }
inline void mbarrier_expect(unsigned barrier, unsigned bytes);
inline void mbarrier_wait(unsigned barrier, unsigned parity);
inline void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier, unsigned long long);
}
"""
BODY = """
namespace comet {
static long long expected[STAGES];
inline void mbarrier_expect(unsigned barrier, unsigned bytes) { expected[(barrier - kFullAt) / 8] += bytes; }
inline void mbarrier_wait(unsigned barrier, unsigned parity) {
  events.push_back({3, lane_now, (barrier - kEmptyAt) / 8, parity, 0});
}
inline void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier, unsigned long long) {
  const int stage = to / kStageBytes, at = to % kStageBytes;
  const int what = at >= kRecordsAt ? 2 : at >= kCodesBytes ? 1 : 0;
  if (barrier != kFullAt + 8 * stage) expected[stage] += 1; // announced elsewhere
  expected[stage] -= bytes;
  events.push_back({what, lane_now, stage, static_cast<const char*>(from) - base[what], bytes});
}
}
// Returns the number of events; -1 where bytes announced and copied differ.
extern "C" int run(const int* s, int tokens, int rows, int atoms, int row_tiles, int eights, int cta, int ctas,
                   int weights, Event* out) {
  using namespace comet;
  Operands o = {};
  o.codes = (const unsigned char*)(base[0] = (const char*)(1ll << 40));
  o.multiples = (const unsigned char*)(base[1] = (const char*)(2ll << 40));
  o.weight = (const unsigned char*)(base[2] = (const char*)(3ll << 40));
  o.tokens = tokens, o.rows = rows, o.atoms = atoms, o.row_tiles = row_tiles, o.int8_blocks = eights;
  o.schedule = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]};
#if SPLIT > 1
  std::copy(s + 8, s + 8 + SPLIT + 1, o.schedule.cuts);
#endif
  events.clear();
  if (weights) lane_now = 0, produce_weights(o, Place(0, 1), cta, ctas);
  else for (lane_now = 31; lane_now >= 0; --lane_now) produce_activations(o, 0, lane_now, cta, ctas);
  for (int stage = 0; stage < STAGES; ++stage) if (expected[stage]) return -1;
  std::copy(events.begin(), events.end(), out);
  return int(events.size());
}
"""
MOST = 1 << 14
CODES, MULTIPLES, WEIGHTS, WAIT = range(4)
HEADERS = ("tile_schedule", "gemm_integer", "gemm_integer_producers")


class Event(ctypes.Structure):
    _fields_ = [(name, ctypes.c_longlong) for name in ("what", "lane", "stage", "start", "bytes")]


def library(folder: Path, tiles: IntegerTiles) -> ctypes.CDLL:
    text = "".join(f"#define {name} {value}\n" for name, value in tiles.defines(torch.bfloat16).items()) + STUBS
    for name in HEADERS:
        header = (SOURCE_FOLDER / "include" / "comet" / f"{name}.cuh").read_text()
        text += re.sub("^#(include|pragma once|pragma unroll).*$", "", header, flags=re.MULTILINE)
    return compiled(folder, text + BODY)


def walk(schedule: tuple[int, ...], cta: int, ctas: int) -> list[tuple[int, int]]:
    """(tile, block) of each stage's turn, as tile_schedule.cuh describes it."""
    stream_tiles, tiles, _, _, _, blocks, each, longer, *cuts = schedule
    if cuts:  # a cluster a tile, whose ctas have a part of K each
        tile, part = divmod(cta, len(cuts) - 1)
        return [(tile, block) for block in range(cuts[part], cuts[part + 1])]
    start = cta * each + min(cta, longer)
    units = range(start, start + each + (cta < longer)) if stream_tiles else range(0)
    whole = range(stream_tiles + cta, tiles, ctas)
    return [divmod(unit, blocks) for unit in units] + [(tile, block) for tile in whole for block in range(blocks)]


def place_of(schedule: tuple[int, ...], tile: int) -> tuple[int, int]:
    """Row group and token tile: bands of row groups, inside which row groups change fastest."""
    _, _, row_groups, token_tiles, wide, *_ = schedule
    band, within = divmod(tile, wide * token_tiles)
    token_tile, row = divmod(within, min(wide, row_groups - band * wide))
    return band * wide + row, token_tile


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize(
    ("tiles", "tokens", "rows", "blocks", "eights"),
    [
        (IntegerTiles(8, stages=14, batch=4), 1, 4096, 32, 5),  # fewer blocks a cta than stages
        (IntegerTiles(16, row_wgs=3, stages=12, batch=3), 13, 5000, 39, 9),
        (IntegerTiles(64, stages=12), 64, 12288, 96, 96),
        (IntegerTiles(64, row_wgs=3, stages=10, stream=0), 200, 2056, 11, 2),
        (IntegerTiles(128, token_tiles=2, stages=5, stream=0, band=16), 1000, 4096, 8, 1),
        (IntegerTiles(64, stages=1), 64, 520, 9, 2),
        (IntegerTiles(128, stages=7, stream=0, split=2), 200, 2056, 39, 9),
        (IntegerTiles(64, row_wgs=3, stages=5, stream=0, split=4), 64, 520, 2, 1),  # parts without blocks
    ],
)
def test_each_stage_gets_its_block_in_turn(
    tiles: IntegerTiles, tokens: int, rows: int, blocks: int, eights: int, tmp_path: Path
) -> None:
    plan = tiles.plan(tokens, rows, blocks, eights, 132)
    atoms, row_tiles, tile_atoms = token_atoms(tokens), -(-rows // ROW_TILE), tiles.tile_tokens // 8
    run, events = library(tmp_path, tiles).run, (Event * MOST)()
    schedule = (ctypes.c_int * len(plan.schedule))(*plan.schedule)
    for cta in {0, 1, plan.ctas // 2, plan.ctas - 1}:
        turns = walk(plan.schedule, cta, plan.ctas)
        for weights in (0, 1):
            count = run(schedule, tokens, rows, atoms, row_tiles, eights, cta, plan.ctas, weights, events)
            assert (count > 0 or not turns) and 0 <= count <= MOST
            waits: dict[int, list[int]] = {}
            found: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (what, stage) -> (start, bytes) in turn
            for e in events[:count]:
                if e.what == WAIT:
                    waits.setdefault(e.stage, []).append(e.start)
                else:
                    found.setdefault((e.what, e.stage), []).append((e.start, e.bytes))
            want: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for turn, (tile, block) in enumerate(turns):
                row_group, token_tile = place_of(plan.schedule, tile)
                stage = turn % tiles.stages
                if weights:
                    first = row_group * tiles.row_wgs
                    want.setdefault((WEIGHTS, stage), []).extend(
                        ((row * blocks + block) * RECORD, RECORD)
                        for row in range(first, min(first + tiles.row_wgs, row_tiles))
                    )
                    continue
                at, present = block * atoms + token_tile * tile_atoms, min(tile_atoms, atoms - token_tile * tile_atoms)
                want.setdefault((CODES, stage), []).append((at * 1024, present * 1024))
                if block < eights:
                    want.setdefault((MULTIPLES, stage), []).append((at * 32, present * 32))
            assert found == want
            for stage in range(
                min(tiles.stages, len(turns))
            ):  # filled once without, or with, a wait for a fresh barrier
                rounds = len(range(stage, len(turns), tiles.stages))
                parities = [(1 + turn) % 2 for turn in range(0 if weights else 1, rounds)]
                assert waits.get(stage, []) == parities
