#include "models/quantized_weights.h"

#include <cmath>
#include <cstring>

#include "cadre/error.h"
#include "cadre/float16.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

constexpr std::string_view kWeight = ".weight";
constexpr ScaleLayout kGroups{DType::kF8E8M0, 1, 32};

// "X" of "X.weight"; else the name itself.
std::string module_of(const std::string& name) {
  const std::string_view view = name;
  return view.ends_with(kWeight) ? name.substr(0, name.size() - kWeight.size()) : name;
}

// The first is the one that is missed when none is there.
std::vector<std::string> scale_names(const std::string& name) {
  std::vector<std::string> names = {name + "_scale_inv", name + "_scale"};
  if (const std::string module = module_of(name); module != name) {
    names.push_back(module + ".scale");
  } else {
    names.push_back(name + "_scales");  // beside P_blocks
  }
  return names;
}

std::vector<std::string> input_scale_names(const std::string& name) {
  const std::string module = module_of(name);
  if (module == name) return {name + "_activation_scale", name + "_input_scale"};
  return {module + ".input_scale", module + ".activation_scale"};
}

bool is_fp4_container(DType dtype) { return dtype == DType::kI8 || dtype == DType::kU8; }

bool is_scale_container(DType dtype) {
  return is_compute_dtype(dtype) || dtype == DType::kF8E8M0 || dtype == DType::kU8;
}

template <typename T>
float widened(const void* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return static_cast<float>(value);
}

// Element `i` of a contiguous tensor of a compute dtype, at any address.
float float_at(const TensorView& tensor, int64_t i) {
  const char* at =
      static_cast<const char*>(tensor.data()) + i * static_cast<int64_t>(size_of(tensor.dtype()));
  if (tensor.dtype() == DType::kF32) return widened<float>(at);
  return tensor.dtype() == DType::kBF16 ? widened<BFloat16>(at) : widened<Float16>(at);
}

// `shape` with other rows and columns.
Dims with_matrix(const Dims& shape, int64_t rows, int64_t columns) {
  Dims result = shape;
  result[shape.rank() - 2] = rows;
  result[shape.rank() - 1] = columns;
  return result;
}

int64_t num_matrices(const Dims& shape) { return shape.rank() == 3 ? shape[0] : 1; }
int64_t rows_of(const Dims& shape) { return shape[shape.rank() - 2]; }
int64_t columns_of(const Dims& shape) { return shape[shape.rank() - 1]; }

std::string named(const CheckpointTensor& tensor) {
  return str_cat(tensor.file, ": tensor ", quote(tensor.name));
}

}  // namespace

struct QuantizedWeights::Found {
  const CheckpointTensor* values = nullptr;
  const CheckpointTensor* scales = nullptr;
  StorageFormat format = StorageFormat::kFp4;
  ScaleLayout layout = kGroups;
  Dims scale_shape;           // the file's, but [.., 1, 1] or [E, 2, 1] for one scale per matrix
  bool halves_apart = false;  // of a pair: each has blocks of its own

  bool is_fp4() const { return format == StorageFormat::kFp4; }
};

StoredWeight QuantizedWeights::take(const std::string& name, const Dims& shape,
                                    std::string_view part, Rows rows) const {
  return take(name, shape, part, rows, config_.dequantize());
}

TensorView QuantizedWeights::take_plain(const std::string& name, const Dims& shape,
                                        std::string_view part) const {
  return take(name, shape, part, Rows::kOneMatrix, true).values;
}

bool QuantizedWeights::is_fp4(const std::string& name) const {
  if (!loader_.has(name)) return has_blocks(name);
  return is_fp4_container(loader_.checkpoint().find(name)->view.dtype());
}

bool QuantizedWeights::has_blocks(const std::string& name) const {
  return !loader_.has(name) && (loader_.has(name + "_blocks") || loader_.has(name + "_scales"));
}

StoredWeight QuantizedWeights::take(const std::string& name, const Dims& shape,
                                    std::string_view part, Rows rows, bool dequantize) const {
  Found found;
  const bool is_blocks = shape.rank() == 3 && has_blocks(name);
  found.values = loader_.checkpoint().find(is_blocks ? name + "_blocks" : name);
  const DType dtype = found.values != nullptr ? found.values->view.dtype() : DType::kF32;
  if (!is_blocks && dtype != DType::kF8E4M3 && !is_fp4_container(dtype)) {
    return take_unquantized(name, shape, part);
  }
  if (!find(name, shape, rows, found)) {
    if (found.values != nullptr) loader_.use(*found.values, part, {});
    for (const std::string& scales : scale_names(name)) loader_.ignore(scales);
    for (const std::string& scales : input_scale_names(name)) loader_.ignore(scales);
    StoredWeight none{dequantize ? *plain_format(dtype_) : found.format,
                      TensorView(nullptr, dequantize ? dtype_ : dtype, shape)};
    if (!dequantize) none.layout = found.layout;
    return none;
  }
  if (is_excluded(config_.fp8, module_of(name))) loader_.contradict(name);
  StoredWeight weight =
      dequantize ? dequantized(found, shape, part) : as_stored(found, shape, part);
  if (weight.activations == ActivationScheme::kStatic) {
    weight.input_scales = take_input_scales(name, num_matrices(shape), part);
  } else if (config_.fp8.activation_scheme == ActivationScheme::kStatic) {
    for (const std::string& scales : input_scale_names(name)) loader_.ignore(scales);
  }
  return weight;
}

// A plain one, or none at all.
StoredWeight QuantizedWeights::take_unquantized(const std::string& name, const Dims& shape,
                                                std::string_view part) const {
  const CheckpointTensor* tensor = loader_.checkpoint().find(name);
  for (const std::string& scales : scale_names(name)) {
    if (!loader_.has(scales)) continue;
    loader_.ignore(scales);
    if (tensor == nullptr) continue;  // which is fault enough
    loader_.add_fault(str_cat(named(*loader_.checkpoint().find(scales)), ": a scale of ",
                              quote(name), ", which is stored as ", tensor->view.dtype(),
                              " and takes none"));
  }
  if (tensor == nullptr) {
    for (const std::string& scales : input_scale_names(name)) loader_.ignore(scales);
  }
  const TensorView values = loader_.take(name, shape, part);
  return {plain_format(values.dtype()).value_or(StorageFormat::kBF16), values};
}

bool QuantizedWeights::find(const std::string& name, const Dims& shape, Rows rows,
                            Found& found) const {
  const bool is_blocks = found.values == nullptr || found.values->name != name;
  Dims expected = shape;
  if (is_blocks) expected = {shape[0], rows_of(shape), columns_of(shape) / 32, 16};
  if (found.values == nullptr) {
    loader_.miss(name + "_blocks", expected);
    return false;
  }
  const TensorView& values = found.values->view;
  const DType dtype = values.dtype();
  const bool is_fp4 = is_fp4_container(dtype);
  if (is_blocks && !is_fp4) {
    loader_.add_fault(str_cat(named(*found.values), ": expected uint8 or int8 (two values in a ",
                              "byte), found ", dtype, " ", values.shape()));
    return false;
  }
  if (is_fp4 ? !config_.has_fp4 : !config_.has_fp8) {
    loader_.add_fault(str_cat(named(*found.values), ": expected ",
                              config_.has_fp8 ? "float8_e4m3, " : "",
                              "float32, bfloat16 or float16, found ", dtype, " ", values.shape(),
                              "; config.json says nothing of ", is_fp4 ? "FP4" : "FP8",
                              " weights (quantization_config", is_fp4 ? ", expert_dtype)" : ")"));
    return false;
  }
  if (!is_fp4) {
    found.format = storage_format_of(config_.fp8);
    found.layout = scale_layout_of(config_.fp8);
  }
  if (!is_blocks) {
    expected = with_matrix(shape, rows_of(shape), row_bytes(found.format, columns_of(shape)));
  }
  if (!(values.shape() == expected) || (is_blocks && columns_of(shape) % 32 != 0)) {
    loader_.add_fault(str_cat(named(*found.values), ": expected shape ", expected,
                              is_fp4 ? " (two values in a byte)" : "", ", found ", values.shape(),
                              " (", dtype, ")"));
    return false;
  }
  return find_scales(name, shape, rows, found);
}

bool QuantizedWeights::find_scales(const std::string& name, const Dims& shape, Rows rows,
                                   Found& found) const {
  const std::vector<std::string> names = scale_names(name);
  for (const std::string& candidate : names) {
    const CheckpointTensor* tensor = loader_.checkpoint().find(candidate);
    if (tensor == nullptr) continue;
    if (found.scales != nullptr) {
      loader_.add_fault(str_cat(named(*tensor), ": a second scale of ", quote(found.values->name),
                                " beside ", quote(found.scales->name)));
      return false;
    }
    found.scales = tensor;
  }
  if (found.scales == nullptr) {
    const Dims blocks = cadre::scale_shape(found.layout, rows_of(shape), columns_of(shape));
    loader_.miss(found.values->name != name ? names.back() : names.front(),
                 with_matrix(shape, blocks[0], blocks[1]));
    return false;
  }
  return check_scales(shape, rows, found);
}

bool QuantizedWeights::check_scales(const Dims& shape, Rows rows, Found& found) const {
  const TensorView& scales = found.scales->view;
  if (!is_scale_container(scales.dtype())) {
    loader_.add_fault(str_cat(named(*found.scales), ": expected scales as float32, bfloat16, ",
                              "float16, float8_e8m0 or uint8, found ", scales.dtype(), " ",
                              scales.shape()));
    return false;
  }
  const bool is_e8m0 = scales.dtype() == DType::kF8E8M0 || scales.dtype() == DType::kU8;
  ScaleLayout& layout = found.layout;
  if (found.format == StorageFormat::kFp8Block && layout.block_rows == kGroups.block_rows &&
      layout.block_cols == kGroups.block_cols &&
      (is_e8m0 || config_.fp8.scale_fmt == ScaleFormat::kUe8m0)) {
    found.format = StorageFormat::kMxFp8;
  }
  layout.dtype = scale_dtype(found.scales->name, found.format, scales.dtype());

  const int64_t n = rows_of(shape);
  const Dims over_both = cadre::scale_shape(layout, n, columns_of(shape));
  const Dims of_half = cadre::scale_shape(layout, n / 2, columns_of(shape));
  const bool is_pair = rows == Rows::kTwoMatrices;
  const Dims whole = with_matrix(shape, over_both[0], over_both[1]);
  const Dims halves = with_matrix(shape, 2 * of_half[0], of_half[1]);
  const auto fits = [&](const Dims& expected) {
    if (layout.block_rows == 0) return scales.numel() == num_elements(expected);
    return scales.shape() == expected;
  };
  found.halves_apart = is_pair && !fits(whole) && fits(halves);
  found.scale_shape = found.halves_apart ? halves : whole;
  if (fits(found.scale_shape)) return true;
  loader_.add_fault(
      str_cat(named(*found.scales), ": expected shape ", is_pair ? halves : whole, " (scales of ",
              quote(found.values->name), " ", found.values->view.shape(), " in blocks of ",
              layout.block_rows == 0 ? "a whole matrix"
                                     : str_cat(layout.block_rows, " x ", layout.block_cols),
              "), found ", scales.shape(), " (", scales.dtype(), ")"));
  return false;
}

StoredWeight QuantizedWeights::dequantized(const Found& found, const Dims& shape,
                                           std::string_view part) const {
  const TensorView& stored = found.values->view;
  const int64_t bytes = row_bytes(found.format, columns_of(shape));
  WeightRequest request;
  request.stored = stored;
  request.dtype = dtype_;
  request.shape = shape;
  request.scales_name = found.scales->name;
  Dims values = with_matrix(shape, rows_of(shape), bytes);
  Dims scales = found.scale_shape;
  if (found.halves_apart) {  // twice as many matrices, each with blocks of its own
    values = {2 * shape[0], rows_of(shape) / 2, bytes};
    scales = {2 * shape[0], scales[1] / 2, scales[2]};
  }
  request.quantized = {found.format, found.layout, stored.reshape(values),
                       found.scales->view.reshape(scales)};
  StoredWeight weight;
  weight.format = *plain_format(dtype_);
  weight.values =
      loader_.take_converted(*found.values, std::move(request), part, name_of(found.format));
  loader_.use(*found.scales, part, "scales");
  return weight;
}

StoredWeight QuantizedWeights::as_stored(const Found& found, const Dims& shape,
                                         std::string_view part) const {
  StoredWeight weight;
  weight.format = found.format;
  weight.layout = found.layout;
  weight.values =
      loader_
          .take_bytes(*found.values, found.is_fp4() ? DType::kI8 : DType::kF8E4M3, part,
                      name_of(found.format))
          .reshape(with_matrix(shape, rows_of(shape), row_bytes(found.format, columns_of(shape))));
  const TensorView& stored = found.scales->view;
  const DType dtype = found.layout.dtype;
  if (stored.dtype() == dtype || (stored.dtype() == DType::kU8 && dtype == DType::kF8E8M0)) {
    weight.scales = loader_.take_bytes(*found.scales, dtype, part, "scales");
  } else {
    WeightRequest request;
    request.stored = stored;
    request.dtype = dtype;
    request.shape = stored.shape();
    weight.scales = loader_.take_converted(*found.scales, std::move(request), part, "scales");
  }
  weight.scales = weight.scales.reshape(found.scale_shape);
  const bool takes_fp8 =
      found.format == StorageFormat::kFp8Block || found.format == StorageFormat::kFp8Tensor;
  if (takes_fp8) weight.activations = config_.fp8.activation_scheme;
  return weight;
}

std::vector<float> QuantizedWeights::take_input_scales(const std::string& name, int64_t count,
                                                       std::string_view part) const {
  const std::vector<std::string> names = input_scale_names(name);
  const CheckpointTensor* tensor = nullptr;
  for (const std::string& candidate : names) {
    if (tensor == nullptr) tensor = loader_.checkpoint().find(candidate);
  }
  if (tensor == nullptr) {
    loader_.miss(names.front(), {count});
    return {};
  }
  loader_.use(*tensor, part, "scales");
  if (!is_compute_dtype(tensor->view.dtype()) || tensor->view.numel() != count) {
    loader_.add_fault(str_cat(named(*tensor), ": expected ", count, " float32, bfloat16 or ",
                              "float16 (one input scale for each matrix), found ",
                              tensor->view.dtype(), " ", tensor->view.shape()));
    return {};
  }
  std::vector<float> result;
  for (int64_t i = 0; i < count; ++i) {
    result.push_back(float_at(tensor->view, i));
    if (std::isfinite(result.back()) && result.back() > 0) continue;
    loader_.add_fault(
        str_cat(named(*tensor), ": expected positive numbers, found ", result.back(), " at ", i));
    return {};
  }
  return result;
}

namespace {

// The place of the first element that is NaN or infinite; -1: none. Most scales are bytes, of which
// large models have gigabytes.
int64_t first_not_finite(const TensorView& scales) {
  const int64_t count = scales.numel();
  if (size_of(scales.dtype()) == 1) {
    const auto* bytes = static_cast<const uint8_t*>(scales.data());
    const void* found = std::memchr(bytes, 255, static_cast<size_t>(count));
    return found == nullptr ? -1 : static_cast<const uint8_t*>(found) - bytes;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(float_at(scales, i))) return i;
  }
  return -1;
}

void check_scale_values(const std::string& name, const TensorView& scales) {
  const int64_t at = first_not_finite(scales);
  if (at < 0) return;
  throw CheckpointError(
      str_cat("loading: tensor ", quote(name), ": expected scales that are finite numbers, found ",
              size_of(scales.dtype()) == 1 ? "the byte 255 (NaN)" : str_cat(float_at(scales, at)),
              " at element ", at, " of ", scales.shape(), "; fetch the checkpoint again"));
}

}  // namespace

void check_scale_values(const WeightLoader& loader) {
  for (const WeightRequest& request : loader.requests()) {
    if (request.quantized.values) {
      check_scale_values(request.scales_name, request.quantized.scales);
    } else if (request.form == WeightForm::kConverted ||
               (request.form == WeightForm::kAsStored &&
                (request.stored.dtype() == DType::kF8E8M0 ||
                 request.stored.dtype() == DType::kF32))) {
      check_scale_values(request.name, request.stored);
    }
  }
}

}  // namespace cadre
