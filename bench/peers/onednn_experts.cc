// onednn_experts: times an experts layer made of oneDNN matrix products on the layers and routings
// that `cadre bench experts` has with the same --seed, and in its manner: checked first, other
// memory read before each call. Prints a row per form and number of tokens.
#include <omp.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <nlohmann/json.hpp>

#include "bench_layers.h"
#include "bench_options.h"
#include "core/str_cat.h"
#include "exit_codes.h"
#include "loops.h"
#include "onednn_layer.h"
#include "output.h"
#include "shapes.h"
#include "statistics.h"
#include "table.h"

namespace cadre::peers {

namespace {

constexpr int64_t kSampledTokens = 4;               // that the slow reference checks
constexpr int64_t kReadBytes = int64_t{128} << 20;  // before each call

struct Options {
  cli::NamedShape shape = cli::parse_shape("--shape", "qwen3-30b-a3b");
  std::vector<int64_t> tokens = {1, 4, 32, 256, 1024};
  std::vector<Form> forms = {Form::kPlain, Form::kPacked};
  cli::BenchOptions bench;
  int threads = default_num_threads();
  uint64_t seed = 0;
  bool json = false;
};

struct Row {
  Form form = Form::kPlain;
  int64_t tokens = 0;
  double us_median = 0;
  double us_mad = 0;
  double rel_error = 0;
  std::string implementation;
};

std::string name_of(Form form) { return form == Form::kPlain ? "onednn_plain" : "onednn_packed"; }

/// Cadre's pool may pin the thread that makes it, and OpenMP's threads would inherit that: what
/// needs a pool gets a thread of its own and leaves none behind.
template <typename Make>
auto with_pool(int threads, const Make& make) {
  return std::async(std::launch::async,
                    [&] {
                      ThreadPool pool(threads);
                      return make(pool);
                    })
      .get();
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    query_.config = options.shape.config;
    const size_t bytes = options.bench.memory_bytes();
    const size_t read_bytes = std::max(bytes, static_cast<size_t>(kReadBytes));
    const int64_t count = cli::num_layers(query_, bytes, options.bench.repeats + 1);
    const size_t layer_bytes = cli::expert_bytes(query_.config, query_.format) *
                               static_cast<size_t>(query_.config.num_experts);
    layers_ = with_pool(options.threads, [&](ThreadPool& pool) {
      return cli::make_layers(query_, count, read_bytes + static_cast<size_t>(count) * layer_bytes,
                              options.seed, Stream::cpu(pool));
    });
    memory_ = Tensor(DType::kU8, {static_cast<int64_t>(read_bytes)});
    std::memset(memory_->mutable_data(), 1, memory_->nbytes());
    for (const Form form : options.forms) {
      OneDnnExperts experts(query_.config, form);
      for (const auto& layer : layers_) experts.add_layer(layer);
      experts_.emplace_back(form, std::move(experts));
    }
  }

  size_t num_forms() const { return experts_.size(); }

  Row measure(size_t which, int64_t tokens) {
    auto& [form, experts] = experts_[which];
    cli::BenchCall call = new_call(tokens);
    call.route(cli::Routing::kUniform);
    experts.forward(0, call.tokens());
    Row row{form,
            tokens,
            0,
            0,
            call.error_of_sample(*layers_[0], kSampledTokens),
            experts.implementation()};
    require_within_bound(row);
    make_products(experts, tokens);
    std::vector<double> times;
    for (int64_t i = 1; i <= options_.bench.repeats; ++i) {
      call.route(cli::Routing::kUniform);
      read_other_memory();
      const auto start = std::chrono::steady_clock::now();
      experts.forward(layer_of(i), call.tokens());
      const auto end = std::chrono::steady_clock::now();
      times.push_back(std::chrono::duration<double, std::micro>(end - start).count());
    }
    row.us_mad = cli::median_deviation(times);
    row.us_median = cli::median(std::move(times));
    return row;
  }

 private:
  cli::BenchCall new_call(int64_t tokens) {
    return with_pool(options_.threads, [&](ThreadPool& pool) {
      return cli::BenchCall(query_.config, query_.compute_dtype, tokens, options_.seed,
                            Stream::cpu(pool));
    });
  }

  size_t layer_of(int64_t call) const { return static_cast<size_t>(call) % layers_.size(); }

  /// Runs the routings that will be timed, on another layer: a product for another number of rows
  /// takes oneDNN about a millisecond to make.
  void make_products(OneDnnExperts& experts, int64_t tokens) {
    cli::BenchCall call = new_call(tokens);
    for (int64_t i = 0; i <= options_.bench.repeats; ++i) {
      call.route(cli::Routing::kUniform);
      experts.forward(layer_of(i + 1), call.tokens());
    }
  }

  void read_other_memory() {
    if (next_ + kReadBytes > memory_->numel()) next_ = 0;
    sum_ = sum_ + read_memory(memory_->as<uint8_t>() + next_, kReadBytes);
    next_ += kReadBytes;
  }

  static void require_within_bound(const Row& row) {
    const double bound = stated_bound(DType::kBF16, StorageFormat::kBF16);
    if (row.rel_error <= bound) return;  // false for NaN
    throw Error(str_cat(
        name_of(row.form), " with ", row.tokens, " tokens: expected a relative error of at most ",
        bound, " against the float64 reference, got ", row.rel_error, "; it is not timed"));
  }

  const Options& options_;
  ExpertsQuery query_;
  std::vector<std::shared_ptr<const ExpertsWeights>> layers_;
  std::vector<std::pair<Form, OneDnnExperts>> experts_;
  Tensor memory_;
  int64_t next_ = 0;           // byte of memory_ to read from
  volatile uint64_t sum_ = 0;  // keeps the reads
};

Json to_json(const Row& row, const Options& options) {
  return {
      {"bench", "peers"},
      {"peer", name_of(row.form)},
      {"shape", options.shape.name},
      {"tokens", row.tokens},
      {"threads", options.threads},
      {"us_median", row.us_median},
      {"us_mad", row.us_mad},
      {"calls", options.bench.repeats},
      {"rel_error", row.rel_error},
      {"version", str_cat(DNNL_VERSION_MAJOR, ".", DNNL_VERSION_MINOR, ".", DNNL_VERSION_PATCH)},
      {"implementation", row.implementation}};
}

std::string to_text(const std::vector<Row>& rows, const Options& options) {
  cli::Table table({"shape", "tokens", "peer", "us", "+-", "rel. error", "implementation"});
  for (const size_t column : {1, 3, 4, 5}) table.right_align(column);
  for (const Row& row : rows) {
    table.add_row({options.shape.name, str_cat(row.tokens), name_of(row.form),
                   cli::format_number("%.1f", row.us_median),
                   cli::format_number("%.1f", row.us_mad),
                   cli::format_number("%.1e", row.rel_error), row.implementation});
  }
  return table.to_string();
}

void run(const Options& options) {
  omp_set_num_threads(options.threads);
  Bench bench(options);
  std::vector<Row> rows;
  for (const int64_t tokens : options.tokens) {
    for (size_t i = 0; i < bench.num_forms(); ++i) {
      rows.push_back(bench.measure(i, tokens));
      if (options.json && !cli::write_json(to_json(rows.back(), options))) return;
    }
  }
  if (!options.json) cli::write_stdout(to_text(rows, options));
}

void add_options(CLI::App& app, Options& options) {
  app.add_option_function<std::string>(
         "--shape",
         [&options](const std::string& text) { options.shape = cli::parse_shape("--shape", text); },
         "A model's experts, by the names of cadre bench experts, or E,k,H,I")
      ->type_name("NAME|E,k,H,I")
      ->default_str(options.shape.name);
  cli::add_numbers(app, "--tokens", options.tokens, 1, int64_t{1} << 24, "Tokens of a call");
  cli::add_choice(
      app, "--form", {"both", "plain", "packed"},
      [&options](const std::string& text) {
        if (text == "plain") options.forms = {Form::kPlain};
        if (text == "packed") options.forms = {Form::kPacked};
      },
      "plain: weights as checkpoints have them; packed: copied to oneDNN's own layout before");
  cli::add_number(app, "--threads", options.threads, 1, ThreadPool::kMaxThreads,
                  "Threads, oneDNN's and OpenMP's own");
  cli::add_number(app, "--seed", options.seed, uint64_t{0}, UINT64_MAX,
                  "Of weights and routings, as in cadre bench experts");
  cli::add_bench_options(app, options.bench);
  app.add_flag("--json", options.json, "An object a row, one a line");
}

int run_command_line(int argc, char** argv) {
  Options options;
  CLI::App app("Times an experts layer made of oneDNN matrix products.", "onednn_experts");
  add_options(app, options);
  try {
    app.parse(argc, argv);
    run(options);
    return cli::kExitDone;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? cli::kExitDone : cli::kExitUsage;
  } catch (const std::exception& error) {
    cli::note(str_cat("onednn_experts: ", error.what()), false);
    return cli::exit_code_of(error);
  }
}

}  // namespace

}  // namespace cadre::peers

int main(int argc, char** argv) { return cadre::peers::run_command_line(argc, argv); }
