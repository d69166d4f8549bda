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

  /// Numbers in [0, 1) by target; empty when drawing is greedy.
  void set_uniform(std::span<const double> uniform);
  /// Puts a draw for each row into the stream, with the copies of its numbers and its tokens.
  void draw(const SamplingOptions& options, Workspace& workspace, const Stream& stream) const;
  /// Drawn tokens by target; when the stream is done.
  void take_tokens(std::span<TokenId> next) const;

  /// Puts copies of the rows to their targets into the stream.
  void bring_logits(const MutableTensorView& logits, const Stream& stream) const;

 private:
  int64_t num_rows() const { return static_cast<int64_t>(targets_.size()); }

  std::vector<int64_t> targets_;        // [rows]
  Tensor logits_;                       // [at least rows, vocab_size] f32
  Tensor uniform_;                      // [at least rows] f64
  Tensor drawn_;                        // [at least rows] i32
  std::shared_ptr<void> host_uniform_;  // pinned, the same on the host
  std::shared_ptr<void> host_drawn_;
};

}  // namespace cadre
