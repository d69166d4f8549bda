// What a step on a GPU gives when the caller's memory is not there: logits that are copied to the
// host, or tokens that are drawn where the logits are. Rows of a step are counted 0, 1, ... there;
// targets are the rows or sequences that they belong to.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cadre/model.h"
#include "layers/decoder.h"

namespace cadre {

class StepOutputs {
 public:
  void reserve(int64_t max_rows) { targets_.reserve(static_cast<size_t>(max_rows)); }

  /// Takes the targets of `wanted`, which then counts rows. True when memory had to grow: whatever
  /// was recorded with the old one is void.
  bool begin(std::span<LogitsRow> wanted, int64_t vocab_size, Device device);
  /// [rows, vocab_size] f32 of the step.
  MutableTensorView logits() const;

  /// Numbers in [0, 1) by target, empty when drawing is greedy; puts their copy to the device into
  /// the stream. The step before the last one must be done.
  void set_uniform(std::span<const double> uniform, const Stream& stream);
  /// Puts a draw for each row into the stream. With `next` the kernel brings the tokens to the host
  /// (next.host_ids is set here), without it a copy does.
  void draw(const SamplingOptions& options, NextStep next, Workspace& workspace,
            const Stream& stream) const;
  /// Drawn tokens by target, when the step is done; `positions` of its tokens by target, empty when
  /// it was drawn without `next`.
  void take_tokens(std::span<const int64_t> positions, std::span<TokenId> next) const;

  /// Puts copies of the rows to their targets into the stream.
  void bring_logits(const MutableTensorView& logits, const Stream& stream) const;

 private:
  int64_t num_rows() const { return static_cast<int64_t>(targets_.size()); }

  std::vector<int64_t> targets_;  // [rows]
  Tensor logits_;                 // [at least rows, vocab_size] f32
  Tensor uniform_;                // [at least rows] f64
  Tensor drawn_;                  // [at least rows] i32
  // Pinned, two of each, taken in turn: a step may begin before the host is done with the last.
  std::shared_ptr<void> host_uniform_;
  std::shared_ptr<void> host_drawn_;
  int64_t uniform_turn_ = 0;
};

}  // namespace cadre
