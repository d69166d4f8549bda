#include "machine.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "cadre/thread_pool.h"
#include "cadre/version.h"
#include "core/device_runtime.h"
#include "core/str_cat.h"
#include "dense/dense_ops.h"

namespace cadre::cli {

namespace {

constexpr int64_t kPartBytes = int64_t{128} << 20;  // some milliseconds of a CPU
constexpr int kTrials = 7;                          // of each way of reading

}  // namespace

void require_device(Device device) {
  ceilings_of(device.type);
  if (device.type != DeviceType::kCpu) device_runtime(device);
}

Machine describe_machine(DeviceType device, int num_threads) {
  return {build_commit(), ceilings_of(device).processor(),
          std::string(dense_ops(device).instruction_set()), num_threads};
}

void add_machine(Json& row, const Machine& machine) {
  row["commit"] = machine.commit;
  row["cpu"] = machine.processor;
  row["isa"] = machine.instruction_set;
  row["threads"] = machine.num_threads;
}

std::string to_string(const Machine& machine) {
  return str_cat("cadre ", version(), " (", machine.commit, ") on ", machine.processor, ", ",
                 machine.instruction_set, ", ", machine.num_threads,
                 machine.num_threads == 1 ? " thread" : " threads");
}

CeilingMeter::CeilingMeter(DType compute_dtype, size_t memory_bytes, size_t page_bytes,
                           const Stream& stream)
    : ceilings_(ceilings_of(stream.device.type)), compute_dtype_(compute_dtype), stream_(stream) {
  if (stream.device.type == DeviceType::kCpu) {
    memory_ = pages_.emplace(memory_bytes, page_bytes, *stream.threads).view();
    page_bytes_ = page_bytes_of(memory_.data());
  } else {
    memory_ = tensor_.emplace(DType::kU8, Dims{static_cast<int64_t>(memory_bytes)}, stream.device);
  }
  const bool on_cpu = stream.device.type == DeviceType::kCpu;  // a GPU reads it all in no time
  part_bytes_ = on_cpu ? std::min(kPartBytes, memory_.numel()) : memory_.numel();
  way_ = fastest_way();
  way_name_ = ceilings_.ways_of_reading()[way_];
}

CeilingSample CeilingMeter::sample() {
  if (stream_.device.type == DeviceType::kCpu) {
    return {read(way_), ceilings_.peak_flops(compute_dtype_, stream_)};
  }
  // Products lower a GPU's clocks for a millisecond, and what is measured next would feel it.
  const double flops = ceilings_.peak_flops(compute_dtype_, stream_);
  return {read(way_), flops};
}

double CeilingMeter::read(size_t way) {
  if (next_ + part_bytes_ > memory_.numel()) next_ = 0;
  const TensorView part = memory_.slice(next_, next_ + part_bytes_);
  next_ += part_bytes_;
  return ceilings_.read_bandwidth(part, way, stream_);
}

size_t CeilingMeter::fastest_way() {
  const size_t num_ways = ceilings_.ways_of_reading().size();
  std::vector<std::vector<double>> rates(num_ways);
  for (int i = 0; i < kTrials; ++i) {  // taking turns: what disturbs, disturbs all of them
    for (size_t way = 0; way < num_ways; ++way) rates[way].push_back(read(way));
  }
  size_t best = 0;
  for (size_t way = 1; way < num_ways; ++way) {
    if (median(rates[way]) > median(rates[best])) best = way;
  }
  return best;
}

}  // namespace cadre::cli
