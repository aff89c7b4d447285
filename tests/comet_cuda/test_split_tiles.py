"""Tiles that a cluster shares along K: cuts, plans, and the exchange of sums, whose header g++ compiles for a CPU here.

All threads of all ctas send first, then all of them add and store: the header must put every sum where its owner looks,
announce as many bytes as come, and store every result once. Order is the barriers' business, which only a GPU shows.
"""

import ctypes
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from comet_cuda.errors import CometError
from comet_cuda.jit import SOURCE_FOLDER
from comet_cuda.split_tiles import AT_ONCE, INT8_COST, cuts_of, waves_of
from comet_cuda.tiles_sm90 import SHARED_LIMIT
from comet_cuda.w4ax_gemm_integer import IntegerTiles
from tests.comet_cuda.emulated import compiled

STUBS = """
#include <cstring>
#include <map>
#define __device__
#define __forceinline__ inline
struct uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
namespace comet {
static unsigned char memory[8][232448];
static std::map<unsigned, long long> bytes[8], arrivals[8];  // that a barrier still waits for
static int here, bad;
static unsigned* result;  // [group, atom, thread, 4], and after them how often each was stored
inline void mbarrier_init(unsigned b, unsigned count) { arrivals[here][b] = count; }
inline void mbarrier_expect(unsigned b, unsigned n) { --arrivals[here][b], bytes[here][b] += n; }
inline void wait_for_cluster(unsigned, unsigned) {}
inline unsigned address_in_cta(unsigned at, unsigned rank) { return rank << 24 | at; }
inline void arrive_in_cta(unsigned there) { --arrivals[there >> 24][there & 0xffffff]; }
inline unsigned char* at_cta(unsigned there) { return memory[there >> 24] + (there & 0xffffff); }
inline void send_16(unsigned there, const unsigned* x, unsigned barrier) {
  bad += there >> 24 != barrier >> 24 || (there >> 24) == unsigned(here);
  std::memcpy(at_cta(there), x, 16);
  bytes[barrier >> 24][barrier & 0xffffff] -= 16;
}
inline uint4 load_shared_16(unsigned at) { uint4 v; std::memcpy(&v, memory[here] + at, 16); return v; }
inline void __syncwarp() {}
}
"""
STORE = """
namespace comet {
template <int kCount>
void store_scaled(const unsigned (&sums)[kCount], const Operands&, int row_tile, int first_token, int thread) {
  for (int i = 0; i < kCount; ++i) {
    const long long at = ((row_tile * kTileAtoms + first_token / 8 + i / 4) * 128ll + thread) * 4 + i % 4;
    result[at] = sums[i], ++result[ROW_WGS * kTileAtoms * 512 + at];
  }
}
}
"""
RUN = """
extern "C" void sizes(unsigned* out) {
  using namespace comet;
  out[0] = kApart, out[1] = kApart ? kApartAt + kSumsBytes : kBarriersEnd;
}
// acc: [cta, group, thread, sums]. Returns what is wrong: sends to the wrong place, or barriers that wait for more.
extern "C" int run(const unsigned* acc, unsigned* out) {
  using namespace comet;
  constexpr int kCount = kSets * kResults;
  result = out, bad = 0;
  auto each = [&](auto what) {
    for (here = 0; here < SPLIT; ++here)
      for (int group = 0; group < ROW_WGS; ++group)
        for (int thread = 0; thread < 128; ++thread) {
          unsigned own[kSets][kResults];
          std::memcpy(own, acc + ((here * ROW_WGS + group) * 128ll + thread) * kCount, sizeof own);
          what(Exchange{0, here, group, thread}, own);
        }
  };
  for (here = 0; here < SPLIT; ++here) {
    std::memset(memory[here], 0x5a, sizeof memory[here]);
    Exchange::prepare(0, here);
  }
  each([](const Exchange& exchange, auto& own) { exchange.send(own); });
  for (int cta = 0; cta < SPLIT; ++cta) {
    for (auto& [barrier, left] : bytes[cta]) bad += left != 0;
    for (auto& [barrier, left] : arrivals[cta])
      bad += left != (kApart && barrier >= kReadAt || barrier == kReadAt + 8 * cta ? ROW_WGS * 4 : 0);
  }
  each([](const Exchange& exchange, auto& own) { finish<0>(own, Operands{}, exchange, exchange.group, 0); });
  return bad;
}
"""
S = IntegerTiles(64, stream=0, split=2)
EXCHANGED = [
    replace(S, tokens=128, stages=7),
    replace(S, tokens=128, stages=9),
    replace(S, tokens=128, row_wgs=3, stages=6),
    replace(S, tokens=256, stages=5, split=3),
    replace(S, tokens=128, token_tiles=2, stages=5),
    replace(S, tokens=96, stages=8, split=4),
    replace(S, tokens=64, row_wgs=3, stages=8, split=6),
    replace(S, tokens=8, stages=14, batch=4, split=8),
    replace(S, tokens=24, stages=12, batch=2, split=2),
]


def library(folder: Path, tiles: IntegerTiles) -> ctypes.CDLL:
    text = "".join(f"#define {name} {value}\n" for name, value in tiles.defines(torch.bfloat16).items()) + STUBS
    for name in ("tile_schedule", "gemm_integer", "gemm_integer_split"):
        header = (SOURCE_FOLDER / "include" / "comet" / f"{name}.cuh").read_text()
        header = re.sub("^ *#(include|pragma once|pragma unroll).*$", "", header, flags=re.MULTILINE)
        text += header.replace("__device__ __forceinline__ void tile_place", "inline void tile_place")
        text += STORE if name == "gemm_integer" else ""
    return compiled(folder, "#include <algorithm>\nusing std::max; using std::min;\n" + text + RUN)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("tiles", EXCHANGED, ids=str)
def test_sums_meet_in_their_owner(tiles: IntegerTiles, tmp_path: Path) -> None:
    shared, count = library(tmp_path, tiles), tiles.tile_tokens // 2
    acc = torch.randint(-(2**31), 2**31, (tiles.split, tiles.row_wgs, 128, count), dtype=torch.int64).to(torch.int32)
    out = torch.zeros(2, tiles.row_wgs, tiles.tile_tokens // 8, 128, 4, dtype=torch.int32)
    assert shared.run(ctypes.c_void_p(acc.data_ptr()), ctypes.c_void_p(out.data_ptr())) == 0
    want = acc.sum(0, dtype=torch.int32).view(tiles.row_wgs, 128, -1, 4).transpose(1, 2)
    assert torch.equal(out[0], want)  # sums may wrap
    assert torch.equal(out[1], torch.ones_like(out[1]))
    sizes = (ctypes.c_uint * 2)()
    shared.sizes(sizes)
    assert sizes[1] + 1024 == tiles.shared_bytes <= SHARED_LIMIT


def test_both_places_for_sums_are_tried(tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    found = set()
    for index, tiles in enumerate(EXCHANGED[:2]):
        sizes = (ctypes.c_uint * 2)()
        (tmp_path / str(index)).mkdir()
        library(tmp_path / str(index), tiles).sizes(sizes)
        found.add(sizes[0])
    assert found == {0, 1}


@pytest.mark.parametrize("split", [2, 3, 4, 6, 8])
def test_cuts_cover_all_blocks_once_and_cost_the_same(split: int) -> None:
    for blocks in (*range(1, 41), 86, 108, 224):
        for eights in {0, 1, blocks // 6, blocks // 2, blocks}:
            cuts = cuts_of(split, blocks, eights, INT8_COST)
            assert cuts[0] == 0 and cuts[-1] == blocks and list(cuts) == sorted(cuts)
            costs = [INT8_COST if block < eights else 4 for block in range(blocks)]
            parts = [sum(costs[a:b]) for a, b in pairwise(cuts)]
            assert max(parts) <= sum(costs) / split + INT8_COST  # half a block at either end, rounded
    assert cuts_of(2, 32, 5, 4) == (0, 16, 32)
    assert cuts_of(2, 32, 5, 8) == (0, 14, 32)  # 5 * 2 + 9 against 18


@pytest.mark.parametrize(("tokens", "rows"), [(1, 8), (256, 4096), (300, 6200)])
def test_a_plan_has_each_tile_once(tokens: int, rows: int) -> None:
    for tiles in EXCHANGED:
        plan = tiles.plan(tokens, rows, 32, 5, 132)
        row_groups, token_tiles = -(-rows // (64 * tiles.row_wgs)), -(-tokens // tiles.tile_tokens)
        count = row_groups * token_tiles
        assert plan.ctas == count * tiles.split and plan.schedule[1:4] == (count, row_groups, token_tiles)
        assert plan.schedule[8:] == cuts_of(tiles.split, 32, 5, INT8_COST) and plan.partial_floats == 0


def test_waves_count_clusters_that_find_room() -> None:
    tiles = replace(S, tokens=128)
    assert waves_of(tiles, 256, 4096, 132) == 1 and waves_of(tiles, 256, 4352, 132) == 2
    assert all(split * count <= 132 for split, count in AT_ONCE.items())


def test_tiles_are_shared_in_one_way_only() -> None:
    for other in ("stream", "quick"):
        with pytest.raises(CometError, match="two ways"):
            replace(S, **{other: 1})
