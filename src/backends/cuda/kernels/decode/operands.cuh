// What a warp makes of one stage: rows of weights and of tokens in shared memory to sums.
//
// Operands say what the bytes are. Plain ones go to tensor cores as they are. e4m3 codes become
// float16, which is exact, and the codes' sum over each 128 of k is multiplied by the scales of
// token and row in float32.
#pragma once

#include "backends/cuda/kernels/decode/decode_kernels.h"
#include "backends/cuda/kernels/decode/shapes.h"
#include "backends/cuda/kernels/decode/tiles.cuh"
#include "backends/cuda/kernels/small_floats.cuh"

namespace cadre::cuda {

/// Weights, tokens and h of one type.
template <typename T>
struct PlainOperands {
  static constexpr Kind kKind = Kind::kPlain;
  using Weight = T;  // what strides count
  using Number = T;  // of the products
  using H = T;
  using Output = T;  // of the call, and of routing weights
};
struct Fp8Operands {
  static constexpr Kind kKind = Kind::kFp8;
  using Weight = uint8_t;
  using Number = __half;
  using H = float;
  using Output = void;  // DecodeArgs::compute_dtype
};

#ifdef __CUDACC__

/// The 64-byte halves of every 128 are swapped in odd rows, so that reading two rows at once meets
/// every bank once.
__device__ inline int place_in_row(int piece, int row) { return (piece ^ ((row & 1) << 2)) * 16; }

/// A stage as one lane sees it.
struct StageView {
  const char* weights;        // [2 * kHalf][kChunk]
  const char* tokens;         // [kTokens][kTokenChunk]
  const char* scales;         // of rows
  const float* token_scales;  // [kGroups][kTokens], or [kGroups] of one token
  int lane;
  int count;  // of tokens
};

template <typename Shape>
__device__ const uint4& weight_piece(const StageView& view, int half, int row) {
  return *reinterpret_cast<const uint4*>(view.weights + row * Shape::kChunk +
                                         place_in_row(4 * half + view.lane % 4, row));
}

template <typename Shape>
__device__ const uint4& token_piece(const StageView& view, int half, int n) {
  const int row = Shape::kTokens == 1 ? 0 : 8 * n + view.lane / 4;
  return *reinterpret_cast<const uint4*>(view.tokens + row * Shape::kChunk +
                                         place_in_row(4 * half + view.lane % 4, row));
}

/// Of one output each: [kM][kN], as mma lays them out.
template <typename Shape>
using TileSums = float[Shape::kM][Shape::kN][4];

/// The weights of a stage in registers.
template <typename Shape>
struct RawWeights {
  static constexpr int kHalves = Shape::kChunk / 64;  // what one lane's 16 bytes are a quarter of
  uint4 low[kHalves][Shape::kM];
  uint4 high[kHalves][Shape::kM];

  __device__ void load(const StageView& view) {
    const int row = view.lane / 4;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < Shape::kM; ++i) {
        low[h][i] = weight_piece<Shape>(view, h, 8 * i + row);
        high[h][i] = weight_piece<Shape>(view, h, Shape::kHalf + 8 * i + row);
      }
    }
  }
};

__device__ inline uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/// load() takes all that multiply() needs of the stage into registers, but for the tokens where
/// Shape::kReadsTokensLate.
template <typename Operands, typename Shape, Kind kKind = Shape::kKind>
struct Stage;

template <typename Operands, typename Shape>
struct Stage<Operands, Shape, Kind::kPlain> {
  using T = typename Operands::Number;
  static constexpr int kHalves = RawWeights<Shape>::kHalves;
  RawWeights<Shape> raw;
  uint4 x[kHalves][Shape::kN];

  __device__ void load(const DecodeArgs& /*args*/, const StageView& view) {
    raw.load(view);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int n = 0; n < Shape::kN; ++n) {
        if (n != 0 && 8 * n >= view.count) continue;
        x[h][n] = token_piece<Shape>(view, h, n);
      }
    }
  }

  __device__ void multiply(const StageView& view, TileSums<Shape> (&sums)[Shape::kSets]) const {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      typename Product<T>::Fragment low[Shape::kM];
      typename Product<T>::Fragment high[Shape::kM];
#pragma unroll
      for (int i = 0; i < Shape::kM; ++i) {
        low[i] = Product<T>::prepare(raw.low[h][i]);
        high[i] = Product<T>::prepare(raw.high[h][i]);
      }
#pragma unroll
      for (int step = 0; step < Product<T>::kSteps; ++step) {
        TileSums<Shape>& to = sums[(2 * h + step) % Shape::kSets];
#pragma unroll
        for (int n = 0; n < Shape::kN; ++n) {
          if (n != 0 && 8 * n >= view.count) continue;
          const auto fragment = Product<T>::prepare(x[h][n]);
#pragma unroll
          for (int i = 0; i < Shape::kM; ++i) {
            Product<T>::add(to[i][n], step, low[i], high[i], fragment);
          }
        }
      }
    }
  }
};

__device__ inline float e8m0_at(uint32_t word, uint32_t shift) {
  return e8m0_value(static_cast<uint8_t>(word >> shift));
}

/// Four e4m3 codes as two registers of float16. Moving bits instead (two shifts and two LOP3 for
/// two codes) was slower: the kernels are short of the units that do that.
struct Pairs {
  uint32_t first;
  uint32_t second;
};
__device__ inline Pairs half_pairs(uint32_t codes) {
  Pairs pairs;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  // Written out because the intrinsic shifts the upper codes down first.
  asm("{.reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;}"
      : "=r"(pairs.first), "=r"(pairs.second)
      : "r"(codes));
#else
  const __half2 first = e4m3_pair(codes & 0xffff);
  const __half2 second = e4m3_pair(codes >> 16);
  pairs = {*reinterpret_cast<const uint32_t*>(&first), *reinterpret_cast<const uint32_t*>(&second)};
#endif
  return pairs;
}

template <typename Operands, typename Shape>
struct Stage<Operands, Shape, Kind::kFp8> {
  static constexpr int kHalves = RawWeights<Shape>::kHalves;
  static constexpr bool kIsLate = Shape::kReadsTokensLate;
  RawWeights<Shape> raw;
  uint4 x[kIsLate ? 1 : kHalves][Shape::kN];
  float row_scale[Shape::kGroups][2 * Shape::kM];  // lower and upper half of each i
  float2 token_scale[kIsLate ? 1 : Shape::kGroups][Shape::kN];

  __device__ void load_tokens(const StageView& view, int half, uint4 (&to)[Shape::kN]) const {
#pragma unroll
    for (int n = 0; n < Shape::kN; ++n) {
      if (n == 0 || 8 * n < view.count) to[n] = token_piece<Shape>(view, half, n);
    }
  }

  __device__ void load_token_scales(const StageView& view, int g, float2 (&to)[Shape::kN]) const {
#pragma unroll
    for (int n = 0; n < Shape::kN; ++n) {
      if (n != 0 && 8 * n >= view.count) continue;
      if constexpr (Shape::kIsResident) {
        to[n] = {view.token_scales[g], 0};
      } else {
        to[n] = *reinterpret_cast<const float2*>(view.token_scales + g * Shape::kTokens + 8 * n +
                                                 view.lane % 4 * 2);
      }
    }
  }

  __device__ void load(const DecodeArgs& args, const StageView& view) {
    raw.load(view);
    if constexpr (!kIsLate) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) load_tokens(view, h, x[h]);
#pragma unroll
      for (int g = 0; g < Shape::kGroups; ++g) load_token_scales(view, g, token_scale[g]);
    }
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 2 * Shape::kM; ++i) {
        const int row = (i % 2 == 0 ? 0 : Shape::kHalf) + i / 2 * 8 + view.lane / 4;
        const char* const at = view.scales + (g * Shape::kRows + row) * 8;
        const uint32_t word = *reinterpret_cast<const uint32_t*>(at);
        row_scale[g][i] = args.format.is_e8m0
                              ? e8m0_at(word, *reinterpret_cast<const uint32_t*>(at + 4))
                              : __uint_as_float(word);
      }
    }
  }

  __device__ void multiply(const StageView& view, TileSums<Shape> (&sums)[Shape::kSets]) {
    constexpr int kParts = Shape::kM * Shape::kN >= 2 ? 1 : 2;
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      float part[kParts][Shape::kM][Shape::kN][4] = {};
      if constexpr (kIsLate) load_token_scales(view, g, token_scale[0]);
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        const int h = 2 * g + step / 4;
        if constexpr (kIsLate) {
          if (step % 4 == 0) load_tokens(view, h, x[0]);
        }
        Pairs low[Shape::kM];
        Pairs high[Shape::kM];
#pragma unroll
        for (int i = 0; i < Shape::kM; ++i) {
          low[i] = half_pairs(word_of(raw.low[h][i], step % 4));
          high[i] = half_pairs(word_of(raw.high[h][i], step % 4));
        }
#pragma unroll
        for (int n = 0; n < Shape::kN; ++n) {
          if (n != 0 && 8 * n >= view.count) continue;
          const Pairs token = half_pairs(word_of(x[kIsLate ? 0 : h][n], step % 4));
#pragma unroll
          for (int i = 0; i < Shape::kM; ++i) {
            mma_16816(part[step % kParts][i][n], low[i].first, high[i].first, low[i].second,
                      high[i].second, token.first, token.second, __half{});
          }
        }
      }
#pragma unroll
      for (int n = 0; n < Shape::kN; ++n) {
        if (n != 0 && 8 * n >= view.count) continue;
        const float2 token = token_scale[kIsLate ? 0 : g][n];
#pragma unroll
        for (int i = 0; i < Shape::kM; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float sum = part[0][i][n][c];
            if constexpr (kParts == 2) sum += part[1][i][n][c];
            const float scale = (c % 2 == 0 ? token.x : token.y) * row_scale[g][2 * i + c / 2];
            sums[0][i][n][c] += scale * sum;
          }
        }
      }
    }
  }
};

#endif

}  // namespace cadre::cuda
