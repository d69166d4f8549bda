// Checks and addresses that plain and quantised experts' tensors share. Errors name
// make_experts_weights, the tensor, both shapes and both dtypes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cadre/experts.h"

namespace cadre {

/// Throws InvalidArgument: the tensor is not as expected.
[[noreturn]] void fail_tensor(std::string_view name, const TensorView& tensor,
                              const std::string& expected);

/// There, of this shape, with memory behind it and stride 1 in its last dimension.
void check_present(std::string_view name, const TensorView& tensor, const Dims& shape);

/// Of the dtype and on the device of the first tensor.
void check_like(std::string_view name, const TensorView& tensor, std::string_view first_name,
                const TensorView& first);

/// The address of an element, counted from the first.
const void* address_of(const TensorView& tensor, int64_t element);

/// [E, N, K], or [E, K, N] when transposed.
Dims fused_shape(bool is_transposed, int64_t experts, int64_t n, int64_t k);

/// The rows of a fused gate_up_proj that belong to gate or to up: first, first + step, ...
struct FusedRows {
  int64_t count = 0;     // of the whole tensor
  int64_t step = 1;      // 2: interleaved
  int64_t first_up = 0;  // those of gate begin at 0
};
FusedRows fused_rows(const ExpertsConfig& config);

/// "gate_up_proj", or "up_proj" without a gate.
std::string_view up_name_of(const ExpertsConfig& config);

/// Checks the biases [E, 2I] (or [E, I]) and [E, H] against the config and puts their addresses
/// into `weights`, whose device is set. Absent ones are right without has_bias alone.
void set_biases(const ExpertsConfig& config, const TensorView& up_bias, const TensorView& down_bias,
                ExpertsWeights& weights);

/// The [N, K] matrices of all experts of [E, N, K] (transposed: [E, K, N]), N from row `first` on
/// in steps.
std::vector<ExpertMatrix> fused_matrices(const TensorView& fused, bool is_transposed, int64_t first,
                                         int64_t step);

}  // namespace cadre
