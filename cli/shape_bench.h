// The experts of one shape on a device, timed call by call: layers that take turns, ceilings before
// and after, every backend checked against the reference first.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench_layers.h"
#include "bench_options.h"
#include "cadre/workspace.h"
#include "core/device_runtime.h"
#include "machine.h"
#include "progress.h"
#include "report.h"

namespace cadre::cli {

struct ShapeBenchOptions {
  std::string shape;   // its name in rows
  std::string format;  // the name of the weights' format
  ExpertsQuery query;
  BenchOptions bench;
  Routing routing = Routing::kUniform;
  bool graph = false;   // GPU: calls are recorded and replayed
  bool packed = false;  // CPU: layers are packed first
  uint64_t seed = 0;
};

class ShapeBench {
 public:
  /// Makes the layers.
  ShapeBench(const ShapeBenchOptions& options, ThreadPool& pool, Progress& progress);

  /// Throws Error when the backend's result is out of its bound. Empty after Ctrl-C.
  std::optional<ExpertsRow> measure(const std::string& name, int64_t tokens, Progress& progress);

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

  bool on_cpu() const { return query_.device.type == DeviceType::kCpu; }
  std::vector<std::shared_ptr<const ExpertsWeights>> make_layers(Progress& progress) const;
  size_t pages_of_weights() const;
  int64_t calls_together(int64_t tokens) const;

  void prepare(Subject& subject, const std::string& name, int64_t tokens);
  void run_call(Subject& subject, size_t call, size_t layer);
  void run_all(Subject& subject);
  void check(const Subject& subject, ExpertsRow& row) const;
  void record(Subject& subject, const std::string& name);
  TimedCall time_one(Subject& subject, int64_t round);
  TimedCall time_all(Subject& subject);
  ExpertsRow new_row(const std::string& name, int64_t tokens) const;
  Work work_of(int64_t tokens, double active) const;

  ShapeBenchOptions options_;
  ExpertsQuery query_;
  ThreadPool& pool_;
  OwnedStream owned_stream_;
  Stream stream_;
  std::vector<std::shared_ptr<const ExpertsWeights>> layers_;
  CeilingMeter meter_;
};

}  // namespace cadre::cli
