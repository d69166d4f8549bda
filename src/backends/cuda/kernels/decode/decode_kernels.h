// The two kernels of a decode step: `up` (gate and up products, gate function: h) and `down` (down
// products, weighted sum). Both read the experts in place. The fast pair streams rows of weights
// through shared memory into tensor cores; the plain pair takes any layout.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/kernels/device_weights.h"
#include "backends/cuda/kernels/gate_function.cuh"

namespace cadre::cuda {

/// One block of tokens, passed to kernels by value. Strides in elements.
struct DecodeArgs {
  const void* ids = nullptr;  // [num_tokens, top_k]
  int64_t ids_stride = 0;
  bool ids_are_64 = false;
  const void* routing_weights = nullptr;  // [num_tokens, top_k] f32, or `T` of the kernel
  int64_t routing_weights_stride = 0;
  bool routing_weights_are_f32 = true;
  int num_tokens = 0;
  int top_k = 0;
  int num_experts = 0;
  int hidden = 0;        // H
  int intermediate = 0;  // I
  const void* x = nullptr;
  int64_t x_stride = 0;
  void* out = nullptr;
  int64_t out_stride = 0;
  bool out_is_f32 = false;
  GateFunction gate_function = {};
  DeviceMatrices gate;
  DeviceMatrices up;
  DeviceMatrices down;
  DType bias_dtype = DType::kF32;
  DeviceVectors gate_bias;
  DeviceVectors up_bias;
  DeviceVectors down_bias;
  void* h = nullptr;  // [pairs, h_stride] in the compute dtype; rows 16-byte aligned
  int64_t h_stride = 0;
  float* y = nullptr;  // [pairs, hidden]: down results of each pair
};

/// A multiple of the 16 bytes that the fast kernels load at once.
int64_t decode_h_stride(int64_t intermediate, int64_t element_bytes);

/// Most pairs (token, slot) of one block, and most experts: their lists lie in shared memory.
inline constexpr int64_t kMaxDecodePairs = 1024;
inline constexpr int64_t kMaxDecodeTopK = 4096;
inline constexpr int64_t kMaxDecodeExperts = 8192;

/// Where the kernels run.
struct DecodeDevice {
  int num_sms = 0;
  int shared_bytes = 0;               // that a block may have
  bool has_dependent_launch = false;  // compute capability 9.0 and up
  cudaStream_t stream = nullptr;
};

/// Any layout, alignment and dtype.
void decode_plain(DType dtype, const DecodeArgs& args, const DecodeDevice& device);

/// Rows of weights and of x start at multiples of 16 bytes, are multiples of 16 bytes long and have
/// col_stride 1; gate and up of an expert have one row_stride. False, and nothing launched, when
/// the device has too little shared memory.
bool decode_fast_bf16(const DecodeArgs& args, const DecodeDevice& device);
bool decode_fast_f16(const DecodeArgs& args, const DecodeDevice& device);
bool decode_fast_f32(const DecodeArgs& args, const DecodeDevice& device);

}  // namespace cadre::cuda
