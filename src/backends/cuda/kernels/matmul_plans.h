// Products through cuBLASLt. The library is asked once for each shape how to compute it; the answer
// is kept, so a shape takes the same algorithm every time and a repeated call costs microseconds.
#pragma once

#include <cstddef>

#include "backends/cuda/device/cublas_lt.h"
#include "backends/cuda/kernels/matmul.h"

namespace cadre::cuda {

/// The scratch that plans are made for.
constexpr size_t kCublasLtScratch = size_t{32} << 20;

/// Makes the library's handle for the device if it is not there yet.
void prepare_cublas_lt(const CublasLt& lib, int device);

/// out = x W^T (+ bias where `epilogue_bias`) (+ out). False when the library does not take this
/// shape, layout or alignment; nothing has been done then. `scratch` holds kCublasLtScratch bytes.
bool cublas_lt_matmul(const CublasLt& lib, const Matmul& args, bool epilogue_bias, void* scratch,
                      const Stream& stream);

/// Whether cublas_lt_matmul() without a bias will compute it.
bool cublas_lt_takes(const CublasLt& lib, const Matmul& args, const Stream& stream);

}  // namespace cadre::cuda
