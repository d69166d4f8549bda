// Experts' weights as kernels take them: by base and stride where the experts of a layer lie evenly
// (loaded models and fused tensors), else through a table in device memory.
#pragma once

#include <cstdint>
#include <memory>

#include "cadre/experts.h"

namespace cadre::cuda {

/// One expert's matrix; strides in elements (of FP4, in bytes). Scales as in ExpertMatrix.
struct DeviceMatrix {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
  const void* scales = nullptr;
  int64_t scale_row_stride = 0;
  int64_t scale_col_stride = 1;
  int64_t scale_row_offset = 0;
  float input_scale = 0;
};

DeviceMatrix device_matrix(const ExpertMatrix& matrix);

/// A projection of all experts of a layer, passed to kernels by value.
struct DeviceMatrices {
  DeviceMatrix first;              // expert 0
  int64_t expert_stride = 0;       // elements from one expert's data to the next's; may be negative
  int64_t scale_expert_bytes = 0;  // bytes from one expert's scales to the next's
  const DeviceMatrix* table = nullptr;  // [E] in device memory; set when experts lie unevenly

#ifdef __CUDACC__
  /// T: the type of an element, uint8_t for quantised formats.
  template <typename T>
  __device__ DeviceMatrix expert(int64_t e) const {
    if (table != nullptr) return table[e];
    DeviceMatrix result = first;
    result.data = static_cast<const T*>(first.data) + e * expert_stride;
    result.scales = static_cast<const char*>(first.scales) + e * scale_expert_bytes;
    return result;
  }
#endif
};

struct DeviceVector {
  const void* data = nullptr;  // null: no bias
  int64_t stride = 1;
};

struct DeviceVectors {
  DeviceVector first;
  int64_t expert_stride = 0;
  const DeviceVector* table = nullptr;

#ifdef __CUDACC__
  template <typename T>
  __device__ DeviceVector expert(int64_t e) const {
    if (table != nullptr) return table[e];
    DeviceVector result = first;
    if (result.data != nullptr) result.data = static_cast<const T*>(first.data) + e * expert_stride;
    return result;
  }
#endif
};

struct DeviceWeights {
  DeviceMatrices gate;  // first.data null without a gate
  DeviceMatrices up;
  DeviceMatrices down;
  DType bias_dtype = DType::kF32;
  DeviceVectors gate_bias;
  DeviceVectors up_bias;
  DeviceVectors down_bias;
  std::shared_ptr<void> tables;  // device memory of the tables; null when there are none
};

/// What CUDA backends prepare: addresses, and tables of addresses where experts lie unevenly (a few
/// KiB that added_bytes does not count: no weight is copied).
struct CudaPrepared : PreparedExperts {
  CudaPrepared(const ExpertsQuery& query, std::shared_ptr<const ExpertsWeights> weights);

  DeviceWeights device;
};

/// What a backend takes of activations beside quantised weights, other than the compute dtype for
/// all formats and dynamic scales for FP8.
struct QuantizedActivations {
  bool with_static_scales = false;
  bool dynamic_with_mx = false;  // MXFP8 and FP4 weights
};

/// The reasons that all CUDA backends share: no usable GPU of that number, plain weights stored in
/// another dtype than the compute dtype (the loader converts on its way to the GPU), scales or
/// activations that are not served, expert parallelism.
Support supports_on_gpu(const ExpertsQuery& query, QuantizedActivations takes = {});

}  // namespace cadre::cuda
