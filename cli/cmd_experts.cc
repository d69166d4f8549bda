// cadre experts: one experts forward from a file, to develop and check a backend.
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "cadre/thread_pool.h"
#include "commands.h"
#include "convert.h"
#include "core/device_runtime.h"
#include "exit_codes.h"
#include "experts/device_experts.h"
#include "experts_case.h"
#include "interrupt.h"
#include "io/safetensors.h"
#include "output.h"

namespace cadre::cli {

namespace {

struct ExpertsOptions {
  std::string file;
  std::string out;
};

std::string chosen_backend(const CommonOptions& common) {
  const ExpertsImplementation map = chosen_experts(common);
  if (map.size() == 1 && map.begin()->first.empty()) return map.begin()->second;
  throw InvalidArgument(str_cat("--experts: expected the NAME of one backend (",
                                join(backend_names()), "), got ",
                                map.empty() ? "nothing" : "a map of sub-configs"));
}

std::vector<std::string> runnable_backends(const ExpertsQuery& query) {
  std::vector<std::string> names;
  for (const std::string& name : backend_names()) {
    if (supports(name, query)) names.push_back(name);
  }
  return names;
}

Tensor run_backend(const ExpertsCase& input, const std::string& name, const ExpertsQuery& query,
                   int num_threads) {
  ExpertsBackend& backend = find_backend(name, query.device.type);
  const Support support = backend.supports(query);
  if (!support) {
    const std::vector<std::string> others = runnable_backends(query);
    throw Unsupported(str_cat("--experts ", name, ": cannot run this case on ",
                              to_string(query.device), ": ", to_string(support),
                              "; backends that can: ", others.empty() ? "none" : join(others)));
  }
  const Tensor hidden = to_dtype(input.hidden_states, query.compute_dtype);
  const Tensor weights = to_dtype(input.top_k_weights, DType::kF32);
  std::vector<int64_t> ids;
  append_integers(input.top_k_index, ids);
  ThreadPool pool(num_threads);
  const OwnedStream owned(query.device, pool);
  const Stream& stream = owned.get();
  const Tensor x = to_device_of(stream, hidden.view());
  const Tensor index = to_device_of(stream, {ids.data(), DType::kI64, input.top_k_index.shape()});
  const Tensor factors = to_device_of(stream, weights.view());
  const Tensor output(DType::kF32, hidden->shape(), query.device);
  Workspace workspace(query.device,
                      backend.workspace_bytes(query, hidden->dim(0), pool.num_threads()));
  const auto prepared = backend.prepare(query, copy_to_device(query, input.weights, stream));
  backend.forward(*prepared, {x.view(), index.view(), factors.view(), output}, workspace, stream);
  Tensor result = to_host(stream, output.view());
  synchronize(stream);
  return result;
}

/// |out - expected| / |expected|; empty when the case holds no output, 0 for two empty ones.
std::optional<double> relative_error(const Tensor& out, const TensorView& expected) {
  if (!expected) return std::nullopt;
  std::vector<float> truth;
  append_floats(expected, truth);
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    const double delta = static_cast<double>(out->as<float>()[i]) - static_cast<double>(truth[i]);
    difference += delta * delta;
    norm += static_cast<double>(truth[i]) * static_cast<double>(truth[i]);
  }
  return difference == 0 ? 0 : std::sqrt(difference / norm);
}

void refuse_model(const CommonOptions& common) {
  if (common.model.empty() && common.load.revision.empty()) return;
  throw InvalidArgument(str_cat(
      common.model.empty() ? "--revision " + common.load.revision : "--model " + common.model,
      ": expected no model, the CASE file holds all that runs; leave it out"));
}

int run_command(const ExpertsOptions& options, const CommonOptions& common) {
  refuse_model(common);
  const std::string name = chosen_backend(common);
  require_writable(options.out);
  require_distinct(options.out, options.file);
  const ExpertsCase input = read_experts_case(options.file);
  ExpertsQuery query;
  query.config = input.config;
  query.device = common.load.device;
  query.compute_dtype = common.load.dtype.value_or(DType::kF32);
  query.format =
      query.device.type == DeviceType::kCpu ? input.format : *plain_format(query.compute_dtype);
  query.scale_layout = input.weights->scale_layout;
  const Tensor output = run_backend(input, name, query, common.load.num_threads);
  {
    const InterruptGuard guard;
    const NamedTensor tensor{"output", output};
    write_safetensors(options.out, {&tensor, 1});
  }
  const std::optional<double> error = relative_error(output, input.expected_output);
  if (common.json) {
    write_json(Json{{"backend", name},
                    {"device", to_string(query.device)},
                    {"dtype", name_of(query.compute_dtype)},
                    {"format", name_of(query.format)},
                    {"num_tokens", output->dim(0)},
                    {"relative_error", error ? Json(*error) : Json()}});
  } else if (error) {
    write_stdout(str_cat("relative error against the case's own output: ", *error, "\n"));
  }
  return interrupt_signal() != 0 ? kExitSignal + interrupt_signal() : kExitDone;
}

}  // namespace

void add_experts(CLI::App& app, CommonOptions& common, Runner& run) {
  auto options = std::make_shared<ExpertsOptions>();
  CLI::App* command = app.add_subcommand("experts", "Run one experts forward from a file");
  command->footer(
      "Needs --experts NAME; --dtype auto means float32 here. When the case holds an output, "
      "prints "
      "how far the result lies from it.\n"
      "Example: cadre experts case.safetensors --experts eager --out out.safetensors");
  add_text(*command, "CASE", options->file, "FILE",
           "A safetensors file: hidden_states, top_k_index, top_k_weights, weights and biases, "
           "with the experts' configuration as header metadata")
      ->required();
  add_text(*command, "--out", options->out, "FILE",
           "Write output (T, H) f32 to this safetensors file")
      ->required();
  add_common_options(*command, common);
  hide_options(*command, {"--model", "--revision", "--prepack", "--dequantize", "--seed",
                          "--decode-experts", "--no-graph"});
  command->callback([&run, &common, options] {
    run = [&common, options] { return run_command(*options, common); };
  });
}

}  // namespace cadre::cli
