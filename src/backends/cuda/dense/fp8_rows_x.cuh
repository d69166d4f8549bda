// What the kernel of fp8_rows.cu does with x: quantises it, or takes codes, and keeps it in shared
// memory as its products want it.
#pragma once

#include "backends/cuda/dense/fp8_rows.h"
#include "backends/cuda/dense/linear_parts.cuh"
#include "backends/cuda/dense/mma.cuh"
#include "backends/cuda/kernels/activation_scale.cuh"
#include "backends/cuda/kernels/small_floats.cuh"

namespace cadre::cuda::fp8 {

inline constexpr int kWarps = 8;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int32_t kGroup = kActivationGroup;
inline constexpr int32_t kStride = kWarps * kGroup;  // of k, from a warp's unit to its next
inline constexpr int32_t kLoad = 64;  // of k, in one load of 8 weight rows by all lanes
inline constexpr int kLoads = kGroup / kLoad;
inline constexpr int kTileRows = 16;
inline constexpr int kCodeBytes = 2 * kLoads * 512;
inline constexpr int kUnitBytes = kCodeBytes + 16;  // with the word of the scale
inline constexpr size_t kMostShared = 227 << 10;    // of a block on the GPUs that have most

static_assert(kActivationGroup == 128);

/// kRows: rows of x at most; kWide: x lies as fp16, else as codes.
template <int kRowsOfX, bool kIsWide>
struct Shape {
  static constexpr int kRows = kRowsOfX;
  static constexpr bool kWide = kIsWide;
  // Leaves room for the next kernel's block beside this one's where x is small: its weights are
  // asked for while this one ends.
  static constexpr int kStages = 4;
  static constexpr int kRingBytes = kStages * kUnitBytes;  // of a warp
  static constexpr int kHalves = kRows / 8;                // groups of eight rows of x
  static constexpr int kColumns = kTileRows;
  static constexpr int kSums = kRows * kColumns;                   // of a tile
  static constexpr int kBatch = (kRows == 8 ? 256 : 512) / kSums;  // tiles between barriers
  static constexpr int kOutputs = kBatch * kSums / kThreads;       // of a thread
  static constexpr size_t kSharedBytes =
      static_cast<size_t>(kWarps) * (kRingBytes + kBatch * kSums * sizeof(float));
  static constexpr int kValueBytes = kWide ? 2 : 1;  // of x
};

/// Where the quantised rows lie behind Shape::kSharedBytes: whole groups, so that a load needs no
/// look at K. Rows begin where the 16 bytes that two rows' lanes read lie in different banks. The
/// scales are [groups, kRows].
template <typename S>
struct XLayout {
  int32_t row_bytes;
  int32_t groups;

  __host__ __device__ explicit XLayout(int64_t k) {
    groups = static_cast<int32_t>((k + kGroup - 1) / kGroup);
    row_bytes = groups * kGroup * S::kValueBytes + (S::kWide ? 16 : 64);
  }
  __host__ __device__ size_t bytes(int64_t rows) const {
    return static_cast<size_t>(rows) * row_bytes + groups * S::kRows * sizeof(float);
  }
};

__device__ inline uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/// Four codes to two pairs of fp16. Exact.
__device__ inline void widen_codes(uint32_t codes, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  // Written out because the intrinsic shifts the upper codes down first.
  asm("{.reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  const __half2 first = e4m3_pair(codes & 0xffffu);
  const __half2 second = e4m3_pair(codes >> 16);
  low = *reinterpret_cast<const uint32_t*>(&first);
  high = *reinterpret_cast<const uint32_t*>(&second);
#endif
}

/// 16 codes.
__device__ inline void widen_codes(const uint4& codes, uint32_t (&pairs)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) widen_codes(word(codes, i), pairs[2 * i], pairs[2 * i + 1]);
}

/// Brings a warp's slices of x to shared memory: 16 values a lane, four groups of 128 at a time,
/// those of several rounds asked for together.
template <typename S>
class SlicesOfX {
 public:
  __device__ SlicesOfX(const Fp8LinearRows& args, const XLayout<S>& layout, unsigned char* values,
                       float* scales)
      : args_(args), layout_(layout), values_(values), scales_(scales) {}

  __device__ void bring(int warp) const {
    if (args_.x_codes != nullptr) {
      copy(warp);
    } else {
      quantize(warp);
    }
    __syncwarp();
  }

 private:
  struct Place {
    int32_t row;
    int32_t group;
    bool is_there;

    __device__ int32_t k() const {
      return group * kGroup + static_cast<int32_t>(threadIdx.x) % 8 * 16;
    }
  };

  __device__ int32_t count(int warp) const {
    return (layout_.groups - warp + kWarps - 1) / kWarps * static_cast<int32_t>(args_.rows);
  }
  __device__ Place place_of(int warp, int32_t item) const {
    const auto rows = static_cast<int32_t>(args_.rows);
    return {item % rows, warp + item / rows * kWarps, item < count(warp)};
  }

  __device__ void quantize(int warp) const {
    if (count(warp) <= 4) return quantize_rounds<1>(warp);
    quantize_rounds<4>(warp);
  }
  template <int kAtOnce>
  __device__ void quantize_rounds(int warp) const {
    for (int32_t first = 0; first < count(warp); first += 4 * kAtOnce) {
      float values[kAtOnce][16];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) load(place(warp, first, i), values[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) quantize(place(warp, first, i), values[i]);
    }
  }
  __device__ void copy(int warp) const {
    constexpr int kAtOnce = 8;
    for (int32_t first = 0; first < count(warp); first += 4 * kAtOnce) {
      uint4 codes[kAtOnce];
      float scales[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Place at = place(warp, first, i);
        const bool is_there = at.is_there && at.k() < args_.k;
        codes[i] = {0, 0, 0, 0};
        if (is_there) {
          codes[i] = *reinterpret_cast<const uint4*>(args_.x_codes + at.row * args_.x_code_stride +
                                                     at.k());
        }
        scales[i] = 0;
        if (is_there && threadIdx.x % 8 == 0) {
          scales[i] = args_.x_scales[at.group * args_.x_scale_stride + at.row];
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) store(place(warp, first, i), codes[i], scales[i]);
    }
  }
  __device__ Place place(int warp, int32_t first, int i) const {
    return place_of(warp, first + 4 * i + static_cast<int32_t>(threadIdx.x) % 32 / 8);
  }

  __device__ void load(const Place& place, float (&values)[16]) const {
    const int64_t at = place.row * args_.x_stride + place.k();
    float halves[2][8] = {};
    if (place.is_there && place.k() < args_.k) {
      load_eight(args_.x, args_.dtype, at, halves[0]);
      load_eight(args_.x, args_.dtype, at + 8, halves[1]);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) values[i] = halves[i / 8][i % 8];
  }

  __device__ void quantize(const Place& place, const float (&values)[16]) const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = max(largest, magnitude_bits(values[i]));
#pragma unroll
    for (int step = 4; step > 0; step /= 2) {
      largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    }
    const ActivationScale scale = activation_scale_of_bits(largest);
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const float2 two = {scaled_activation(values[i], scale),
                          scaled_activation(values[i + 1], scale)};
      words[i / 4] |= uint32_t{__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3)}
                      << i % 4 * 8;
    }
    store(place, make_uint4(words[0], words[1], words[2], words[3]), scale.scale);
  }

  __device__ void store(const Place& place, const uint4& codes, float scale) const {
    if (!place.is_there) return;
    auto* to = reinterpret_cast<uint4*>(values_ + place.row * layout_.row_bytes +
                                        place.k() * S::kValueBytes);
    if constexpr (S::kWide) {
      uint32_t pairs[8];
      widen_codes(codes, pairs);
      to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    } else {
      to[0] = codes;
    }
    if (threadIdx.x % 8 == 0) scales_[place.group * S::kRows + place.row] = scale;
  }

  const Fp8LinearRows& args_;
  const XLayout<S>& layout_;
  unsigned char* values_;
  float* scales_;
};

/// What a lane reads of x: row lane / 4 and, of sixteen, 8 further on; beyond the last row that one
/// once more. Scales of the rows of its sums: 2 (lane % 4) and the next, and 8 further on.
template <typename S>
struct XRows {
  uint32_t values[S::kHalves];
  uint32_t scales;

  __device__ XRows(const Fp8LinearRows& args, const XLayout<S>& layout,
                   const unsigned char* first_values, const float* first_scales) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    scales = shared_address(first_scales + lane % 4 * 2);
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h) {
      const int row = min(8 * h + lane / 4, static_cast<int>(args.rows) - 1);
      values[h] =
          shared_address(first_values) + row * layout.row_bytes + 16 * (lane % 4) * S::kValueBytes;
    }
  }

  // The lane's 16 values from k on, in pairs.
  __device__ void load(int h, int32_t k, uint32_t (&pairs)[8]) const {
    const uint32_t from = values[h] + static_cast<uint32_t>(k * S::kValueBytes);
    if constexpr (S::kWide) {
      const uint4 low = load_shared(from);
      const uint4 high = load_shared(from + 16);
#pragma unroll
      for (int i = 0; i < 8; ++i) pairs[i] = word(i < 4 ? low : high, i % 4);
    } else {
      widen_codes(load_shared(from), pairs);
    }
  }
  __device__ float2 load_scales(int h, int32_t group) const {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                 : "=f"(v.x), "=f"(v.y)
                 : "r"(scales + static_cast<uint32_t>(group * S::kRows + 8 * h) * 4)
                 : "memory");
    return v;
  }
};

}  // namespace cadre::cuda::fp8
