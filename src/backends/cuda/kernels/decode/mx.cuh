// FP4 (e2m1) and MXFP8 (e4m3) weights with an E8M0 scale for each 32 of k: from a stage in shared
// memory to sums.
//
// Codes become float16, which is exact: e2m1 times 2^-14. ldmatrix gives each lane one word of a
// row's group of 32 (of MXFP8 two), so that two products of 16 of k are the sum of one group of
// each row; it starts from zero and is added in float32 times the row's scale. Tokens are float16
// in the order that this makes of k (half_rows.cuh).
#pragma once

#include "backends/cuda/kernels/decode/operands.cuh"

namespace cadre::cuda {

template <Kind kKind_>
struct MxOperands {
  static constexpr Kind kKind = kKind_;
  using Weight = uint8_t;
  using Number = __half;
  using H = void;  // DecodeArgs::compute_dtype
  using Output = void;
};

/// Pieces of 16 bytes of a row of weights.
template <typename Operands>
__host__ __device__ constexpr int row_pieces(int k) {
  if constexpr (Operands::kKind == Kind::kFp4) {
    return k / 32;
  } else {
    return k * static_cast<int>(sizeof(typename Operands::Weight)) / 16;
  }
}

#ifdef __CUDACC__

/// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
template <typename T>
__device__ T load_shared_16(uint32_t address) {
  static_assert(sizeof(T) == 16);
  T v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(reinterpret_cast<uint32_t&>(v.x)), "=r"(reinterpret_cast<uint32_t&>(v.y)),
                 "=r"(reinterpret_cast<uint32_t&>(v.z)), "=r"(reinterpret_cast<uint32_t&>(v.w))
               : "r"(address)
               : "memory");
  return v;
}

/// Bits of a where the mask has ones, of b elsewhere; written out because ptxas makes two
/// instructions of it where it knows the mask.
__device__ inline uint32_t bits_of(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
  return result;
}

/// Eight e2m1 codes times 2^-14: pairs of the nibbles (0, 4), (2, 6), (1, 5), (3, 7). Nibbles
/// become the upper bytes of float16 first, and those are taken apart by multiplications: bit
/// operations and shifts alone would keep their unit busy longer than reading takes.
__device__ inline void fp4_halves(uint32_t codes, uint32_t (&halves)[4]) {
  const uint32_t signs = codes & 0x88888888u;
  const uint32_t even = bits_of(0x0e0e0e0eu, codes * 2, signs * 16);
  const uint32_t odd = bits_of(0x0e0e0e0eu, codes >> 3, signs);
  halves[1] = even & 0xff00ff00u;
  halves[3] = odd & 0xff00ff00u;
  asm("mad.lo.u32 %0, %1, -256, %2;" : "=r"(halves[0]) : "r"(halves[1]), "r"(even * 256));
  asm("mad.lo.u32 %0, %1, -256, %2;" : "=r"(halves[2]) : "r"(halves[3]), "r"(odd * 256));
}

/// What a lane multiplies of one group of 32: of row g in `low`, of the upper half's in `high`.
template <Kind kKind>
__device__ void mx_halves(const uint32_t (&raw)[4], int group, uint32_t (&low)[4],
                          uint32_t (&high)[4]) {
  if constexpr (kKind == Kind::kFp4) {
    fp4_halves(raw[2 * group], low);
    fp4_halves(raw[2 * group + 1], high);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Pairs a = half_pairs(raw[2 * i]);
      const Pairs b = half_pairs(raw[2 * i + 1]);
      low[2 * i] = a.first, low[2 * i + 1] = a.second;
      high[2 * i] = b.first, high[2 * i + 1] = b.second;
    }
  }
}

/// Scales are 2^-8 of what they stand for, so that sums beside the largest do not overflow; this
/// makes up for it.
inline constexpr float kMxUnbias = 256;

/// Four E8M0 codes as float32, times 2^-8; all 256 of them.
__device__ inline float4 mx_scales(uint32_t codes) {
  float4 result;
  // 64 to 191, as good as always: their two upper bits differ.
  if (((codes ^ codes * 2) & 0x80808080u) == 0x80808080u) {
    const uint32_t biased = codes - 0x08080808u;
    result.x = __uint_as_float(biased << 23 & 0x7f800000u);
    result.y = __uint_as_float(biased << 15 & 0x7f800000u);
    result.z = __uint_as_float(biased << 7 & 0x7f800000u);
    result.w = __uint_as_float(biased >> 1 & 0x7f800000u);
  } else {
    result.x = e8m0_value(static_cast<uint8_t>(codes)) / kMxUnbias;
    result.y = e8m0_value(static_cast<uint8_t>(codes >> 8)) / kMxUnbias;
    result.z = e8m0_value(static_cast<uint8_t>(codes >> 16)) / kMxUnbias;
    result.w = e8m0_value(static_cast<uint8_t>(codes >> 24)) / kMxUnbias;
  }
  return result;
}

/// Where the scales of a row of weights begin, and how many bytes from there on may be read.
struct RowScales {
  const char* at;
  int readable;
};

/// A lane's scales of a stage: kEach neighbours of the row lane % kRows. They are copied as the
/// words that they lie in, to 16 bytes of the lane's own, and become float32 when their stage is
/// multiplied.
template <typename Shape>
struct MxScales {
  static constexpr int kEach = Shape::kRows * Shape::kMxGroups / 32;  // 2, 4 or 8
  static constexpr int kWords = (kEach + 3) / 4;

  __device__ static int first_group(int chunk) {
    return chunk * Shape::kMxGroups + threadIdx.x % 32 / Shape::kRows * kEach;
  }

  __device__ static void copy(uint32_t slot, const RowScales& row, int chunk) {
    const int first = first_group(chunk);
    const char* const from = row.at + first;
    const auto address = reinterpret_cast<uintptr_t>(from);
    const int readable = row.readable - first;
    if (kEach == 8 && address % 8 == 0 && readable >= 8) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(slot), "l"(from));
      store_shift(slot, 0);
    } else if (readable >= kEach + 4) {
      const auto before = static_cast<int>(address % 4);
#pragma unroll
      for (int w = 0; w <= kWords; ++w) {
        if (w < kWords || before != 0) copy_word(slot + 4 * w, from - before + 4 * w);
      }
      store_shift(slot, before * 8);
    } else {  // near the end of a matrix
#pragma unroll 1
      for (int i = 0; i < min(readable, kEach); ++i) {
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(slot + i),
                     "r"(uint32_t{__ldg(reinterpret_cast<const uint8_t*>(from) + i)})
                     : "memory");
      }
      store_shift(slot, 0);
    }
  }

  /// To shared memory: [groups / 4][kRows][4] floats; something finite beyond `groups`.
  __device__ static void decode(uint32_t slot, uint32_t to, int chunk, int groups) {
    const int lane = threadIdx.x % 32;
    const int row = lane % Shape::kRows;
    const int part = lane / Shape::kRows;
    const uint4 raw = load_shared_16<uint4>(slot);
    uint32_t codes[2] = {__funnelshift_r(raw.x, raw.y, raw.w), 0};
    if constexpr (kWords == 2) codes[1] = __funnelshift_r(raw.y, raw.z, raw.w);
    if ((chunk + 1) * Shape::kMxGroups > groups) {
      const int left = groups - first_group(chunk);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int here = left - 4 * w;
        if (here < 4) codes[w] = here <= 0 ? 0 : codes[w] & (0xffffffffu >> (32 - 8 * here));
      }
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const float4 four = mx_scales(codes[w]);
      if constexpr (kEach == 2) {
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + (row * 4 + part * 2) * 4),
                     "f"(four.x), "f"(four.y)
                     : "memory");
      } else {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                         to + ((part * kWords + w) * Shape::kRows + row) * 16),
                     "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w)
                     : "memory");
      }
    }
  }

 private:
  __device__ static void copy_word(uint32_t to, const char* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
  }
  __device__ static void store_shift(uint32_t slot, int bits) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(slot + 12), "r"(bits) : "memory");
  }
};

/// The weights of a stage in registers, and their products.
template <typename Shape>
struct MxStage {
  static constexpr bool kIsFp4 = Shape::kKind == Kind::kFp4;
  static constexpr int kSteps = Shape::kChunk / 32;
  uint32_t raw[kSteps][Shape::kM][4];

  /// All lanes of a warp; `stage` in shared memory.
  __device__ void load(uint32_t stage) {
    const int lane = threadIdx.x % 32;
    const uint32_t from =
        stage + lane / 8 % 2 * Shape::kHalfBytes + lane % 8 * Shape::kPitch + lane / 16 * 16;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < Shape::kM; ++i) {
        load_matrices(raw[s][i], from + i * 8 * Shape::kPitch + s * 32);
      }
    }
  }

  /// Adds to sums. `scales` as MxScales stores them; `tokens`: this lane's 16 bytes of the first
  /// group of token 8 n + lane / 4.
  __device__ void multiply(uint32_t scales, const uint32_t (&tokens)[Shape::kN], int count,
                           TileSums<Shape>& sums) const {
    const uint32_t row_scales = scales + threadIdx.x % 32 / 4 * 16;
    float4 scale[2 * Shape::kM];
#pragma unroll
    for (int group = 0; group < Shape::kMxGroups; ++group) {
      if (group % 4 == 0) {
#pragma unroll
        for (int i = 0; i < 2 * Shape::kM; ++i) {
          const int row = (i % 2 == 0 ? 0 : Shape::kHalf) + i / 2 * 8;
          scale[i] = load_shared_16<float4>(row_scales + (group / 4 * Shape::kRows + row) * 16);
        }
      }
      uint32_t low[Shape::kM][4];
      uint32_t high[Shape::kM][4];
#pragma unroll
      for (int i = 0; i < Shape::kM; ++i) {
        mx_halves<Shape::kKind>(raw[kIsFp4 ? group / 2 : group][i], group % 2, low[i], high[i]);
      }
#pragma unroll
      for (int n = 0; n < Shape::kN; ++n) {
        if (n != 0 && 8 * n >= count) continue;
        const uint4 x = load_shared_16<uint4>(tokens[n] + group * 64);
#pragma unroll
        for (int i = 0; i < Shape::kM; ++i) {
          float part[4] = {};
          mma_16816(part, low[i][0], high[i][0], low[i][1], high[i][1], x.x, x.y, __half{});
          mma_16816(part, low[i][2], high[i][2], low[i][3], high[i][3], x.z, x.w, __half{});
          const float scale_low = number_of(scale[2 * i], group % 4);
          const float scale_high = number_of(scale[2 * i + 1], group % 4);
          sums[i][n][0] += scale_low * part[0];
          sums[i][n][1] += scale_low * part[1];
          sums[i][n][2] += scale_high * part[2];
          sums[i][n][3] += scale_high * part[3];
        }
      }
    }
  }

 private:
  __device__ static float number_of(const float4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  }
};

#endif

}  // namespace cadre::cuda
