#include "cadre/dtype.h"

#include <array>

#include "core/check.h"

namespace cadre {
namespace {

struct DTypeInfo {
  std::string_view name;
  std::string_view safetensors;
  size_t bytes;
};

// In the order of the enum.
constexpr std::array<DTypeInfo, kNumDTypes> kInfo = {{
    {"float64", "F64", 8},
    {"float32", "F32", 4},
    {"float16", "F16", 2},
    {"bfloat16", "BF16", 2},
    {"float8_e4m3", "F8_E4M3", 1},
    {"float8_e5m2", "F8_E5M2", 1},
    {"float8_e8m0", "F8_E8M0", 1},
    {"int64", "I64", 8},
    {"int32", "I32", 4},
    {"int16", "I16", 2},
    {"int8", "I8", 1},
    {"uint64", "U64", 8},
    {"uint32", "U32", 4},
    {"uint16", "U16", 2},
    {"uint8", "U8", 1},
    {"bool", "BOOL", 1},
}};

const DTypeInfo& info(DType dtype) {
  const auto i = static_cast<size_t>(dtype);
  CADRE_ASSERT(i < kInfo.size());
  return kInfo[i];
}

std::optional<DType> find(std::string_view name, std::string_view DTypeInfo::*field) {
  for (size_t i = 0; i < kInfo.size(); ++i) {
    if (kInfo[i].*field == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

}  // namespace

size_t size_of(DType dtype) { return info(dtype).bytes; }
std::string_view name_of(DType dtype) { return info(dtype).name; }
std::string_view safetensors_name(DType dtype) { return info(dtype).safetensors; }

std::optional<DType> parse_dtype(std::string_view name) {
  constexpr std::string_view kTorch = "torch.";
  if (name.starts_with(kTorch)) name.remove_prefix(kTorch.size());
  if (name == "half") return DType::kF16;
  if (name == "float") return DType::kF32;
  if (name == "double") return DType::kF64;
  if (name == "float8_e4m3fn") return DType::kF8E4M3;
  if (name == "float8_e8m0fnu") return DType::kF8E8M0;
  return find(name, &DTypeInfo::name);
}

std::optional<DType> parse_safetensors_dtype(std::string_view name) {
  return find(name, &DTypeInfo::safetensors);
}

bool is_compute_dtype(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

}  // namespace cadre
