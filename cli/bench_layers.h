// Made-up experts for benchmarks: layers of random weights that take turns, and calls with random
// tokens and routings.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

#include "cadre/experts.h"
#include "cadre/model.h"
#include "cadre/thread_pool.h"

namespace cadre::cli {

enum class Routing : uint8_t {
  kUniform,  // every token draws its experts, all equally likely
  kSkewed,   // expert e is drawn like 1 / (e + 1): a few busy ones, many that rest
  kOne,      // all tokens of a call go to the same top_k experts
};

std::string_view name_of(Routing routing);

/// Bytes of the weights of one expert, scales included.
size_t expert_bytes(const ExpertsQuery& query);

/// `count` layers of normally distributed weights on the stream's device, scaled so that outputs
/// are of order one. No two experts are equal, and no two scales beside each other need be. Throws
/// DeviceError, saying how much is needed, when the layers and `more_bytes` do not fit in the
/// memory that is available.
std::vector<std::shared_ptr<const ExpertsWeights>> make_layers(
    const ExpertsQuery& query, int64_t count, size_t more_bytes, uint64_t seed,
    const Stream& stream, const ProgressCallback& progress = {});

/// The same layers, each with its packed form as well.
std::vector<std::shared_ptr<const ExpertsWeights>> pack_layers(
    const ExpertsConfig& config, const std::vector<std::shared_ptr<const ExpertsWeights>>& layers,
    ThreadPool& pool, const ProgressCallback& progress = {});

/// How many layers take turns: as many as fill `rotate_bytes`, two at least, no more than calls.
int64_t num_layers(const ExpertsQuery& query, size_t rotate_bytes, int64_t num_calls);

/// The arguments of a call on the stream's device; route() brings another routing.
class BenchCall {
 public:
  BenchCall(const ExpertsConfig& config, DType compute_dtype, int64_t num_tokens, uint64_t seed,
            const Stream& stream);

  /// Draws experts and weights for every token; returns the number of experts hit.
  int64_t route(Routing routing);
  const RoutedTokens& tokens() const { return tokens_; }

  /// |out - reference| / |reference| over at most `max_tokens` tokens of the last call, first and
  /// last among them. The reference rounds activations by the same scheme.
  double error_of_sample(const ExpertsWeights& weights, ActivationScheme activations,
                         int64_t max_tokens) const;

 private:
  void draw_experts(Routing routing, int32_t* ids);

  ExpertsConfig config_;
  Stream stream_;
  std::mt19937_64 random_;
  // On the host, and what a call takes: the same memory on the CPU, copies on a GPU.
  Tensor hidden_states_;
  Tensor top_k_index_;
  Tensor top_k_weights_;
  std::vector<Tensor> on_device_;
  RoutedTokens tokens_;
  std::vector<std::pair<double, int32_t>> keys_;  // scratch of a draw
};

}  // namespace cadre::cli
