// The images of a forward: which tokens stand for them, what the vision tower makes of them, and
// where all tokens stand for the rotation (Qwen's M-RoPE: time, row, column).
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cadre/model.h"
#include "layers/decoder.h"
#include "layers/vision_tower.h"

namespace cadre {

/// How far a sequence's rotary positions are from its token numbers: an image takes fewer positions
/// than tokens, so what comes after it is shifted.
class RopeShift {
 public:
  /// Of text at token `length` and on.
  int64_t at(int64_t length) const;
  /// From token `length` on the shift is this.
  void add(int64_t length, int64_t shift) { changes_.emplace_back(length, shift); }
  /// Forgets what came behind token `length`. What is left of an image that is cut in two counts as
  /// text.
  void truncate(int64_t length);
  bool is_zero() const { return changes_.empty(); }

 private:
  std::vector<std::pair<int64_t, int64_t>> changes_;  // ascending
};

class ImageInputs {
 public:
  ImageInputs(VisionTower tower, TokenId image_token_id, Device device);

  /// Throws InvalidArgument when grids, pixel values and placeholders do not belong together.
  /// Placeholders without any image are plain tokens.
  void check(const ForwardInput& input) const;

  /// Runs the tower on all images, and finds the positions of all new tokens. Sequence s has
  /// lengths[s] tokens and shifts[s] before. Takes memory when the images are larger than before.
  void begin(const ForwardInput& input, std::span<const int64_t> lengths,
             std::span<const RopeShift> shifts, const Stream& stream);
  /// Gives a step over the new tokens [first, end) what it needs of images and positions; views are
  /// valid until the next call, when the step must be done.
  void give(int64_t first, int64_t end, DecoderStep& step, const Stream& stream);
  /// What begin() found, for when the tokens are in the cache.
  void store_shifts(std::span<RopeShift> shifts) const;

  /// Of the workspace and the features.
  size_t bytes() const;

 private:
  int64_t tokens_of(const ImageGrid& grid) const;
  void check_grids(const ForwardInput& input) const;
  void run_tower(const ForwardInput& input, const Stream& stream);
  void place_sequence(const ForwardInput& input, int64_t first, int64_t count, int64_t length,
                      RopeShift& shift);
  void place(const std::array<int64_t, kRopeAxes>& position);

  VisionTower tower_;
  TokenId image_token_id_;
  Workspace workspace_;
  std::vector<Tensor> features_;  // [tower's] each [image tokens, width]
  // Of the forward under way. No positions: every token stands at its number.
  std::vector<int32_t> positions_;   // [num_tokens, kRopeAxes]
  std::vector<int32_t> image_rows_;  // of all new tokens, ascending
  std::vector<RopeShift> shifts_;
  size_t next_grid_ = 0;
  // Of the step under way.
  std::vector<int32_t> step_positions_;  // [kRopeAxes, num_tokens]
  std::vector<int32_t> step_rows_;
  Tensor rows_on_device_;  // the same; empty on the CPU
  StepImages step_images_;
};

}  // namespace cadre
