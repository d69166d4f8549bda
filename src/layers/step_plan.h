// What a step's kernels read besides weights: token ids, positions, slots. Filled on the host,
// copied to the ops' device in one piece, from and to places that depend on the numbers of tokens,
// sequences and wanted rows alone: a recorded copy brings the next step's values.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "cadre/tensor.h"
#include "dense/dense_ops.h"

namespace cadre {

/// Where a row of logits goes.
struct LogitsRow {
  int32_t row = 0;     // of this step's tokens
  int64_t target = 0;  // of the logits
};

/// Time, row and column, for tokens of images.
inline constexpr int64_t kRopeAxes = 3;

class StepPlan {
 public:
  /// Room for steps of up to max_tokens tokens. Only when no step is under way.
  void reserve(int64_t max_tokens, Device device);
  int64_t reserved_tokens() const { return reserved_; }

  /// The inputs of a step; spans must live as long as the views below are used. The step before
  /// must be done. rope_positions: [kRopeAxes, num_tokens], or empty.
  void fill(std::span<const int32_t> token_ids, std::span<const SequenceSpan> sequences,
            std::span<const LogitsRow> wanted, std::span<const int32_t> rope_positions,
            const Stream& stream);
  /// Puts the copy to the device into the stream; nothing to do on the CPU.
  void upload(const Stream& stream) const;

  TensorView token_ids() const { return ids_; }                  // [num_tokens] i32
  TensorView wanted_rows() const { return rows_; }               // [wanted] i32
  TensorView rope_positions() const { return rope_positions_; }  // as given; absent when none were
  const StepTokens& tokens() const { return tokens_; }
  /// For a draw after a step with one token a sequence: what it leaves here serves as the inputs of
  /// the step after it, of the same size, without fill() and upload().
  NextStep next_step() const;

 private:
  int64_t reserved_ = 0;
  size_t bytes_ = 0;              // of the step
  std::shared_ptr<void> host_;    // [all parts of reserved] i32, pinned for a GPU
  std::shared_ptr<void> memory_;  // the same on the device; host_ itself on the CPU
  TensorView ids_;
  TensorView rows_;
  TensorView rope_positions_;
  StepTokens tokens_;
};

}  // namespace cadre
