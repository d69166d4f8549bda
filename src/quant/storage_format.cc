#include "cadre/storage_format.h"

#include <array>

#include "core/check.h"

namespace cadre {

std::string_view name_of(StorageFormat format) {
  static constexpr std::array<std::string_view, kNumStorageFormats> kNames = {
      "float32", "float16", "bfloat16", "fp8", "fp8-tensor", "mxfp8", "fp4"};
  const auto i = static_cast<size_t>(format);
  CADRE_ASSERT(i < kNames.size());
  return kNames[i];
}

std::string_view name_of(ActivationScheme scheme) {
  if (scheme == ActivationScheme::kNone) return "none";
  return scheme == ActivationScheme::kDynamic ? "dynamic" : "static";
}

std::optional<StorageFormat> plain_format(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return StorageFormat::kF32;
    case DType::kF16:
      return StorageFormat::kF16;
    case DType::kBF16:
      return StorageFormat::kBF16;
    default:
      return std::nullopt;
  }
}

std::optional<DType> plain_dtype(StorageFormat format) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (plain_format(dtype) == format) return dtype;
  }
  return std::nullopt;
}

bool is_quantized(StorageFormat format) { return format > StorageFormat::kBF16; }

int64_t row_bytes(StorageFormat format, int64_t k) {
  if (format == StorageFormat::kFp4) return (k + 1) / 2;
  const std::optional<DType> plain = plain_dtype(format);
  return plain ? k * static_cast<int64_t>(size_of(*plain)) : k;
}

}  // namespace cadre
