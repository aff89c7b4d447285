// wgmma of one 128-channel block: D[64 rows x TOKENS] = sum of four k32 steps, A from registers, B from shared memory.
//
// TOKENS (a preprocessor definition, 8, 16, 24, 32 or a multiple of 16 up to 256) sets the shape; a thread holds TOKENS / 2 results, four
// of every 8 tokens: (row g, tokens 2t, 2t + 1), (row g + 8, the same tokens). The register list of the instruction must
// be spelled out; a group of four registers is one macro, empty beyond TOKENS. Operands are numbered results first,
// then A, the descriptor and the flag; A must be plain inputs, since copies between two wgmma would serialize them.
#pragma once

#ifndef TOKENS
#error "define TOKENS, the n of wgmma"
#endif

namespace comet {

#define COMET_TEXT_(x) #x
#define COMET_TEXT(x) COMET_TEXT_(x)

#define COMET_NAMES_0 "%0, %1, %2, %3"
#define COMET_GROUP_0(C) C(d[0]), C(d[1]), C(d[2]), C(d[3])
#if TOKENS >= 16
#define COMET_NAMES_1 ", %4, %5, %6, %7"
#define COMET_GROUP_1(C) , C(d[4]), C(d[5]), C(d[6]), C(d[7])
#else
#define COMET_NAMES_1
#define COMET_GROUP_1(C)
#endif
#if TOKENS >= 24
#define COMET_NAMES_2 ", %8, %9, %10, %11"
#define COMET_GROUP_2(C) , C(d[8]), C(d[9]), C(d[10]), C(d[11])
#else
#define COMET_NAMES_2
#define COMET_GROUP_2(C)
#endif
#if TOKENS >= 32
#define COMET_NAMES_3 ", %12, %13, %14, %15"
#define COMET_GROUP_3(C) , C(d[12]), C(d[13]), C(d[14]), C(d[15])
#else
#define COMET_NAMES_3
#define COMET_GROUP_3(C)
#endif
#if TOKENS >= 40
#define COMET_NAMES_4 ", %16, %17, %18, %19"
#define COMET_GROUP_4(C) , C(d[16]), C(d[17]), C(d[18]), C(d[19])
#else
#define COMET_NAMES_4
#define COMET_GROUP_4(C)
#endif
#if TOKENS >= 48
#define COMET_NAMES_5 ", %20, %21, %22, %23"
#define COMET_GROUP_5(C) , C(d[20]), C(d[21]), C(d[22]), C(d[23])
#else
#define COMET_NAMES_5
#define COMET_GROUP_5(C)
#endif
#if TOKENS >= 56
#define COMET_NAMES_6 ", %24, %25, %26, %27"
#define COMET_GROUP_6(C) , C(d[24]), C(d[25]), C(d[26]), C(d[27])
#else
#define COMET_NAMES_6
#define COMET_GROUP_6(C)
#endif
#if TOKENS >= 64
#define COMET_NAMES_7 ", %28, %29, %30, %31"
#define COMET_GROUP_7(C) , C(d[28]), C(d[29]), C(d[30]), C(d[31])
#else
#define COMET_NAMES_7
#define COMET_GROUP_7(C)
#endif
#if TOKENS >= 72
#define COMET_NAMES_8 ", %32, %33, %34, %35"
#define COMET_GROUP_8(C) , C(d[32]), C(d[33]), C(d[34]), C(d[35])
#else
#define COMET_NAMES_8
#define COMET_GROUP_8(C)
#endif
#if TOKENS >= 80
#define COMET_NAMES_9 ", %36, %37, %38, %39"
#define COMET_GROUP_9(C) , C(d[36]), C(d[37]), C(d[38]), C(d[39])
#else
#define COMET_NAMES_9
#define COMET_GROUP_9(C)
#endif
#if TOKENS >= 88
#define COMET_NAMES_10 ", %40, %41, %42, %43"
#define COMET_GROUP_10(C) , C(d[40]), C(d[41]), C(d[42]), C(d[43])
#else
#define COMET_NAMES_10
#define COMET_GROUP_10(C)
#endif
#if TOKENS >= 96
#define COMET_NAMES_11 ", %44, %45, %46, %47"
#define COMET_GROUP_11(C) , C(d[44]), C(d[45]), C(d[46]), C(d[47])
#else
#define COMET_NAMES_11
#define COMET_GROUP_11(C)
#endif
#if TOKENS >= 104
#define COMET_NAMES_12 ", %48, %49, %50, %51"
#define COMET_GROUP_12(C) , C(d[48]), C(d[49]), C(d[50]), C(d[51])
#else
#define COMET_NAMES_12
#define COMET_GROUP_12(C)
#endif
#if TOKENS >= 112
#define COMET_NAMES_13 ", %52, %53, %54, %55"
#define COMET_GROUP_13(C) , C(d[52]), C(d[53]), C(d[54]), C(d[55])
#else
#define COMET_NAMES_13
#define COMET_GROUP_13(C)
#endif
#if TOKENS >= 120
#define COMET_NAMES_14 ", %56, %57, %58, %59"
#define COMET_GROUP_14(C) , C(d[56]), C(d[57]), C(d[58]), C(d[59])
#else
#define COMET_NAMES_14
#define COMET_GROUP_14(C)
#endif
#if TOKENS >= 128
#define COMET_NAMES_15 ", %60, %61, %62, %63"
#define COMET_GROUP_15(C) , C(d[60]), C(d[61]), C(d[62]), C(d[63])
#else
#define COMET_NAMES_15
#define COMET_GROUP_15(C)
#endif
#if TOKENS >= 136
#define COMET_NAMES_16 ", %64, %65, %66, %67"
#define COMET_GROUP_16(C) , C(d[64]), C(d[65]), C(d[66]), C(d[67])
#else
#define COMET_NAMES_16
#define COMET_GROUP_16(C)
#endif
#if TOKENS >= 144
#define COMET_NAMES_17 ", %68, %69, %70, %71"
#define COMET_GROUP_17(C) , C(d[68]), C(d[69]), C(d[70]), C(d[71])
#else
#define COMET_NAMES_17
#define COMET_GROUP_17(C)
#endif
#if TOKENS >= 152
#define COMET_NAMES_18 ", %72, %73, %74, %75"
#define COMET_GROUP_18(C) , C(d[72]), C(d[73]), C(d[74]), C(d[75])
#else
#define COMET_NAMES_18
#define COMET_GROUP_18(C)
#endif
#if TOKENS >= 160
#define COMET_NAMES_19 ", %76, %77, %78, %79"
#define COMET_GROUP_19(C) , C(d[76]), C(d[77]), C(d[78]), C(d[79])
#else
#define COMET_NAMES_19
#define COMET_GROUP_19(C)
#endif
#if TOKENS >= 168
#define COMET_NAMES_20 ", %80, %81, %82, %83"
#define COMET_GROUP_20(C) , C(d[80]), C(d[81]), C(d[82]), C(d[83])
#else
#define COMET_NAMES_20
#define COMET_GROUP_20(C)
#endif
#if TOKENS >= 176
#define COMET_NAMES_21 ", %84, %85, %86, %87"
#define COMET_GROUP_21(C) , C(d[84]), C(d[85]), C(d[86]), C(d[87])
#else
#define COMET_NAMES_21
#define COMET_GROUP_21(C)
#endif
#if TOKENS >= 184
#define COMET_NAMES_22 ", %88, %89, %90, %91"
#define COMET_GROUP_22(C) , C(d[88]), C(d[89]), C(d[90]), C(d[91])
#else
#define COMET_NAMES_22
#define COMET_GROUP_22(C)
#endif
#if TOKENS >= 192
#define COMET_NAMES_23 ", %92, %93, %94, %95"
#define COMET_GROUP_23(C) , C(d[92]), C(d[93]), C(d[94]), C(d[95])
#else
#define COMET_NAMES_23
#define COMET_GROUP_23(C)
#endif
#if TOKENS >= 200
#define COMET_NAMES_24 ", %96, %97, %98, %99"
#define COMET_GROUP_24(C) , C(d[96]), C(d[97]), C(d[98]), C(d[99])
#else
#define COMET_NAMES_24
#define COMET_GROUP_24(C)
#endif
#if TOKENS >= 208
#define COMET_NAMES_25 ", %100, %101, %102, %103"
#define COMET_GROUP_25(C) , C(d[100]), C(d[101]), C(d[102]), C(d[103])
#else
#define COMET_NAMES_25
#define COMET_GROUP_25(C)
#endif
#if TOKENS >= 216
#define COMET_NAMES_26 ", %104, %105, %106, %107"
#define COMET_GROUP_26(C) , C(d[104]), C(d[105]), C(d[106]), C(d[107])
#else
#define COMET_NAMES_26
#define COMET_GROUP_26(C)
#endif
#if TOKENS >= 224
#define COMET_NAMES_27 ", %108, %109, %110, %111"
#define COMET_GROUP_27(C) , C(d[108]), C(d[109]), C(d[110]), C(d[111])
#else
#define COMET_NAMES_27
#define COMET_GROUP_27(C)
#endif
#if TOKENS >= 232
#define COMET_NAMES_28 ", %112, %113, %114, %115"
#define COMET_GROUP_28(C) , C(d[112]), C(d[113]), C(d[114]), C(d[115])
#else
#define COMET_NAMES_28
#define COMET_GROUP_28(C)
#endif
#if TOKENS >= 240
#define COMET_NAMES_29 ", %116, %117, %118, %119"
#define COMET_GROUP_29(C) , C(d[116]), C(d[117]), C(d[118]), C(d[119])
#else
#define COMET_NAMES_29
#define COMET_GROUP_29(C)
#endif
#if TOKENS >= 248
#define COMET_NAMES_30 ", %120, %121, %122, %123"
#define COMET_GROUP_30(C) , C(d[120]), C(d[121]), C(d[122]), C(d[123])
#else
#define COMET_NAMES_30
#define COMET_GROUP_30(C)
#endif
#if TOKENS >= 256
#define COMET_NAMES_31 ", %124, %125, %126, %127"
#define COMET_GROUP_31(C) , C(d[124]), C(d[125]), C(d[126]), C(d[127])
#else
#define COMET_NAMES_31
#define COMET_GROUP_31(C)
#endif
#define COMET_NAMES \
    COMET_NAMES_0 COMET_NAMES_1 COMET_NAMES_2 COMET_NAMES_3 COMET_NAMES_4 COMET_NAMES_5 COMET_NAMES_6 \
    COMET_NAMES_7 COMET_NAMES_8 COMET_NAMES_9 COMET_NAMES_10 COMET_NAMES_11 COMET_NAMES_12 COMET_NAMES_13 \
    COMET_NAMES_14 COMET_NAMES_15 COMET_NAMES_16 COMET_NAMES_17 COMET_NAMES_18 COMET_NAMES_19 COMET_NAMES_20 \
    COMET_NAMES_21 COMET_NAMES_22 COMET_NAMES_23 COMET_NAMES_24 COMET_NAMES_25 COMET_NAMES_26 COMET_NAMES_27 \
    COMET_NAMES_28 COMET_NAMES_29 COMET_NAMES_30 COMET_NAMES_31
#define COMET_RESULTS(C) \
    COMET_GROUP_0(C) COMET_GROUP_1(C) COMET_GROUP_2(C) COMET_GROUP_3(C) COMET_GROUP_4(C) COMET_GROUP_5(C) \
    COMET_GROUP_6(C) COMET_GROUP_7(C) COMET_GROUP_8(C) COMET_GROUP_9(C) COMET_GROUP_10(C) COMET_GROUP_11(C) \
    COMET_GROUP_12(C) COMET_GROUP_13(C) COMET_GROUP_14(C) COMET_GROUP_15(C) COMET_GROUP_16(C) COMET_GROUP_17(C) \
    COMET_GROUP_18(C) COMET_GROUP_19(C) COMET_GROUP_20(C) COMET_GROUP_21(C) COMET_GROUP_22(C) COMET_GROUP_23(C) \
    COMET_GROUP_24(C) COMET_GROUP_25(C) COMET_GROUP_26(C) COMET_GROUP_27(C) COMET_GROUP_28(C) COMET_GROUP_29(C) \
    COMET_GROUP_30(C) COMET_GROUP_31(C)
#if TOKENS == 8
#define COMET_OPERANDS "{%4, %5, %6, %7}, %8, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
#elif TOKENS == 16
#define COMET_OPERANDS "{%8, %9, %10, %11}, %12, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
#elif TOKENS == 24
#define COMET_OPERANDS "{%12, %13, %14, %15}, %16, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %17, 0;\n"
#elif TOKENS == 32
#define COMET_OPERANDS "{%16, %17, %18, %19}, %20, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
#elif TOKENS == 48
#define COMET_OPERANDS "{%24, %25, %26, %27}, %28, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %29, 0;\n"
#elif TOKENS == 64
#define COMET_OPERANDS "{%32, %33, %34, %35}, %36, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
#elif TOKENS == 80
#define COMET_OPERANDS "{%40, %41, %42, %43}, %44, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %45, 0;\n"
#elif TOKENS == 96
#define COMET_OPERANDS "{%48, %49, %50, %51}, %52, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %53, 0;\n"
#elif TOKENS == 112
#define COMET_OPERANDS "{%56, %57, %58, %59}, %60, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %61, 0;\n"
#elif TOKENS == 128
#define COMET_OPERANDS "{%64, %65, %66, %67}, %68, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
#elif TOKENS == 144
#define COMET_OPERANDS "{%72, %73, %74, %75}, %76, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %77, 0;\n"
#elif TOKENS == 160
#define COMET_OPERANDS "{%80, %81, %82, %83}, %84, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %85, 0;\n"
#elif TOKENS == 176
#define COMET_OPERANDS "{%88, %89, %90, %91}, %92, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %93, 0;\n"
#elif TOKENS == 192
#define COMET_OPERANDS "{%96, %97, %98, %99}, %100, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %101, 0;\n"
#elif TOKENS == 208
#define COMET_OPERANDS "{%104, %105, %106, %107}, %108, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %109, 0;\n"
#elif TOKENS == 224
#define COMET_OPERANDS "{%112, %113, %114, %115}, %116, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %117, 0;\n"
#elif TOKENS == 240
#define COMET_OPERANDS "{%120, %121, %122, %123}, %124, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %125, 0;\n"
#elif TOKENS == 256
#define COMET_OPERANDS "{%128, %129, %130, %131}, %132, p"
#define COMET_ACCUMULATE "{.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
#else
#error "INT8 wgmma has n = 8, 16, 24 and multiples of 16"
#endif

#define COMET_RESULT(x) "+r"(x)
#define COMET_FLOAT_RESULT(x) "+f"(x)

// Shared-memory descriptor of B: K-major, 128-byte swizzle, 1,024 bytes from one 8-token atom to the next.
__device__ __forceinline__ unsigned long long activation_descriptor(unsigned shared) {
    return (static_cast<unsigned long long>(1) << 62) | (static_cast<unsigned long long>(1024 >> 4) << 32) |
           (static_cast<unsigned long long>(1) << 16) | ((shared & 0x3ffffu) >> 4);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most kPending groups of this warp are under way; d's is not among them. The empty statements keep reads
// of the results behind the wait.
template <int kPending>
__device__ __forceinline__ void wgmma_wait(unsigned (&d)[TOKENS / 2]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// D = A * B (accumulate = 0) or D += A * B for 32 channels: u8 x s8 -> s32 or e4m3 x e4m3 -> f32. Both leave their
// results in the same untyped registers.
template <bool kInt8>
__device__ __forceinline__ void wgmma_k32(
    unsigned (&d)[TOKENS / 2], const unsigned (&a)[4], unsigned long long b, int accumulate) {
    if (kInt8)
        asm volatile(
            COMET_ACCUMULATE
            "wgmma.mma_async.sync.aligned.m64n" COMET_TEXT(TOKENS) "k32.s32.u8.s8 {" COMET_NAMES
            "}, " COMET_OPERANDS ";\n}\n"
            : COMET_RESULTS(COMET_RESULT)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    else
        asm volatile(
            COMET_ACCUMULATE
            "wgmma.mma_async.sync.aligned.m64n" COMET_TEXT(TOKENS) "k32.f32.e4m3.e4m3 {" COMET_NAMES
            "}, " COMET_OPERANDS ", 1, 1;\n}\n"
            : COMET_RESULTS(COMET_RESULT)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// D = A * B (accumulate = 0) or D += A * B for 32 channels, s8 x s8 -> s32.
__device__ __forceinline__ void wgmma_k32_s8(
    unsigned (&d)[TOKENS / 2], const unsigned (&a)[4], unsigned long long b, int accumulate) {
    asm volatile(
        COMET_ACCUMULATE
        "wgmma.mma_async.sync.aligned.m64n" COMET_TEXT(TOKENS) "k32.s32.s8.s8 {" COMET_NAMES
        "}, " COMET_OPERANDS ";\n}\n"
        : COMET_RESULTS(COMET_RESULT)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// D = A * B (accumulate = 0) or D += A * B for 16 bf16 values along K.
__device__ __forceinline__ void wgmma_k16_bf16(
    float (&d)[TOKENS / 2], const uint4& a, unsigned long long b, int accumulate) {
    asm volatile(
        COMET_ACCUMULATE
        "wgmma.mma_async.sync.aligned.m64n" COMET_TEXT(TOKENS) "k16.f32.bf16.bf16 {" COMET_NAMES
        "}, " COMET_OPERANDS ", 1, 1, 0;\n}\n"
        : COMET_RESULTS(COMET_FLOAT_RESULT)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(accumulate));
}

// Pin A's computation before the fence: one sunk between two wgmma would make the compiler serialize them all.
__device__ __forceinline__ void pin(unsigned (&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i / 4][i % 4]));
}

// One block: four k32 steps along the 128 bytes of the swizzled rows, not yet committed; `a` is pinned.
template <bool kInt8>
__device__ __forceinline__ void wgmma_steps(unsigned (&d)[TOKENS / 2], const unsigned (&a)[4][4], unsigned long long b) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_k32<kInt8>(d, a[step], b + 2 * step, step > 0);
}

template <bool kInt8>
__device__ __forceinline__ void wgmma_block(unsigned (&d)[TOKENS / 2], unsigned (&a)[4][4], unsigned long long b) {
    pin(a);
    wgmma_steps<kInt8>(d, a, b);
}

}  // namespace comet
