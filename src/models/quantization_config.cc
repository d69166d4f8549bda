#include "models/quantization_config.h"

#include <nlohmann/json.hpp>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "models/text_config.h"

namespace cadre {
namespace {

constexpr int64_t kMaxBlock = int64_t{1} << 28;

// `key`'s value, which must be one of `served`.
std::string choice(const ConfigReader& config, std::string_view key, std::string_view fallback,
                   std::initializer_list<std::string_view> served) {
  const std::string value = config.text_or(key, fallback);
  for (const std::string_view one : served) {
    if (value == one) return value;
  }
  throw Unsupported(
      str_cat(config.origin(), ": ", config.path(key), " ", quote(value),
              " is not supported; supported: ", join(std::vector<std::string_view>(served))));
}

std::optional<std::array<int64_t, 2>> read_block(const ConfigReader& config,
                                                 std::array<int64_t, 2> fallback) {
  constexpr std::string_view kKey = "weight_block_size";
  if (config.is_null(kKey)) return std::nullopt;
  if (!config.has(kKey)) return fallback;
  const std::vector<int64_t> block = config.integers(kKey);
  const auto fits = [](int64_t size) { return size > 0 && size <= kMaxBlock; };
  if (block.size() != 2 || !fits(block[0]) || !fits(block[1])) {
    config_error(config, str_cat(config.path(kKey), ": expected two positive numbers or null, got ",
                                 config.json().at(std::string(kKey)).dump()));
  }
  return {{block[0], block[1]}};
}

std::vector<std::string> read_exclusions(const ConfigReader& config) {
  for (const std::string_view key : {"modules_to_not_convert", "ignored_layers"}) {
    if (config.has(key)) return config.texts(key);
  }
  return {};
}

void read_fp8(const ConfigReader& config, std::array<int64_t, 2> block, std::string_view scale_fmt,
              FineGrainedFP8Config& fp8) {
  choice(config, "fmt", "e4m3", {"e4m3"});
  const std::string scheme = choice(config, "activation_scheme", "dynamic", {"dynamic", "static"});
  fp8.activation_scheme =
      scheme == "static" ? ActivationScheme::kStatic : ActivationScheme::kDynamic;
  fp8.weight_block_size = read_block(config, block);
  const std::string scales = choice(config, "scale_fmt", scale_fmt, {"float", "ue8m0"});
  fp8.scale_fmt = scales == "ue8m0" ? ScaleFormat::kUe8m0 : ScaleFormat::kFloat;
}

bool has_fp4_experts(const ConfigReader& config) {
  return config.has("expert_dtype") && choice(config, "expert_dtype", "", {"fp4", "fp8"}) == "fp4";
}

// Whether `text`, or what stands before one of its dots, is `pattern`.
bool begins_with_pattern(std::string_view text, std::string_view pattern) {
  size_t t = 0;
  size_t p = 0;
  size_t star = std::string_view::npos;  // the last one met, which may take more than it has
  size_t taken = 0;                      // where the text goes on behind it
  while (true) {
    if (p == pattern.size() && (t == text.size() || text[t] == '.')) return true;
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = t;
    } else if (p < pattern.size() && t < text.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos && taken < text.size()) {
      p = star + 1;
      t = ++taken;
    } else {
      return false;
    }
  }
}

}  // namespace

CheckpointQuantization read_quantization(const ConfigReader& config,
                                         const std::optional<FineGrainedFP8Config>& wanted) {
  CheckpointQuantization result;
  result.has_fp4 = has_fp4_experts(config);
  if (config.has("text_config")) result.has_fp4 |= has_fp4_experts(config.object("text_config"));
  if (config.has("quantization_config")) {
    const ConfigReader own = config.object("quantization_config");
    result.method = choice(own, "quant_method", "", {"fp8", "mxfp8", "mxfp4"});
    FineGrainedFP8Config& fp8 = result.fp8;
    if (result.method == "mxfp4") {
      result.has_fp4 = true;
    } else {
      result.has_fp8 = true;
      if (result.method == "fp8") {
        read_fp8(own, {128, 128}, "float", fp8);
      } else {
        read_fp8(own, {1, 32}, "ue8m0", fp8);
      }
    }
    fp8.modules_to_not_convert = read_exclusions(own);
    fp8.dequantize = own.boolean_or("dequantize", false);
  }
  if (!wanted) return result;
  validate(*wanted);
  if (!result.has_fp8 && !result.has_fp4 && !wanted->dequantize) {
    throw Unsupported(str_cat(config.origin(),
                              ": the checkpoint is not quantised, and weights are ",
                              "not quantised while loading; write a quantised copy with cadre ",
                              "quantize, or leave quantization_config out"));
  }
  result.fp8.dequantize = result.fp8.dequantize || wanted->dequantize;
  return result;
}

bool is_excluded(const FineGrainedFP8Config& config, std::string_view module) {
  for (const std::string& pattern : config.modules_to_not_convert) {
    if (module.ends_with(pattern) || begins_with_pattern(module, pattern)) return true;
  }
  return false;
}

}  // namespace cadre
