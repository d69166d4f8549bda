// Decode steps recorded once and replayed: a step of the same size, on the same memory and the same
// backends differs from the last one only in what StepPlan brought to the device.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "cadre/sampling.h"
#include "core/device_runtime.h"

namespace cadre {

/// What a recorded step has built in.
struct StepKey {
  int64_t num_tokens = 0;
  bool has_inputs = false;  // see DecoderStep
  const void* logits = nullptr;
  const void* cache = nullptr;
  int64_t cache_sequences = 0;
  int64_t cache_tokens = 0;                 // of a sequence
  std::vector<const void*> experts;         // the prepared experts of each group
  std::optional<SamplingOptions> sampling;  // what is drawn at the end; empty: nothing

  friend bool operator==(const StepKey&, const StepKey&) = default;
};

class StepGraphs {
 public:
  static constexpr size_t kMaxGraphs = 32;

  /// Runs `work` as it is when the key is new (so that nothing is loaded or chosen for the first
  /// time while recording), records it the second time, and launches the record from then on. The
  /// graphs used longest ago make room.
  void run(const StepKey& key, const Stream& stream, FunctionRef<void()> work);
  /// Before memory that a graph uses goes or moves. The stream must be idle.
  void clear() { graphs_.clear(); }

 private:
  struct Entry {
    StepKey key;
    std::unique_ptr<DeviceGraph> graph;  // null until the second run
  };

  std::list<Entry> graphs_;  // the last used first
};

}  // namespace cadre
