// One experts forward in a safetensors file: tensors and header metadata as in tests/data/experts.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>

#include "cadre/experts.h"

namespace cadre::cli {

struct ExpertsCase {
  ExpertsConfig config;
  StorageFormat format = StorageFormat::kBF16;
  std::shared_ptr<const ExpertsWeights> weights;
  TensorView hidden_states;    // [num_tokens, hidden_size], any float dtype, maybe unaligned
  TensorView top_k_index;      // [num_tokens, top_k] i64 or i32, maybe unaligned
  TensorView top_k_weights;    // [num_tokens, top_k], any float dtype, maybe unaligned
  TensorView expected_output;  // [num_tokens, hidden_size]; absent when the file has none
};

/// Reads and checks a case. Metadata values are JSON text: num_experts, hidden_size,
/// intermediate_size, top_k, hidden_act, has_gate, has_bias, is_transposed, is_concatenated,
/// swiglu_limit and swiglu_alpha (a number or null); "route", "sentinel" and "format" say how the
/// file was made and are ignored. Throws CheckpointError naming the file and the metadata or tensor
/// that is missing, unknown or does not fit.
ExpertsCase read_experts_case(const std::filesystem::path& file);

}  // namespace cadre::cli
