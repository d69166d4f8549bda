#include "layers/step_plan.h"

#include <algorithm>

#include "core/check.h"
#include "core/device_runtime.h"

namespace cadre {
namespace {

constexpr int64_t kSpanFields = 4;
// ids, positions, slots, rows, spans (one a token at most), positions on axes
constexpr int64_t kParts = 4 + kSpanFields + kRopeAxes;

}  // namespace

void StepPlan::reserve(int64_t max_tokens, Device device) {
  if (max_tokens <= reserved_) return;
  const size_t bytes = static_cast<size_t>(kParts * max_tokens) * sizeof(int32_t);
  memory_ = allocate_shared_memory(device, bytes);
  host_ = device.type == DeviceType::kCpu ? memory_ : device_runtime(device).allocate_pinned(bytes);
  reserved_ = max_tokens;
}

void StepPlan::fill(std::span<const int32_t> token_ids, std::span<const SequenceSpan> sequences,
                    std::span<const LogitsRow> wanted, std::span<const int32_t> rope_positions,
                    const Stream& stream) {
  const auto num_tokens = static_cast<int64_t>(token_ids.size());
  const auto num_sequences = static_cast<int64_t>(sequences.size());
  const auto num_wanted = static_cast<int64_t>(wanted.size());
  CADRE_ASSERT(num_tokens <= reserved_ && num_sequences <= num_tokens && num_wanted <= num_tokens);
  auto* const host = static_cast<int32_t*>(host_.get());
  int32_t* const positions = host + num_tokens;
  int32_t* const slots = positions + num_tokens;
  int32_t* const rows = slots + num_tokens;
  int32_t* span = rows + num_wanted;
  std::copy(token_ids.begin(), token_ids.end(), host);
  for (const SequenceSpan& s : sequences) {
    for (int64_t t = 0; t < s.num_tokens; ++t) {
      positions[s.first_row + t] = static_cast<int32_t>(s.past + t);
      slots[s.first_row + t] = static_cast<int32_t>(s.slot);
    }
    for (const int64_t field : {s.slot, s.first_row, s.num_tokens, s.past}) {
      *span++ = static_cast<int32_t>(field);
    }
  }
  for (int64_t i = 0; i < num_wanted; ++i) rows[i] = wanted[static_cast<size_t>(i)].row;
  const int32_t* end = std::copy(rope_positions.begin(), rope_positions.end(), span);

  const auto* next = static_cast<const int32_t*>(memory_.get());
  const auto view = [&](const Dims& shape) {
    const TensorView result(next, DType::kI32, shape, stream.device);
    next += result.numel();
    return result;
  };
  ids_ = view({num_tokens});
  tokens_.positions = view({num_tokens});
  tokens_.slots = view({num_tokens});
  rows_ = view({num_wanted});
  tokens_.spans = view({num_sequences, kSpanFields});
  rope_positions_ = rope_positions.empty() ? TensorView{} : view({kRopeAxes, num_tokens});
  tokens_.sequences = sequences;
  bytes_ = static_cast<size_t>(end - host) * sizeof(int32_t);
}

NextStep StepPlan::next_step() const {
  const auto to_write = [](const TensorView& view) {
    return MutableTensorView(const_cast<void*>(view.data()), view.dtype(), view.shape(),
                             view.device());
  };
  CADRE_ASSERT(tokens_.num_sequences() == tokens_.num_tokens());
  return {to_write(ids_), to_write(tokens_.positions), to_write(tokens_.spans), nullptr};
}

void StepPlan::upload(const Stream& stream) const {
  if (host_ == memory_) return;
  device_runtime(stream.device).copy(memory_.get(), host_.get(), bytes_, stream);
}

}  // namespace cadre
