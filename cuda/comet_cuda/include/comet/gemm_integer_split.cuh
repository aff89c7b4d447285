// Partial sums of a tile that the SPLIT ctas of a cluster share along K, exchanged through distributed shared memory.
//
// Each cta owns a part of the tile's atoms (8 tokens) and receives the others' sums of it, warpgroup by warpgroup. They
// lie behind the ring where there is room (kApart), else in the ring, which its cta must have read to the end first: its
// warps then say so to every other cta. No barrier of the whole cluster follows the main loop: an mbarrier counts the
// bytes that come, and a cta may end as soon as its own part is there, since nothing is sent to it after that.
// Included behind `store_scaled`.
#pragma once

#include "comet/gemm_integer.cuh"
#include "comet/pipeline.cuh"

namespace comet {

// Behind the ring: a barrier for what each warpgroup receives, and one for each cta whose ring has been read.
constexpr unsigned kReceivedAt = kRingEnd, kReadAt = kReceivedAt + 8 * ROW_WGS, kBarriersEnd = kReadAt + 8 * SPLIT;
constexpr int kMostAtoms = (kTileAtoms + SPLIT - 1) / SPLIT;  // of a part
constexpr int kAtomBytes = 128 * 16;                          // sums of a warpgroup, four a thread
constexpr unsigned kSumsBytes = (SPLIT - 1) * ROW_WGS * kMostAtoms * kAtomBytes;
constexpr unsigned kApartAt = (kBarriersEnd + 127) / 128 * 128;
constexpr bool kApart = kApartAt + kSumsBytes + 1024 <= 232448;
constexpr unsigned kSumsAt = kApart ? kApartAt : 0;
static_assert(kBarriersEnd + 1024 <= 232448 && (kApart || kSumsBytes <= kFullAt), "sums fit in shared memory");

constexpr __device__ __forceinline__ int first_atom(int part) { return kTileAtoms * part / SPLIT; }
constexpr __device__ __forceinline__ int atoms_of(int part) { return first_atom(part + 1) - first_atom(part); }

struct Exchange {
    unsigned ring;
    int rank, group, thread;

    // By one thread, before the cluster's first barrier.
    static __device__ __forceinline__ void prepare(unsigned ring, int rank) {
        for (int group = 0; group < ROW_WGS; ++group) {
            mbarrier_init(ring + kReceivedAt + 8 * group, 1);
            mbarrier_expect(ring + kReceivedAt + 8 * group, (SPLIT - 1) * atoms_of(rank) * kAtomBytes);
        }
        for (int from = 0; from < SPLIT; ++from) mbarrier_init(ring + kReadAt + 8 * from, ROW_WGS * 4);
    }

    // Where sums of `from` lie in cta `to`.
    __device__ __forceinline__ unsigned place(int from, int to) const {
        const int slot = (from < to ? from : from - 1) * ROW_WGS + group;
        return ring + kSumsAt + slot * (kMostAtoms * kAtomBytes) + thread * 16;
    }
    __device__ __forceinline__ unsigned received() const { return ring + kReceivedAt + 8 * group; }

    // Sums of other ctas' parts, each to its owner; in turns, so that owners receive side by side.
    __device__ __forceinline__ void send(const unsigned (&acc)[kSets][kResults]) const {
        if (!kApart) {
            __syncwarp();
            if ((thread & 31) == 0)
                for (int to = 0; to < SPLIT; ++to)
                    if (to != rank) arrive_in_cta(address_in_cta(ring + kReadAt + 8 * rank, to));
            for (int from = 0; from < SPLIT; ++from)
                if (from != rank) wait_for_cluster(ring + kReadAt + 8 * from, 0);
        }
#pragma unroll
        for (int i = 0; i < kMostAtoms; ++i)
#pragma unroll
            for (int to = 0; to < SPLIT; ++to)
                if (to != rank && i < atoms_of(to)) {
                    const int atom = first_atom(to) + i;
                    const unsigned* four = &acc[atom / kAtoms][4 * (atom % kAtoms)];
                    send_16(address_in_cta(place(rank, to), to) + i * kAtomBytes, four, address_in_cta(received(), to));
                }
    }
    __device__ __forceinline__ void wait() const { wait_for_cluster(received(), 0); }

    // The others' sums of atom number `i` of the own part are added to four of this thread's.
    __device__ __forceinline__ void add(unsigned (&sums)[4], int i) const {
        uint4 parts[SPLIT - 1];
#pragma unroll
        for (int slot = 0; slot < SPLIT - 1; ++slot)
            parts[slot] = load_shared_16(place(slot, SPLIT) + i * kAtomBytes);
#pragma unroll
        for (int slot = 0; slot < SPLIT - 1; ++slot) {
            sums[0] += parts[slot].x;
            sums[1] += parts[slot].y;
            sums[2] += parts[slot].z;
            sums[3] += parts[slot].w;
        }
    }
};

// Of the tile's atoms those that this cta owns: the others' sums are added, and results stored, a few atoms at a time.
template <int kFrom, int kTo>
__device__ __forceinline__ void finish_atoms(const unsigned (&acc)[kSets][kResults], const Operands& operands,
                                             const Exchange& exchange, int row_tile, int token, int part_start) {
    if constexpr (kFrom < kTo) {
        constexpr int kCount = kTo - kFrom < 8 ? kTo - kFrom : 8;
        unsigned sums[4 * kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            unsigned four[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) four[j] = acc[(kFrom + i) / kAtoms][4 * ((kFrom + i) % kAtoms) + j];
            exchange.add(four, kFrom + i - part_start);
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[4 * i + j] = four[j];
        }
        store_scaled(sums, operands, row_tile, token + 8 * kFrom, exchange.thread);
        finish_atoms<kFrom + kCount, kTo>(acc, operands, exchange, row_tile, token, part_start);
    }
}
template <int kPart>
__device__ __forceinline__ void finish(const unsigned (&acc)[kSets][kResults], const Operands& operands,
                                       const Exchange& exchange, int row_tile, int token) {
    if constexpr (kPart < SPLIT) {
        if (exchange.rank == kPart)
            finish_atoms<first_atom(kPart), first_atom(kPart + 1)>(acc, operands, exchange, row_tile, token, first_atom(kPart));
        else
            finish<kPart + 1>(acc, operands, exchange, row_tile, token);
    }
}

}  // namespace comet
