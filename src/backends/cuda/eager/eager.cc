// The plain order: the routing is read on the host, then one expert after the other has its rows
// gathered and multiplied, and at the end each token sums its slots in order. Easy to follow and a
// wait for the device in every call: it cannot be recorded into a graph. Serves every format of
// weights with every scheme of activations.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "backends/cuda/device/check.h"
#include "backends/cuda/eager/eager_kernels.h"
#include "backends/cuda/kernels/device_weights.h"
#include "backends/cuda/kernels/matmul.h"
#include "backends/cuda/kernels/quantized_gemm.h"
#include "backends/cuda/kernels/routing.h"
#include "cadre/error.h"

namespace cadre::cuda {
namespace {

constexpr int64_t kMaxRows = 4096;                       // multiplied at a time
constexpr int64_t kMaxResultBytes = int64_t{256} << 20;  // of a chunk of tokens

/// Tokens whose results are kept at a time.
int64_t chunk_tokens(const ExpertsConfig& config, int64_t max_tokens) {
  const int64_t bytes = config.top_k * config.hidden_size * static_cast<int64_t>(sizeof(float));
  return std::clamp<int64_t>(kMaxResultBytes / bytes, 1, std::max<int64_t>(max_tokens, 1));
}

/// Rows of a chunk by expert. On the host, reused from call to call.
struct HostRouting {
  std::vector<char> ids;  // [num_tokens, top_k] i32 or i64, all tokens
  std::vector<int32_t> pair_of_row;
  std::vector<int32_t> row_of_pair;
  std::vector<int64_t> offsets;  // [E + 1]

  int64_t num_rows() const { return offsets.back(); }
};

void read_ids(const TensorView& index, HostRouting& routing, const Stream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CADRE_CUDA_CHECK(cudaStreamIsCapturing(stream_of(stream), &status));
  if (status != cudaStreamCaptureStatusNone) {
    throw Unsupported(
        "eager on a GPU: reads the routing on the host and cannot be recorded into a graph; use "
        "batched_mm or grouped_mm, or run without graphs (--no-graph)");
  }
  const size_t element = size_of(index.dtype());
  const size_t width = static_cast<size_t>(index.dim(1)) * element;
  const auto rows = static_cast<size_t>(index.dim(0));
  routing.ids.resize(rows * width);
  CADRE_CUDA_CHECK(cudaMemcpy2DAsync(routing.ids.data(), width, index.data(),
                                     static_cast<size_t>(index.stride(0)) * element, width, rows,
                                     cudaMemcpyDeviceToHost, stream_of(stream)));
  CADRE_CUDA_CHECK(cudaStreamSynchronize(stream_of(stream)));
}

// Sorts the pairs of tokens [begin, end) by expert, stable.
template <typename Id>
void sort_pairs(int64_t begin, int64_t end, const ExpertsConfig& config, HostRouting& routing) {
  const Id* ids = reinterpret_cast<const Id*>(routing.ids.data()) + begin * config.top_k;
  const int64_t num_pairs = (end - begin) * config.top_k;
  const auto known = [&](Id id) { return id >= 0 && id < config.num_experts; };
  routing.offsets.assign(static_cast<size_t>(config.num_experts) + 1, 0);
  for (int64_t p = 0; p < num_pairs; ++p) {
    if (known(ids[p])) ++routing.offsets[static_cast<size_t>(ids[p]) + 1];
  }
  for (size_t e = 1; e < routing.offsets.size(); ++e) routing.offsets[e] += routing.offsets[e - 1];
  routing.pair_of_row.resize(static_cast<size_t>(num_pairs));
  routing.row_of_pair.assign(static_cast<size_t>(num_pairs), -1);
  // Each expert's offset moves to the next one's while its rows are handed out, and then back.
  for (int64_t p = 0; p < num_pairs; ++p) {
    if (!known(ids[p])) continue;
    const int64_t row = routing.offsets[static_cast<size_t>(ids[p])]++;
    routing.pair_of_row[static_cast<size_t>(row)] = static_cast<int32_t>(p);
    routing.row_of_pair[static_cast<size_t>(p)] = static_cast<int32_t>(row);
  }
  std::rotate(routing.offsets.begin(), routing.offsets.end() - 1, routing.offsets.end());
  routing.offsets.front() = 0;
}

/// One chunk of tokens.
class Chunk {
 public:
  Chunk(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace& workspace,
        const Stream& stream)
      : query_(experts.query),
        config_(experts.query.config),
        weights_(*experts.weights),
        tokens_(tokens),
        workspace_(workspace),
        stream_(stream),
        num_pairs_(tokens.top_k_index.dim(0) * config_.top_k),
        max_rows_(std::min(num_pairs_, kMaxRows)),
        pair_of_row_(workspace.allocate<int32_t>(num_pairs_)),
        row_of_pair_(workspace.allocate<int32_t>(num_pairs_)),
        y_(workspace.allocate<float>(num_pairs_ * config_.hidden_size)),
        x_(workspace.allocate(element_bytes(max_rows_ * config_.hidden_size))),
        gate_(workspace.allocate<float>(max_rows_ * config_.intermediate_size)),
        up_(workspace.allocate<float>(max_rows_ * config_.intermediate_size)),
        h_(workspace.allocate(static_cast<size_t>(max_rows_ * config_.intermediate_size) *
                              size_of(h_dtype(query_)))) {}

  static size_t workspace_bytes(const ExpertsQuery& query, int64_t num_tokens) {
    const ExpertsConfig& config = query.config;
    const int64_t pairs = num_tokens * config.top_k;
    const int64_t rows = std::min(pairs, kMaxRows);
    const auto padded = [](int64_t count, size_t size) {
      return Workspace::padded(static_cast<size_t>(count) * size);
    };
    const size_t element = size_of(query.compute_dtype);
    return 2 * padded(pairs, sizeof(int32_t)) + padded(pairs * config.hidden_size, sizeof(float)) +
           padded(rows * config.hidden_size, element) +
           2 * padded(rows * config.intermediate_size, sizeof(float)) +
           padded(rows * config.intermediate_size, size_of(h_dtype(query))) +
           std::max(matmul_workspace_bytes(), codes_bytes(query, rows));
  }

  void run(const HostRouting& routing) {
    to_device(pair_of_row_, routing.pair_of_row);
    to_device(row_of_pair_, routing.row_of_pair);
    for (int64_t e = 0; e < config_.num_experts; ++e) {
      const int64_t end = routing.offsets[static_cast<size_t>(e) + 1];
      for (int64_t row = routing.offsets[static_cast<size_t>(e)]; row < end; row += kMaxRows) {
        project(static_cast<size_t>(e), row, std::min(kMaxRows, end - row));
      }
    }
    const TensorView y(y_, DType::kF32, {routing.num_rows(), config_.hidden_size}, query_.device);
    combine(y, row_of_pair_, tokens_.top_k_weights, tokens_.output, stream_);
  }

 private:
  static bool quantizes(const ExpertsQuery& query) {
    return is_quantized(query.format) && query.activation_scheme != ActivationScheme::kNone;
  }
  // h is quantised from float32.
  static DType h_dtype(const ExpertsQuery& query) {
    return quantizes(query) ? DType::kF32 : query.compute_dtype;
  }
  static size_t codes_bytes(const ExpertsQuery& query, int64_t rows) {
    if (!quantizes(query)) return 0;
    const int64_t k = std::max(query.config.hidden_size, query.config.intermediate_size);
    return activation_codes_bytes(rows, k, activation_group(query.format));
  }

  size_t element_bytes(int64_t count) const {
    return static_cast<size_t>(count) * size_of(query_.compute_dtype);
  }

  // Pageable memory: the call has read it when it returns.
  void to_device(int32_t* to, const std::vector<int32_t>& from) {
    CADRE_CUDA_CHECK(cudaMemcpyAsync(to, from.data(), from.size() * sizeof(int32_t),
                                     cudaMemcpyHostToDevice, stream_of(stream_)));
  }

  /// Rows [first, first + rows) of expert e, from tokens to results.
  void project(size_t e, int64_t first, int64_t rows) {
    gather_rows_of_pairs(tokens_.hidden_states, pair_of_row_ + first, rows, config_.top_k, x_,
                         stream_);
    const int64_t hidden = config_.hidden_size;
    const int64_t width = config_.intermediate_size;
    const DType dtype = query_.compute_dtype;
    if (config_.has_gate) multiply(weights_.gate[e], x_, dtype, rows, width, hidden, gate_);
    multiply(weights_.up[e], x_, dtype, rows, width, hidden, up_);
    apply_gate(gate_function(config_), gate_, bias(weights_.gate_bias, e), up_,
               bias(weights_.up_bias, e), rows, width, h_, h_dtype(query_), stream_);
    float* y = y_ + first * hidden;
    multiply(weights_.down[e], h_, h_dtype(query_), rows, hidden, width, y);
    const Bias down_bias = bias(weights_.down_bias, e);
    if (down_bias.vector.data != nullptr) add_to_rows(y, down_bias, rows, hidden, stream_);
  }

  void multiply(const ExpertMatrix& w, const void* x, DType x_dtype, int64_t rows, int64_t n,
                int64_t k, float* out) {
    if (is_quantized(weights_.format)) return multiply_codes(w, x, x_dtype, rows, n, k, out);
    Matmul product;
    product.dtype = x_dtype;
    product.m = rows;
    product.n = n;
    product.k = product.x_stride = k;
    product.x = x;
    product.w = {w.data, w.row_stride, w.col_stride};
    product.out = out;
    product.out_stride = n;
    matmul(product, workspace_, stream_);
  }

  void multiply_codes(const ExpertMatrix& w, const void* x, DType x_dtype, int64_t rows, int64_t n,
                      int64_t k, float* out) {
    const Workspace::Scope scope(workspace_);
    QuantizedGemm product;
    product.format = weights_.format;
    product.layout = weights_.scale_layout;
    product.gemm.dtype = query_.compute_dtype;
    product.gemm.max_rows = rows;
    product.gemm.n = n;
    product.gemm.k = product.gemm.x_stride = k;
    product.gemm.x = x;
    product.gemm.w.first = device_matrix(w);
    product.gemm.out = out;
    product.gemm.out_stride = n;
    if (quantizes(query_)) {
      const bool is_static = query_.activation_scheme == ActivationScheme::kStatic;
      QuantizeRows quantize;
      quantize.dtype = x_dtype;
      quantize.x = x;
      quantize.x_stride = quantize.k = k;
      quantize.rows = rows;
      quantize.group = activation_group(weights_.format);
      if (is_static) quantize.static_scale = w.input_scale;
      const ActivationCodes codes = allocate_activation_codes(rows, k, quantize.group, workspace_);
      quantize_rows(quantize, codes, stream_);
      set_codes(product, codes, is_static ? 0 : quantize.group);
    }
    quantized_gemm(product, stream_);
  }

  Bias bias(const std::vector<ExpertVector>& vectors, size_t e) const {
    if (vectors.empty()) return {};
    return {{vectors[e].data, vectors[e].stride}, weights_.bias_dtype};
  }

  const ExpertsQuery& query_;
  const ExpertsConfig& config_;
  const ExpertsWeights& weights_;
  const RoutedTokens& tokens_;
  Workspace& workspace_;
  const Stream& stream_;
  int64_t num_pairs_;
  int64_t max_rows_;
  int32_t* pair_of_row_;
  int32_t* row_of_pair_;
  float* y_;
  void* x_;
  float* gate_;
  float* up_;
  void* h_;
};

class Eager final : public ExpertsBackend {
 public:
  Support supports(const ExpertsQuery& query) const override {
    return supports_on_gpu(query, {.with_static_scales = true, .dynamic_with_mx = true});
  }

  std::unique_ptr<PreparedExperts> prepare(const ExpertsQuery& query,
                                           std::shared_ptr<const ExpertsWeights> weights) override {
    prepare_matmul(query.device);
    return std::make_unique<PreparedExperts>(query, std::move(weights));
  }

  bool can_be_captured() const override { return false; }

  size_t workspace_bytes(const ExpertsQuery& query, int64_t max_tokens,
                         int /*num_threads*/) const override {
    return Chunk::workspace_bytes(query, chunk_tokens(query.config, max_tokens));
  }

 protected:
  void run(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace& workspace,
           const Stream& stream) override {
    const ExpertsConfig& config = experts.query.config;
    const int64_t num_tokens = tokens.hidden_states.dim(0);
    if (num_tokens == 0) return;
    static thread_local HostRouting routing;
    read_ids(tokens.top_k_index, routing, stream);
    const int64_t step = chunk_tokens(config, num_tokens);
    for (int64_t begin = 0; begin < num_tokens; begin += step) {
      const int64_t end = std::min(num_tokens, begin + step);
      if (tokens.top_k_index.dtype() == DType::kI32) {
        sort_pairs<int32_t>(begin, end, config, routing);
      } else {
        sort_pairs<int64_t>(begin, end, config, routing);
      }
      const RoutedTokens part{
          tokens.hidden_states.slice(begin, end), tokens.top_k_index.slice(begin, end),
          tokens.top_k_weights.slice(begin, end), tokens.output.slice(begin, end)};
      const Workspace::Scope scope(workspace);
      Chunk(experts, part, workspace, stream).run(routing);
    }
  }
};

}  // namespace

std::unique_ptr<ExpertsBackend> make_eager() { return std::make_unique<Eager>(); }

}  // namespace cadre::cuda
