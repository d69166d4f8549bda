// The host side of the decode kernels: which pair runs, blocks of tokens, memory.
#include "backends/cuda/kernels/decode/decode.h"

#include <algorithm>

#include "backends/cuda/device/check.h"
#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/kernels/decode/decode_kernels.h"
#include "backends/cuda/kernels/decode/shapes.h"
#include "core/str_cat.h"
#include "quant/activations.h"

namespace cadre::cuda {
namespace {

constexpr int64_t kAlignment = 16;              // of a load of the fast kernels
constexpr int64_t kMaxSize = int64_t{1} << 18;  // times kMaxDecodeTopK is an int

bool has_codes(const ExpertsQuery& query) {
  return query.activation_scheme == ActivationScheme::kDynamic;
}

bool is_mx(StorageFormat format) {
  return format == StorageFormat::kMxFp8 || format == StorageFormat::kFp4;
}

// Whether activations become float16.
bool has_halves(const ExpertsQuery& query) {
  return is_mx(query.format) && query.activation_scheme == ActivationScheme::kNone &&
         size_of(query.compute_dtype) == 2;
}

bool is_aligned(const void* data, int64_t row_bytes) {
  return reinterpret_cast<uintptr_t>(data) % kAlignment == 0 && row_bytes % kAlignment == 0;
}

// Bytes of an element; of quantised weights, whose strides count bytes, 1.
int64_t weight_bytes(StorageFormat format) {
  return is_quantized(format) ? 1 : static_cast<int64_t>(size_of(*plain_dtype(format)));
}

bool suits_fast(const std::vector<ExpertMatrix>& experts, const ExpertsQuery& query) {
  const int64_t element = weight_bytes(query.format);
  const auto scale = static_cast<int64_t>(size_of(query.scale_layout.dtype));
  return std::all_of(experts.begin(), experts.end(), [&](const ExpertMatrix& m) {
    if (m.col_stride != 1 || !is_aligned(m.data, m.row_stride * element)) return false;
    return !is_quantized(query.format) ||
           (m.scale_col_stride == 1 && reinterpret_cast<uintptr_t>(m.scales) % scale == 0);
  });
}

bool same_strides(const std::vector<ExpertMatrix>& a, const std::vector<ExpertMatrix>& b) {
  return a.empty() || std::equal(a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) {
           return x.row_stride == y.row_stride;
         });
}

bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

// Of activations beside quantised weights, and of scales.
bool suits_fast_format(const ExpertsQuery& query) {
  const ScaleLayout& layout = query.scale_layout;
  switch (query.format) {
    case StorageFormat::kFp8Block:
      return has_codes(query) && is_power_of_two(layout.block_rows) &&
             layout.block_cols % kActivationGroup == 0 && is_power_of_two(layout.block_cols);
    case StorageFormat::kFp8Tensor:
      return has_codes(query);
    case StorageFormat::kMxFp8:
    case StorageFormat::kFp4:
      return has_halves(query);
    default:
      return true;
  }
}

bool is_fast_size(StorageFormat format, int64_t k) {
  return is_mx(format) ? k % 32 == 0 : row_bytes(format, k) % kAlignment == 0;
}

DecodeDevice device_of(const Stream& stream) {
  const int index = stream.device.index;
  DecodeDevice device;
  device.num_sms = properties_of(index).num_multiprocessors;
  device.has_dependent_launch = compute_capability(index) >= 90;
  device.stream = &stream;
  CADRE_CUDA_CHECK(
      cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
  return device;
}

using Fast = bool (*)(const DecodeArgs& args, const DecodeDevice& device);

Fast fast_of(StorageFormat format) {
  switch (format) {
    case StorageFormat::kF32:
      return decode_fast_f32;
    case StorageFormat::kF16:
      return decode_fast_f16;
    case StorageFormat::kBF16:
      return decode_fast_bf16;
    case StorageFormat::kFp4:
      return decode_fast_fp4;
    case StorageFormat::kMxFp8:
      return decode_fast_mxfp8;
    default:
      return decode_fast_fp8;
  }
}

void launch_block(bool is_fast, const DecodeArgs& args, const DecodeDevice& device) {
  const StorageFormat format = args.format.format;
  if (is_fast && fast_of(format)(args, device)) return;
  if (is_quantized(format)) return decode_plain_quantized(args, device);
  decode_plain(args, device);
}

// A block of tokens and the memory that it takes. Where activations become codes, h is float32.
struct Block {
  int64_t tokens;
  int64_t pairs;
  size_t h_bytes;
  size_t y_bytes;
};

int64_t h_element(const ExpertsQuery& query) {
  return static_cast<int64_t>(has_codes(query) ? sizeof(float) : size_of(query.compute_dtype));
}

Block block_of(const ExpertsQuery& query, int64_t max_tokens) {
  const ExpertsConfig& c = query.config;
  const int64_t most = std::max<int64_t>(1, kMaxDecodePairs / c.top_k);
  const int64_t tokens = std::min(max_tokens, most);
  const int64_t pairs = tokens * c.top_k;
  const int64_t element = h_element(query);
  return {tokens, pairs,
          static_cast<size_t>(pairs * decode_h_stride(c.intermediate_size, element) * element),
          static_cast<size_t>(pairs * c.hidden_size) * sizeof(float)};
}

// Whole chunks of the kernels' rings.
constexpr int64_t kHalfRowUnit = 256;

int64_t half_row_bytes(int64_t k) {
  return (k + kHalfRowUnit - 1) / kHalfRowUnit * kHalfRowUnit * 2;
}

size_t half_rows_bytes(int64_t rows, int64_t k) {
  return Workspace::padded(static_cast<size_t>(rows * half_row_bytes(k))) +
         Workspace::padded(static_cast<size_t>(rows) * sizeof(float));
}

HalfRows allocate_half_rows(int64_t rows, int64_t k, Workspace& workspace) {
  HalfRows result;
  result.stride = half_row_bytes(k);
  result.data = workspace.allocate(static_cast<size_t>(rows * result.stride));
  result.factors =
      static_cast<float*>(workspace.allocate(static_cast<size_t>(rows) * sizeof(float)));
  return result;
}

int shift_of(int64_t block, int64_t unit) {
  int shift = 0;
  for (; block > unit; block /= 2) ++shift;
  return block == 0 ? 31 : shift;
}

DecodeFormat format_of(const ExpertsQuery& query) {
  const ScaleLayout& layout = query.scale_layout;
  DecodeFormat format;
  format.format = query.format;
  format.is_e8m0 = layout.dtype == DType::kF8E8M0;
  format.block_rows = layout.block_rows;
  format.block_cols = layout.block_cols;
  format.row_shift = shift_of(layout.block_rows, 1);
  format.col_shift = shift_of(layout.block_cols, kActivationGroup);
  return format;
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
  a.h_stride = static_cast<int64_t>(block.h_bytes) / (h_element(prepared.query) * block.pairs);
  a.compute_dtype = prepared.query.compute_dtype;
  a.format = format_of(prepared.query);
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
  return suits_fast_format(query) && is_fast_size(query.format, query.config.hidden_size) &&
         is_fast_size(query.format, query.config.intermediate_size) && suits_fast(w.gate, query) &&
         suits_fast(w.up, query) && suits_fast(w.down, query) && same_strides(w.gate, w.up);
}

size_t decode_workspace_bytes(const ExpertsQuery& query, int64_t max_tokens) {
  const ExpertsConfig& c = query.config;
  const Block block = block_of(query, max_tokens);
  size_t bytes = Workspace::padded(block.h_bytes) + Workspace::padded(block.y_bytes);
  if (has_codes(query)) {
    bytes += activation_codes_bytes(block.tokens, c.hidden_size, kActivationGroup) +
             activation_codes_bytes(block.pairs, c.intermediate_size, kActivationGroup);
  }
  if (has_halves(query)) {
    bytes += half_rows_bytes(block.tokens, c.hidden_size) +
             half_rows_bytes(block.pairs, c.intermediate_size);
  }
  return bytes;
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
  if (has_codes(query)) {
    const ExpertsConfig& c = query.config;
    args.x_codes =
        allocate_activation_codes(block.tokens, c.hidden_size, kActivationGroup, workspace);
    args.h_codes =
        allocate_activation_codes(block.pairs, c.intermediate_size, kActivationGroup, workspace);
  }
  if (has_halves(query)) {
    const ExpertsConfig& c = query.config;
    args.x_halves = allocate_half_rows(block.tokens, c.hidden_size, workspace);
    args.h_halves = allocate_half_rows(block.pairs, c.intermediate_size, workspace);
  }
  const TensorView& x = tokens.hidden_states;
  const auto element = static_cast<int64_t>(size_of(query.compute_dtype));
  const bool is_fast_call =
      is_fast && (has_codes(query) || is_aligned(x.data(), x.stride(0) * element));
  for (int64_t t = 0; t < num_tokens; t += block.tokens) {
    point_at(args, tokens, t, std::min(block.tokens, num_tokens - t));
    launch_block(is_fast_call, args, device);
  }
}

void make_x_codes(const DecodeArgs& a, const DecodeDevice& device) {
  QuantizeRows rows;
  rows.dtype = a.compute_dtype;
  rows.x = a.x;
  rows.x_stride = a.x_stride;
  rows.rows = a.num_tokens;
  rows.k = a.hidden;
  quantize_rows(rows, a.x_codes, *device.stream);
}

void make_h_codes(const DecodeArgs& a, const DecodeDevice& device) {
  QuantizeRows rows;
  rows.dtype = DType::kF32;
  rows.x = a.h;
  rows.x_stride = a.h_stride;
  rows.rows = int64_t{a.num_tokens} * a.top_k;
  rows.k = a.intermediate;
  rows.next_starts_first = true;  // `down` reads no more than weights and routing before it waits
  quantize_rows(rows, a.h_codes, *device.stream);
}

}  // namespace cadre::cuda
