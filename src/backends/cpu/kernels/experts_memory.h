// How much memory a forward of the experts takes, and how it is divided.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cadre/dtype.h"
#include "cadre/experts.h"

namespace cadre::cpu {

/// Rows [begin, end) of the sorted pairs, all of one expert; at most kMaxBlockRows.
struct RowBlock {
  int64_t expert = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t arranged = 0;  // where its arranged rows begin, counted in rows
};

/// Large calls run in chunks of tokens, and the float32 results of the pairs are held for a range
/// of columns at a time; neither changes a bit of the output. Bytes are padded as a workspace pads.
struct MemoryPlan {
  int64_t chunk_tokens = 0;
  int64_t input_stride = 0;   // bytes of an arranged row of x; 0 = x is never arranged
  int64_t h_stride = 0;       // bytes of a row of h
  int64_t range_columns = 0;  // of the results
  size_t routing_bytes = 0;
  size_t block_bytes = 0;
  size_t first_block_bytes = 0;
  size_t used_bytes = 0;
  size_t input_bytes = 0;
  size_t intermediate_bytes = 0;
  size_t result_bytes = 0;
  size_t scratch_bytes = 0;
  // Quantised activations: codes of x as bfloat16 and scales of x and h.
  size_t code_bytes = 0;
  size_t x_scale_bytes = 0;
  size_t h_scale_bytes = 0;

  size_t total() const {
    return routing_bytes + block_bytes + first_block_bytes + used_bytes + input_bytes +
           intermediate_bytes + result_bytes + scratch_bytes + code_bytes + x_scale_bytes +
           h_scale_bytes;
  }
};

/// k under one scale of quantised activations.
int64_t activation_group(StorageFormat format);

/// For a forward of up to max_tokens tokens. Throws InvalidArgument when max_tokens is negative.
MemoryPlan plan_memory(const ExpertsQuery& query, int64_t max_tokens, int num_threads);

}  // namespace cadre::cpu
