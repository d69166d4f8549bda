#include "shape_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "interrupt.h"
#include "paged_memory.h"

namespace cadre::cli {

namespace {

constexpr int64_t kSampledTokens = 4;  // that the slow reference checks
// Calls that are timed together on a GPU: of few tokens as many as a model has layers, which share
// the start of one graph in a decode step too.
constexpr int64_t kCallsTogether = 8;
constexpr int64_t kShortCallsTogether = 32;
constexpr int64_t kMostTokensOfShort = 64;

/// The bound is one of norms over many numbers; those over few scatter.
double bound_of_sample(const ExpertsBackend& backend, const ExpertsQuery& query, int64_t tokens) {
  const int64_t numbers = std::min(tokens, kSampledTokens) * query.config.hidden_size;
  return backend.emulation_bound(query, query.compute_dtype) *
         std::max(1.0, 32 / std::sqrt(static_cast<double>(numbers)));
}

void require_within_bound(const ExpertsRow& row) {
  if (row.rel_error <= row.bound) return;  // false for NaN
  throw Error(str_cat(row.experts, " on ", row.shape, " with ", row.tokens,
                      " tokens: expected a relative error of at most ", row.bound,
                      " against the float64 reference, got ", row.rel_error,
                      "; it is not timed. This is a fault of the backend: please report it"));
}

}  // namespace

ShapeBench::ShapeBench(const ShapeBenchOptions& options, ThreadPool& pool, Progress& progress)
    : options_(options),
      query_(options.query),
      pool_(pool),
      owned_stream_(query_.device, pool),
      stream_(owned_stream_.get()),
      layers_(make_layers(progress)),
      meter_(query_.compute_dtype, options.bench.memory_bytes(), pages_of_weights(), stream_) {}

std::optional<ExpertsRow> ShapeBench::measure(const std::string& name, int64_t tokens,
                                              Progress& progress) {
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
    progress.update(str_cat(options_.shape, ", ", tokens, " tokens, ", name), i - 1,
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

void ShapeBench::prepare(Subject& subject, const std::string& name, int64_t tokens) {
  ExpertsBackend& backend = find_backend(name, query_.device.type);
  subject.backend = &backend;
  subject.workspace.reserve(backend.workspace_bytes(query_, tokens, pool_.num_threads()));
  for (const auto& layer : layers_) subject.layers.push_back(backend.prepare(query_, layer));
  for (int64_t i = 0; i < calls_together(tokens); ++i) {
    subject.calls.push_back(std::make_unique<BenchCall>(query_.config, query_.compute_dtype, tokens,
                                                        options_.seed + static_cast<uint64_t>(i),
                                                        stream_));
    subject.active += static_cast<double>(subject.calls.back()->route(options_.routing));
  }
  subject.active /= static_cast<double>(subject.calls.size());
}

void ShapeBench::run_call(Subject& subject, size_t call, size_t layer) {
  subject.backend->forward(*subject.layers[layer % subject.layers.size()],
                           subject.calls[call]->tokens(), subject.workspace, stream_);
}

void ShapeBench::run_all(Subject& subject) {
  for (size_t call = 0; call < subject.calls.size(); ++call) run_call(subject, call, call);
}

/// Of the first call, which runs on the first layer.
void ShapeBench::check(const Subject& subject, ExpertsRow& row) const {
  const double error =
      subject.calls[0]->error_of_sample(*layers_[0], query_.activation_scheme, kSampledTokens);
  row.rel_error = std::isnan(error) ? error : std::max(row.rel_error, error);
  require_within_bound(row);
}

void ShapeBench::record(Subject& subject, const std::string& name) {
  if (!subject.backend->can_be_captured()) {
    throw Unsupported(str_cat("--graph: ", name, " reads the routing on the host and cannot be ",
                              "recorded; leave out --graph or ", name));
  }
  subject.graph = device_runtime(query_.device).capture(stream_, [&] { run_all(subject); });
  subject.graph->launch(stream_);
  synchronize(stream_);
}

TimedCall ShapeBench::time_one(Subject& subject, int64_t round) {
  subject.active = static_cast<double>(subject.calls[0]->route(options_.routing));
  const auto start = std::chrono::steady_clock::now();
  run_call(subject, 0, static_cast<size_t>(round));
  TimedCall timed;
  timed.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return timed;
}

TimedCall ShapeBench::time_all(Subject& subject) {
  const double seconds = device_runtime(query_.device).time(stream_, [&] {
    subject.graph ? subject.graph->launch(stream_) : run_all(subject);
  });
  TimedCall timed;
  timed.seconds = seconds / static_cast<double>(subject.calls.size());
  return timed;
}

std::vector<std::shared_ptr<const ExpertsWeights>> ShapeBench::make_layers(
    Progress& progress) const {
  const size_t ceilings = options_.bench.memory_bytes();
  const int64_t count = num_layers(query_, ceilings, options_.bench.repeats + 1);
  const size_t copies =
      options_.packed ? prepacked_bytes(query_.config, query_.format) * static_cast<size_t>(count)
                      : 0;
  const auto layers = cli::make_layers(query_, count, ceilings + copies, options_.seed, stream_,
                                       progress.callback());
  return options_.packed ? pack_layers(query_.config, layers, pool_, progress.callback()) : layers;
}

/// Calls that are timed together: on a GPU as many as take turns over the layers with routings of
/// their own, so that nothing is left in the cache from one to the next.
int64_t ShapeBench::calls_together(int64_t tokens) const {
  if (on_cpu()) return 1;
  return std::max(tokens <= kMostTokensOfShort ? kShortCallsTogether : kCallsTogether,
                  static_cast<int64_t>(layers_.size()));
}

/// Packed weights ask for huge pages, as the meter then does.
size_t ShapeBench::pages_of_weights() const {
  if (!on_cpu()) return 0;
  if (options_.packed && huge_page_bytes() > 0) return huge_page_bytes();
  return page_bytes_of(layers_[0]->up[0].data);
}

ExpertsRow ShapeBench::new_row(const std::string& name, int64_t tokens) const {
  ExpertsRow row;
  row.shape = options_.shape;
  row.config = query_.config;
  row.tokens = tokens;
  row.experts = name;
  row.device = query_.device;
  row.dtype = query_.compute_dtype;
  row.format = options_.format;
  row.activations = query_.activation_scheme;
  row.packed = options_.packed;
  row.pages = meter_.page_bytes();
  row.graph = options_.graph;
  row.routing = name_of(options_.routing);
  row.bound = bound_of_sample(find_backend(name, query_.device.type), query_, tokens);
  return row;
}

Work ShapeBench::work_of(int64_t tokens, double active) const {
  const ExpertsConfig& c = query_.config;
  return {active * static_cast<double>(expert_bytes(query_)),
          6.0 * static_cast<double>(tokens * c.top_k) *
              static_cast<double>(c.hidden_size * c.intermediate_size)};
}

}  // namespace cadre::cli
