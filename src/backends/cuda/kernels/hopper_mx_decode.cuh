// FP4, MXFP8 and FP8 weights from a tile in shared memory to the A operand of wgmma.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "backends/cuda/kernels/ptx.cuh"
#include "backends/cuda/kernels/small_floats.cuh"

namespace cadre::cuda::hopper {

/// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

__device__ inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

/// A scale twice, as bf16x2. 0 is a subnormal, 255 NaN.
__device__ inline uint32_t e8m0_bf16x2(uint32_t code) {
  uint32_t bits = code << 7;
  if (code == 0 || code == 255) bits |= 0x40u;
  return bits * 0x10001u;
}

/// A warp's 16 rows of weights and 64 of K as the A operands of four products of 16 of K. Row
/// `lane / 4` and the one 8 further on; scales of 32 of K each, as e8m0_bf16x2() gives them.
struct Fp4Weights {
  using Operand = __nv_bfloat16;
  static constexpr int kRowBytes = 32;  // of 64 of K
  static constexpr bool kIsFp4 = true;

  /// Of K in [32 h, 32 h + 32) in the tile of 32-byte rows at `tile`: two products' operands.
  __device__ static void load(uint32_t tile, uint32_t (&raw)[4]) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t row = lane % 8 + lane / 8 % 2 * 8;
    const uint32_t chunk = lane / 16 ^ (row / 4 % 2);  // the 32-byte swizzle
    load_matrices(raw, tile + row * kRowBytes + chunk * 16);
  }

  /// raw[2 h], raw[2 h + 1]: 8 nibbles of either row.
  __device__ static void decode(const uint32_t (&raw)[4], int h, const uint32_t (&scale)[2],
                                uint32_t (&a)[8]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t word = raw[2 * h + r];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        // Nibbles p and p + 4 to the top of either half: s.eem at the bits of sign, exponent and
        // mantissa, which is the value times 2^-126.
        const uint32_t magnitude =
            (p < 2 ? word << (6 - 4 * p) : word >> (4 * p - 6)) & 0x01c001c0u;
        const uint32_t bits = (word << (12 - 4 * p) & 0x80008000u) | magnitude;
        const uint32_t value = multiply_bf16x2(bits, 0x7e807e80u);
        a[p / 2 * 4 + p % 2 * 2 + r] = multiply_bf16x2(value, scale[r]);
      }
    }
  }
};

struct MxFp8Weights {
  using Operand = __nv_bfloat16;
  static constexpr int kRowBytes = 64;
  static constexpr bool kIsFp4 = false;

  __device__ static void load_half(uint32_t tile, int h, uint32_t (&raw)[4]) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t row = lane % 8 + lane / 8 % 2 * 8;
    const uint32_t chunk = (2 * h + lane / 16) ^ (row / 2 % 4);  // the 64-byte swizzle
    load_matrices(raw, tile + row * kRowBytes + chunk * 16);
  }

  /// raw[2 j + r]: 4 bytes of row r of the product j of 16 of K.
  __device__ static void decode(const uint32_t (&raw)[4], const uint32_t (&scale)[2],
                                uint32_t (&a)[8]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 two = __half22float2(e4m3_pair(raw[2 * j + r] >> 16 * i & 0xffffu));
          const uint32_t value = ptx::pack(two.x, two.y, __nv_bfloat16());
          a[4 * j + 2 * i + r] = multiply_bf16x2(value, scale[r]);
        }
      }
    }
  }
};

/// e4m3 codes as they are, in fp16; their scales are for the sums.
struct Fp8Weights {
  using Operand = __half;
  static constexpr int kRowBytes = 64;
  static constexpr bool kIsFp4 = false;

  __device__ static void load_half(uint32_t tile, int h, uint32_t (&raw)[4]) {
    MxFp8Weights::load_half(tile, h, raw);
  }

  __device__ static void decode(const uint32_t (&raw)[4], uint32_t (&a)[8]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const __half2 two = e4m3_pair(raw[2 * j + r] >> 16 * i & 0xffffu);
          a[4 * j + 2 * i + r] = *reinterpret_cast<const uint32_t*>(&two);
        }
      }
    }
  }
};

// ---- wgmma with A in registers -----------------------------------------------------------------

#define CADRE_D8(o)                                                                           \
  "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), \
      "+f"(d[o + 6]), "+f"(d[o + 7])
#define CADRE_A4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// clang-format off
#define CADRE_WGMMA_N32(type) \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n" \
    "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " " \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, " \
    "%18, %19}, %20, add, 1, 1, 0;\n}" \
    : CADRE_D8(0), CADRE_D8(8) \
    : CADRE_A4, "l"(b), "r"(add))
#define CADRE_WGMMA_N64(type) \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n" \
    "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, " \
    "%34, %35}, %36, add, 1, 1, 0;\n}" \
    : CADRE_D8(0), CADRE_D8(8), CADRE_D8(16), CADRE_D8(24) \
    : CADRE_A4, "l"(b), "r"(add))
#define CADRE_WGMMA_N128(type) \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n" \
    "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, " \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, " \
    "%66, %67}, %68, add, 1, 1, 0;\n}" \
    : CADRE_D8(0), CADRE_D8(8), CADRE_D8(16), CADRE_D8(24), CADRE_D8(32), CADRE_D8(40), CADRE_D8(48), CADRE_D8(56) \
    : CADRE_A4, "l"(b), "r"(add))
// clang-format on

/// d (+)= a b^T: 64 rows of a, kColumns of b, 16 of K; `add` 0 starts from zero.
template <typename T, int kColumns>
__device__ inline void wgmma_registers(float (&d)[kColumns / 2], const uint32_t* a, uint64_t b,
                                       int32_t add) {
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  if constexpr (kColumns == 32) {
    if constexpr (kIsHalf) {
      CADRE_WGMMA_N32("f16");
    } else {
      CADRE_WGMMA_N32("bf16");
    }
  } else if constexpr (kColumns == 64) {
    if constexpr (kIsHalf) {
      CADRE_WGMMA_N64("f16");
    } else {
      CADRE_WGMMA_N64("bf16");
    }
  } else {
    static_assert(kColumns == 128 && !kIsHalf);
    CADRE_WGMMA_N128("bf16");
  }
}

#undef CADRE_WGMMA_N128
#undef CADRE_WGMMA_N64
#undef CADRE_WGMMA_N32
#undef CADRE_A4
#undef CADRE_D8

}  // namespace cadre::cuda::hopper
