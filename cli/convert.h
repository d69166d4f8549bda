// Element types of tensors in files, turned into those that a command computes with. Source views
// may be unaligned; their last dimension has stride 1.
#pragma once

#include <cstdint>
#include <vector>

#include "cadre/tensor.h"

namespace cadre::cli {

/// Appends all elements of a float32, bfloat16 or float16 tensor, row by row. Throws
/// InvalidArgument on another dtype.
void append_floats(const TensorView& tensor, std::vector<float>& out);

/// Appends all elements of an int64 or int32 tensor, row by row. Throws InvalidArgument on another
/// dtype.
void append_integers(const TensorView& tensor, std::vector<int64_t>& out);

/// A contiguous copy of a floating-point tensor in float32, bfloat16 or float16.
Tensor to_dtype(const TensorView& tensor, DType dtype);

}  // namespace cadre::cli
