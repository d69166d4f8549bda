#include "convert.h"

#include <cstring>

#include "cadre/error.h"
#include "cadre/float16.h"
#include "core/str_cat.h"

namespace cadre::cli {

namespace {

template <typename Stored, typename T>
void append_rows(const TensorView& tensor, std::vector<T>& out) {
  if (tensor.rank() > 1) {
    for (int64_t i = 0; i < tensor.dim(0); ++i) append_rows<Stored>(tensor[i], out);
    return;
  }
  const auto* bytes = static_cast<const std::byte*>(tensor.data());
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    Stored stored;
    std::memcpy(&stored, bytes + static_cast<size_t>(i) * sizeof stored, sizeof stored);
    out.push_back(static_cast<T>(stored));
  }
}

template <typename T>
void store(const std::vector<float>& values, const Tensor& out) {
  auto* data = out->as<T>();
  for (size_t i = 0; i < values.size(); ++i) data[i] = T(values[i]);
}

}  // namespace

void append_floats(const TensorView& tensor, std::vector<float>& out) {
  switch (tensor.dtype()) {
    case DType::kF32:
      return append_rows<float>(tensor, out);
    case DType::kBF16:
      return append_rows<BFloat16>(tensor, out);
    case DType::kF16:
      return append_rows<Float16>(tensor, out);
    default:
      throw InvalidArgument(
          str_cat("expected float32, bfloat16 or float16, got ", describe("tensor", tensor)));
  }
}

void append_integers(const TensorView& tensor, std::vector<int64_t>& out) {
  switch (tensor.dtype()) {
    case DType::kI64:
      return append_rows<int64_t>(tensor, out);
    case DType::kI32:
      return append_rows<int32_t>(tensor, out);
    default:
      throw InvalidArgument(str_cat("expected int64 or int32, got ", describe("tensor", tensor)));
  }
}

Tensor to_dtype(const TensorView& tensor, DType dtype) {
  std::vector<float> values;
  append_floats(tensor, values);
  const Tensor out(dtype, tensor.shape());
  switch (dtype) {
    case DType::kF32:
      store<float>(values, out);
      return out;
    case DType::kBF16:
      store<BFloat16>(values, out);
      return out;
    case DType::kF16:
      store<Float16>(values, out);
      return out;
    default:
      throw InvalidArgument(str_cat("expected float32, bfloat16 or float16, got ", dtype));
  }
}

}  // namespace cadre::cli
