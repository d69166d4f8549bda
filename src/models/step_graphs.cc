#include "models/step_graphs.h"

#include <algorithm>

namespace cadre {

void StepGraphs::run(const StepKey& key, const Stream& stream, FunctionRef<void()> work) {
  const auto found = std::find_if(graphs_.begin(), graphs_.end(),
                                  [&](const Entry& entry) { return entry.key == key; });
  if (found == graphs_.end()) {
    work();
    graphs_.push_front({key, nullptr});
    if (graphs_.size() > kMaxGraphs) graphs_.pop_back();
    return;
  }
  graphs_.splice(graphs_.begin(), graphs_, found);
  Entry& entry = graphs_.front();
  if (entry.graph == nullptr) entry.graph = device_runtime(stream.device).capture(stream, work);
  entry.graph->launch(stream);
}

}  // namespace cadre
