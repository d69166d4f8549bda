// What happens to fresh queries, keys and values before attention: QkvArgs as kernels take it.
#pragma once

#include <cstdint>

#include "cadre/dtype.h"
#include "dense/dense_ops.h"

namespace cadre::cuda {

/// A head of q, k or v.
struct HeadArgs {
  void* x;             // [num_tokens, heads, head_dim]
  const void* weight;  // norm weight; null: no norm
  DType weight_dtype;
  int64_t weight_stride;  // elements from one head's weights to the next's
  int64_t heads;
  bool rotates;
  void* cache;  // null: in place
};

struct FinishArgs {
  HeadArgs parts[3];  // q, k, v; those with 0 heads are left out
  DType dtype;
  int64_t num_tokens;
  int64_t head_dim;
  int64_t half;
  const float* cos;
  const float* sin;
  float eps;
  bool clips;
  float limit;
  const int32_t* slots;
  const int32_t* positions;
  int64_t kv_heads;    // of the caches
  int64_t max_tokens;  // of the caches
};

FinishArgs finish_args(const QkvArgs& qkv);

/// Whether lanes can take eight elements of a head each (finish_eight()); head_dim apart.
bool fits_wide(const FinishArgs& args);

}  // namespace cadre::cuda
