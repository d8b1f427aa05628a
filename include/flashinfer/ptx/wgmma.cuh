// SPDX-License-Identifier: Apache-2.0
// Matrix products of a warpgroup (PTX ISA: Asynchronous Warpgroup Level Matrix Instructions, "wgmma"), sm_90a.
//
// D (64 x N, fp32, N / 2 registers a thread) = A (64 x K) B^T (N x K), plus D if `accumulate`. K is 32 bytes: 16
// elements of 16 bits, 32 of 8. A comes from shared memory or from registers; B from shared memory.
// Descriptors are those of hopper/smem_tile.cuh. Thread t, lane l = t % 32, has in registers 4 j, 4 j + 1 row
// 16 (t / 32) + l / 4, columns 8 j + 2 (l % 4) + {0, 1}, and in 4 j + 2, 4 j + 3 the same columns eight rows below.
//
//   WgmmaFence(); Wgmma<...>::Run(d, a, b, accumulate); ... WgmmaCommit(); WgmmaWait<0>(); WgmmaPin(d);
//
// No register of an unfinished product may be touched, or ptxas serialises all of them (notes C7510 to C7519).
#pragma once
#include <cstdint>

namespace flashinfer {
namespace ptx {

/// Types of the operands.
enum class WgmmaType { kBf16, kF16, kE4m3 };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Order accesses to registers and shared memory before the products that follow.
__device__ __forceinline__ void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Close a group of products.
__device__ __forceinline__ void WgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Wait until at most `PENDING` of the latest groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/// Keep the compiler from moving accesses to these registers across this point.
template <int COUNT>
__device__ __forceinline__ void WgmmaPin(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Keep an operand in its registers until this point, which follows the wait for its products.
template <int COUNT>
__device__ __forceinline__ void WgmmaPin(uint32_t (&a)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

/// Matrix product of one operand type and width N. `TRANSPOSE_A`, `TRANSPOSE_B`: the operand is MN-major, 16-bit types
/// only.
template <WgmmaType TYPE, int N, bool TRANSPOSE_A = false, bool TRANSPOSE_B = false>
struct Wgmma;

// Operand lists of 4, 8, ... 128 registers: as text, and as constraints.
#define FLASHINFER_WGMMA_TEXT_4 "%0, %1, %2, %3"
#define FLASHINFER_WGMMA_TEXT_8 \
  FLASHINFER_WGMMA_TEXT_4       \
  ", %4, %5, %6, %7"
#define FLASHINFER_WGMMA_TEXT_16 \
  FLASHINFER_WGMMA_TEXT_8        \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHINFER_WGMMA_TEXT_24 \
  FLASHINFER_WGMMA_TEXT_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASHINFER_WGMMA_TEXT_32 \
  FLASHINFER_WGMMA_TEXT_24       \
  ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHINFER_WGMMA_TEXT_40 \
  FLASHINFER_WGMMA_TEXT_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHINFER_WGMMA_TEXT_44 \
  FLASHINFER_WGMMA_TEXT_40       \
  ", %40, %41, %42, %43"
#define FLASHINFER_WGMMA_TEXT_48 \
  FLASHINFER_WGMMA_TEXT_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHINFER_WGMMA_TEXT_64 \
  FLASHINFER_WGMMA_TEXT_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHINFER_WGMMA_TEXT_80 \
  FLASHINFER_WGMMA_TEXT_64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FLASHINFER_WGMMA_TEXT_96                                                     \
  FLASHINFER_WGMMA_TEXT_64                                                           \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHINFER_WGMMA_TEXT_128                                                                \
  FLASHINFER_WGMMA_TEXT_96                                                                       \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FLASHINFER_WGMMA_LIST_4(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])
#define FLASHINFER_WGMMA_LIST_8(o) FLASHINFER_WGMMA_LIST_4(o), FLASHINFER_WGMMA_LIST_4(o + 4)
#define FLASHINFER_WGMMA_LIST_16(o) FLASHINFER_WGMMA_LIST_8(o), FLASHINFER_WGMMA_LIST_8(o + 8)
#define FLASHINFER_WGMMA_LIST_24(o) FLASHINFER_WGMMA_LIST_16(o), FLASHINFER_WGMMA_LIST_8(o + 16)
#define FLASHINFER_WGMMA_LIST_32(o) FLASHINFER_WGMMA_LIST_16(o), FLASHINFER_WGMMA_LIST_16(o + 16)
#define FLASHINFER_WGMMA_LIST_40(o) FLASHINFER_WGMMA_LIST_32(o), FLASHINFER_WGMMA_LIST_8(o + 32)
#define FLASHINFER_WGMMA_LIST_44(o) FLASHINFER_WGMMA_LIST_40(o), FLASHINFER_WGMMA_LIST_4(o + 40)
#define FLASHINFER_WGMMA_LIST_48(o) FLASHINFER_WGMMA_LIST_32(o), FLASHINFER_WGMMA_LIST_16(o + 32)
#define FLASHINFER_WGMMA_LIST_64(o) FLASHINFER_WGMMA_LIST_32(o), FLASHINFER_WGMMA_LIST_32(o + 32)
#define FLASHINFER_WGMMA_LIST_80(o) FLASHINFER_WGMMA_LIST_64(o), FLASHINFER_WGMMA_LIST_16(o + 64)
#define FLASHINFER_WGMMA_LIST_96(o) FLASHINFER_WGMMA_LIST_64(o), FLASHINFER_WGMMA_LIST_32(o + 64)
#define FLASHINFER_WGMMA_LIST_128(o) FLASHINFER_WGMMA_LIST_64(o), FLASHINFER_WGMMA_LIST_64(o + 64)

// 16 bits: operands from shared memory, and A from registers. COUNT is N / 2; P0 .. P6 are the numbers
// COUNT .. COUNT + 6 of the operands that follow the accumulators, spelled out because they become text.
#define FLASHINFER_WGMMA_16(TYPE, NAME, N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                          \
  template <bool TRANSPOSE_A, bool TRANSPOSE_B>                                                                        \
  struct Wgmma<TYPE, N, TRANSPOSE_A, TRANSPOSE_B> {                                                                    \
    static __device__ __forceinline__ void Run(float (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate) {           \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2                                                            \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" FLASHINFER_WGMMA_TEXT_##COUNT  \
                   "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 ";\n}"                                            \
                   : FLASHINFER_WGMMA_LIST_##COUNT(0)                                                                  \
                   : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(TRANSPOSE_A)), "n"(int(TRANSPOSE_B)));              \
    }                                                                                                                  \
    static __device__ __forceinline__ void Run(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b,                  \
                                               bool accumulate) {                                                      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5                                                            \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" FLASHINFER_WGMMA_TEXT_##COUNT  \
                   "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 ";\n}"                      \
                   : FLASHINFER_WGMMA_LIST_##COUNT(0)                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(TRANSPOSE_B))); \
    }                                                                                                                  \
  };
// 8 bits: both operands K-major. Registers of A, lane l: bytes k = 4 (l % 4) + {0 .. 3} of rows l / 4 and l / 4 + 8, then the
// same of k + 16.
#define FLASHINFER_WGMMA_8(TYPE, NAME, N, COUNT, P0, P1, P2, P3, P4, P5)                                              \
  template <>                                                                                                         \
  struct Wgmma<TYPE, N, false, false> {                                                                               \
    static __device__ __forceinline__ void Run(float (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate) {          \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2                                                           \
                   ", 0;\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." NAME "." NAME " {" FLASHINFER_WGMMA_TEXT_##COUNT \
                   "}, %" #P0 ", %" #P1 ", p, 1, 1;\n}"                                                               \
                   : FLASHINFER_WGMMA_LIST_##COUNT(0)                                                                 \
                   : "l"(a), "l"(b), "r"(int(accumulate)));                                                           \
    }                                                                                                                 \
    static __device__ __forceinline__ void Run(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b,                 \
                                               bool accumulate) {                                                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5                                                           \
                   ", 0;\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." NAME "." NAME " {" FLASHINFER_WGMMA_TEXT_##COUNT \
                   "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1;\n}"                               \
                   : FLASHINFER_WGMMA_LIST_##COUNT(0)                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));                       \
    }                                                                                                                 \
  };
#define FLASHINFER_WGMMA(N, COUNT, P0, P1, P2, P3, P4, P5, P6)                        \
  FLASHINFER_WGMMA_16(WgmmaType::kBf16, "bf16", N, COUNT, P0, P1, P2, P3, P4, P5, P6) \
  FLASHINFER_WGMMA_16(WgmmaType::kF16, "f16", N, COUNT, P0, P1, P2, P3, P4, P5, P6)   \
  FLASHINFER_WGMMA_8(WgmmaType::kE4m3, "e4m3", N, COUNT, P0, P1, P2, P3, P4, P5)

FLASHINFER_WGMMA(8, 4, 4, 5, 6, 7, 8, 9, 10)
FLASHINFER_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
FLASHINFER_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
FLASHINFER_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
FLASHINFER_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
FLASHINFER_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
FLASHINFER_WGMMA(88, 44, 44, 45, 46, 47, 48, 49, 50)
FLASHINFER_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
FLASHINFER_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
FLASHINFER_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
FLASHINFER_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
FLASHINFER_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef FLASHINFER_WGMMA
#undef FLASHINFER_WGMMA_8
#undef FLASHINFER_WGMMA_16
#undef FLASHINFER_WGMMA_LIST_128
#undef FLASHINFER_WGMMA_LIST_96
#undef FLASHINFER_WGMMA_LIST_80
#undef FLASHINFER_WGMMA_LIST_64
#undef FLASHINFER_WGMMA_LIST_48
#undef FLASHINFER_WGMMA_LIST_44
#undef FLASHINFER_WGMMA_LIST_40
#undef FLASHINFER_WGMMA_LIST_32
#undef FLASHINFER_WGMMA_LIST_24
#undef FLASHINFER_WGMMA_LIST_16
#undef FLASHINFER_WGMMA_LIST_8
#undef FLASHINFER_WGMMA_LIST_4
#undef FLASHINFER_WGMMA_TEXT_128
#undef FLASHINFER_WGMMA_TEXT_96
#undef FLASHINFER_WGMMA_TEXT_80
#undef FLASHINFER_WGMMA_TEXT_64
#undef FLASHINFER_WGMMA_TEXT_48
#undef FLASHINFER_WGMMA_TEXT_44
#undef FLASHINFER_WGMMA_TEXT_40
#undef FLASHINFER_WGMMA_TEXT_32
#undef FLASHINFER_WGMMA_TEXT_24
#undef FLASHINFER_WGMMA_TEXT_16
#undef FLASHINFER_WGMMA_TEXT_8
#undef FLASHINFER_WGMMA_TEXT_4

#endif

}  // namespace ptx
}  // namespace flashinfer
