#include "models/step_outputs.h"

#include "core/device_runtime.h"

namespace cadre {

bool StepOutputs::begin(std::span<LogitsRow> wanted, int64_t vocab_size, Device device) {
  targets_.clear();
  for (LogitsRow& row : wanted) {
    targets_.push_back(row.target);
    row.target = num_rows() - 1;
  }
  const int64_t rows = num_rows();
  if (logits_ && logits_->dim(0) >= rows) return false;
  logits_ = {};  // first, so that there is room
  logits_ = Tensor(DType::kF32, {rows, vocab_size}, device);
  uniform_ = Tensor(DType::kF64, {rows}, device);
  drawn_ = Tensor(DType::kI32, {rows}, device);
  DeviceRuntime& runtime = device_runtime(device);
  host_uniform_ = runtime.allocate_pinned(2 * uniform_->nbytes());
  host_drawn_ = runtime.allocate_pinned(2 * drawn_->nbytes());
  return true;
}

MutableTensorView StepOutputs::logits() const { return logits_->slice(0, num_rows()); }

void StepOutputs::set_uniform(std::span<const double> uniform, const Stream& stream) {
  if (uniform.empty() || num_rows() == 0) return;
  uniform_turn_ = 1 - uniform_turn_;
  auto* numbers = static_cast<double*>(host_uniform_.get()) + uniform_turn_ * num_rows();
  for (size_t i = 0; i < targets_.size(); ++i) {
    numbers[i] = uniform[static_cast<size_t>(targets_[i])];
  }
  device_runtime(stream.device)
      .copy(uniform_->mutable_data(), numbers, targets_.size() * sizeof(double), stream);
}

void StepOutputs::draw(const SamplingOptions& options, NextStep next, Workspace& workspace,
                       const Stream& stream) const {
  if (num_rows() == 0) return;
  SampleArgs args;
  args.logits = logits();
  args.temperature = options.temperature;
  args.top_k = options.top_k;
  args.top_p = options.top_p;
  args.min_p = options.min_p;
  args.uniform = uniform_->slice(0, num_rows());
  args.ids = drawn_->slice(0, num_rows());
  args.next = next;
  if (next.token_ids) args.next.host_ids = static_cast<int32_t*>(host_drawn_.get());
  dense_ops(stream.device.type).sample(args, workspace, stream);
  if (next.token_ids) return;
  device_runtime(stream.device).copy(host_drawn_.get(), drawn_->data(), args.ids.nbytes(), stream);
}

void StepOutputs::take_tokens(std::span<const int64_t> positions, std::span<TokenId> next) const {
  const auto* drawn = static_cast<const TokenId*>(host_drawn_.get());
  for (size_t i = 0; i < targets_.size(); ++i) {
    const auto target = static_cast<size_t>(targets_[i]);
    const int64_t turn = positions.empty() ? 0 : positions[target] % 2;
    next[target] = drawn[static_cast<size_t>(turn * num_rows()) + i];
  }
}

void StepOutputs::bring_logits(const MutableTensorView& logits, const Stream& stream) const {
  for (int64_t row = 0; row < num_rows(); ++row) {
    copy_tensor(logits_.view()[row], logits[targets_[static_cast<size_t>(row)]], stream);
  }
}

}  // namespace cadre
