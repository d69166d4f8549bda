// cadre bench ceilings: what the machine reads and multiplies at best, for each number of threads.
#include <nlohmann/json.hpp>

#include "bench_options.h"
#include "cadre/thread_pool.h"
#include "commands.h"
#include "exit_codes.h"
#include "interrupt.h"
#include "machine.h"
#include "output.h"
#include "progress.h"
#include "table.h"

namespace cadre::cli {

namespace {

/// Medians and their deviations, by name of the field.
struct CeilingsRow {
  Machine machine;
  std::vector<double> read;      // bytes per second
  std::vector<double> bfloat16;  // flop per second
  std::vector<double> float32;
};

CeilingsRow measure(const BenchOptions& options, Device device, int num_threads) {
  ThreadPool pool(num_threads);
  Stream stream = Stream::cpu(pool);
  stream.device = device;
  const Ceilings& ceilings = ceilings_of(device.type);
  CeilingMeter meter(DType::kBF16, options.memory_bytes(), stream);
  CeilingsRow row;
  row.machine = describe_machine(device.type, pool.num_threads());
  for (int64_t i = 0; i < options.repeats && interrupt_signal() == 0; ++i) {
    const CeilingSample sample = meter.sample();
    row.read.push_back(sample.bytes_per_second);
    row.bfloat16.push_back(sample.flops);
    row.float32.push_back(ceilings.peak_flops(DType::kF32, stream));
  }
  return row;
}

Json to_json(const CeilingsRow& row) {
  Json json = {{"bench", "ceilings"},
               {"read_gbs", median(row.read) / 1e9},
               {"read_gbs_mad", median_deviation(row.read) / 1e9},
               {"bfloat16_tflops", median(row.bfloat16) / 1e12},
               {"bfloat16_tflops_mad", median_deviation(row.bfloat16) / 1e12},
               {"float32_tflops", median(row.float32) / 1e12},
               {"float32_tflops_mad", median_deviation(row.float32) / 1e12}};
  add_machine(json, row.machine);
  return json;
}

std::string cell(const std::vector<double>& values, double unit, const char* format) {
  return format_number(format, median(values) / unit);
}

std::string spread(const std::vector<double>& values) {
  return format_number("%.1f %%", 100 * median_deviation(values) / median(values));
}

std::string to_text(const std::vector<CeilingsRow>& rows) {
  Table table({"threads", "read GB/s", "+-", "bfloat16 TFLOP/s", "+-", "float32 TFLOP/s", "+-"});
  for (size_t column = 0; column < 7; ++column) table.right_align(column);
  for (const CeilingsRow& row : rows) {
    table.add_row({str_cat(row.machine.num_threads), cell(row.read, 1e9, "%.1f"), spread(row.read),
                   cell(row.bfloat16, 1e12, "%.3f"), spread(row.bfloat16),
                   cell(row.float32, 1e12, "%.3f"), spread(row.float32)});
  }
  return table.to_string();
}

int run_command(const BenchOptions& options, const CommonOptions& common) {
  const Device device = common.load.device;
  ceilings_of(device.type);  // refuses the device before anything is measured
  const int most = common.load.num_threads == 0 ? default_num_threads() : common.load.num_threads;
  Progress progress(ProgressTerminal::standard_error(common.quiet), "thread counts");
  std::vector<CeilingsRow> rows;
  const InterruptGuard guard;
  for (int threads = 1; threads <= most && interrupt_signal() == 0; ++threads) {
    progress.update("measuring", threads - 1, most);
    CeilingsRow row = measure(options, device, threads);
    if (interrupt_signal() != 0) break;
    if (common.json && !write_json(to_json(row))) break;
    rows.push_back(std::move(row));
  }
  progress.clear();
  if (!common.json && !rows.empty()) {
    write_stdout(str_cat(to_string(rows.back().machine), "\n\n", to_text(rows)));
  }
  return interrupt_signal() != 0 ? kExitSignal + interrupt_signal() : kExitDone;
}

}  // namespace

void add_bench_ceilings(CLI::App& bench, CommonOptions& common, Runner& run) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      bench.add_subcommand("ceilings", "What the machine reads and multiplies at best");
  command->footer(
      "One row for each number of threads up to --threads: reading memory, and the products that "
      "bfloat16 and float32 run on with the instruction set in use, operands in registers. +- is "
      "the median deviation.\n"
      "Example: cadre bench ceilings --json");
  add_bench_options(*command, *options);
  add_common_options(*command, common);
  hide_options(*command, {"--model", "--revision", "--dtype", "--experts", "--prepack",
                          "--dequantize", "--seed", "--decode-experts", "--no-graph"});
  command->callback([&run, &common, options] {
    run = [&common, options] { return run_command(*options, common); };
  });
}

}  // namespace cadre::cli
