// The host side of the decode kernels: which pair runs, blocks of tokens, memory.
#include "backends/cuda/kernels/decode/decode.h"

#include <algorithm>

#include "backends/cuda/device/check.h"
#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/kernels/decode/decode_kernels.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

constexpr int64_t kAlignment = 16;              // of a load of the fast kernels
constexpr int64_t kMaxSize = int64_t{1} << 18;  // times kMaxDecodeTopK is an int

bool is_aligned(const void* data, int64_t row_stride, int64_t element) {
  return reinterpret_cast<uintptr_t>(data) % kAlignment == 0 &&
         row_stride * element % kAlignment == 0;
}

bool suits_fast(const std::vector<ExpertMatrix>& experts, int64_t element) {
  return std::all_of(experts.begin(), experts.end(), [&](const ExpertMatrix& m) {
    return m.col_stride == 1 && is_aligned(m.data, m.row_stride, element);
  });
}

bool same_strides(const std::vector<ExpertMatrix>& a, const std::vector<ExpertMatrix>& b) {
  return a.empty() || std::equal(a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) {
           return x.row_stride == y.row_stride;
         });
}

DecodeDevice device_of(const Stream& stream) {
  const int index = stream.device.index;
  DecodeDevice device;
  device.num_sms = properties_of(index).num_multiprocessors;
  device.has_dependent_launch = compute_capability(index) >= 90;
  device.stream = stream_of(stream);
  CADRE_CUDA_CHECK(
      cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
  return device;
}

void launch_block(DType dtype, bool is_fast, const DecodeArgs& args, const DecodeDevice& device) {
  if (is_fast) {
    const auto fast = dtype == DType::kBF16  ? decode_fast_bf16
                      : dtype == DType::kF16 ? decode_fast_f16
                                             : decode_fast_f32;
    if (fast(args, device)) return;
  }
  decode_plain(dtype, args, device);
}

// A block of tokens and the memory that it takes.
struct Block {
  int64_t tokens;
  size_t h_bytes;
  size_t y_bytes;
};

Block block_of(const ExpertsQuery& query, int64_t max_tokens) {
  const ExpertsConfig& c = query.config;
  const int64_t most = std::max<int64_t>(1, kMaxDecodePairs / c.top_k);
  const int64_t tokens = std::min(max_tokens, most);
  const int64_t pairs = tokens * c.top_k;
  const auto element = static_cast<int64_t>(size_of(query.compute_dtype));
  return {tokens,
          static_cast<size_t>(pairs * decode_h_stride(c.intermediate_size, element) * element),
          static_cast<size_t>(pairs * c.hidden_size) * sizeof(float)};
}

const void* row_at(const TensorView& view, int64_t row) {
  return static_cast<const char*>(view.data()) +
         row * view.stride(0) * static_cast<int64_t>(size_of(view.dtype()));
}

DecodeArgs args_of(const CudaPrepared& prepared, const RoutedTokens& tokens, const Block& block) {
  const ExpertsConfig& c = prepared.query.config;
  DecodeArgs a;
  a.ids_stride = tokens.top_k_index.stride(0);
  a.ids_are_64 = tokens.top_k_index.dtype() == DType::kI64;
  a.routing_weights_stride = tokens.top_k_weights.stride(0);
  a.routing_weights_are_f32 = tokens.top_k_weights.dtype() == DType::kF32;
  a.top_k = static_cast<int>(c.top_k);
  a.num_experts = static_cast<int>(c.num_experts);
  a.hidden = static_cast<int>(c.hidden_size);
  a.intermediate = static_cast<int>(c.intermediate_size);
  a.x_stride = tokens.hidden_states.stride(0);
  a.out_stride = tokens.output.stride(0);
  a.out_is_f32 = tokens.output.dtype() == DType::kF32;
  a.gate_function = gate_function(c);
  const DeviceWeights& w = prepared.device;
  a.gate = w.gate;
  a.up = w.up;
  a.down = w.down;
  a.bias_dtype = w.bias_dtype;
  a.gate_bias = w.gate_bias;
  a.up_bias = w.up_bias;
  a.down_bias = w.down_bias;
  const auto element = static_cast<int64_t>(size_of(prepared.query.compute_dtype));
  a.h_stride = static_cast<int64_t>(block.h_bytes) / (element * block.tokens * c.top_k);
  return a;
}

void point_at(DecodeArgs& a, const RoutedTokens& tokens, int64_t first, int64_t count) {
  a.num_tokens = static_cast<int>(count);
  a.ids = row_at(tokens.top_k_index, first);
  a.routing_weights = row_at(tokens.top_k_weights, first);
  a.x = row_at(tokens.hidden_states, first);
  a.out = const_cast<void*>(row_at(tokens.output, first));
}

}  // namespace

int64_t decode_h_stride(int64_t intermediate, int64_t element_bytes) {
  const int64_t each = kAlignment / element_bytes;
  return (intermediate + each - 1) / each * each;
}

void add_decode_limits(const ExpertsConfig& c, Support& support) {
  if (c.num_experts > kMaxDecodeExperts) {
    support.reasons.push_back(
        str_cat("needs at most ", kMaxDecodeExperts, " experts, these are ", c.num_experts));
  }
  if (c.top_k > kMaxDecodeTopK) {
    support.reasons.push_back(
        str_cat("needs a top_k of at most ", kMaxDecodeTopK, ", this is ", c.top_k));
  }
  if (std::max(c.hidden_size, c.intermediate_size) > kMaxSize) {
    support.reasons.push_back(str_cat("needs a hidden_size and intermediate_size of at most ",
                                      kMaxSize, ", these are ", c.hidden_size, " and ",
                                      c.intermediate_size));
  }
}

bool suits_fast_decode(const ExpertsQuery& query, const ExpertsWeights& w) {
  const auto element = static_cast<int64_t>(size_of(query.compute_dtype));
  const int64_t piece = kAlignment / element;
  return query.config.hidden_size % piece == 0 && query.config.intermediate_size % piece == 0 &&
         suits_fast(w.gate, element) && suits_fast(w.up, element) && suits_fast(w.down, element) &&
         same_strides(w.gate, w.up);
}

size_t decode_workspace_bytes(const ExpertsQuery& query, int64_t max_tokens) {
  const Block block = block_of(query, max_tokens);
  return Workspace::padded(block.h_bytes) + Workspace::padded(block.y_bytes);
}

void decode(const CudaPrepared& prepared, bool is_fast, const RoutedTokens& tokens,
            Workspace& workspace, const Stream& stream) {
  const int64_t num_tokens = tokens.hidden_states.dim(0);
  if (num_tokens == 0) return;
  const ExpertsQuery& query = prepared.query;
  const Block block = block_of(query, num_tokens);
  const DeviceGuard guard(stream.device.index);
  const DecodeDevice device = device_of(stream);
  const Workspace::Scope scope(workspace);
  DecodeArgs args = args_of(prepared, tokens, block);
  args.h = workspace.allocate(block.h_bytes);
  args.y = static_cast<float*>(workspace.allocate(block.y_bytes));
  const auto element = static_cast<int64_t>(size_of(query.compute_dtype));
  const bool is_fast_call =
      is_fast && is_aligned(tokens.hidden_states.data(), tokens.hidden_states.stride(0), element);
  for (int64_t t = 0; t < num_tokens; t += block.tokens) {
    point_at(args, tokens, t, std::min(block.tokens, num_tokens - t));
    launch_block(query.compute_dtype, is_fast_call, args, device);
  }
}

}  // namespace cadre::cuda
