// Which piece of the output a cluster works on: stream-K for the first tiles, whole tiles for the rest.
//
// A tile is (row group, token tile); its unit of work is one block of 128 channels. The first `stream_tiles` tiles, as
// one line of stream_tiles * blocks units, are cut into equal ranges, one a cluster (one tile to many clusters, and the
// reverse), so that every SM works to the end; the other tiles are dealt whole, a wave at a time. A cluster whose range
// begins inside a tile hands its partial sum, f32, to the cluster that holds the tile's first unit; that one adds the
// partial sums in ascending order of channels, so results do not depend on timing. Ranges are walked front to back: what
// others wait for is computed first, so nobody waits for a cluster that itself waits.
//
// With SPLIT above 1 (w4ax_gemm_integer.cu) there is no stream: SPLIT ctas, a cluster, take the parts of one tile each.
#pragma once

namespace comet {

// Made by the host (make_plan in tiles_sm90.py) and read from constant memory, so that it takes no registers.
struct Schedule {
    int stream_tiles;  // tiles cut along K
    int tiles;         // all tiles
    int row_groups;    // tiles along the rows
    int token_tiles;   // tiles along the tokens
    int band;          // row groups walked together, so that concurrent clusters share operands in L2
    int blocks;        // units a tile
    int range;         // units that each cluster's range has at least,
    int longer;        // and how many clusters have one more
#if SPLIT > 1
    int cuts[SPLIT + 1];  // cta r of a tile's cluster works on blocks cuts[r] .. cuts[r + 1] - 1
#endif
};

struct Segment {
    int tile, first, last;  // blocks first .. last - 1 of a tile
};

#if SPLIT > 1
class Worker {
   public:
    __device__ __forceinline__ Worker(const Schedule& schedule, int cta, int) : schedule_(schedule), cta_(cta) {}

    __device__ __forceinline__ bool next(Segment& segment) {
        if (cta_ < 0) return false;
        segment.tile = cta_ / SPLIT;
        segment.first = schedule_.cuts[cta_ % SPLIT];
        segment.last = schedule_.cuts[cta_ % SPLIT + 1];
        cta_ = -1;
        return true;
    }

   private:
    const Schedule& schedule_;
    int cta_;
};
#else
class Worker {
   public:
    __device__ __forceinline__ Worker(const Schedule& schedule, int cluster, int clusters)
        : schedule_(schedule),
          unit_(range_start(schedule, cluster)),
          end_(range_start(schedule, cluster + 1)),
          tile_(schedule.stream_tiles + cluster),
          clusters_(clusters) {}

    // First unit of a cluster's range.
    static __device__ __forceinline__ int range_start(const Schedule& schedule, int cluster) {
        return cluster * schedule.range + min(cluster, schedule.longer);
    }

    __device__ __forceinline__ bool next(Segment& segment) {
        if (unit_ < end_) {
            segment.tile = unit_ / schedule_.blocks;
            segment.first = unit_ - segment.tile * schedule_.blocks;
            segment.last = min(schedule_.blocks, segment.first + end_ - unit_);
            unit_ += segment.last - segment.first;
            return true;
        }
        if (tile_ < schedule_.tiles) {
            segment.tile = tile_;
            segment.first = 0;
            segment.last = schedule_.blocks;
            tile_ += clusters_;
            return true;
        }
        return false;
    }

   private:
    const Schedule& schedule_;
    int unit_, end_, tile_, clusters_;
};

// The same walk by number, for kernels that have no register to spare: made anew from constant memory each time.
// False when there is no segment number `index`.
__device__ __forceinline__ bool find_segment(
    const Schedule& schedule, int cluster, int clusters, int index, Segment& segment) {
    asm volatile("" : "+r"(cluster));  // or the compiler keeps what does not depend on `index`
    const int unit = Worker::range_start(schedule, cluster), end = Worker::range_start(schedule, cluster + 1);
    const int tile = unit / schedule.blocks + index;
    const int start = tile * schedule.blocks;  // the tile's first unit
    if (start < end && unit < end) {
        segment.tile = tile;
        segment.first = max(unit - start, 0);
        segment.last = min(schedule.blocks, end - start);
        return true;
    }
    const int streamed = unit < end ? (end - 1) / schedule.blocks - unit / schedule.blocks + 1 : 0;
    segment.tile = schedule.stream_tiles + cluster + (index - streamed) * clusters;
    segment.first = 0;
    segment.last = schedule.blocks;
    return segment.tile < schedule.tiles;
}
#endif

// Bands of row groups; inside a band the row groups change fastest.
__device__ __forceinline__ void tile_place(const Schedule& schedule, int tile, int& row_group, int& token_tile) {
    const int per_band = schedule.band * schedule.token_tiles;
    const int band = tile / per_band, within = tile - band * per_band;
    const int width = min(schedule.band, schedule.row_groups - band * schedule.band);
    token_tile = within / width;
    row_group = band * schedule.band + within - token_tile * width;
}

}  // namespace comet
