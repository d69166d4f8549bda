#include "plain_loops.h"

#include <cadre/float16.h>
#include <cadre/thread_pool.h>

#include <cmath>

using cadre::ExpertMatrix;
using cadre::StorageFormat;

namespace {

/// sum over k of matrix[n, k] * x[k]
float row_times(const ExpertMatrix& matrix, StorageFormat format, int64_t n, const float* x,
                int64_t size) {
  float sum = 0;
  for (int64_t k = 0; k < size; ++k) {
    const int64_t at = n * matrix.row_stride + k * matrix.col_stride;
    sum += x[k] * (format == StorageFormat::kF32
                       ? static_cast<const float*>(matrix.data)[at]
                       : static_cast<float>(static_cast<const cadre::BFloat16*>(matrix.data)[at]));
  }
  return sum;
}

float silu(float x) { return x / (1.0f + std::exp(-x)); }

/// output += weight * expert(x); `hidden` holds intermediate_size floats.
void add_expert(const cadre::ExpertsConfig& config, const cadre::ExpertsWeights& weights,
                int64_t expert, float weight, const float* x, float* hidden, float* output) {
  const auto e = static_cast<size_t>(expert);
  for (int64_t i = 0; i < config.intermediate_size; ++i) {
    const float gate = row_times(weights.gate[e], weights.format, i, x, config.hidden_size);
    const float up = row_times(weights.up[e], weights.format, i, x, config.hidden_size);
    hidden[i] = silu(gate) * up;
  }
  for (int64_t n = 0; n < config.hidden_size; ++n) {
    output[n] +=
        weight * row_times(weights.down[e], weights.format, n, hidden, config.intermediate_size);
  }
}

int64_t id_at(const cadre::TensorView& ids, int64_t token, int64_t slot) {
  const cadre::TensorView row = ids[token];
  return ids.dtype() == cadre::DType::kI64 ? row.as<int64_t>()[slot] : row.as<int32_t>()[slot];
}

}  // namespace

// Whatever run() cannot do is refused here, before any weight is loaded, with the reason.
cadre::Support PlainLoops::supports(const cadre::ExpertsQuery& query) const {
  cadre::Support support;
  const auto require = [&support](bool met, const char* requirement) {
    if (!met) support.reasons.emplace_back(requirement);
  };
  const cadre::ExpertsConfig& config = query.config;
  require(query.device.type == cadre::DeviceType::kCpu, "runs on the CPU only");
  require(query.compute_dtype == cadre::DType::kF32, "computes in float32 only");
  require(query.format == StorageFormat::kF32 || query.format == StorageFormat::kBF16,
          "reads float32 and bfloat16 weights only");
  require(config.has_gate && config.activation == cadre::Activation::kSilu &&
              !config.swiglu_limit && !config.swiglu_alpha,
          "knows the plain SwiGLU gate only");
  require(!config.has_bias, "adds no biases");
  require(query.ep_size == 1, "knows nothing of expert parallelism");
  return support;
}

// A backend that wants another layout of the weights makes it here, once per layer.
std::unique_ptr<cadre::PreparedExperts> PlainLoops::prepare(
    const cadre::ExpertsQuery& query, std::shared_ptr<const cadre::ExpertsWeights> weights) {
  return std::make_unique<cadre::PreparedExperts>(query, std::move(weights));
}

size_t PlainLoops::workspace_bytes(const cadre::ExpertsQuery& query, int64_t /*max_tokens*/,
                                   int num_threads) const {
  return cadre::Workspace::padded(static_cast<size_t>(num_threads) * sizeof(float) *
                                  static_cast<size_t>(query.config.intermediate_size));
}

// forward() has checked the shapes and dtypes. Scratch memory comes from the workspace: nothing is
// allocated here.
void PlainLoops::run(const cadre::PreparedExperts& experts, const cadre::RoutedTokens& tokens,
                     cadre::Workspace& workspace, const cadre::Stream& stream) {
  const cadre::ExpertsConfig& config = experts.query.config;
  const cadre::Workspace::Scope scope(workspace);
  float* scratch =
      workspace.allocate<float>(stream.threads->num_threads() * config.intermediate_size);

  stream.threads->parallel_for(tokens.hidden_states.dim(0), [&](int64_t token, int thread) {
    const float* x = tokens.hidden_states[token].as<float>();
    float* output = tokens.output[token].as<float>();
    std::fill_n(output, config.hidden_size, 0.0f);  // every row is written
    for (int64_t slot = 0; slot < config.top_k; ++slot) {
      const int64_t expert = id_at(tokens.top_k_index, token, slot);
      if (expert < 0 || expert >= config.num_experts) continue;  // "no expert"
      add_expert(config, *experts.weights, expert, tokens.top_k_weights[token].as<float>()[slot], x,
                 scratch + thread * config.intermediate_size, output);
    }
  });
}
