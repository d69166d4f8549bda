// cadre bench ceilings: what the machine reads and multiplies at best, for each number of threads.
#include <deque>
#include <map>
#include <nlohmann/json.hpp>

#include "bench_options.h"
#include "cadre/thread_pool.h"
#include "commands.h"
#include "exit_codes.h"
#include "interrupt.h"
#include "machine.h"
#include "output.h"
#include "paged_memory.h"
#include "progress.h"
#include "table.h"

namespace cadre::cli {

namespace {

/// Rates, measured again and again.
struct Rates {
  std::vector<double> values;  // per second
  std::string way;             // how memory was read

  double typical() const { return median(values); }
  double spread() const { return median_deviation(values); }
};

struct CeilingsRow {
  Machine machine;
  std::map<size_t, Rates> read;  // bytes, by the size of the pages
  Rates bfloat16;                // flop
  Rates float32;
};

/// The pages to read from; on a GPU they do not matter.
std::vector<size_t> pages_of(Device device) {
  if (device.type != DeviceType::kCpu) return {0};
  if (huge_page_bytes() == 0) return {small_page_bytes()};
  return {small_page_bytes(), huge_page_bytes()};
}

CeilingsRow measure(const BenchOptions& options, Device device, int num_threads) {
  ThreadPool pool(num_threads);
  const Stream stream{device, &pool, nullptr};
  CeilingsRow row;
  row.machine = describe_machine(device.type, pool.num_threads());
  std::deque<CeilingMeter> meters;
  for (const size_t page : pages_of(device)) {
    const CeilingMeter& meter =
        meters.emplace_back(DType::kBF16, options.memory_bytes(), page, stream);
    row.read[meter.page_bytes()].way = meter.way_of_reading();  // once where none are huge
  }
  for (int64_t i = 0; i < options.repeats && interrupt_signal() == 0; ++i) {
    for (CeilingMeter& meter : meters) {
      const CeilingSample sample = meter.sample();
      row.read[meter.page_bytes()].values.push_back(sample.bytes_per_second);
      row.bfloat16.values.push_back(sample.flops);
    }
    row.float32.values.push_back(ceilings_of(device.type).peak_flops(DType::kF32, stream));
  }
  return row;
}

Json to_json(const CeilingsRow& row) {
  Json json = {{"bench", "ceilings"},
               {"bfloat16_tflops", row.bfloat16.typical() / 1e12},
               {"bfloat16_tflops_mad", row.bfloat16.spread() / 1e12},
               {"float32_tflops", row.float32.typical() / 1e12},
               {"float32_tflops_mad", row.float32.spread() / 1e12}};
  json["read"] = Json::array();
  for (const auto& [pages, rates] : row.read) {
    json["read"].push_back({{"pages", pages},
                            {"gbs", rates.typical() / 1e9},
                            {"gbs_mad", rates.spread() / 1e9},
                            {"way", rates.way}});
  }
  add_machine(json, row.machine);
  return json;
}

void add_cells(std::vector<std::string>& cells, const Rates& rates, double unit,
               const char* format) {
  cells.push_back(format_number(format, rates.typical() / unit));
  cells.push_back(format_number("%.1f %%", 100 * rates.spread() / rates.typical()));
}

std::vector<std::string> titles(const CeilingsRow& row) {
  std::vector<std::string> titles = {"threads"};
  for (const auto& [pages, rates] : row.read) {
    titles.push_back(pages == 0 ? "read GB/s"
                                : str_cat("read GB/s, ", name_of_pages(pages), " pages"));
    titles.emplace_back("+-");
  }
  for (const char* title : {"bfloat16 TFLOP/s", "+-", "float32 TFLOP/s", "+-"}) {
    titles.emplace_back(title);
  }
  return titles;
}

std::string to_text(const std::vector<CeilingsRow>& rows) {
  Table table(titles(rows.back()));
  for (size_t column = 0; column < titles(rows.back()).size(); ++column) table.right_align(column);
  std::string ways = "\nHow memory was read:\n";
  for (const CeilingsRow& row : rows) {
    std::vector<std::string> cells = {str_cat(row.machine.num_threads)};
    for (const auto& [pages, rates] : row.read) {
      add_cells(cells, rates, 1e9, "%.1f");
      ways += str_cat("  threads ", row.machine.num_threads, ", ", name_of_pages(pages),
                      " pages: ", rates.way, "\n");
    }
    add_cells(cells, row.bfloat16, 1e12, "%.3f");
    add_cells(cells, row.float32, 1e12, "%.3f");
    table.add_row(cells);
  }
  return table.to_string() + ways;
}

int run_command(const BenchOptions& options, const CommonOptions& common) {
  const Device device = common.load.device;
  require_device(device);
  const int most = common.load.num_threads == 0 ? default_num_threads() : common.load.num_threads;
  Progress progress(ProgressTerminal::standard_error(common.quiet), "thread counts");
  std::vector<CeilingsRow> rows;
  const InterruptGuard guard;
  const int first = device.type == DeviceType::kCpu ? 1 : most;  // a GPU's ceilings have no threads
  for (int threads = first; threads <= most && interrupt_signal() == 0; ++threads) {
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
      "One row for each number of threads up to --threads: reading memory from small and from huge "
      "pages, in the fastest of several ways, and the products that bfloat16 and float32 run on "
      "with the instruction set in use, operands in registers. +- is the median deviation.\n"
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
