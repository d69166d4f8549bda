// cadre inspect: what a checkpoint holds, and whether every tensor is accounted for. Reads headers
// only.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "exit_codes.h"
#include "output.h"
#include "session.h"
#include "table.h"

namespace cadre::cli {

namespace {

struct InspectOptions {
  std::string model;
  bool tensors = false;
};

Json scales_json(const ExpertsQuery& query) {
  if (!is_quantized(query.format)) return {};
  const ScaleLayout& layout = query.scale_layout;
  return {{"dtype", name_of(layout.dtype)},
          {"block_rows", layout.block_rows},
          {"block_cols", layout.block_cols}};
}

Json to_json(const ExpertsQuery& query) {
  const ExpertsConfig& config = query.config;
  return {{"num_experts", config.num_experts},
          {"top_k", config.top_k},
          {"hidden_size", config.hidden_size},
          {"intermediate_size", config.intermediate_size},
          {"activation", name_of(config.activation)},
          {"has_gate", config.has_gate},
          {"has_bias", config.has_bias},
          {"is_transposed", config.is_transposed},
          {"is_concatenated", config.is_concatenated},
          {"swiglu_limit", config.swiglu_limit ? Json(*config.swiglu_limit) : Json()},
          {"swiglu_alpha", config.swiglu_alpha ? Json(*config.swiglu_alpha) : Json()},
          {"format", name_of(query.format)},
          {"scales", scales_json(query)},
          {"activation_scheme", name_of(query.activation_scheme)}};
}

Json to_json(const std::vector<TensorReport>& tensors) {
  Json list = Json::array();
  for (const TensorReport& tensor : tensors) {
    list.push_back({{"name", tensor.name},
                    {"file", tensor.file},
                    {"part", tensor.part},
                    {"dtype", name_of(tensor.dtype)},
                    {"format", tensor.format},
                    {"shape", std::vector<int64_t>(tensor.shape.begin(), tensor.shape.end())},
                    {"bytes", tensor.bytes}});
  }
  return list;
}

using BytesPerFormat = std::map<std::string, size_t>;

/// The formats that the checkpoint is stored in, scales apart.
BytesPerFormat bytes_per_format(const ModelReport& report) {
  BytesPerFormat bytes;
  for (const TensorReport& tensor : report.used) bytes[tensor.format] += tensor.bytes;
  return bytes;
}

/// The same for each part.
std::map<std::string, BytesPerFormat> formats_per_part(const ModelReport& report) {
  std::map<std::string, BytesPerFormat> parts;
  for (const auto* tensors : {&report.used, &report.ignored, &report.left_over}) {
    for (const TensorReport& tensor : *tensors) parts[tensor.part][tensor.format] += tensor.bytes;
  }
  return parts;
}

std::string formats_text(const BytesPerFormat& formats) {
  std::vector<std::string> items;
  for (const auto& [format, bytes] : formats) {
    items.push_back(str_cat(format, " ", format_bytes(bytes)));
  }
  return join(items);
}

/// What does not fit, in ModelReport::missing: those entries say where and what was expected; that
/// of an absent tensor is "name [shape]".
int64_t num_unfit(const ModelReport& report) {
  return std::count_if(report.missing.begin(), report.missing.end(),
                       [](const std::string& fault) { return fault.find(": ") != fault.npos; });
}

int64_t num_missing(const ModelReport& report) {
  return static_cast<int64_t>(report.missing.size()) - num_unfit(report);
}

Json to_json(const ModelReport& report) {
  const ModelInfo& info = report.info;
  Json experts = Json::object();
  for (const auto& [sub_config, query] : report.experts) experts[sub_config] = to_json(query);
  return {{"architecture", info.architecture},
          {"model_type", info.model_type},
          {"path", info.path},
          {"compute_dtype", name_of(info.compute_dtype)},
          {"vocab_size", info.vocab_size},
          {"hidden_size", info.hidden_size},
          {"num_layers", info.num_layers},
          {"num_moe_layers", info.num_moe_layers},
          {"max_position_embeddings", info.max_position_embeddings},
          {"eos_token_ids", info.eos_token_ids},
          {"sub_configs", info.sub_configs},
          {"experts", std::move(experts)},
          {"formats", bytes_per_format(report)},
          {"formats_per_part", formats_per_part(report)},
          {"bytes_per_part", report.bytes_per_part},
          {"used", to_json(report.used)},
          {"missing", report.missing},
          {"notes", report.notes},
          {"num_missing", num_missing(report)},
          {"num_unfit", num_unfit(report)},
          {"ignored", to_json(report.ignored)},
          {"left_over", to_json(report.left_over)}};
}

/// ", float32 scales of 128 x 128, dynamic activations"
std::string scales_text(const ExpertsQuery& query) {
  if (!is_quantized(query.format)) return {};
  const ScaleLayout& layout = query.scale_layout;
  std::string text = str_cat(", ", layout.dtype, " scales of ");
  text += layout.block_rows == 0 ? "a whole matrix"
                                 : str_cat(layout.block_rows, " x ", layout.block_cols);
  if (query.activation_scheme == ActivationScheme::kNone) return text;
  return str_cat(text, ", ", name_of(query.activation_scheme), " activations");
}

std::string experts_text(const ExpertsQuery& query) {
  const ExpertsConfig& config = query.config;
  return str_cat(config.num_experts, " experts, ", config.top_k, " per token, hidden ",
                 config.hidden_size, ", intermediate ", config.intermediate_size, ", ",
                 config.activation, config.has_gate ? " gated" : "",
                 config.has_bias ? ", biases" : "", ", stored as ", query.format,
                 scales_text(query));
}

std::string facts_text(const ModelReport& report) {
  const ModelInfo& info = report.info;
  Table facts({});
  facts.add_row({"architecture", str_cat(info.architecture, " (", info.model_type, ")")});
  facts.add_row({"folder", info.path});
  facts.add_row({"sizes", str_cat(info.num_layers, " layers (", info.num_moe_layers,
                                  " with experts), hidden ", info.hidden_size, ", vocabulary ",
                                  info.vocab_size, ", context ", info.max_position_embeddings)});
  for (const auto& [sub_config, query] : report.experts) {
    facts.add_row({sub_config.empty() ? "experts" : "experts " + sub_config, experts_text(query)});
  }
  facts.add_row({"formats", formats_text(bytes_per_format(report))});
  facts.add_row({"computes in", std::string(name_of(info.compute_dtype))});
  facts.add_row(
      {"tensors", str_cat(report.used.size(), " used, ", report.ignored.size(), " not needed, ",
                          num_unfit(report), " unfit, ", num_missing(report), " missing, ",
                          report.left_over.size(), " left over")});
  return facts.to_string();
}

std::string parts_text(const ModelReport& report) {
  size_t total = 0;
  for (const auto& [part, bytes] : report.bytes_per_part) total += bytes;
  Table parts({"part", "bytes", "", "formats"});
  parts.right_align(1);
  const std::map<std::string, BytesPerFormat> formats = formats_per_part(report);
  for (const auto& [part, bytes] : report.bytes_per_part) {
    parts.add_row(
        {part, with_thousands(bytes), format_bytes(bytes), formats_text(formats.at(part))});
  }
  parts.add_row({"total", with_thousands(total), format_bytes(total), ""});
  return parts.to_string();
}

std::string tensors_text(const std::vector<TensorReport>& tensors) {
  Table table({"tensor", "part", "dtype", "shape", "file"});
  for (const TensorReport& tensor : tensors) {
    table.add_row({tensor.name, tensor.part, std::string(name_of(tensor.dtype)),
                   to_string(tensor.shape), tensor.file});
  }
  return table.to_string();
}

std::string to_text(const ModelReport& report, bool list_tensors) {
  std::string text = str_cat(facts_text(report), "\n", parts_text(report));
  if (list_tensors) text += "\n" + tensors_text(report.used);
  if (list_tensors && !report.ignored.empty()) {
    text += "\nnot needed:\n" + tensors_text(report.ignored);
  }
  for (const std::string& note : report.notes) text += "\nnote: " + note + "\n";
  if (!report.missing.empty())
    text += "\nmissing or unfit:\n  " + join(report.missing, "\n  ") + "\n";
  if (!report.left_over.empty()) text += "\nleft over:\n" + tensors_text(report.left_over);
  return text;
}

void require_complete(const ModelReport& report) {
  if (report.missing.empty() && report.left_over.empty()) return;
  const std::string first =
      report.missing.empty() ? report.left_over.front().name : report.missing.front();
  throw CheckpointError(str_cat(
      report.info.path, ": expected exactly the tensors of ", report.info.architecture, ", got ",
      num_unfit(report), " unfit, ", num_missing(report), " missing and ", report.left_over.size(),
      " left over (first: ", first, "); check config.json or fetch the checkpoint again"));
}

int run_command(const InspectOptions& options, const CommonOptions& given) {
  const CommonOptions common = with_model(given, options.model);
  const ModelReport report = inspect_model(model_path(common), load_options(common));
  require_known_sub_configs(chosen_experts(common), report.info);
  if (common.json) {
    write_json(to_json(report));
  } else {
    write_stdout(to_text(report, options.tensors));
  }
  require_complete(report);
  return kExitDone;
}

}  // namespace

void add_inspect(CLI::App& app, CommonOptions& common, Runner& run) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command = app.add_subcommand("inspect", "Show what a checkpoint holds");
  command->footer(
      "Architecture, experts, formats, bytes per part, and which tensors are used, unfit, missing "
      "or left over; exit 3 unless all are used and none is missing. No weights are read.\n"
      "Example: cadre inspect Qwen/Qwen1.5-MoE-A2.7B --json");
  add_model_argument(*command, options->model);
  command->add_flag("--tensors", options->tensors, "List every tensor (--json always does)");
  add_common_options(*command, common);
  hide_options(*command, {"--device", "--experts", "--threads", "--prepack", "--dequantize",
                          "--seed", "--decode-experts", "--no-graph"});
  command->callback([&run, &common, options] {
    run = [&common, options] { return run_command(*options, common); };
  });
}

}  // namespace cadre::cli
