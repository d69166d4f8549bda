// One case of the conformance grid: the parameters of a layer and a call, and the data they stand
// for. Values are O(1) everywhere, so relative errors mean something.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/experts.h"
#include "conformance/guarded_buffer.h"

namespace cadre::test {

enum class Routing {
  kRandom,      // distinct experts in a row
  kRepeated,    // an expert may stand several times in a row
  kAllToFirst,  // every slot
  kAllToLast,
  kFirstEmpty,   // expert 0 gets nothing
  kEverySecond,  // odd experts get nothing
  kSkewed,       // most tokens share few experts
  kSentinels,    // a third of the slots is -1, E, E + 1 or the largest id, with weight NaN
  kAllInvalid,
  kOneInvalid,  // in every row
};

struct CaseParams {
  int64_t num_tokens = 9;
  ExpertsConfig config = {.num_experts = 8, .hidden_size = 64, .intermediate_size = 48, .top_k = 2};
  DType compute_dtype = DType::kBF16;
  DType stored_dtype = DType::kBF16;
  DType bias_dtype = DType::kF32;
  DType id_dtype = DType::kI64;
  bool weights_in_compute_dtype = false;
  bool output_f32 = false;
  Routing routing = Routing::kRandom;
  bool per_expert_tensors = false;
  int64_t expert_gap = 0;  // elements between the matrices of two experts
  int64_t row_gap = 0;     // elements between two rows of hidden states and of the output
  size_t byte_shift = 0;   // of every weight's address
  float scale = 1;         // of the hidden states
  uint32_t seed = 1;
  bool round_weights = false;  // the same values, already rounded to the compute dtype

  /// Quantised weights, made from random float32 ones by quantize(); stored_dtype is then unused.
  /// is_transposed turns FP8 blocks and per-tensor FP8 alone.
  std::optional<StorageFormat> quantized = {};
  ScaleLayout scale_layout = {};
  ActivationScheme activations = ActivationScheme::kNone;
  bool has_zero_blocks = false;
  bool has_huge_value = false;     // one weight of each matrix is a thousand times larger
  bool whole_scale_shift = false;  // byte_shift counts elements of scales and biases
};

std::string describe(const CaseParams& params);

/// What a backend is asked about the case.
ExpertsQuery query_of(const CaseParams& params);

/// The data of a case. Bytes that no backend may read are NaN or unmapped.
class ExpertsCase {
 public:
  explicit ExpertsCase(const CaseParams& params);

  const CaseParams& params() const { return params_; }
  ExpertsQuery query() const { return query_of(params_); }
  const std::shared_ptr<const ExpertsWeights>& weights() const { return weights_; }
  /// Inputs, and an output of the given kind of memory.
  RoutedTokens tokens() const { return tokens_; }
  /// The same call for tokens [begin, end) with their own output.
  RoutedTokens slice(int64_t begin, int64_t end) const;

  void set_hidden(int64_t token, int64_t column, float value);
  void set_id(int64_t token, int64_t slot, int64_t id);
  /// Overwrites the first element of the expert's up matrix and of its down matrix; of quantised
  /// ones their first scales (`value` is then not finite: NaN takes its place).
  void set_expert_weights(int64_t expert, float value);

 private:
  void make_weights();
  void make_fused();
  void make_per_expert();
  void make_quantized_fused();
  void make_quantized_per_expert();
  TensorView make_bias(int64_t n);
  std::vector<float> random_weights(int64_t experts, int64_t n, int64_t k);
  TensorView place(const Tensor& tensor, const Dims& gaps);
  void make_tokens();
  void make_routing();
  int64_t pick_id(int64_t token, int64_t slot);
  GuardedBuffer random_matrix(DType dtype, int64_t outer, int64_t stride, int64_t inner,
                              float deviation, bool is_weight = true);
  float normal(float deviation);
  uint64_t bits();

  CaseParams params_;
  uint64_t state_;
  std::vector<GuardedBuffer> buffers_;
  std::vector<float> input_scales_;
  std::shared_ptr<const ExpertsWeights> weights_;
  RoutedTokens tokens_;
};

/// True when weights of this dtype are rounded before they enter a product (docs/numerics.md).
bool is_wider(DType stored, DType compute);

/// The nearest value of the dtype.
double rounded(DType dtype, double value);

/// Writes one element, rounded to the dtype; the address need not be aligned.
void write_element(void* at, DType dtype, double value);

}  // namespace cadre::test
