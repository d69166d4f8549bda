// The parts of an experts forward that are no products, on OpenMP's threads as oneDNN's own work
// is. Compiled for this machine with fast arithmetic: see CMakeLists.txt.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cadre/float16.h"

namespace cadre::peers {

/// Row i of `to` becomes row rows[i] of `from`; both have `width` columns.
void gather_rows(const BFloat16* from, int64_t width, const int64_t* rows, int64_t num_rows,
                 BFloat16* to);

/// h = silu(gate) * up. `gate_up`: [num_rows, 2 * width], gate first; `h`: [num_rows, width].
void silu_mul(const float* gate_up, int64_t num_rows, int64_t width, BFloat16* h);

/// out[t] = sum over s < top_k of weights[t, s] * rows[positions[t, s]], rows of `width` columns.
void weighted_sum(const float* rows, const int64_t* positions, const float* weights,
                  int64_t num_tokens, int64_t top_k, int64_t width, BFloat16* out);

/// Reads `num_bytes` bytes, a multiple of 8; the result only keeps the reads alive.
uint64_t read_memory(const void* memory, int64_t num_bytes);

}  // namespace cadre::peers
