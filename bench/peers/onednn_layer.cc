#include "onednn_layer.h"

#include <algorithm>

#include "core/check.h"
#include "loops.h"

namespace cadre::peers {

using dnnl::memory;

Product::Product(const dnnl::engine& engine, const dnnl::stream& stream, int64_t n, int64_t k,
                 Form form)
    : engine_(engine),
      stream_(stream),
      n_(n),
      k_(k),
      plain_({k, n}, memory::data_type::bf16, memory::format_tag::ba),
      weights_(plain_) {
  if (form == Form::kPlain) return;
  // The layout does not depend on the number of rows (looked at for 1 to 256 with oneDNN 2.6.3).
  const memory::desc any({k, n}, memory::data_type::bf16, memory::format_tag::any);
  weights_ = describe(1, any).weights_desc();
}

dnnl::matmul::primitive_desc Product::describe(int64_t num_rows,
                                               const memory::desc& weights) const {
  const memory::desc x({num_rows, k_}, memory::data_type::bf16, memory::format_tag::ab);
  const memory::desc y({num_rows, n_}, memory::data_type::f32, memory::format_tag::ab);
  return {dnnl::matmul::desc(x, weights, y), engine_};
}

memory Product::prepare(const void* matrix) {
  memory plain(plain_, engine_, const_cast<void*>(matrix));
  if (weights_ == plain_) return plain;
  memory packed(weights_, engine_);
  dnnl::reorder(plain, packed).execute(stream_, plain, packed);
  stream_.wait();
  return packed;
}

Product::Rows& Product::rows_of(int64_t num_rows) {
  const auto found = by_rows_.find(num_rows);
  if (found != by_rows_.end()) return found->second;
  const dnnl::matmul::primitive_desc d = describe(num_rows, weights_);
  Rows rows{dnnl::matmul(d), memory(d.src_desc(), engine_, nullptr),
            memory(d.dst_desc(), engine_, nullptr)};
  return by_rows_.emplace(num_rows, std::move(rows)).first->second;
}

void Product::run(const void* x, int64_t num_rows, const memory& weights, float* y) {
  Rows& rows = rows_of(num_rows);
  rows.x.set_data_handle(const_cast<void*>(x));
  rows.y.set_data_handle(y);
  rows.matmul.execute(
      stream_, {{DNNL_ARG_SRC, rows.x}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, rows.y}});
}

std::string Product::implementation() { return describe(1, weights_).impl_info_str(); }

OneDnnExperts::OneDnnExperts(const ExpertsConfig& config, Form form)
    : config_(config),
      engine_(dnnl::engine::kind::cpu, 0),
      stream_(engine_),
      gate_up_(engine_, stream_, 2 * config.intermediate_size, config.hidden_size, form),
      down_(engine_, stream_, config.hidden_size, config.intermediate_size, form) {}

void OneDnnExperts::add_layer(std::shared_ptr<const ExpertsWeights> weights) {
  const int64_t gate_bytes = config_.intermediate_size * config_.hidden_size * 2;
  Layer layer;
  for (size_t e = 0; e < weights->down.size(); ++e) {
    CADRE_ASSERT(weights->up[e].data ==
                 static_cast<const char*>(weights->gate[e].data) + gate_bytes);
    layer.gate_up.push_back(gate_up_.prepare(weights->gate[e].data));
    layer.down.push_back(down_.prepare(weights->down[e].data));
  }
  layer.owner = std::move(weights);
  layers_.push_back(std::move(layer));
}

void OneDnnExperts::sort_by_expert(const RoutedTokens& tokens) {
  const int64_t num_slots = tokens.top_k_index.numel();
  const auto* ids = tokens.top_k_index.as<int32_t>();
  begin_.assign(static_cast<size_t>(config_.num_experts) + 1, 0);
  for (int64_t i = 0; i < num_slots; ++i) ++begin_[static_cast<size_t>(ids[i]) + 1];
  for (size_t e = 1; e < begin_.size(); ++e) begin_[e] += begin_[e - 1];
  std::vector<int64_t> next(begin_.begin(), begin_.end() - 1);
  token_of_.resize(static_cast<size_t>(num_slots));
  positions_.resize(static_cast<size_t>(num_slots));
  for (int64_t i = 0; i < num_slots; ++i) {
    const int64_t at = next[static_cast<size_t>(ids[i])]++;
    token_of_[static_cast<size_t>(at)] = i / config_.top_k;
    positions_[static_cast<size_t>(i)] = at;
  }
}

void OneDnnExperts::forward(size_t layer_index, const RoutedTokens& tokens) {
  const Layer& layer = layers_[layer_index];
  const int64_t hidden = config_.hidden_size, width = config_.intermediate_size;
  const int64_t num_slots = tokens.top_k_index.numel();
  if (!x_ || x_->dim(0) != num_slots) {
    x_ = Tensor(DType::kBF16, {num_slots, hidden});
    gate_up_out_ = Tensor(DType::kF32, {num_slots, 2 * width});
    h_ = Tensor(DType::kBF16, {num_slots, width});
    down_out_ = Tensor(DType::kF32, {num_slots, hidden});
  }
  sort_by_expert(tokens);
  gather_rows(tokens.hidden_states.as<BFloat16>(), hidden, token_of_.data(), num_slots,
              x_->as<BFloat16>());
  for (size_t e = 0; e + 1 < begin_.size(); ++e) {
    const int64_t first = begin_[e], count = begin_[e + 1] - first;
    if (count == 0) continue;
    auto* gate_up = gate_up_out_->as<float>() + first * 2 * width;
    auto* h = h_->as<BFloat16>() + first * width;
    gate_up_.run(x_->as<BFloat16>() + first * hidden, count, layer.gate_up[e], gate_up);
    silu_mul(gate_up, count, width, h);
    down_.run(h, count, layer.down[e], down_out_->as<float>() + first * hidden);
  }
  weighted_sum(down_out_->as<float>(), positions_.data(), tokens.top_k_weights.as<float>(),
               tokens.hidden_states.dim(0), config_.top_k, hidden, tokens.output.as<BFloat16>());
}

}  // namespace cadre::peers
