#include "machine.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "cadre/thread_pool.h"
#include "cadre/version.h"
#include "core/str_cat.h"
#include "dense/dense_ops.h"

namespace cadre::cli {

namespace {

constexpr int64_t kPartBytes = int64_t{128} << 20;  // some milliseconds

}  // namespace

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

CeilingMeter::CeilingMeter(DType compute_dtype, size_t memory_bytes, const Stream& stream)
    : ceilings_(ceilings_of(stream.device.type)),
      compute_dtype_(compute_dtype),
      stream_(stream),
      memory_(DType::kU8, {static_cast<int64_t>(memory_bytes)}, stream.device),
      part_bytes_(std::min(kPartBytes, memory_->numel())) {
  auto* bytes = static_cast<char*>(memory_->mutable_data());
  // Pages that were never written all lie on one page of zeros.
  stream_.threads->parallel_ranges(memory_->numel(), 1 << 20, [&](int64_t begin, int64_t end, int) {
    std::memset(bytes + begin, 1, static_cast<size_t>(end - begin));
  });
}

CeilingSample CeilingMeter::sample() {
  if (next_ + part_bytes_ > memory_->numel()) next_ = 0;
  const TensorView part = memory_.view().slice(next_, next_ + part_bytes_);
  next_ += part_bytes_;
  return {ceilings_.read_bandwidth(part, stream_), ceilings_.peak_flops(compute_dtype_, stream_)};
}

}  // namespace cadre::cli
