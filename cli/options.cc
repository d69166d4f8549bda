#include "options.h"

#include <CLI/Config.hpp>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "bundled_model.h"
#include "cadre/thread_pool.h"
#include "core/device_runtime.h"
#include "dense/dense_ops.h"
#include "io/json.h"
#include "suggest.h"

namespace cadre::cli {

namespace {

constexpr const char* kExpertsVariable = "CADRE_EXPERTS_IMPLEMENTATION";
constexpr const char* kDeviceVariable = "CADRE_DEVICE";

DType parse_compute_dtype(const std::string& text) {
  const std::optional<DType> dtype = parse_dtype(text);
  constexpr std::string_view kChoices = "auto, float32, bfloat16 or float16";
  if (!dtype)
    throw InvalidArgument(str_cat("--dtype: expected ", kChoices, ", got \"", text, "\""));
  if (!is_compute_dtype(*dtype)) {
    throw Unsupported(str_cat("--dtype: models compute in ", kChoices, ", not in ", *dtype));
  }
  return *dtype;
}

void check_backend(std::string_view source, const std::string& name) {
  const std::vector<std::string> names = backend_names();
  for (const std::string& known : names) {
    if (known == name) return;
  }
  throw InvalidArgument(str_cat(source, ": expected an experts backend (", join(names), "), got \"",
                                name, "\"", did_you_mean(name, names)));
}

ExpertsImplementation parse_experts_map(std::string_view source, std::string_view text) {
  const auto refuse = [&](std::string_view why) {
    throw InvalidArgument(str_cat(source,
                                  ": expected a JSON object of sub-config to backend name, ",
                                  "like {\"\":\"grouped_mm\"}, got ", text, " (", why, ")"));
  };
  ExpertsImplementation map;
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) refuse("malformed");
  for (const auto& [key, value] : json.items()) {
    if (!value.is_string()) refuse(str_cat("\"", key, "\" is not text"));
    map[key] = value.get<std::string>();
  }
  return map;
}

void add_model_options(CLI::App& command, CommonOptions& common) {
  add_text(command, "--model", common.model, "MODEL",
           "A folder in the hub's layout or a hub id in the local cache (default: the bundled "
           "model)");
  add_text(command, "--revision", common.load.revision, "REV",
           "Branch, tag or commit of a hub id (default: refs/main)");
  command
      .add_option_function<std::string>(
          "--device",
          [&common](const std::string& text) {
            common.load.device = parse_device(text);
            common.device_given = true;
          },
          "cpu, cuda or cuda:N (default: $CADRE_DEVICE, else cuda when this build serves a GPU "
          "that is there, else cpu)")
      ->type_name("DEVICE");
  command
      .add_option_function<std::string>(
          "--dtype",
          [&common](const std::string& text) {
            if (text != "auto") common.load.dtype = parse_compute_dtype(text);
          },
          "Compute in auto (the checkpoint's own), float32, bfloat16 or float16")
      ->type_name("DTYPE")
      ->default_str("auto");
}

void add_experts_option(CLI::App& command, CommonOptions& common) {
  command
      .add_option_function<std::string>(
          "--experts",
          [&common](const std::string& text) { common.experts = parse_experts("--experts", text); },
          "Experts backend: a NAME, or JSON of sub-config (\"\": the whole model) to NAME like "
          "'{\"\":\"eager\"}' "
          "(default: $CADRE_EXPERTS_IMPLEMENTATION, else grouped_mm where it runs, else eager)")
      ->type_name("NAME|JSON");
}

void add_run_options(CLI::App& command, CommonOptions& common) {
  add_number(command, "--threads", common.load.num_threads, 0, ThreadPool::kMaxThreads,
             "CPU threads; 0: one per core that may be used");
  add_choice(
      command, "--prepack", {"auto", "on", "off"},
      [&common](const std::string& text) {
        common.load.prepack = text == "on"    ? Prepack::kOn
                              : text == "off" ? Prepack::kOff
                                              : Prepack::kAuto;
      },
      "CPU: on copies the experts' weights when loading, into the order that kernels read fastest "
      "(as much memory as they take; the checkpoint's own need not stay in memory); off reads them "
      "where they lie and starts at once; auto: off for the time being");
  command.add_flag_function(
      "--dequantize",
      [&common](int64_t) { common.load.quantization_config = {.dequantize = true}; },
      "Turn quantised weights (FP8, MXFP8, FP4, MXFP4) into plain ones in the compute dtype while "
      "loading: as much memory as a plain checkpoint; nothing to do for one");
  add_number(command, "--seed", common.seed, uint64_t{0}, std::numeric_limits<uint64_t>::max(),
             "Of everything drawn at random");
  command
      .add_option_function<std::string>(
          "--decode-experts",
          [&common](const std::string& text) {
            DecodeExperts& decode = common.load.decode_experts;
            if (text == "auto") {
              decode.max_tokens = DecodeExperts::kAuto;
            } else if (text == "off") {
              decode.max_tokens = DecodeExperts::kOff;
            } else {
              decode.max_tokens = parse_number<int64_t>("--decode-experts (auto, off or N)", text,
                                                        1, std::numeric_limits<int64_t>::max());
            }
          },
          "GPU: use batched_mm for steps of up to N tokens; auto: N as measured. The CPU keeps its "
          "backend")
      ->type_name("auto|off|N")
      ->default_str("auto");
  command.add_flag("--no-graph", common.no_graph,
                   "GPU: launch kernels one by one. No effect on the CPU");
}

}  // namespace

void add_choice(CLI::App& command, const std::string& name, std::vector<std::string> choices,
                const std::function<void(const std::string&)>& use, const std::string& help) {
  const std::string names = join(choices, "|");
  const std::string first = choices.front();
  command
      .add_option_function<std::string>(
          name,
          [name, choices = std::move(choices), use](const std::string& text) {
            for (const std::string& choice : choices) {
              if (choice == text) return use(text);
            }
            throw InvalidArgument(str_cat(name, ": expected one of ", join(choices), ", got \"",
                                          text, "\"", did_you_mean(text, choices)));
          },
          help)
      ->type_name(names)
      ->default_str(first);
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> items(1);
  for (const char c : text) {
    if (c == ',') {
      items.emplace_back();
    } else {
      items.back() += c;
    }
  }
  return items;
}

void add_numbers(CLI::App& command, const std::string& name, std::vector<int64_t>& values,
                 int64_t min, int64_t max, const std::string& help) {
  command
      .add_option_function<std::string>(
          name,
          [name, &values, min, max](const std::string& text) {
            values.clear();
            for (const std::string& item : split_list(text)) {
              values.push_back(parse_number<int64_t>(name, item, min, max));
            }
          },
          help)
      ->type_name("N,N,...")
      ->default_str(join(values, ","));
}

void add_backends_option(CLI::App& command, std::vector<std::string>& names) {
  command
      .add_option_function<std::string>(
          "--experts",
          [&names](const std::string& text) {
            names.clear();
            if (text == "all") return;
            names = split_list(text);
            for (const std::string& name : names) check_backend("--experts", name);
          },
          "Backends, or all that can run here")
      ->type_name("NAME,NAME,...|all")
      ->default_str(names.empty() ? "all" : join(names, ","));
}

void add_common_options(CLI::App& command, CommonOptions& common, ExpertsOption experts) {
  command.option_defaults()->group("Common options");
  add_model_options(command, common);
  if (experts == ExpertsOption::kCommon) add_experts_option(command, common);
  add_run_options(command, common);
  command.add_flag("--quiet", common.quiet, "No progress bars and notes on standard error");
  command.add_flag("--json", common.json, "One JSON object on standard output and nothing else");
  command.option_defaults()->group("Options");
}

void hide_options(CLI::App& command, const std::vector<std::string>& names) {
  for (const std::string& name : names) command.get_option(name)->group("");
}

namespace {

void require_text(const std::string& name, const std::string& text) {
  if (!text.empty()) return;
  throw InvalidArgument(
      str_cat(name, ": expected a value, got an empty one; is a shell variable unset?"));
}

}  // namespace

CLI::Option* add_text(CLI::App& command, const std::string& name, std::string& value,
                      const std::string& type_name, const std::string& help) {
  return command
      .add_option_function<std::string>(
          name,
          [name, &value](const std::string& text) {
            require_text(name, text);
            value = text;
          },
          help)
      ->type_name(type_name);
}

CLI::Option* add_texts(CLI::App& command, const std::string& name, std::vector<std::string>& values,
                       const std::string& type_name, const std::string& help) {
  return command
      .add_option_function<std::vector<std::string>>(
          name,
          [name, &values](const std::vector<std::string>& texts) {
            for (const std::string& text : texts) require_text(name, text);
            values = texts;
          },
          help)
      ->allow_extra_args(false)
      ->type_name(type_name);
}

void add_model_argument(CLI::App& command, std::string& model) {
  add_text(command, "MODEL", model, "MODEL",
           "A folder in the hub's layout or a hub id, in place of --model");
}

CommonOptions with_model(CommonOptions common, const std::string& argument) {
  if (argument.empty()) return common;
  if (!common.model.empty()) {
    throw InvalidArgument(str_cat("expected one model, got ", argument, " and --model ",
                                  common.model, "; leave out one"));
  }
  common.model = argument;
  return common;
}

ExpertsImplementation parse_experts(std::string_view source, std::string_view text) {
  const ExpertsImplementation map = text.starts_with("{")
                                        ? parse_experts_map(source, text)
                                        : ExpertsImplementation{{"", std::string(text)}};
  for (const auto& [key, name] : map) check_backend(source, name);
  return map;
}

ExpertsImplementation chosen_experts(const CommonOptions& common) {
  if (!common.experts.empty()) return common.experts;
  const char* variable = std::getenv(kExpertsVariable);
  if (variable == nullptr || *variable == '\0') return {};
  return parse_experts(kExpertsVariable, variable);
}

Device default_device() {
  const char* variable = std::getenv(kDeviceVariable);
  if (variable != nullptr && *variable != '\0') {
    try {
      return parse_device(variable);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(str_cat(kDeviceVariable, ": ", error.what()));
    }
  }
  constexpr Device kGpu = {DeviceType::kCuda, 0};
  DeviceRuntime* runtime = find_device_runtime(kGpu.type);
  if (runtime == nullptr || runtime->device_count() == 0) return {};
  return runtime->kernels(kGpu.index).empty() || find_dense_ops(kGpu.type) == nullptr ? Device{}
                                                                                      : kGpu;
}

std::string model_path(const CommonOptions& common) {
  const std::string path = common.model.empty() ? bundled_model_path() : common.model;
  std::error_code ignored;
  if (!common.load.revision.empty() && std::filesystem::is_directory(path, ignored)) {
    throw InvalidArgument(str_cat("--revision ", common.load.revision,
                                  ": expected a hub id as the model, got the folder ", path,
                                  "; a folder has no revisions: leave out --revision"));
  }
  return path;
}

LoadOptions load_options(const CommonOptions& common) {
  LoadOptions options = common.load;
  options.experts_implementation = chosen_experts(common);
  options.graphs = !common.no_graph;
  return options;
}

}  // namespace cadre::cli
