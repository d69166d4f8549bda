// cadre bench experts: one experts layer on each backend, beside the machine's ceilings. A call is
// checked against the reference before it is timed.
#include <nlohmann/json.hpp>
#include <span>

#include "commands.h"
#include "exit_codes.h"
#include "interrupt.h"
#include "io/file_writer.h"
#include "output.h"
#include "paged_memory.h"
#include "shape_bench.h"
#include "shapes.h"
#include "table.h"
#include "weight_formats.h"

namespace cadre::cli {

namespace {

struct CommandOptions {
  BenchOptions bench;
  std::vector<NamedShape> shapes;
  std::vector<int64_t> tokens = {1, 4, 32, 256, 1024};
  std::vector<std::string> experts = {"grouped_mm"};
  WeightFormat format = find_weight_format("bf16");
  std::optional<ActivationScheme> activations;  // default: the format's
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
  query.format = options.format.storage;
  query.scale_layout = options.format.scales;
  query.activation_scheme = options.activations.value_or(options.format.activations);
  query.compute_dtype = common.load.dtype.value_or(default_dtype(options.format.storage));
  return query;
}

void check_options(const CommandOptions& options, const CommonOptions& common) {
  require_writable(options.report, "--report");
  require_device(common.load.device);
  if (options.activations == ActivationScheme::kDynamic && !is_quantized(options.format.storage)) {
    throw InvalidArgument(
        str_cat("--activations dynamic: rounds activations for quantised weights, ", "--format ",
                options.format.name, " is not; choose fp8 or fp4"));
  }
  if (options.graph && common.load.device.type == DeviceType::kCpu) {
    throw Unsupported("--graph: graphs exist on GPUs only, this is the CPU; leave out --graph");
  }
}

/// The backends asked for; "all" leaves out those that cannot run, a name that cannot is an error.
std::vector<std::string> backends_for(const ExpertsQuery& query, const WeightFormat& format,
                                      const std::vector<std::string>& names) {
  std::vector<std::string> runnable;
  for (const std::string& name : backend_names()) {
    if (supports(name, query)) runnable.push_back(name);
  }
  if (names.empty() && runnable.empty()) {
    std::string reasons;
    for (const std::string& name : backend_names()) {
      reasons += str_cat("\n  ", name, ": ", to_string(supports(name, query)));
    }
    throw Unsupported(str_cat("--experts all: expected one that can run ", format.name,
                              " weights here, there is none:", reasons));
  }
  if (names.empty()) return runnable;
  for (const std::string& name : names) {
    const Support support = supports(name, query);
    if (!support) {
      throw Unsupported(str_cat(
          "--experts ", name, ": cannot run ", format.name, " weights here: ", to_string(support),
          "; backends that can: ", runnable.empty() ? "none" : join(runnable)));
    }
  }
  return names;
}

/// The dtype of plain weights, else the name that --format took.
std::string row_name(const WeightFormat& format) {
  const std::optional<DType> plain = plain_dtype(format.storage);
  return std::string(plain ? name_of(*plain) : format.name);
}

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
      {"format", row.format},
      {"activations", name_of(row.activations)},
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
    const ExpertsQuery query = query_of(shape, options, common);
    const std::vector<std::string> backends = backends_for(query, options.format, options.experts);
    ShapeBench bench({shape.name, row_name(options.format), query, options.bench, options.routing,
                      options.graph, common.load.prepack == Prepack::kOn, common.seed},
                     pool, progress);
    for (const int64_t tokens : options.tokens) {
      for (const std::string& name : backends) {
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
      command, "--format", weight_format_names(),
      [&options](const std::string& text) { options.format = find_weight_format(text); },
      "How weights are stored: fp8 and fp8-ue8m0 in blocks of 128 x 128 with float32 or "
      "power-of-two "
      "scales, fp8-tensor with one scale a matrix, mxfp8 and fp4 with one per 32 of K");
  add_choice(
      command, "--activations", {"auto", "none", "dynamic"},
      [&options](const std::string& text) {
        if (text == "none") options.activations = ActivationScheme::kNone;
        if (text == "dynamic") options.activations = ActivationScheme::kDynamic;
      },
      "Rounding of activations before products with quantised weights. auto: as the format asks "
      "for, e4m3 with fp8, none with mxfp8 and fp4");
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
