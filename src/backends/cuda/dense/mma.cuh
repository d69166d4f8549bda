// The tensor cores' 16x8x16 product of 16-bit elements (sm_80 and up), and asynchronous copies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace cadre::cuda {

/// d += a b: a 16x16 by rows, b 16x8 by columns, lane 4 g + q holding rows g and g + 8 of a and d,
/// column g of b, and columns (of d: 2 q, 2 q + 1; in k: 2 q, 2 q + 1, 2 q + 8, 2 q + 9).
template <typename T>
__device__ inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                           uint32_t b0, uint32_t b1);
template <>
__device__ inline void mma<__nv_bfloat16>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                          uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma<__half>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                   uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8,
/// less kOffset bytes.
template <int kOffset>
__device__ inline void load_matrices(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4 + %5];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address), "n"(kOffset)
               : "memory");
}
template <int kOffset>
__device__ inline void load_matrices_transposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4 + %5];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address), "n"(kOffset)
               : "memory");
}

/// A tile of rows of kDim 16-bit elements in shared memory: 16-byte pieces of a row change places
/// so that eight rows' pieces of one column lie in different banks. Byte of a piece; the tile
/// begins at a multiple of 1024.
template <int kDim>
__device__ inline uint32_t piece_offset(int row, int piece) {
  return static_cast<uint32_t>(row * kDim * 2 + ((piece ^ (row & 7)) << 4));
}
/// The address of pieces 2 k + {0, 1} from that of pieces {0, 1} of the same row.
__device__ inline uint32_t at_column(uint32_t address, int k) {
  return address ^ static_cast<uint32_t>(k << 5);
}

/// kBegin, ..., kEnd - 1 as constants.
template <int kBegin, int kEnd, typename Fn>
__device__ inline void for_constants(const Fn& fn) {
  if constexpr (kBegin < kEnd) {
    fn(std::integral_constant<int, kBegin>{});
    for_constants<kBegin + 1, kEnd>(fn);
  }
}

/// 16 bytes to shared memory; zeros when not `valid` (`from` is then not read).
__device__ inline void copy_async(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cadre::cuda
