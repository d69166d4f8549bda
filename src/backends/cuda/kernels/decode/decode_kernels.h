// The two kernels of a decode step: `up` (gate and up products, gate function: h) and `down` (down
// products, weighted sum). Both read the experts in place. The fast pair streams rows of weights
// through shared memory into tensor cores; the plain pair takes any layout.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/kernels/device_weights.h"
#include "backends/cuda/kernels/gate_function.cuh"
#include "backends/cuda/kernels/quantize_rows.h"

namespace cadre::cuda {

/// How quantised weights are stored. The fast kernels find the scale of a row by row_shift and of a
/// group of 128 of k by col_shift.
struct DecodeFormat {
  StorageFormat format = StorageFormat::kBF16;
  bool is_e8m0 = false;  // scales; else float32
  int64_t block_rows = 0;
  int64_t block_cols = 0;
  int row_shift = 31;
  int col_shift = 31;

#ifdef __CUDACC__
  __device__ int scale_bytes() const { return is_e8m0 ? 1 : 4; }
#endif
};

/// Rows as half_rows.cuh makes them, for the rings: up to whole chunks, zeros at the end.
struct HalfRows {
  void* data = nullptr;
  int64_t stride = 0;  // bytes
  float* factors = nullptr;
};

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
  void* h = nullptr;  // [pairs, h_stride] in the compute dtype; rows 16-byte aligned; float32 where
  int64_t h_stride = 0;  // activations become codes
  float* y = nullptr;    // [pairs, hidden]: down results of each pair
  DType compute_dtype = DType::kBF16;
  DecodeFormat format;
  ActivationCodes x_codes;  // of x and of h, where activations become codes
  ActivationCodes h_codes;
  HalfRows x_halves;  // of x and of h, where activations become float16
  HalfRows h_halves;
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
  const Stream* stream = nullptr;
};

/// Any layout, alignment and dtype of plain weights.
void decode_plain(const DecodeArgs& args, const DecodeDevice& device);
/// The same of quantised ones; activations become codes where args.x_codes is set.
void decode_plain_quantized(const DecodeArgs& args, const DecodeDevice& device);

/// Rows of weights and of x start at multiples of 16 bytes, are multiples of 16 bytes long and have
/// col_stride 1; gate and up of an expert have one row_stride. False, and nothing launched, when
/// the device has too little shared memory.
bool decode_fast_bf16(const DecodeArgs& args, const DecodeDevice& device);
bool decode_fast_f16(const DecodeArgs& args, const DecodeDevice& device);
bool decode_fast_f32(const DecodeArgs& args, const DecodeDevice& device);
/// Activations become codes; x may lie anywhere. Blocks of scales have rows by a power of two and
/// k by 128 times a power of two, or all of them.
bool decode_fast_fp8(const DecodeArgs& args, const DecodeDevice& device);

/// Weights of the format with bf16 or f16 activations, H and I multiples of 32; scales may lie
/// anywhere, next to each other along k.
bool decode_fast_fp4(const DecodeArgs& args, const DecodeDevice& device);
bool decode_fast_mxfp8(const DecodeArgs& args, const DecodeDevice& device);

/// Fills args.x_codes from x, and args.h_codes from the float32 h.
void make_x_codes(const DecodeArgs& args, const DecodeDevice& device);
void make_h_codes(const DecodeArgs& args, const DecodeDevice& device);
/// The same of args.x_halves and args.h_halves, from numbers of the compute dtype.
void make_x_halves(const DecodeArgs& args, const DecodeDevice& device);
void make_h_halves(const DecodeArgs& args, const DecodeDevice& device);

}  // namespace cadre::cuda
