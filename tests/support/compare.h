// How far a computed result lies from the truth: one relative error over a whole tensor, so that
// small outputs cannot hide behind an absolute tolerance.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/dtype.h"
#include "cadre/float16.h"
#include "cadre/tensor.h"

namespace cadre::test {

/// |out - ref| / |ref| (Euclidean norms, in double). Infinite when ref is all zero and out is not;
/// NaN when either holds a NaN, so `EXPECT_LE(error, bound)` fails. Throws when the sizes differ.
template <typename A, typename B>
double relative_error(std::span<const A> out, std::span<const B> ref) {
  if (out.size() != ref.size()) {
    throw std::invalid_argument("relative_error: " + std::to_string(out.size()) +
                                " values against " + std::to_string(ref.size()));
  }
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const double expected = static_cast<double>(ref[i]);
    const double delta = static_cast<double>(out[i]) - expected;
    difference += delta * delta;
    norm += expected * expected;
  }
  if (norm == 0) {
    return difference == 0 ? 0
                           : difference * std::numeric_limits<double>::infinity();  // NaN stays NaN
  }
  return std::sqrt(difference) / std::sqrt(norm);
}

inline double relative_error(const std::vector<float>& out, const std::vector<double>& ref) {
  return relative_error(std::span<const float>(out), std::span<const double>(ref));
}
inline double relative_error(const std::vector<float>& out, const std::vector<float>& ref) {
  return relative_error(std::span<const float>(out), std::span<const float>(ref));
}
inline double relative_error(const std::vector<double>& out, const std::vector<double>& ref) {
  return relative_error(std::span<const double>(out), std::span<const double>(ref));
}

/// One element of a CPU tensor at `address`, which need not be aligned.
double element_to_double(const void* address, DType dtype);

/// All elements of a CPU tensor in row-major order, whatever its strides and alignment: F64, F32,
/// F16, BF16 and all integer types. Throws on other dtypes.
std::vector<double> to_doubles(const TensorView& tensor);

/// relative_error of two tensors of the same shape.
inline double relative_error(const TensorView& out, const TensorView& ref) {
  return relative_error(to_doubles(out), to_doubles(ref));
}

}  // namespace cadre::test
