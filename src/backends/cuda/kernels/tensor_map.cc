#include "backends/cuda/kernels/tensor_map.h"

#include <cuda_runtime_api.h>

#include <array>

#include "backends/cuda/device/check.h"
#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

constexpr int64_t kAlignment = 16;
constexpr int64_t kStrideLimit = int64_t{1} << 40;
constexpr int64_t kExtentLimit = int64_t{1} << 31;  // coordinates are int32

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver that is there at run time: libcuda is not linked.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  CADRE_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                    cudaEnableDefault, &result));
#else
  CADRE_CUDA_CHECK(
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result));
#endif
  if (result != cudaDriverEntryPointSuccess || function == nullptr) {
    throw DeviceError(
        "tensor map: the NVIDIA driver has no cuTensorMapEncodeTiled; install a driver of CUDA 12 "
        "or later");
  }
  return reinterpret_cast<Encode>(function);
}

bool fits_stride(const MatrixLayout& m, int64_t elements) {
  const int64_t bytes = elements * static_cast<int64_t>(size_of(m.dtype));
  return bytes > 0 && bytes % kAlignment == 0 && bytes < kStrideLimit;
}

CUtensorMapDataType element_type(DType dtype) {
  if (dtype == DType::kBF16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (dtype == DType::kF16) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

CUtensorMapSwizzle swizzle_of(int bytes) {
  if (bytes == 32) return CU_TENSOR_MAP_SWIZZLE_32B;
  return bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
}

}  // namespace

bool fits_tensor_map(const MatrixLayout& m) {
  return reinterpret_cast<uintptr_t>(m.data) % kAlignment == 0 && fits_stride(m, m.row_stride) &&
         (m.count <= 1 || fits_stride(m, m.matrix_stride)) && m.rows < kExtentLimit &&
         m.columns < kExtentLimit && m.count < kExtentLimit;
}

CUtensorMap make_tensor_map(const MatrixLayout& m, int box_rows, bool always_3d, int box_bytes) {
  static const Encode encode = find_encode();
  const bool three = always_3d || m.count > 1;
  const cuuint64_t element = size_of(m.dtype);
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(m.row_stride) * element;
  const std::array<cuuint64_t, 3> extents = {static_cast<cuuint64_t>(m.columns),
                                             static_cast<cuuint64_t>(m.rows),
                                             static_cast<cuuint64_t>(m.count)};
  const std::array<cuuint64_t, 2> strides = {
      row_bytes, m.count > 1 ? static_cast<cuuint64_t>(m.matrix_stride) * element : row_bytes};
  const std::array<cuuint32_t, 3> box = {static_cast<cuuint32_t>(box_bytes / element),
                                         static_cast<cuuint32_t>(box_rows), 1};
  const std::array<cuuint32_t, 3> steps = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(
      &map, element_type(m.dtype), three ? 3 : 2, const_cast<void*>(m.data), extents.data(),
      strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle_of(box_bytes), CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw DeviceError(str_cat("tensor map: the driver refused ", m.count, " matrices [", m.rows,
                              ", ", m.columns, "] with strides ", m.row_stride, " and ",
                              m.matrix_stride, " (error ", static_cast<int>(result), ")"));
  }
  return map;
}

}  // namespace cadre::cuda
