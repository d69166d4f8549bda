// What a config says, shapes of scales, and the containers that scales come in.
#include "cadre/quantization.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "cadre/error.h"
#include "cadre/float16.h"
#include "core/str_cat.h"
#include "quant/float8.h"

namespace cadre {
namespace {

constexpr ScaleLayout kTensorLayout{DType::kF32, 0, 0};
constexpr ScaleLayout kGroupLayout{DType::kF8E8M0, 1, 32};

std::string describe(const ScaleLayout& layout) {
  return str_cat(name_of(layout.dtype), " scales of blocks of ", layout.block_rows, " x ",
                 layout.block_cols);
}

// ceil(size / block); block 0: one.
int64_t num_blocks(int64_t size, int64_t block) {
  if (block == 0) return 1;
  return size / block + (size % block != 0 ? 1 : 0);
}

bool is_e8m0_container(DType dtype) { return dtype == DType::kF8E8M0 || dtype == DType::kU8; }

bool is_float_container(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

// One element at any alignment.
float load(const void* at, DType dtype) {
  const auto as = [at](auto value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  if (dtype == DType::kF32) return as(float{});
  if (dtype == DType::kBF16) return static_cast<float>(as(BFloat16{}));
  if (dtype == DType::kF16) return static_cast<float>(as(Float16{}));
  return e8m0_to_float(as(uint8_t{}));
}

// Exact, or empty.
std::optional<uint8_t> float_to_e8m0(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (bits == 0x00400000u) return uint8_t{0};  // 2^-127, subnormal in float32
  const uint32_t exponent = bits >> 23;        // a sign lies above it
  if ((bits & 0x7fffffu) != 0 || exponent == 0 || exponent > 254) return std::nullopt;
  return static_cast<uint8_t>(exponent);
}

// Visits every element in row-major order with its address.
template <typename Visit>
void visit_elements(const TensorView& tensor, Visit visit) {
  if (tensor.rank() == 0) {
    visit(static_cast<const char*>(tensor.data()));
    return;
  }
  for (int64_t i = 0; i < tensor.dim(0); ++i) visit_elements(tensor[i], visit);
}

Dims place_of(int64_t index, const Dims& shape) {
  Dims place = shape;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    place[i] = index % shape[i];
    index /= shape[i];
  }
  return place;
}

}  // namespace

void validate(const FineGrainedFP8Config& config) {
  constexpr std::string_view kWhere = "FineGrainedFP8Config: ";
  if (config.activation_scheme != ActivationScheme::kDynamic &&
      config.activation_scheme != ActivationScheme::kStatic) {
    throw InvalidArgument(
        str_cat(kWhere, "activation_scheme: expected dynamic or static, got none"));
  }
  if (!config.weight_block_size) return;
  for (const int64_t size : *config.weight_block_size) {
    if (size > 0) continue;
    throw InvalidArgument(str_cat(kWhere, "weight_block_size: expected two positive sizes, got [",
                                  join(*config.weight_block_size), "]"));
  }
}

StorageFormat storage_format_of(const FineGrainedFP8Config& config) {
  validate(config);
  return config.weight_block_size ? StorageFormat::kFp8Block : StorageFormat::kFp8Tensor;
}

ScaleLayout scale_layout_of(const FineGrainedFP8Config& config) {
  validate(config);
  if (!config.weight_block_size) return kTensorLayout;
  const auto [rows, cols] = *config.weight_block_size;
  return {config.scale_fmt == ScaleFormat::kUe8m0 ? DType::kF8E8M0 : DType::kF32, rows, cols};
}

ScaleLayout scale_layout_of(StorageFormat format) {
  switch (format) {
    case StorageFormat::kFp8Block:
      return {DType::kF32, 128, 128};
    case StorageFormat::kFp8Tensor:
      return kTensorLayout;
    case StorageFormat::kMxFp8:
    case StorageFormat::kFp4:
      return kGroupLayout;
    default:
      throw InvalidArgument(str_cat("scale_layout_of: expected a quantised format, got ",
                                    name_of(format), ", which has no scales"));
  }
}

void validate(StorageFormat format, const ScaleLayout& layout) {
  const bool is_block = format == StorageFormat::kFp8Block;
  const ScaleLayout only = scale_layout_of(format);
  if (!is_block && layout == only) return;
  if (is_block && (layout.dtype == DType::kF32 || layout.dtype == DType::kF8E8M0) &&
      layout.block_rows > 0 && layout.block_cols > 0) {
    return;
  }
  throw InvalidArgument(str_cat(
      "scale layout of ", name_of(format), ": expected ",
      is_block ? "float32 or float8_e8m0 scales of blocks of positive sizes" : describe(only),
      ", got ", describe(layout)));
}

Dims scale_shape(const ScaleLayout& layout, int64_t n, int64_t k) {
  if (n < 0 || k < 0 || layout.block_rows < 0 || layout.block_cols < 0) {
    throw InvalidArgument(str_cat("scale_shape: expected sizes that are not negative, got [", n,
                                  ", ", k, "] and ", describe(layout)));
  }
  return {num_blocks(n, layout.block_rows), num_blocks(k, layout.block_cols)};
}

DType scale_dtype(std::string_view name, StorageFormat format, DType container) {
  const bool is_known = is_e8m0_container(container) || is_float_container(container);
  if (!is_known || !is_quantized(format)) {
    throw InvalidArgument(str_cat(name, ": expected scales of ", name_of(format),
                                  " as float32, bfloat16, float16, float8_e8m0 or uint8 (the bits "
                                  "of float8_e8m0), got ",
                                  name_of(container)));
  }
  if (format == StorageFormat::kFp8Tensor) return DType::kF32;
  if (format != StorageFormat::kFp8Block) return DType::kF8E8M0;
  return is_e8m0_container(container) ? DType::kF8E8M0 : DType::kF32;
}

TensorView convert_scales(std::string_view name, const TensorView& scales, DType dtype,
                          Tensor& storage) {
  const DType from = scales.dtype();
  if ((dtype != DType::kF32 && dtype != DType::kF8E8M0) ||
      !(is_e8m0_container(from) || is_float_container(from))) {
    throw InvalidArgument(str_cat(name,
                                  ": expected scales that become float32 or float8_e8m0, got ",
                                  describe("scales", scales), " to become ", name_of(dtype)));
  }
  if (from == dtype) return scales;
  if (dtype == DType::kF8E8M0 && is_e8m0_container(from)) {
    return {scales.data(), dtype, scales.shape(), scales.strides(), scales.device()};
  }
  storage = Tensor(dtype, scales.shape());
  int64_t index = 0;
  visit_elements(scales, [&](const char* at) {
    const float value = load(at, from);
    if (dtype == DType::kF32) {
      storage->as<float>()[index++] = value;
      return;
    }
    const std::optional<uint8_t> code = float_to_e8m0(value);
    if (!code) {
      throw InvalidArgument(str_cat(name, ": expected powers of two from 2^-127 to 2^127 (they ",
                                    "become float8_e8m0 scales), got ", value, " at ",
                                    place_of(index, scales.shape()), " of ", scales.shape()));
    }
    storage->as<uint8_t>()[index++] = *code;
  });
  return storage.view();
}

}  // namespace cadre
