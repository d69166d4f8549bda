#include "experts/relative_error.h"

#include <cmath>
#include <limits>

#include "cadre/error.h"
#include "cadre/float16.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

template <typename T>
double error_of(const T* out, std::span<const double> truth) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    const double delta = static_cast<double>(static_cast<float>(out[i])) - truth[i];
    difference += delta * delta;
    norm += truth[i] * truth[i];
  }
  // A NaN stays one on both ways.
  if (norm == 0) return difference == 0 ? 0 : difference * std::numeric_limits<double>::infinity();
  return std::sqrt(difference) / std::sqrt(norm);
}

}  // namespace

double relative_error(const TensorView& out, std::span<const double> truth) {
  CADRE_ASSERT(out.is_contiguous() && out.numel() == static_cast<int64_t>(truth.size()));
  switch (out.dtype()) {
    case DType::kF32:
      return error_of(out.as<float>(), truth);
    case DType::kBF16:
      return error_of(out.as<BFloat16>(), truth);
    case DType::kF16:
      return error_of(out.as<Float16>(), truth);
    default:
      throw InvalidArgument(str_cat("relative_error: expected float32, bfloat16 or float16, got ",
                                    describe("out", out)));
  }
}

}  // namespace cadre
