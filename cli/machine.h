// What a measurement was made on, and the ceilings of that minute.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/stream.h"
#include "cadre/tensor.h"
#include "dense/ceilings.h"
#include "io/json.h"
#include "statistics.h"

namespace cadre::cli {

/// The commit that this command was built from, "-dirty" when files had changed, or "unknown"
/// (cmake/commit.cmake).
std::string build_commit();

struct Machine {
  std::string commit;
  std::string processor;
  std::string instruction_set;
  int num_threads = 0;
};

Machine describe_machine(DeviceType device, int num_threads);
/// Adds commit, cpu, isa and threads.
void add_machine(Json& row, const Machine& machine);
/// One line for people.
std::string to_string(const Machine& machine);

/// Looks at the ceilings again and again. Reads another part of its memory each time, so that what
/// it reads comes from memory and not from a cache, as long as it holds more than the caches do.
class CeilingMeter {
 public:
  /// `memory_bytes`: multiples of a MiB, one at least; taken at once.
  CeilingMeter(DType compute_dtype, size_t memory_bytes, const Stream& stream);

  CeilingSample sample();

 private:
  const Ceilings& ceilings_;
  DType compute_dtype_;
  Stream stream_;
  Tensor memory_;
  int64_t part_bytes_;
  int64_t next_ = 0;  // byte to read from
};

}  // namespace cadre::cli
