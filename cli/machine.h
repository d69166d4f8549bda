// What a measurement was made on, and the ceilings of that minute.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "cadre/stream.h"
#include "cadre/tensor.h"
#include "dense/ceilings.h"
#include "io/json.h"
#include "paged_memory.h"
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

/// Throws Unsupported when the build has nothing for this kind of device, DeviceError when it
/// cannot be used here.
void require_device(Device device);

Machine describe_machine(DeviceType device, int num_threads);
/// Adds commit, cpu, isa and threads.
void add_machine(Json& row, const Machine& machine);
/// One line for people.
std::string to_string(const Machine& machine);

/// Looks at the ceilings again and again. Reads another part of its memory each time, so that what
/// it reads comes from memory and not from a cache, as long as it holds more than the caches do. Of
/// the ways of reading it takes the one that is fastest when it is made.
class CeilingMeter {
 public:
  /// `memory_bytes`: multiples of a MiB, one at least; taken at once. `page_bytes`: the pages to
  /// ask for (paged_memory.h), on the CPU.
  CeilingMeter(DType compute_dtype, size_t memory_bytes, size_t page_bytes, const Stream& stream);

  CeilingSample sample();

  /// The pages that it reads from; 0 where memory has none that matter (a GPU).
  size_t page_bytes() const { return page_bytes_; }
  const std::string& way_of_reading() const { return way_name_; }

 private:
  double read(size_t way);
  size_t fastest_way();

  const Ceilings& ceilings_;
  DType compute_dtype_;
  Stream stream_;
  std::optional<PagedMemory> pages_;  // the memory: this on the CPU
  std::optional<Tensor> tensor_;      // and this elsewhere
  TensorView memory_;
  size_t page_bytes_ = 0;
  int64_t part_bytes_;
  int64_t next_ = 0;  // byte to read from
  size_t way_ = 0;
  std::string way_name_;
};

}  // namespace cadre::cli
