#include "conformance/experts_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "cadre/float16.h"
#include "core/str_cat.h"

namespace cadre::test {
namespace {

std::string_view name_of(Routing routing) {
  constexpr std::string_view kNames[] = {
      "random",       "repeated", "all_to_first", "all_to_last", "first_empty",
      "every_second", "skewed",   "sentinels",    "all_invalid", "one_invalid"};
  return kNames[static_cast<size_t>(routing)];
}

size_t bytes_for(DType dtype, int64_t elements) {
  return static_cast<size_t>(elements) * size_of(dtype);
}

// Elements of `size` bytes that lie without gaps, to where the strides say. The end of what was
// read.
const char* copy_elements(const char* from, std::span<const int64_t> shape, size_t size, char* to,
                          std::span<const int64_t> strides) {
  if (shape.size() == 1 && strides[0] == 1) {
    const size_t bytes = static_cast<size_t>(shape[0]) * size;
    std::memcpy(to, from, bytes);
    return from + bytes;
  }
  for (int64_t i = 0; i < shape[0]; ++i) {
    char* const at = to + i * strides[0] * static_cast<int64_t>(size);
    if (shape.size() == 1) {
      std::memcpy(at, from, size);
      from += size;
    } else {
      from = copy_elements(from, shape.subspan(1), size, at, strides.subspan(1));
    }
  }
  return from;
}

}  // namespace

void write_element(void* at, DType dtype, double value) {
  const auto put = [&](auto typed) { std::memcpy(at, &typed, sizeof(typed)); };
  const auto narrow = static_cast<float>(value);
  if (dtype == DType::kF32) put(narrow);
  if (dtype == DType::kBF16) put(BFloat16(narrow));
  if (dtype == DType::kF16) put(Float16(narrow));
}

double rounded(DType dtype, double value) {
  const auto narrow = static_cast<float>(value);
  if (dtype == DType::kBF16) return static_cast<float>(BFloat16(narrow));
  if (dtype == DType::kF16) return static_cast<float>(Float16(narrow));
  return narrow;
}

bool is_wider(DType stored, DType compute) {
  if (stored == DType::kF32) return compute != DType::kF32;
  return stored == DType::kF16 && compute == DType::kBF16;
}

std::string describe(const CaseParams& p) {
  const ExpertsConfig& c = p.config;
  std::string quantized;
  if (p.quantized) {
    const ScaleLayout& layout = p.scale_layout;
    quantized = str_cat(" ", cadre::name_of(*p.quantized), "/", cadre::name_of(layout.dtype), "/",
                        layout.block_rows, "x", layout.block_cols,
                        " activations=", cadre::name_of(p.activations),
                        " zeros=", p.has_zero_blocks, " huge=", p.has_huge_value);
  }
  return str_cat("T=", p.num_tokens, " E=", c.num_experts, " k=", c.top_k, " H=", c.hidden_size,
                 " I=", c.intermediate_size, " ", cadre::name_of(p.compute_dtype), " x ",
                 cadre::name_of(p.stored_dtype), " ids=", cadre::name_of(p.id_dtype),
                 " act=", cadre::name_of(c.activation), " gate=", c.has_gate, " bias=", c.has_bias,
                 " transposed=", c.is_transposed, " concatenated=", c.is_concatenated,
                 " limit=", c.swiglu_limit.value_or(0), " alpha=", c.swiglu_alpha.value_or(0),
                 " routing=", name_of(p.routing), " per_expert=", p.per_expert_tensors,
                 " expert_gap=", p.expert_gap, " row_gap=", p.row_gap, " shift=", p.byte_shift,
                 " out_f32=", p.output_f32, " seed=", p.seed, quantized);
}

ExpertsCase::ExpertsCase(const CaseParams& params)
    : params_(params), state_(params.seed * 0x9e3779b97f4a7c15u + 1) {
  make_weights();
  make_tokens();
  make_routing();
}

// splitmix64: the same values on every platform.
uint64_t ExpertsCase::bits() {
  state_ += 0x9e3779b97f4a7c15u;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// The sum of four uniform numbers: near enough to a normal distribution, and cheap.
float ExpertsCase::normal(float deviation) {
  const uint64_t r = bits();
  float sum = -2;
  for (int i = 0; i < 4; ++i) sum += static_cast<float>((r >> (16 * i)) & 0xffffu) / 65536.0f;
  return sum * 1.732f * deviation;
}

// `outer` runs of `inner` random elements, `stride` apart; what lies between stays NaN.
GuardedBuffer ExpertsCase::random_matrix(DType dtype, int64_t outer, int64_t stride, int64_t inner,
                                         float deviation, bool is_weight) {
  const int64_t elements = outer == 0 ? 0 : (outer - 1) * stride + inner;
  const size_t shift = params_.byte_shift * (params_.whole_scale_shift ? size_of(dtype) : 1);
  GuardedBuffer buffer(bytes_for(dtype, elements), shift);
  const bool round = is_weight && params_.round_weights && is_wider(dtype, params_.compute_dtype);
  for (int64_t i = 0; i < outer; ++i) {
    for (int64_t j = 0; j < inner; ++j) {
      double value = rounded(dtype, normal(deviation));
      if (round) value = rounded(params_.compute_dtype, value);
      write_element(buffer.data() + bytes_for(dtype, i * stride + j), dtype, value);
    }
  }
  return buffer;
}

void ExpertsCase::make_weights() {
  if (params_.quantized) {
    params_.per_expert_tensors ? make_quantized_per_expert() : make_quantized_fused();
  } else {
    params_.per_expert_tensors ? make_per_expert() : make_fused();
  }
}

void ExpertsCase::make_fused() {
  const ExpertsConfig& c = params_.config;
  const int64_t up_rows = c.has_gate ? 2 * c.intermediate_size : c.intermediate_size;
  const auto add = [&](DType dtype, int64_t n, int64_t k, float deviation) -> TensorView {
    const int64_t stride = n * k + params_.expert_gap;
    buffers_.push_back(random_matrix(dtype, c.num_experts, stride, n * k, deviation));
    const Dims shape = c.is_transposed ? Dims{c.num_experts, k, n} : Dims{c.num_experts, n, k};
    return {buffers_.back().data(), dtype, shape, {stride, c.is_transposed ? n : k, 1}};
  };
  FusedExperts fused;
  const auto deviation = [](int64_t k) { return 1.5f / std::sqrt(static_cast<float>(k)); };
  fused.gate_up_proj = add(params_.stored_dtype, up_rows, c.hidden_size, deviation(c.hidden_size));
  fused.down_proj =
      add(params_.stored_dtype, c.hidden_size, c.intermediate_size, deviation(c.intermediate_size));
  if (c.has_bias) {
    fused.gate_up_proj_bias = make_bias(up_rows);
    fused.down_proj_bias = make_bias(c.hidden_size);
  }
  weights_ = std::make_shared<ExpertsWeights>(make_experts_weights(c, fused));
}

TensorView ExpertsCase::make_bias(int64_t n) {
  const int64_t experts = params_.config.num_experts;
  const int64_t stride = n + params_.expert_gap;
  buffers_.push_back(random_matrix(params_.bias_dtype, experts, stride, n, 0.5f, false));
  return {buffers_.back().data(), params_.bias_dtype, {experts, n}, {stride, 1}};
}

void ExpertsCase::make_per_expert() {
  const ExpertsConfig& c = params_.config;
  const auto add = [&](int64_t n, int64_t k) {
    std::vector<TensorView> views;
    for (int64_t e = 0; e < c.num_experts; ++e) {
      buffers_.push_back(random_matrix(params_.stored_dtype, n, k + params_.expert_gap, k,
                                       1.5f / std::sqrt(static_cast<float>(k))));
      views.emplace_back(buffers_.back().data(), params_.stored_dtype, Dims{n, k},
                         Dims{k + params_.expert_gap, 1});
    }
    return views;
  };
  const auto up = add(c.intermediate_size, c.hidden_size);
  const auto gate =
      c.has_gate ? add(c.intermediate_size, c.hidden_size) : std::vector<TensorView>();
  const auto down = add(c.hidden_size, c.intermediate_size);
  weights_ = std::make_shared<ExpertsWeights>(make_experts_weights(c, gate, up, down));
}

// [experts, n, k] float32, with what the parameters want in it.
std::vector<float> ExpertsCase::random_weights(int64_t experts, int64_t n, int64_t k) {
  const float deviation = 1.5f / std::sqrt(static_cast<float>(k));
  const int64_t rows = std::max<int64_t>(params_.scale_layout.block_rows, 1);
  const int64_t cols = std::max<int64_t>(params_.scale_layout.block_cols, 1);
  std::vector<float> values(static_cast<size_t>(experts * n * k));
  size_t at = 0;
  for (int64_t row = 0; row < experts * n; ++row) {
    for (int64_t col = 0; col < k; ++col) {
      const bool is_zero = params_.has_zero_blocks && (row % n / rows + col / cols) % 3 == 1;
      float value = normal(deviation);
      if (params_.has_huge_value && row % n == n / 2 && col == k / 2) value *= 1000;
      values[at++] = is_zero ? 0 : value;
    }
  }
  return values;
}

// A copy at the parameters' alignment that ends at an unreadable page, with gaps[i] elements
// between the slices of dimension i.
TensorView ExpertsCase::place(const Tensor& tensor, const Dims& gaps) {
  const TensorView& from = tensor.view();
  Dims strides = from.shape();
  int64_t stride = 1;
  for (int i = from.rank() - 1; i >= 0; --i) {
    stride += gaps[i];
    strides[i] = stride;
    stride *= from.dim(i);
  }
  const size_t size = size_of(from.dtype());
  int64_t last = 0;
  for (int i = 0; i < from.rank(); ++i) last += (from.dim(i) - 1) * strides[i];
  const size_t shift = params_.byte_shift * (params_.whole_scale_shift ? size : 1);
  GuardedBuffer& buffer = buffers_.emplace_back(static_cast<size_t>(last + 1) * size, shift);
  copy_elements(static_cast<const char*>(from.data()), from.shape(), size, buffer.data(), strides);
  return {buffer.data(), from.dtype(), from.shape(), strides};
}

void ExpertsCase::make_quantized_fused() {
  const ExpertsConfig& c = params_.config;
  const StorageFormat format = *params_.quantized;
  const ScaleLayout& layout = params_.scale_layout;
  const bool is_transposed = c.is_transposed && (format == StorageFormat::kFp8Block ||
                                                 format == StorageFormat::kFp8Tensor);
  const Dims gaps{params_.expert_gap, 0, 0};
  const auto add = [&](int64_t n, int64_t k) {
    const std::vector<float> values = random_weights(c.num_experts, n, k);
    const TensorView rows(values.data(), DType::kF32, {c.num_experts, n, k});
    const TensorView columns(values.data(), DType::kF32, {c.num_experts, k, n}, {n * k, 1, k});
    const ScaleLayout turned{layout.dtype, layout.block_cols, layout.block_rows};
    const QuantizedWeight q =
        is_transposed ? quantize(columns, format, turned) : quantize(rows, format, layout);
    return QuantizedTensor{format, layout, place(q.values, gaps), place(q.scales, gaps)};
  };
  QuantizedFusedExperts fused;
  const int64_t up_rows = c.has_gate ? 2 * c.intermediate_size : c.intermediate_size;
  fused.gate_up_proj = add(up_rows, c.hidden_size);
  fused.down_proj = add(c.hidden_size, c.intermediate_size);
  if (format == StorageFormat::kFp8Tensor && c.has_gate) {  // gate's and up's own
    const Tensor two(DType::kF32, {c.num_experts, 2, 1});
    for (int64_t i = 0; i < 2 * c.num_experts; ++i) {
      const TensorView& one = fused.gate_up_proj.scales;
      float scale;
      std::memcpy(&scale, one[i / 2].data(), sizeof(scale));
      two->as<float>()[i] = i % 2 == 0 ? scale : scale * 0.75f;
    }
    fused.gate_up_proj.scales = place(two, gaps);
  }
  if (c.has_bias) {
    fused.gate_up_proj_bias = make_bias(up_rows);
    fused.down_proj_bias = make_bias(c.hidden_size);
  }
  if (params_.activations == ActivationScheme::kStatic) {
    for (int64_t e = 0; e < c.num_experts; ++e) {
      input_scales_.push_back(params_.scale * (1 + 0.125f * static_cast<float>(e)) / 128);
    }
    fused.gate_up_input_scales = fused.down_input_scales = input_scales_;
  }
  weights_ = std::make_shared<ExpertsWeights>(make_experts_weights(c, fused));
}

void ExpertsCase::make_quantized_per_expert() {
  const ExpertsConfig& c = params_.config;
  const auto add = [&](int64_t n, int64_t k) {
    std::vector<QuantizedTensor> tensors;
    for (int64_t e = 0; e < c.num_experts; ++e) {
      const std::vector<float> values = random_weights(1, n, k);
      const QuantizedWeight q =
          quantize({values.data(), DType::kF32, {n, k}}, *params_.quantized, params_.scale_layout);
      const Dims gaps{params_.expert_gap, 0};
      tensors.push_back({q.format, q.layout, place(q.values, gaps), place(q.scales, gaps)});
    }
    return tensors;
  };
  const auto up = add(c.intermediate_size, c.hidden_size);
  const auto gate =
      c.has_gate ? add(c.intermediate_size, c.hidden_size) : std::vector<QuantizedTensor>();
  const auto down = add(c.hidden_size, c.intermediate_size);
  weights_ =
      std::make_shared<ExpertsWeights>(make_experts_weights(c, QuantizedExperts{gate, up, down}));
}

void ExpertsCase::make_tokens() {
  const ExpertsConfig& c = params_.config;
  const int64_t tokens = params_.num_tokens;
  const int64_t stride = c.hidden_size + params_.row_gap;
  const Dims shape{tokens, c.hidden_size};
  buffers_.push_back(
      random_matrix(params_.compute_dtype, tokens, stride, c.hidden_size, params_.scale));
  tokens_.hidden_states =
      TensorView(buffers_.back().data(), params_.compute_dtype, shape, Dims{stride, 1});
  const DType out = params_.output_f32 ? DType::kF32 : params_.compute_dtype;
  buffers_.emplace_back(tokens == 0 ? 0 : bytes_for(out, (tokens - 1) * stride + c.hidden_size));
  tokens_.output = MutableTensorView(buffers_.back().data(), out, shape, Dims{stride, 1});
}

int64_t ExpertsCase::pick_id(int64_t token, int64_t slot) {
  const int64_t experts = params_.config.num_experts;
  const auto random = [&](int64_t n) {
    return static_cast<int64_t>(bits() % static_cast<uint64_t>(n));
  };
  const int64_t distinct = (token * 7 + slot + random(1)) % experts;
  const int64_t invalid[] = {-1, experts, experts + 1, std::numeric_limits<int32_t>::max()};
  switch (params_.routing) {
    case Routing::kRandom:
      return (token * 31 % experts + slot * (experts > 7 && experts % 7 != 0 ? 7 : 1)) % experts;
    case Routing::kRepeated:
      return random(std::max<int64_t>(1, experts / 2));
    case Routing::kAllToFirst:
      return 0;
    case Routing::kAllToLast:
      return experts - 1;
    case Routing::kFirstEmpty:
      return experts == 1 ? 0 : 1 + random(experts - 1);
    case Routing::kEverySecond:
      return random((experts + 1) / 2) * 2;
    case Routing::kSkewed:
      return random(4) != 0 ? slot % experts : random(experts);
    case Routing::kSentinels:
      return random(3) == 0 ? invalid[random(4)] : distinct;
    case Routing::kAllInvalid:
      return invalid[random(4)];
    case Routing::kOneInvalid:
      return slot == token % params_.config.top_k ? invalid[random(4)] : distinct;
  }
  return 0;
}

void ExpertsCase::make_routing() {
  const int64_t tokens = params_.num_tokens;
  const int64_t k = params_.config.top_k;
  const DType dtype = params_.weights_in_compute_dtype ? params_.compute_dtype : DType::kF32;
  buffers_.emplace_back(bytes_for(params_.id_dtype, tokens * k));
  tokens_.top_k_index = TensorView(buffers_.back().data(), params_.id_dtype, {tokens, k});
  buffers_.emplace_back(bytes_for(dtype, tokens * k));
  tokens_.top_k_weights = TensorView(buffers_.back().data(), dtype, {tokens, k});
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t s = 0; s < k; ++s) {
      const int64_t id = pick_id(t, s);
      set_id(t, s, id);
      const bool is_valid = id >= 0 && id < params_.config.num_experts;
      const double weight = 0.3 + 0.7 * static_cast<double>(bits() % 1024) / 1024;
      write_element(buffers_.back().data() + bytes_for(dtype, t * k + s), dtype,
                    is_valid ? weight : std::nan(""));
    }
  }
}

ExpertsQuery query_of(const CaseParams& params) {
  ExpertsQuery query;
  query.config = params.config;
  query.compute_dtype = params.compute_dtype;
  query.format = params.quantized.value_or(*plain_format(params.stored_dtype));
  query.scale_layout = params.scale_layout;
  query.activation_scheme = params.activations;
  return query;
}

RoutedTokens ExpertsCase::slice(int64_t begin, int64_t end) const {
  return {tokens_.hidden_states.slice(begin, end), tokens_.top_k_index.slice(begin, end),
          tokens_.top_k_weights.slice(begin, end), tokens_.output.slice(begin, end)};
}

void ExpertsCase::set_hidden(int64_t token, int64_t column, float value) {
  const TensorView& x = tokens_.hidden_states;
  char* data = static_cast<char*>(const_cast<void*>(x.data()));
  write_element(data + bytes_for(x.dtype(), token * x.stride(0) + column), x.dtype(), value);
}

void ExpertsCase::set_id(int64_t token, int64_t slot, int64_t id) {
  char* data = static_cast<char*>(const_cast<void*>(tokens_.top_k_index.data()));
  const int64_t at = token * params_.config.top_k + slot;
  if (params_.id_dtype == DType::kI32) {
    const auto narrow = static_cast<int32_t>(id);
    std::memcpy(data + at * 4, &narrow, sizeof(narrow));
  } else {
    std::memcpy(data + at * 8, &id, sizeof(id));
  }
}

void ExpertsCase::set_expert_weights(int64_t expert, float value) {
  const auto e = static_cast<size_t>(expert);
  for (const ExpertMatrix* matrix : {&weights_->up[e], &weights_->down[e]}) {
    if (params_.quantized) {  // all bits set: NaN in both containers
      std::memset(const_cast<void*>(matrix->scales), 0xff, size_of(params_.scale_layout.dtype));
    } else {
      write_element(const_cast<void*>(matrix->data), params_.stored_dtype, value);
    }
  }
}

}  // namespace cadre::test
