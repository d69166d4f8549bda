// Shows the MoE layers of a forward to the caller's hooks, on the host wherever they run.
#pragma once

#include "cadre/model.h"
#include "layers/forward_context.h"

namespace cadre {

/// Copies what lies on a GPU, and brings routing back that a hook has changed; waits for the
/// stream.
class HookObserver final : public MoeObserver {
 public:
  /// Both must outlive it.
  HookObserver(const MoeHooks& hooks, const Stream& stream) : hooks_(hooks), stream_(stream) {}

  void on_routing(const MoeLayerView& view) override;
  void on_output(const MoeLayerView& view) override;

 private:
  bool on_host() const { return stream_.device.type == DeviceType::kCpu; }

  const MoeHooks& hooks_;
  const Stream& stream_;
};

}  // namespace cadre
