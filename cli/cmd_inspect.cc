// cadre inspect: what a checkpoint holds, and whether every tensor is accounted for. Reads headers
// only.
#include <nlohmann/json.hpp>

#include "commands.h"
#include "exit_codes.h"
#include "output.h"
#include "table.h"

namespace cadre::cli {

namespace {

struct InspectOptions {
  std::string model;
  bool tensors = false;
};

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
          {"format", name_of(query.format)}};
}

Json to_json(const std::vector<TensorReport>& tensors) {
  Json list = Json::array();
  for (const TensorReport& tensor : tensors) {
    list.push_back({{"name", tensor.name},
                    {"file", tensor.file},
                    {"part", tensor.part},
                    {"dtype", name_of(tensor.dtype)},
                    {"shape", std::vector<int64_t>(tensor.shape.begin(), tensor.shape.end())},
                    {"bytes", tensor.bytes}});
  }
  return list;
}

/// Bytes by element type: the formats that the checkpoint is stored in.
std::map<std::string, size_t> bytes_per_dtype(const ModelReport& report) {
  std::map<std::string, size_t> bytes;
  for (const TensorReport& tensor : report.used)
    bytes[std::string(name_of(tensor.dtype))] += tensor.bytes;
  return bytes;
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
          {"formats", bytes_per_dtype(report)},
          {"bytes_per_part", report.bytes_per_part},
          {"used", to_json(report.used)},
          {"missing", report.missing},
          {"left_over", to_json(report.left_over)}};
}

std::string experts_text(const ExpertsQuery& query) {
  const ExpertsConfig& config = query.config;
  return str_cat(config.num_experts, " experts, ", config.top_k, " per token, hidden ",
                 config.hidden_size, ", intermediate ", config.intermediate_size, ", ",
                 config.activation, config.has_gate ? " gated" : "",
                 config.has_bias ? ", biases" : "", ", stored as ", query.format);
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
  std::vector<std::string> formats;
  for (const auto& [dtype, bytes] : bytes_per_dtype(report)) {
    formats.push_back(str_cat(dtype, " ", format_bytes(bytes)));
  }
  facts.add_row({"formats", join(formats)});
  facts.add_row({"computes in", std::string(name_of(info.compute_dtype))});
  facts.add_row({"tensors", str_cat(report.used.size(), " used, ", report.missing.size(),
                                    " missing, ", report.left_over.size(), " left over")});
  return facts.to_string();
}

std::string parts_text(const ModelReport& report) {
  size_t total = 0;
  for (const auto& [part, bytes] : report.bytes_per_part) total += bytes;
  Table parts({"part", "bytes", ""});
  parts.right_align(1);
  for (const auto& [part, bytes] : report.bytes_per_part) {
    parts.add_row({part, with_thousands(bytes), format_bytes(bytes)});
  }
  parts.add_row({"total", with_thousands(total), format_bytes(total)});
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
  if (!report.missing.empty()) text += "\nmissing:\n  " + join(report.missing, "\n  ") + "\n";
  if (!report.left_over.empty()) text += "\nleft over:\n" + tensors_text(report.left_over);
  return text;
}

void require_complete(const ModelReport& report) {
  if (report.missing.empty() && report.left_over.empty()) return;
  const std::string first =
      report.missing.empty() ? report.left_over.front().name : report.missing.front();
  throw CheckpointError(str_cat(
      report.info.path, ": expected exactly the tensors of ", report.info.architecture, ", got ",
      report.missing.size(), " missing and ", report.left_over.size(), " left over (first: ", first,
      "); the checkpoint is incomplete or its config.json is another model's: fetch it again"));
}

int run_command(const InspectOptions& options, const CommonOptions& common) {
  if (!options.model.empty() && !common.model.empty()) {
    throw InvalidArgument(str_cat("expected one model, got ", options.model, " and --model ",
                                  common.model, "; leave out one"));
  }
  const std::string path = options.model.empty() ? model_path(common) : options.model;
  const ModelReport report = inspect_model(path, load_options(common));
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
      "Architecture, experts, formats, bytes per part, and which tensors are used, missing or left "
      "over;\nexit 3 when some are missing or left over. No weights are read.\n"
      "Example: cadre inspect Qwen/Qwen1.5-MoE-A2.7B --json");
  command
      ->add_option(
          "MODEL", options->model,
          "A folder in the hub's layout or a hub id (default: --model, else the bundled model)")
      ->type_name("MODEL");
  command->add_flag("--tensors", options->tensors, "List every tensor (--json always does)");
  add_common_options(*command, common);
  command->callback([&run, &common, options] {
    run = [&common, options] { return run_command(*options, common); };
  });
}

}  // namespace cadre::cli
