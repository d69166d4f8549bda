// The inner products of the fast kernels: m16n8 tiles on tensor cores from 16-byte pieces of rows.
//
// A dot product does not care for the order of its terms, so the fragments of mma are filled in an
// order of k of our own: lane (g, t) = (lane / 4, lane % 4) takes the 16 bytes at 16 * t of each 64
// bytes of row g. Weights and tokens are permuted alike, and every load is one of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace cadre::cuda {

#ifdef __CUDACC__

__device__ inline void mma_16816(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                 uint32_t b0, uint32_t b1, __nv_bfloat16 /*type*/) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void mma_16816(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                 uint32_t b0, uint32_t b1, __half /*type*/) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// What a tile adds up in: `c` of lane (g, t) holds rows g (0, 1) and g + 8 (2, 3) of the tile and
/// tokens 2t and 2t + 1.
template <typename T>
struct Product {
  using Fragment = uint4;
  __device__ static Fragment prepare(uint4 raw) { return raw; }
  // 64 bytes of k: two steps of 16.
  static constexpr int kSteps = 2;
  __device__ static void add(float (&c)[4], int step, const Fragment& low, const Fragment& high,
                             const Fragment& x) {
    if (step == 0) {
      mma_16816(c, low.x, high.x, low.y, high.y, x.x, x.y, T{});
    } else {
      mma_16816(c, low.z, high.z, low.w, high.w, x.z, x.w, T{});
    }
  }
};

/// float32 as the sum of two tf32 numbers, whose products are exact: three products of four give
/// float32's precision. Tensor cores round sums towards zero, so few are left to them at a time.
struct SplitFloats {
  uint32_t high[4];
  uint32_t low[4];
};

__device__ inline void mma_1688(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
struct Product<float> {
  using Fragment = SplitFloats;
  __device__ static Fragment prepare(uint4 raw) {
    Fragment f;
    const uint32_t values[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f.high[i] = values[i] & 0xffffe000u;
      const float rest = __uint_as_float(values[i]) - __uint_as_float(f.high[i]);
      const bool is_finite = (values[i] & 0x7f800000u) != 0x7f800000u;
      f.low[i] = is_finite ? __float_as_uint(rest) : 0u;
      if (!is_finite) f.high[i] = values[i];
    }
    return f;
  }
  static constexpr int kSteps = 1;
  __device__ static void add(float (&c)[4], int /*step*/, const Fragment& low, const Fragment& high,
                             const Fragment& x) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      mma_1688(sum, low.low[i], high.low[i], low.low[i + 1], high.low[i + 1], x.high[i],
               x.high[i + 1]);
      mma_1688(sum, low.high[i], high.high[i], low.high[i + 1], high.high[i + 1], x.low[i],
               x.low[i + 1]);
      mma_1688(sum, low.high[i], high.high[i], low.high[i + 1], high.high[i + 1], x.high[i],
               x.high[i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += sum[i];
  }
};

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
/// 4 bytes to shared memory, of which the first `bytes` are read and the rest is zero.
__device__ inline void copy_word(uint32_t to, const char* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
/// 16 bytes to shared memory. No compiler barrier: wait_copies is one.
__device__ inline void copy_piece(uint32_t to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
/// The same; zeros, and nothing is read, when `bytes` is 0 and not 16.
__device__ inline void copy_piece(uint32_t to, const char* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#endif

}  // namespace cadre::cuda
