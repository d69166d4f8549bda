// Element types of tensors, with the names that files and users give them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace cadre {

enum class DType : uint8_t {
  kF64,
  kF32,
  kF16,
  kBF16,  // floating point
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,  // 8-bit floats; E8M0 is a bare power-of-two exponent (scales)
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool,
};

inline constexpr int kNumDTypes = 16;

/// Bytes of one element.
size_t size_of(DType dtype);

/// The user's name: "float32", "bfloat16", "float8_e4m3", "int64", ...
std::string_view name_of(DType dtype);

/// The name in a safetensors header: "F32", "BF16", "F8_E4M3", "I64", ...
std::string_view safetensors_name(DType dtype);

/// The inverse of name_of; also takes PyTorch's forms ("torch.float32", "half",
/// "float8_e4m3fn"). Empty when unknown.
std::optional<DType> parse_dtype(std::string_view name);

/// The inverse of safetensors_name. Empty when unknown.
std::optional<DType> parse_safetensors_dtype(std::string_view name);

/// True for the types that a forward can compute in: float32, bfloat16, float16.
bool is_compute_dtype(DType dtype);

}  // namespace cadre
