// cadre backends: which experts backends can run here, for what, and if not, why. Reads no weights.
#include <array>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "core/device_runtime.h"
#include "exit_codes.h"
#include "output.h"
#include "session.h"
#include "table.h"

namespace cadre::cli {

namespace {

constexpr std::array kComputeDTypes = {DType::kF32, DType::kBF16, DType::kF16};
constexpr std::array kFormats = {StorageFormat::kF32,       StorageFormat::kF16,
                                 StorageFormat::kBF16,      StorageFormat::kFp8Block,
                                 StorageFormat::kFp8Tensor, StorageFormat::kMxFp8,
                                 StorageFormat::kFp4};
static_assert(kFormats.size() == kNumStorageFormats);

/// What one backend on one device says.
struct Answer {
  std::string sub_config;  // with a model
  std::string name;
  Device device;
  std::vector<StorageFormat> formats;  // that it runs; one of `dtypes` at least
  std::vector<DType> dtypes;
  std::vector<std::string> reasons;  // when it runs nothing

  bool runs() const { return reasons.empty(); }
};

/// The usual scales of a format: 128 x 128 blocks for fp8, 32 of K for the MX formats.
void set_usual_scales(ExpertsQuery& query) {
  switch (query.format) {
    case StorageFormat::kFp8Block:
      query.scale_layout = {DType::kF32, 128, 128};
      break;
    case StorageFormat::kMxFp8:
    case StorageFormat::kFp4:
      query.scale_layout = {DType::kF8E8M0, 1, 32};
      break;
    default:
      query.scale_layout = {};
  }
  const bool is_fp8 =
      query.format == StorageFormat::kFp8Block || query.format == StorageFormat::kFp8Tensor;
  query.activation_scheme = is_fp8 ? ActivationScheme::kDynamic : ActivationScheme::kNone;
}

/// A plain gated SwiGLU layer: what most models have.
ExpertsQuery usual_query(Device device) {
  ExpertsQuery query;
  query.config.num_experts = 64;
  query.config.hidden_size = 2048;
  query.config.intermediate_size = 1024;
  query.config.top_k = 8;
  query.device = device;
  return query;
}

template <typename T>
void add_once(std::vector<T>& list, T item) {
  for (const T& known : list) {
    if (known == item) return;
  }
  list.push_back(item);
}

Answer ask_in_general(const BackendEntry& entry, const CommonOptions& common) {
  Answer answer;
  answer.name = entry.name;
  answer.device = Device{entry.device, 0};
  ExpertsQuery query = usual_query(answer.device);
  query.compute_dtype = common.load.dtype.value_or(query.compute_dtype);
  const Support usual = supports(entry.name, query);
  for (const StorageFormat format : kFormats) {
    for (const DType dtype : kComputeDTypes) {
      if (dtype != common.load.dtype.value_or(dtype)) continue;
      query.format = format;
      query.compute_dtype = dtype;
      set_usual_scales(query);
      if (!supports(entry.name, query)) continue;
      add_once(answer.formats, format);
      add_once(answer.dtypes, dtype);
    }
  }
  if (answer.formats.empty()) answer.reasons = usual.reasons;
  return answer;
}

std::vector<Answer> answers_in_general(const CommonOptions& common) {
  std::vector<Answer> answers;
  for (const BackendEntry& entry : list_backends()) {
    answers.push_back(ask_in_general(entry, common));
  }
  return answers;
}

std::vector<Answer> answers_for(const ModelReport& report) {
  std::vector<Answer> answers;
  for (const auto& [sub_config, model_query] : report.experts) {
    for (const BackendEntry& entry : list_backends()) {
      ExpertsQuery query = model_query;
      if (query.device.type != entry.device) query.device = Device{entry.device, 0};
      Answer answer{sub_config, entry.name, query.device,
                    {},         {},         supports(entry.name, query).reasons};
      if (answer.runs()) {
        answer.formats = {query.format};
        answer.dtypes = {query.compute_dtype};
      }
      answers.push_back(std::move(answer));
    }
  }
  return answers;
}

/// Only the rows that --device and --experts ask for.
void select(std::vector<Answer>& answers, const CommonOptions& common, bool device_given) {
  std::erase_if(answers, [&](const Answer& answer) {
    if (device_given && answer.device.type != common.load.device.type) return true;
    if (common.experts.empty()) return false;
    auto entry = common.experts.find(answer.sub_config);
    if (entry == common.experts.end()) entry = common.experts.find("");
    return entry != common.experts.end() && entry->second != answer.name;
  });
}

/// Without a model there is nothing that these could apply to.
void refuse_without_model(const CommonOptions& common) {
  if (!common.load.revision.empty()) {
    throw InvalidArgument(str_cat("--revision ", common.load.revision,
                                  ": expected a MODEL that it is the revision of, got none"));
  }
  for (const auto& entry : common.experts) {
    if (entry.first.empty()) continue;
    throw InvalidArgument(str_cat("--experts: sub-config \"", entry.first,
                                  "\": expected a MODEL that has it, got none; add a MODEL"));
  }
}

template <typename T>
std::vector<std::string> names_of(const std::vector<T>& items) {
  std::vector<std::string> names;
  for (const T& item : items) names.emplace_back(name_of(item));
  return names;
}

std::string capability_of(const DeviceProperties& properties) {
  return str_cat(properties.major, ".", properties.minor);
}

/// The runtime of GPUs, null with the reason when none can be used.
DeviceRuntime* find_gpus(std::string& why_none) {
  DeviceRuntime* runtime = find_device_runtime(DeviceType::kCuda);
  why_none = runtime == nullptr ? "this build has no CUDA backends" : runtime->why_none();
  return runtime != nullptr && runtime->device_count() > 0 ? runtime : nullptr;
}

void add_gpus(Json& json) {
  std::string why_none;
  DeviceRuntime* runtime = find_gpus(why_none);
  json["gpus"] = Json::array();
  if (runtime == nullptr) {
    json["why_no_gpu"] = why_none;
    return;
  }
  for (int i = 0; i < runtime->device_count(); ++i) {
    const DeviceProperties properties = runtime->properties(i);
    const DeviceMemory memory = runtime->memory(i);
    json["gpus"].push_back({{"device", to_string(Device{DeviceType::kCuda, i})},
                            {"name", properties.name},
                            {"compute_capability", capability_of(properties)},
                            {"multiprocessors", properties.num_multiprocessors},
                            {"free_bytes", memory.free_bytes},
                            {"total_bytes", memory.total_bytes},
                            {"kernels", runtime->kernels(i)}});
  }
  json["gpu_products"] = runtime->products();
}

/// A line for each GPU, or one that says why there is none.
std::string describe_gpus() {
  std::string why_none;
  DeviceRuntime* runtime = find_gpus(why_none);
  if (runtime == nullptr) return str_cat("GPU: none (", why_none, ")\n");
  std::string text;
  for (int i = 0; i < runtime->device_count(); ++i) {
    const DeviceProperties properties = runtime->properties(i);
    const DeviceMemory memory = runtime->memory(i);
    const std::string kernels = runtime->kernels(i);
    text += str_cat(to_string(Device{DeviceType::kCuda, i}), ": ", properties.name,
                    ", compute capability ", capability_of(properties), ", ",
                    format_bytes(memory.free_bytes), " of ", format_bytes(memory.total_bytes),
                    " free, ",
                    kernels.empty() ? "no kernels (they need compute capability 8.0)"
                                    : str_cat(kernels, " kernels"),
                    "\n");
  }
  return str_cat(text, "GPU products: ", runtime->products(), "\n");
}

Json to_json(const std::vector<Answer>& answers, const ModelReport* report) {
  Json json = {{"cpu_isa", cpu_instruction_set()}};
  add_gpus(json);
  if (report != nullptr) {
    json["model"] = {{"path", report->info.path}, {"architecture", report->info.architecture}};
  }
  json["backends"] = Json::array();
  for (const Answer& answer : answers) {
    Json row = {{"name", answer.name},
                {"device", name_of(answer.device.type)},
                {"runs", answer.runs()},
                {"formats", names_of(answer.formats)},
                {"dtypes", names_of(answer.dtypes)},
                {"reasons", answer.reasons}};
    if (report != nullptr) row["sub_config"] = answer.sub_config;
    json["backends"].push_back(std::move(row));
  }
  return json;
}

std::string to_text(const std::vector<Answer>& answers, const ModelReport* report) {
  std::vector<std::string> header = {"backend", "device",      "runs",
                                     "formats", "computes in", "why not"};
  const bool has_sub_configs = report != nullptr && report->experts.size() > 1;
  if (has_sub_configs) header.insert(header.begin(), "sub-config");
  Table table(header);
  for (const Answer& answer : answers) {
    std::vector<std::string> row = {answer.name,
                                    std::string(name_of(answer.device.type)),
                                    answer.runs() ? "yes" : "no",
                                    join(names_of(answer.formats)),
                                    join(names_of(answer.dtypes)),
                                    join(answer.reasons, "; ")};
    if (has_sub_configs)
      row.insert(row.begin(), answer.sub_config.empty() ? "-" : answer.sub_config);
    table.add_row(std::move(row));
  }
  const std::string text =
      str_cat("CPU instruction set: ", cpu_instruction_set(), " (CADRE_CPU_ISA chooses another)\n",
              describe_gpus(), "\n", table.to_string());
  if (report == nullptr) return text;
  return str_cat(report->info.architecture, " in ", report->info.path, "\n", text);
}

int run_command(const CommonOptions& common, bool device_given) {
  // Without a model the answer is about the machine, not about the bundled model.
  std::optional<ModelReport> report;
  if (common.model.empty()) {
    refuse_without_model(common);
  } else {
    report = inspect_model(model_path(common), load_options(common));
    require_known_sub_configs(chosen_experts(common), report->info);
  }
  std::vector<Answer> answers = report ? answers_for(*report) : answers_in_general(common);
  select(answers, common, device_given);
  const ModelReport* model = report ? &*report : nullptr;
  if (common.json) {
    write_json(to_json(answers, model));
  } else {
    write_stdout(to_text(answers, model));
  }
  return kExitDone;
}

}  // namespace

void add_backends(CLI::App& app, CommonOptions& common, Runner& run) {
  auto model = std::make_shared<std::string>();
  CLI::App* command =
      app.add_subcommand("backends", "List the experts backends: what runs, and why not");
  command->footer(
      "Without a MODEL: for a plain gated layer in every format. With one: for its experts, by "
      "sub-config; no weights are read. --device and --experts show only the rows they name. "
      "Environment: CADRE_CPU_ISA names the CPU's instruction set (portable, avx2, avx512, "
      "avx512_bf16 or amx), CADRE_CUBLASLT the cuBLASLt library that products on a GPU run on (a "
      "file, or off).\n"
      "Example: cadre backends Qwen/Qwen1.5-MoE-A2.7B");
  add_model_argument(*command, *model);
  add_common_options(*command, common);
  hide_options(*command, {"--threads", "--prepack", "--dequantize", "--seed", "--decode-experts",
                          "--no-graph"});
  command->callback([&run, &common, model, command] {
    run = [&common, model, command] {
      return run_command(with_model(common, *model), command->count("--device") > 0);
    };
  });
}

}  // namespace cadre::cli
