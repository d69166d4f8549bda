// The inner step of attention: one query row against one block of keys, with a running softmax.
#pragma once

#include <cstdint>
#include <span>

namespace cadre::cpu {

/// Keys in a block. Blocks lie at multiples of this from position 0, whatever the batch or the
/// chunk, so a row's order of summation depends on its position alone.
inline constexpr int64_t kKeyBlock = 64;

/// A query row's state: out = accumulator / sum once all blocks are done.
struct SoftmaxState {
  float max;
  float sum;
};

struct AttendArgs {
  const float* query;   // [head_dim], scaled
  const float* keys;    // [count, head_dim]
  const float* values;  // [count, head_dim]
  int64_t count;        // at most kKeyBlock
  int64_t head_dim;
  float* accumulator;  // [head_dim]
  SoftmaxState* state;
};

using AttendFunction = void (*)(const AttendArgs&);

/// The forms that this processor runs, fastest first; the last one runs anywhere.
std::span<const AttendFunction> attend_functions();

}  // namespace cadre::cpu
