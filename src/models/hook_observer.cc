#include "models/hook_observer.h"

#include "core/device_runtime.h"

namespace cadre {

void HookObserver::on_routing(const MoeLayerView& view) {
  if (!hooks_.on_routing) return;
  if (on_host()) return hooks_.on_routing(view.layer, view.top_k_index, view.top_k_weights);
  const Tensor index = to_host(stream_, view.top_k_index);
  const Tensor weights = to_host(stream_, view.top_k_weights);
  synchronize(stream_);
  hooks_.on_routing(view.layer, index, weights);
  copy_tensor(index.view(), view.top_k_index, stream_);
  copy_tensor(weights.view(), view.top_k_weights, stream_);
  synchronize(stream_);
}

void HookObserver::on_output(const MoeLayerView& view) {
  if (!hooks_.on_output) return;
  if (on_host()) {
    return hooks_.on_output(
        {view.layer, view.hidden_states, view.top_k_index, view.top_k_weights, view.output});
  }
  const Tensor x = to_host(stream_, view.hidden_states);
  const Tensor index = to_host(stream_, view.top_k_index);
  const Tensor weights = to_host(stream_, view.top_k_weights);
  const Tensor output = to_host(stream_, view.output);
  synchronize(stream_);
  hooks_.on_output({view.layer, x.view(), index.view(), weights.view(), output.view()});
}

}  // namespace cadre
