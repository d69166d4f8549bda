#include "support/compare.h"

#include <cstring>

#include "core/str_cat.h"

namespace cadre::test {
namespace {

template <typename T>
T load(const void* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

void append(const TensorView& tensor, std::vector<double>& values) {
  if (tensor.rank() == 0) {
    values.push_back(element_to_double(tensor.data(), tensor.dtype()));
    return;
  }
  for (int64_t i = 0; i < tensor.dim(0); ++i) append(tensor[i], values);
}

}  // namespace

double element_to_double(const void* address, DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return load<double>(address);
    case DType::kF32:
      return static_cast<double>(load<float>(address));
    case DType::kF16:
      return static_cast<double>(static_cast<float>(load<Float16>(address)));
    case DType::kBF16:
      return static_cast<double>(static_cast<float>(load<BFloat16>(address)));
    case DType::kI64:
      return static_cast<double>(load<int64_t>(address));
    case DType::kI32:
      return load<int32_t>(address);
    case DType::kI16:
      return load<int16_t>(address);
    case DType::kI8:
      return load<int8_t>(address);
    case DType::kU64:
      return static_cast<double>(load<uint64_t>(address));
    case DType::kU32:
      return load<uint32_t>(address);
    case DType::kU16:
      return load<uint16_t>(address);
    case DType::kU8:
    case DType::kBool:
      return load<uint8_t>(address);
    default:
      throw std::invalid_argument(str_cat("element_to_double: no conversion from ", dtype));
  }
}

std::vector<double> to_doubles(const TensorView& tensor) {
  std::vector<double> values;
  if (!tensor) return values;
  values.reserve(static_cast<size_t>(tensor.numel()));
  append(tensor, values);
  return values;
}

}  // namespace cadre::test
