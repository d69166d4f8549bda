// cadre bench experts: one experts layer on each backend, beside the machine's ceilings. A call is
// checked against the reference before it is timed.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>

#include "bench_layers.h"
#include "bench_options.h"
#include "commands.h"
#include "core/device_runtime.h"
#include "exit_codes.h"
#include "interrupt.h"
#include "io/file_writer.h"
#include "machine.h"
#include "output.h"
#include "paged_memory.h"
#include "progress.h"
#include "report.h"
#include "shapes.h"
#include "table.h"

namespace cadre::cli {

namespace {

constexpr int64_t kSampledTokens = 4;  // that the slow reference checks
constexpr int64_t kCallsTogether = 8;  // on a GPU

/// The stated bound is one of norms over many numbers; those over few scatter.
double bound_of_sample(const ExpertsQuery& query, int64_t tokens) {
  const int64_t numbers = std::min(tokens, kSampledTokens) * query.config.hidden_size;
  return stated_bound(query.compute_dtype, query.format) *
         std::max(1.0, 32 / std::sqrt(static_cast<double>(numbers)));
}

struct CommandOptions {
  BenchOptions bench;
  std::vector<NamedShape> shapes;
  std::vector<int64_t> tokens = {1, 4, 32, 256, 1024};
  std::vector<std::string> experts = {"grouped_mm"};
  StorageFormat format = StorageFormat::kBF16;
  Routing routing = Routing::kUniform;
  bool graph = false;
  std::string report;
};

DType default_dtype(StorageFormat format) {
  if (format == StorageFormat::kF32) return DType::kF32;
  return format == StorageFormat::kF16 ? DType::kF16 : DType::kBF16;
}

ExpertsQuery query_of(const NamedShape& shape, const CommandOptions& options,
                      const CommonOptions& common) {
  ExpertsQuery query;
  query.config = shape.config;
  query.device = common.load.device;
  query.format = options.format;
  query.compute_dtype = common.load.dtype.value_or(default_dtype(options.format));
  return query;
}

void check_options(const CommandOptions& options, const CommonOptions& common) {
  require_writable(options.report, "--report");
  require_device(common.load.device);
  if (is_quantized(options.format)) {
    throw Unsupported(str_cat("--format ", options.format,
                              ": quantised experts are not part of this build yet; use bf16, f32 "
                              "or fp16"));
  }
  if (options.graph && common.load.device.type == DeviceType::kCpu) {
    throw Unsupported("--graph: graphs exist on GPUs only, this is the CPU; leave out --graph");
  }
}

/// The backends asked for; "all" leaves out those that cannot run, a name that cannot is an error.
std::vector<std::string> backends_for(const ExpertsQuery& query,
                                      const std::vector<std::string>& names) {
  std::vector<std::string> runnable;
  for (const std::string& name : backend_names()) {
    if (supports(name, query)) runnable.push_back(name);
  }
  if (names.empty()) return runnable;
  for (const std::string& name : names) {
    const Support support = supports(name, query);
    if (!support) {
      throw Unsupported(str_cat("--experts ", name, ": cannot run here: ", to_string(support),
                                "; backends that can: ", join(runnable)));
    }
  }
  return names;
}

/// One shape: its layers, and what all its rows share.
class ShapeBench {
 public:
  ShapeBench(const NamedShape& shape, const CommandOptions& options, const CommonOptions& common,
             ThreadPool& pool, Progress& progress)
      : shape_(shape),
        options_(options),
        query_(query_of(shape, options, common)),
        backends_(backends_for(query_, options.experts)),
        seed_(common.seed),
        pool_(pool),
        owned_stream_(query_.device, pool),
        stream_(owned_stream_.get()),
        packed_(common.load.prepack == Prepack::kOn),
        layers_(make_layers(progress)),
        meter_(query_.compute_dtype, options.bench.memory_bytes(), pages_of_weights(), stream_) {}

  const std::vector<std::string>& backends() const { return backends_; }

  /// Throws Error when the backend's result is out of its bound. Empty after Ctrl-C.
  std::optional<ExpertsRow> measure(const std::string& name, int64_t tokens, Progress& progress) {
    const CurrentDevice current(query_.device);
    Subject subject(query_.device);
    prepare(subject, name, tokens);
    ExpertsRow row = new_row(name, tokens);
    run_call(subject, 0, 0);  // also the warm-up
    check(subject, row);
    if (options_.graph) {
      record(subject, name);
      check(subject, row);
    }
    std::vector<TimedCall> timed_calls;
    std::vector<double> active;
    CeilingSample before = meter_.sample();
    for (int64_t i = 1; i <= options_.bench.repeats; ++i) {
      progress.update(str_cat(shape_.name, ", ", tokens, " tokens, ", name), i - 1,
                      options_.bench.repeats);
      TimedCall timed = on_cpu() ? time_one(subject, i) : time_all(subject);
      timed.work = work_of(tokens, subject.active);
      timed.before = before;
      timed.after = before = meter_.sample();
      timed_calls.push_back(timed);
      active.push_back(subject.active);
      if (interrupt_signal() != 0) return std::nullopt;
    }
    row.calls = summarize(timed_calls);
    row.active_experts = std::llround(median(std::move(active)));
    return row;
  }

 private:
  /// A backend with everything that its calls take.
  struct Subject {
    explicit Subject(Device device) : workspace(device) {}

    ExpertsBackend* backend = nullptr;
    std::vector<std::unique_ptr<PreparedExperts>> layers;
    Workspace workspace;
    std::vector<std::unique_ptr<BenchCall>> calls;  // with routings of their own
    double active = 0;                              // experts hit, mean over what is timed
    std::unique_ptr<DeviceGraph> graph;             // of all calls
  };

  void prepare(Subject& subject, const std::string& name, int64_t tokens) {
    ExpertsBackend& backend = find_backend(name, query_.device.type);
    subject.backend = &backend;
    subject.workspace.reserve(backend.workspace_bytes(query_, tokens, pool_.num_threads()));
    for (const auto& layer : layers_) subject.layers.push_back(backend.prepare(query_, layer));
    for (int64_t i = 0; i < calls_together(); ++i) {
      subject.calls.push_back(std::make_unique<BenchCall>(
          query_.config, query_.compute_dtype, tokens, seed_ + static_cast<uint64_t>(i), stream_));
      subject.active += static_cast<double>(subject.calls.back()->route(options_.routing));
    }
    subject.active /= static_cast<double>(subject.calls.size());
  }

  void run_call(Subject& subject, size_t call, size_t layer) {
    subject.backend->forward(*subject.layers[layer % subject.layers.size()],
                             subject.calls[call]->tokens(), subject.workspace, stream_);
  }

  void run_all(Subject& subject) {
    for (size_t call = 0; call < subject.calls.size(); ++call) run_call(subject, call, call);
  }

  /// Of the first call, which runs on the first layer.
  void check(const Subject& subject, ExpertsRow& row) const {
    const double error = subject.calls[0]->error_of_sample(*layers_[0], kSampledTokens);
    row.rel_error = std::isnan(error) ? error : std::max(row.rel_error, error);
    require_within_bound(row);
  }

  void record(Subject& subject, const std::string& name) {
    if (!subject.backend->can_be_captured()) {
      throw Unsupported(str_cat("--graph: ", name, " reads the routing on the host and cannot be ",
                                "recorded; leave out --graph or ", name));
    }
    subject.graph = device_runtime(query_.device).capture(stream_, [&] { run_all(subject); });
    subject.graph->launch(stream_);
    synchronize(stream_);
  }

  TimedCall time_one(Subject& subject, int64_t round) {
    subject.active = static_cast<double>(subject.calls[0]->route(options_.routing));
    const auto start = std::chrono::steady_clock::now();
    run_call(subject, 0, static_cast<size_t>(round));
    TimedCall timed;
    timed.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return timed;
  }

  TimedCall time_all(Subject& subject) {
    const double seconds = device_runtime(query_.device).time(stream_, [&] {
      subject.graph ? subject.graph->launch(stream_) : run_all(subject);
    });
    TimedCall timed;
    timed.seconds = seconds / static_cast<double>(subject.calls.size());
    return timed;
  }

  bool on_cpu() const { return query_.device.type == DeviceType::kCpu; }

  std::vector<std::shared_ptr<const ExpertsWeights>> make_layers(Progress& progress) const {
    const size_t ceilings = options_.bench.memory_bytes();
    const int64_t count = num_layers(query_, ceilings, options_.bench.repeats + 1);
    const size_t copies =
        packed_ ? prepacked_bytes(query_.config, query_.format) * static_cast<size_t>(count) : 0;
    const auto layers =
        cli::make_layers(query_, count, ceilings + copies, seed_, stream_, progress.callback());
    return packed_ ? pack_layers(query_.config, layers, pool_, progress.callback()) : layers;
  }

  /// Calls that are timed together: on a GPU as many as take turns over the layers with routings of
  /// their own, so that nothing is left in the cache from one to the next.
  int64_t calls_together() const {
    if (on_cpu()) return 1;
    return std::max<int64_t>(kCallsTogether, static_cast<int64_t>(layers_.size()));
  }

  /// Packed weights ask for huge pages, as the meter then does.
  size_t pages_of_weights() const {
    if (!on_cpu()) return 0;
    if (packed_ && huge_page_bytes() > 0) return huge_page_bytes();
    return page_bytes_of(layers_[0]->up[0].data);
  }

  ExpertsRow new_row(const std::string& name, int64_t tokens) const {
    ExpertsRow row;
    row.shape = shape_.name;
    row.config = query_.config;
    row.tokens = tokens;
    row.experts = name;
    row.device = query_.device;
    row.dtype = query_.compute_dtype;
    row.format = query_.format;
    row.packed = packed_;
    row.pages = meter_.page_bytes();
    row.graph = options_.graph;
    row.routing = name_of(options_.routing);
    row.bound = bound_of_sample(query_, tokens);
    return row;
  }

  static void require_within_bound(const ExpertsRow& row) {
    if (row.rel_error <= row.bound) return;  // false for NaN
    throw Error(str_cat(row.experts, " on ", row.shape, " with ", row.tokens,
                        " tokens: expected a relative error of at most ", row.bound,
                        " against the float64 reference, got ", row.rel_error,
                        "; it is not timed. This is a fault of the backend: please report it"));
  }

  Work work_of(int64_t tokens, double active) const {
    const ExpertsConfig& c = query_.config;
    return {active * static_cast<double>(expert_bytes(c, query_.format)),
            6.0 * static_cast<double>(tokens * c.top_k) *
                static_cast<double>(c.hidden_size * c.intermediate_size)};
  }

  const NamedShape& shape_;
  const CommandOptions& options_;
  ExpertsQuery query_;
  std::vector<std::string> backends_;
  uint64_t seed_;
  ThreadPool& pool_;
  OwnedStream owned_stream_;
  Stream stream_;
  bool packed_;
  std::vector<std::shared_ptr<const ExpertsWeights>> layers_;
  CeilingMeter meter_;
};

Json to_json(const ExpertsRow& row, const Machine& machine) {
  const CallStatistics& calls = row.calls;
  Json json = {
      {"bench", "experts"},
      {"shape", row.shape},
      {"num_experts", row.config.num_experts},
      {"top_k", row.config.top_k},
      {"hidden_size", row.config.hidden_size},
      {"intermediate_size", row.config.intermediate_size},
      {"tokens", row.tokens},
      {"experts", row.experts},
      {"device", to_string(row.device)},
      {"dtype", name_of(row.dtype)},
      {"format", name_of(row.format)},
      {"packed", row.packed},
      {"pages", row.pages},
      {"graph", row.graph},
      {"routing", row.routing},
      {"us_median", calls.median_seconds * 1e6},
      {"us_mad", calls.deviation_seconds * 1e6},
      {"tflops", calls.flops / 1e12},
      {"gbs", calls.bytes_per_second / 1e9},
      {"percent_of_limit", calls.percent_of_limit ? Json(*calls.percent_of_limit) : Json()},
      {"active_experts", row.active_experts},
      {"rel_error", row.rel_error},
      {"bound", row.bound},
      {"calls", calls.num_calls},
      {"calls_dropped", calls.num_dropped},
      {"ceiling_gbs", calls.ceilings.bytes_per_second / 1e9},
      {"ceiling_tflops", calls.ceilings.flops / 1e12}};
  add_machine(json, machine);
  return json;
}

std::string to_text(const std::vector<ExpertsRow>& rows) {
  Table table({"shape", "tokens", "experts", "dtype/format", "us", "+-", "TFLOP/s", "GB/s",
               "% of limit", "active", "rel. error", "dropped", "pages", "read GB/s",
               "peak TFLOP/s"});
  for (size_t column = 4; column < 15; ++column) table.right_align(column);
  table.right_align(1);
  for (const ExpertsRow& row : rows) {
    const CallStatistics& calls = row.calls;
    table.add_row({row.shape, str_cat(row.tokens), row.experts,
                   str_cat(row.dtype, "/", row.format, row.packed ? " packed" : ""),
                   format_number("%.1f", calls.median_seconds * 1e6),
                   format_number("%.1f", calls.deviation_seconds * 1e6),
                   format_number("%.3f", calls.flops / 1e12),
                   format_number("%.1f", calls.bytes_per_second / 1e9),
                   format_number("%.1f", calls.percent_of_limit), str_cat(row.active_experts),
                   format_number("%.1e", row.rel_error),
                   str_cat(calls.num_dropped, "/", calls.num_calls),
                   row.pages > 0 ? name_of_pages(row.pages) : "-",
                   format_number("%.1f", calls.ceilings.bytes_per_second / 1e9),
                   format_number("%.3f", calls.ceilings.flops / 1e12)});
  }
  return table.to_string();
}

void write_report(const std::string& path, const std::string& page) {
  FileWriter writer(path, page.size());
  writer.write(std::as_bytes(std::span(page)));
  writer.commit();
}

int run_command(const CommandOptions& options, const CommonOptions& common) {
  check_options(options, common);
  ThreadPool pool(common.load.num_threads);
  const Machine machine = describe_machine(common.load.device.type, pool.num_threads());
  Progress progress(ProgressTerminal::standard_error(common.quiet), "calls");
  std::vector<ExpertsRow> rows;
  const InterruptGuard guard;
  for (const NamedShape& shape : options.shapes) {
    ShapeBench bench(shape, options, common, pool, progress);
    for (const int64_t tokens : options.tokens) {
      for (const std::string& name : bench.backends()) {
        if (interrupt_signal() != 0) break;
        const std::optional<ExpertsRow> row = bench.measure(name, tokens, progress);
        if (!row) break;
        rows.push_back(*row);
        if (common.json && !write_json(to_json(*row, machine))) return kExitDone;
      }
    }
  }
  progress.clear();
  if (!common.json) write_stdout(str_cat(to_string(machine), "\n\n", to_text(rows)));
  if (!options.report.empty()) write_report(options.report, report_page(machine, rows));
  return interrupt_signal() != 0 ? kExitSignal + interrupt_signal() : kExitDone;
}

StorageFormat parse_format(const std::string& text) {
  for (const auto& [name, format] :
       {std::pair{"bf16", StorageFormat::kBF16}, std::pair{"f32", StorageFormat::kF32},
        std::pair{"fp16", StorageFormat::kF16}, std::pair{"fp8", StorageFormat::kFp8Block},
        std::pair{"mxfp8", StorageFormat::kMxFp8}}) {
    if (text == name) return format;
  }
  return StorageFormat::kFp4;
}

void add_own_options(CLI::App& command, CommandOptions& options) {
  command
      .add_option_function<std::vector<std::string>>(
          "--shape",
          [&options](const std::vector<std::string>& texts) {
            options.shapes.clear();
            for (const std::string& text : texts) {
              options.shapes.push_back(parse_shape("--shape", text));
            }
          },
          "A model's experts, by name, or E,k,H,I: experts, experts per token, hidden size, "
          "intermediate size. May be given several times")
      ->type_name("NAME|E,k,H,I")
      ->default_str(options.shapes.front().name)
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  add_numbers(command, "--tokens", options.tokens, 1, int64_t{1} << 24, "Tokens of a call");
  add_backends_option(command, options.experts);
  add_choice(
      command, "--format", {"bf16", "f32", "fp16", "fp8", "mxfp8", "fp4"},
      [&options](const std::string& text) { options.format = parse_format(text); },
      "How weights are stored");
  add_choice(
      command, "--routing", {"uniform", "skewed", "one"},
      [&options](const std::string& text) {
        options.routing = text == "uniform"  ? Routing::kUniform
                          : text == "skewed" ? Routing::kSkewed
                                             : Routing::kOne;
      },
      "uniform: all experts equally likely; skewed: expert e like 1/(e+1); one: all tokens of a "
      "call to the same k experts");
  command.add_flag("--graph", options.graph, "GPU: replay a captured graph");
  add_text(command, "--report", options.report, "FILE",
           "Write an HTML page with the table and plots");
  add_bench_options(command, options.bench);
}

}  // namespace

void add_bench_experts(CLI::App& bench, CommonOptions& common, Runner& run) {
  auto options = std::make_shared<CommandOptions>();
  options->shapes = {parse_shape("--shape", "qwen3-30b-a3b")};
  std::vector<std::string> names;
  for (const NamedShape& shape : named_shapes()) names.push_back(shape.name);
  CLI::App* command = bench.add_subcommand("experts", "Time one experts layer on each backend");
  command->footer(str_cat(
      "Random weights of several layers take turns and every call brings another routing, so that "
      "weights come from memory. A backend whose result is out of its bound is not timed: exit 1. "
      "% of limit: reading the experts that were hit, or the products, whichever takes longer at "
      "the ceilings measured before and after each call, over the call's time; the median of the "
      "calls. Reading is measured on pages of the weights' size (pages): huge ones with --prepack "
      "on. Calls whose two limits differ by more than 5 % are dropped and counted. --json "
      "prints one object a row.\n"
      "Shapes: ",
      join(names),
      ".\n"
      "Example: cadre bench experts --experts all --tokens 1,32 --report bench.html"));
  add_own_options(*command, *options);
  add_common_options(*command, common, ExpertsOption::kOwn);
  hide_options(*command, {"--model", "--revision", "--dequantize", "--decode-experts"});
  command->callback([&run, &common, options] {
    run = [&common, options] { return run_command(*options, common); };
  });
}

}  // namespace cadre::cli
