// The writing side of the kernel for few tokens: gate function and quantisation of h, or rows of y.
//
// A thread's sums: [4 j + 2 h + i] is row (lane / 4 + 8 h) of its warp's 16 rows of weights, token
// (8 j + 2 (lane % 4) + i).
#pragma once

#include "backends/cuda/kernels/activation_scale.cuh"
#include "backends/cuda/kernels/hopper_fp8_few_tile.cuh"
#include "backends/cuda/kernels/hopper_write.cuh"

namespace cadre::cuda::hopper {

/// All consumers.
__device__ inline void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(128 * kFewConsumers) : "memory");
}

__device__ inline int32_t few_token(int value) {
  return value / 4 * 8 + static_cast<int32_t>(threadIdx.x % 4) * 2 + value % 2;
}
/// Of the piece's 128.
__device__ inline int32_t few_row(int value) {
  return static_cast<int32_t>(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) + value / 2 % 2 * 8;
}

__device__ inline float bias_of_row(const FewParams& p, const DeviceVectors& biases, int32_t expert,
                                    int32_t row) {
  if (biases.first.data == nullptr) return 0.0f;
  if (p.few.args.bias_dtype == DType::kF32) {
    const DeviceVector b = biases.expert<float>(expert);
    return static_cast<const float*>(b.data)[row * b.stride];
  }
  const DeviceVector b = biases.expert<uint16_t>(expert);
  if (p.few.args.bias_dtype == DType::kBF16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(b.data)[row * b.stride]);
  }
  return __half2float(static_cast<const __half*>(b.data)[row * b.stride]);
}

// Biases and every gate function, in rolled loops over sums in shared memory, where each thread has
// 8 words of its own.
template <int kN>
__device__ void apply_special_few(const FewParams& p, const FewPiece& piece, char* staging,
                                  float (&sums)[2][kN / 2]) {
  const DecodeArgs& a = p.few.args;
  constexpr int kStep = 128 * kFewConsumers;
  float* own = reinterpret_cast<float*>(staging) + threadIdx.x;
  sync_consumers();  // the codes of the piece before have been read
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      own[i * kStep] = sums[0][4 * j + i];
      own[(4 + i) * kStep] = sums[1][4 * j + i];
    }
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const int32_t row = piece.row + few_row(i);
      float value = 0;
      if (row < a.intermediate) {
        const float up_bias = bias_of_row(p, a.up_bias, piece.expert, row);
        if (a.gate_function.has_gate) {
          value = apply(a.gate_function,
                        own[i * kStep] + bias_of_row(p, a.gate_bias, piece.expert, row),
                        own[(4 + i) * kStep] + up_bias);
        } else {
          value = apply(a.gate_function, 0.0f, own[i * kStep] + up_bias);
        }
      }
      own[i * kStep] = value;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[0][4 * j + i] = own[i * kStep];
  }
}

/// The scales of a thread's tokens, from the largest of the 128 rows of h.
template <int kN>
__device__ void find_scales(FewShared& shared, const float (&h)[kN / 2],
                            ActivationScale (&scales)[kN / 4]) {
  const auto lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < kN / 4; ++c) {
    const int value = c / 2 * 4 + c % 2;
    uint32_t largest = max(magnitude_bits(h[value]), magnitude_bits(h[value + 2]));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    }
    if (lane < 4) shared.largest[threadIdx.x / 32][few_token(value)] = largest;
  }
  sync_consumers();
#pragma unroll
  for (int c = 0; c < kN / 4; ++c) {
    uint32_t largest = 0;
#pragma unroll
    for (int w = 0; w < kFewConsumerWarps; ++w) {
      largest = max(largest, shared.largest[w][few_token(c / 2 * 4 + c % 2)]);
    }
    scales[c] = activation_scale_of_bits(largest);
  }
}

template <int kN>
__device__ void write_h(const FewParams& p, const Plan& plan, const FewPiece& piece,
                        FewShared& shared, char* staging, float (&sums)[2][kN / 2]) {
  if (p.special) {
    apply_special_few<kN>(p, piece, staging, sums);
  } else {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) sums[0][i] = swiglu(sums[0][i], sums[1][i]);
  }
  ActivationScale scales[kN / 4];
  find_scales<kN>(shared, sums[0], scales);
  const ActivationCodes& to = p.few.args.h_codes;
  const uint16_t* const pairs = plan.pair + piece.first;
#pragma unroll
  for (int c = 0; c < kN / 4; ++c) {
    const int value = c / 2 * 4 + c % 2;
    const int32_t token = few_token(value);
    const uint16_t codes = ptx::pack_e4m3(scaled_activation(sums[0][value], scales[c]),
                                          scaled_activation(sums[0][value + 2], scales[c]));
    char* const place = staging + token * kFewStagingPitch + few_row(value);
    place[0] = static_cast<char>(codes);
    place[8] = static_cast<char>(codes >> 8);
    if (threadIdx.x < 4 && token < piece.count) {
      to.scales[pairs[token] * to.groups + piece.row / kFewRows] = scales[c].scale;
    }
  }
  sync_consumers();
  const auto token = static_cast<int32_t>(threadIdx.x / 8),
             chunk = static_cast<int32_t>(threadIdx.x % 8);
  static_assert(128 * kFewConsumers / 8 == kMaxFewTokens);
  if (token < piece.count) {
    *reinterpret_cast<int4*>(to.codes + pairs[token] * to.stride + piece.row + chunk * 16) =
        *reinterpret_cast<const int4*>(staging + token * kFewStagingPitch + chunk * 16);
  }
}

template <int kN>
__device__ void write_y(const FewParams& p, const Plan& plan, const FewPiece& piece,
                        const float (&sums)[2][kN / 2]) {
  const DecodeArgs& a = p.few.args;
  const uint16_t* const pairs = plan.pair + piece.first;
  float bias[2] = {};
  if (piece.part == 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t row = piece.row + few_row(2 * h);
      if (row < a.hidden) bias[h] = bias_of_row(p, a.down_bias, piece.expert, row);
    }
  }
#pragma unroll
  for (int v = 0; v < kN / 2; ++v) {
    const int32_t token = few_token(v), row = piece.row + few_row(v);
    if (token < piece.count && row < a.hidden) {
      const int64_t part = int64_t{pairs[token]} * p.few.parts + piece.part;
      a.y[part * a.hidden + row] = sums[0][v] + sums[1][v] + bias[v / 2 % 2];
    }
  }
}

}  // namespace cadre::cuda::hopper
