// Dense products on a GPU: cuBLASLt where it is found at run time and the layout suits it, else our
// own portable GEMM.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "backends/cuda/device/cublas_lt.h"
#include "backends/cuda/kernels/device_weights.h"
#include "cadre/stream.h"
#include "cadre/workspace.h"

namespace cadre::cuda {

/// out = x W^T + bias (+ out). x [m, k] and W [n, k] in `dtype`; products accumulate in float32
/// (float32 inputs: within the float32 bound, never plain tf32).
struct Matmul {
  DType dtype = DType::kBF16;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const void* x = nullptr;
  int64_t x_stride = 0;  // elements between rows
  DeviceMatrix w;
  const void* bias = nullptr;     // [n] in dtype; null = none
  void* out = nullptr;            // [m, n]
  DType out_dtype = DType::kF32;  // f32 or dtype
  int64_t out_stride = 0;
  bool accumulate = false;  // add to out; f32 out only
};

/// Scratch that matmul() may take for any shape.
size_t matmul_workspace_bytes();

/// The same call gives the same bits, also when replayed from a graph. The first call of a shape
/// costs the host a tenth of a millisecond, later ones some microseconds.
void matmul(const Matmul& args, Workspace& workspace, const Stream& stream);

/// Makes what matmul() needs on a device once (some milliseconds), so that no forward has to.
void prepare_matmul(Device device);

/// What products run on: "cuBLASLt 13.1.0", or "own GEMM" (why_no_cublas_lt() says why). Throws
/// InvalidArgument when the environment variable CADRE_CUBLASLT names a file that cannot be used.
std::string matmul_library();

}  // namespace cadre::cuda
