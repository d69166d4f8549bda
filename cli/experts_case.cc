#include "experts_case.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace cadre::cli {

namespace {

constexpr std::array<std::string_view, 11> kKeys = {
    "num_experts", "hidden_size",   "intermediate_size", "top_k",        "hidden_act",  "has_gate",
    "has_bias",    "is_transposed", "is_concatenated",   "swiglu_limit", "swiglu_alpha"};
constexpr std::array<std::string_view, 3> kIgnoredKeys = {"route", "sentinel", "format"};

template <typename Range>
bool contains(const Range& range, std::string_view name) {
  return std::find(range.begin(), range.end(), name) != range.end();
}

/// The metadata as one JSON object; keys are complete and known.
ConfigReader read_metadata(const SafetensorsFile& file) {
  const std::string origin = file.path().string() + ": __metadata__";
  Json json = Json::object();
  for (const auto& [key, text] : file.header().metadata) {
    if (contains(kIgnoredKeys, key)) continue;
    if (!contains(kKeys, key)) {
      throw CheckpointError(str_cat(origin, ": unknown key \"", key, "\"; expected ", join(kKeys)));
    }
    json[key] = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (json[key].is_discarded()) {
      throw CheckpointError(str_cat(origin, ": \"", key, "\": expected JSON text (a number, true, ",
                                    "false, null or a quoted string), got ", text));
    }
  }
  for (const std::string_view key : kKeys) {
    if (!json.contains(key)) {
      throw CheckpointError(str_cat(origin, ": \"", key, "\" is missing; expected ", join(kKeys)));
    }
  }
  return ConfigReader(std::move(json), origin);
}

std::optional<float> optional_number(const ConfigReader& metadata, std::string_view key) {
  if (!metadata.has(key)) return std::nullopt;  // null
  return static_cast<float>(metadata.number(key));
}

ExpertsConfig read_config(const ConfigReader& metadata) {
  ExpertsConfig config;
  config.num_experts = metadata.integer("num_experts");
  config.hidden_size = metadata.integer("hidden_size");
  config.intermediate_size = metadata.integer("intermediate_size");
  config.top_k = metadata.integer("top_k");
  config.activation = parse_activation(metadata.text("hidden_act"));
  config.has_gate = metadata.boolean("has_gate");
  config.has_bias = metadata.boolean("has_bias");
  config.is_transposed = metadata.boolean("is_transposed");
  config.is_concatenated = metadata.boolean("is_concatenated");
  config.swiglu_limit = optional_number(metadata, "swiglu_limit");
  config.swiglu_alpha = optional_number(metadata, "swiglu_alpha");
  validate(config);
  return config;
}

void refuse_unknown_tensors(const SafetensorsFile& file, const std::vector<std::string>& known) {
  for (const SafetensorsEntry& entry : file.header().entries) {
    if (contains(known, entry.name)) continue;
    throw CheckpointError(str_cat(file.path().string(), ": unexpected tensor ",
                                  describe(entry.name, file.view(entry)), "; expected ",
                                  join(known)));
  }
}

void require_shape(const std::string& file, std::string_view name, const TensorView& tensor,
                   int64_t rows, int64_t columns, bool is_integer) {
  const DType dtype = tensor.dtype();
  const bool dtype_fits =
      is_integer ? dtype == DType::kI64 || dtype == DType::kI32 : is_compute_dtype(dtype);
  if (dtype_fits && tensor.shape() == Dims{rows, columns}) return;
  throw CheckpointError(str_cat(file, ": expected ", name, ": ",
                                is_integer ? "int64 or int32" : "float32, bfloat16 or float16", " ",
                                Dims{rows, columns}, ", got ", describe(name, tensor)));
}

FusedExperts fused_tensors(const SafetensorsFile& file, const ExpertsConfig& config) {
  const std::string up = config.has_gate ? "gate_up_proj" : "up_proj";
  std::vector<std::string> known = {"hidden_states", "top_k_index", "top_k_weights", "output", up,
                                    "down_proj"};
  FusedExperts tensors;
  tensors.gate_up_proj = file.tensor(up);
  tensors.down_proj = file.tensor("down_proj");
  if (config.has_bias) {
    tensors.gate_up_proj_bias = file.tensor(up + "_bias");
    tensors.down_proj_bias = file.tensor("down_proj_bias");
    known.insert(known.end(), {up + "_bias", "down_proj_bias"});
  }
  refuse_unknown_tensors(file, known);
  return tensors;
}

void read_tokens(const SafetensorsFile& file, ExpertsCase& result) {
  const std::string path = file.path().string();
  const ExpertsConfig& config = result.config;
  result.hidden_states = file.tensor("hidden_states");
  const int64_t rows = result.hidden_states.rank() > 0 ? result.hidden_states.dim(0) : 0;
  require_shape(path, "hidden_states", result.hidden_states, rows, config.hidden_size, false);
  result.top_k_index = file.tensor("top_k_index");
  require_shape(path, "top_k_index", result.top_k_index, rows, config.top_k, true);
  result.top_k_weights = file.tensor("top_k_weights");
  require_shape(path, "top_k_weights", result.top_k_weights, rows, config.top_k, false);
  if (file.find("output") != nullptr) {
    result.expected_output = file.tensor("output");
    require_shape(path, "output", result.expected_output, rows, config.hidden_size, false);
  }
}

}  // namespace

ExpertsCase read_experts_case(const std::filesystem::path& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const ConfigReader metadata = read_metadata(file);
  try {
    ExpertsCase result;
    result.config = read_config(metadata);
    const FusedExperts tensors = fused_tensors(file, result.config);
    read_tokens(file, result);
    result.weights = std::make_shared<const ExpertsWeights>(
        make_experts_weights(result.config, tensors, file.owner()));
    result.format = result.weights->format;
    return result;
  } catch (const InvalidArgument& error) {
    // What is wrong came from the file, not from the command line.
    throw CheckpointError(str_cat(path.string(), ": ", error.what()));
  } catch (const Unsupported& error) {
    throw Unsupported(str_cat(path.string(), ": ", error.what()));
  }
}

}  // namespace cadre::cli
