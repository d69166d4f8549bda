// Pairs sorted by expert, one grouped GEMM for gate and up with the gate function in it, one for
// down, one weighted sum. On Hopper with kernels/hopper_gemm.h, elsewhere and for layouts that it
// does not take with kernels/portable_gemm.h and kernels/quantized_gemm.h. Calls with very many
// tokens run in chunks, with the same results.
#include <algorithm>
#include <memory>

#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/grouped_mm/choose_path.h"
#include "backends/cuda/kernels/hopper_gemm.h"
#include "backends/cuda/kernels/hopper_mx_gemm.h"
#include "backends/cuda/kernels/portable_gemm.h"
#include "backends/cuda/kernels/quantized_gemm.h"
#include "backends/cuda/kernels/routing.h"
#include "backends/cuda/kernels/weight_layout.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

constexpr int64_t kMaxChunkBytes = int64_t{4} << 30;  // of the rows between the products
// Results of down up to this size stay in float32 on the portable path: few outputs show a third
// rounding, and so few bytes cost nothing.
constexpr int64_t kMaxFloatResults = int64_t{8} << 20;

GroupedPath path_of(const ExpertsQuery& query, const DeviceWeights& device) {
  const int capability = compute_capability(query.device.index);
  if (!is_quantized(query.format)) {
    return choose_path(query.config, query.compute_dtype, device, capability);
  }
  return fits_hopper_mx(query, device, capability) ? GroupedPath::kHopperMx
                                                   : GroupedPath::kPortable;
}

struct Prepared : CudaPrepared {
  Prepared(const ExpertsQuery& query, std::shared_ptr<const ExpertsWeights> weights)
      : CudaPrepared(query, std::move(weights)), path(path_of(query, device)) {
    const ExpertsConfig& c = query.config;
    if (path == GroupedPath::kHopper) {
      up = make_tensor_map(up_layout(c, query.compute_dtype, device), kHopperWeightBox, true);
      gate = c.has_gate ? make_tensor_map(gate_layout(c, query.compute_dtype, device),
                                          kHopperWeightBox, true)
                        : up;
      down = make_tensor_map(down_layout(c, query.compute_dtype, device), kHopperWeightBox, true);
    } else if (path == GroupedPath::kHopperMx) {
      const int64_t width = c.intermediate_size;
      up = make_mx_map(query.format, device.up, c.num_experts, width, c.hidden_size);
      gate = c.has_gate
                 ? make_mx_map(query.format, device.gate, c.num_experts, width, c.hidden_size)
                 : up;
      down = make_mx_map(query.format, device.down, c.num_experts, c.hidden_size, width);
    }
  }

  GroupedPath path;
  CUtensorMap gate = {};
  CUtensorMap up = {};
  CUtensorMap down = {};
};

bool quantizes(const ExpertsQuery& q) {
  return is_quantized(q.format) && q.activation_scheme == ActivationScheme::kDynamic;
}

// h is quantised from float32.
DType h_dtype(const ExpertsQuery& q) { return quantizes(q) ? DType::kF32 : q.compute_dtype; }

int64_t pair_bytes(const ExpertsQuery& q) {
  const auto element = [](DType dtype) { return static_cast<int64_t>(size_of(dtype)); };
  return q.config.hidden_size * element(q.compute_dtype) +
         q.config.intermediate_size * (element(h_dtype(q)) + (quantizes(q) ? 2 : 0));
}

int64_t chunk_tokens(const ExpertsQuery& q, int64_t num_tokens) {
  const int64_t most = std::max<int64_t>(1, kMaxChunkBytes / (pair_bytes(q) * q.config.top_k));
  return std::min(num_tokens, most);
}

// One chunk of a call.
class Call {
 public:
  Call(const Prepared& experts, const RoutedTokens& tokens, Workspace& workspace,
       const Stream& stream)
      : experts_(experts),
        config_(experts.query.config),
        dtype_(experts.query.compute_dtype),
        tokens_(tokens),
        stream_(stream),
        num_rows_(tokens.top_k_index.numel()),
        plan_(plan_routing(tokens.top_k_index, config_.num_experts, workspace, stream,
                           num_counts(config_, num_rows_))),
        y_dtype_(dtype_for_results(num_rows_ * config_.hidden_size)),
        wide_(workspace.allocate(static_cast<size_t>(num_rows_ * config_.hidden_size) *
                                 size_of(y_dtype_))),
        h_(workspace.allocate(static_cast<size_t>(num_rows_ * config_.intermediate_size) *
                              size_of(h_dtype(experts.query)))) {
    if (experts.path == GroupedPath::kHopper && cuts_down(config_, num_rows_)) {
      partial_sums_ = workspace.allocate<float>(kHopperPartialSums);
    }
    if (!quantizes(experts.query)) return;
    if (experts.path == GroupedPath::kHopperMx) {
      placed_h_ = workspace.allocate<uint16_t>(num_rows_ * config_.intermediate_size);
      row_scales_ = workspace.allocate<float>(num_row_scales(config_, num_rows_));
      return;
    }
    x_codes_ = allocate_activation_codes(tokens.hidden_states.dim(0), config_.hidden_size,
                                         activation_group(experts.query.format), workspace);
    h_codes_ = allocate_activation_codes(num_rows_, config_.intermediate_size,
                                         activation_group(experts.query.format), workspace);
  }

  /// Of the rows of either product of FP8 on Hopper, one after the other.
  static int64_t num_row_scales(const ExpertsConfig& c, int64_t num_rows) {
    const int64_t k = std::max(c.hidden_size, c.intermediate_size);
    return num_groups(k, activation_group(StorageFormat::kFp8Block)) * row_scale_stride(num_rows);
  }

  static int64_t num_counts(const ExpertsConfig& c, int64_t num_rows) {
    return hopper_gemm_counts(false, num_rows, c.num_experts) +  // of down
           hopper_gemm_counts(true, num_rows, c.num_experts) +   // of gate and up
           (cuts_down(c, num_rows) ? kHopperPartialTurns : 0);
  }

  static bool cuts_down(const ExpertsConfig& c, int64_t num_rows) {
    return hopper_gemm_cuts_k(num_rows, c.num_experts, c.intermediate_size);
  }

  void run() {
    if (experts_.path == GroupedPath::kHopper) {
      hopper_products();
    } else if (experts_.path == GroupedPath::kHopperMx) {
      mx_products();
    } else if (is_quantized(experts_.query.format)) {
      quantized_products();
    } else {
      portable_products();
    }
    const TensorView y(wide_, y_dtype_, {num_rows_, config_.hidden_size}, stream_.device);
    combine(y, plan_.row_of_pair, tokens_.top_k_weights, tokens_.output, stream_);
  }

 private:
  DType dtype_for_results(int64_t count) const {
    if (quantizes(experts_.query) && tokens_.output.dtype() == DType::kF32) return DType::kF32;
    const bool is_small = count * 4 <= kMaxFloatResults;
    return experts_.path == GroupedPath::kPortable && is_small ? DType::kF32 : dtype_;
  }

  CUtensorMap rows_map(const void* data, int64_t columns, int box = kHopperRowBox) const {
    return make_tensor_map({dtype_, data, columns, num_rows_, 1, columns, 0}, box, false);
  }

  void hopper_products() {
    const DeviceWeights& w = experts_.device;
    HopperGemm up = hopper_gemm_base();
    up.counts = plan_.counters + hopper_gemm_counts(false, num_rows_, config_.num_experts);
    up.n = config_.intermediate_size;
    up.k = config_.hidden_size;
    up.pair_of_row = plan_.pair_of_row;
    up.top_k = config_.top_k;
    up.x = tokens_.hidden_states.data();
    up.x_stride = tokens_.hidden_states.stride(0);
    up.sorted = wide_;  // y overwrites it later
    up.rows = rows_map(wide_, config_.hidden_size);
    up.weights = experts_.gate;
    up.up_weights = experts_.up;
    up.gated = config_.has_gate;
    up.apply_gate = true;
    up.gate = gate_function(config_);
    up.bias = config_.has_gate ? w.gate_bias : w.up_bias;
    if (config_.has_gate) up.up_bias = w.up_bias;
    up.out = h_;
    up.out_stride = config_.intermediate_size;
    up.out_boxes = rows_map(h_, config_.intermediate_size, kHopperOutBox);
    hopper_gemm(up, stream_);

    HopperGemm down = hopper_gemm_base();
    down.counts = plan_.counters;
    if (partial_sums_ != nullptr) {
      down.partial_sums = partial_sums_;
      down.partial_turns = up.counts + hopper_gemm_counts(true, num_rows_, config_.num_experts);
    }
    down.n = config_.hidden_size;
    down.k = config_.intermediate_size;
    down.rows = rows_map(h_, config_.intermediate_size);
    down.weights = experts_.down;
    down.up_weights = experts_.down;
    down.bias = w.down_bias;
    down.out = wide_;
    down.out_stride = config_.hidden_size;
    down.out_boxes = rows_map(wide_, config_.hidden_size, kHopperOutBox);
    hopper_gemm(down, stream_);
  }

  HopperGemm hopper_gemm_base() const {
    HopperGemm args;
    args.dtype = dtype_;
    args.num_experts = config_.num_experts;
    args.expert_offsets = plan_.expert_offsets;
    args.max_rows = num_rows_;
    args.bias_dtype = experts_.device.bias_dtype;
    return args;
  }

  void mx_products() {
    const DeviceWeights& w = experts_.device;
    const StorageFormat format = experts_.query.format;
    if (quantizes(experts_.query)) {
      QuantizeRows x = rows_to_quantize(config_.hidden_size);
      x.dtype = dtype_;
      x.x = tokens_.hidden_states.data();
      x.x_stride = tokens_.hidden_states.stride(0);
      x.pair_of_row = plan_.pair_of_row;
      x.top_k = config_.top_k;
      x.placed = static_cast<uint16_t*>(wide_);
      quantize_rows(x, stream_);
    } else {
      place_mx_rows(format, tokens_.hidden_states, plan_.pair_of_row, config_.top_k,
                    plan_.expert_offsets + config_.num_experts, num_rows_, wide_, stream_);
    }
    HopperMxGemm up = mx_gemm_base();
    up.n = config_.intermediate_size;
    up.k = config_.hidden_size;
    up.rows = wide_;  // y overwrites them later
    up.weights = experts_.gate;
    up.up_weights = experts_.up;
    up.scales = config_.has_gate ? w.gate : w.up;
    up.up_scales = w.up;
    up.gated = config_.has_gate;
    up.apply_gate = true;
    up.gate = gate_function(config_);
    up.bias = config_.has_gate ? w.gate_bias : w.up_bias;
    if (config_.has_gate) up.up_bias = w.up_bias;
    up.out = h_;
    up.out_dtype = h_dtype(experts_.query);
    up.out_placed = !quantizes(experts_.query);
    hopper_mx_gemm(up, stream_);

    if (quantizes(experts_.query)) {
      QuantizeRows h = rows_to_quantize(config_.intermediate_size);
      h.dtype = DType::kF32;
      h.x = h_;
      h.x_stride = config_.intermediate_size;
      h.placed = placed_h_;
      quantize_rows(h, stream_);
    }
    HopperMxGemm down = mx_gemm_base();
    down.n = config_.hidden_size;
    down.k = config_.intermediate_size;
    down.rows = quantizes(experts_.query) ? placed_h_ : h_;
    down.weights = experts_.down;
    down.up_weights = experts_.down;
    down.scales = w.down;
    down.up_scales = w.down;
    down.bias = w.down_bias;
    down.out = wide_;
    down.out_dtype = y_dtype_;
    hopper_mx_gemm(down, stream_);
  }

  static int64_t row_scale_stride(int64_t num_rows) { return num_rows + 64; }

  // FP8 on Hopper: all rows there are, to row_scales_.
  QuantizeRows rows_to_quantize(int64_t k) const {
    QuantizeRows args;
    args.rows = num_rows_;
    args.num_rows = plan_.expert_offsets + config_.num_experts;
    args.k = k;
    args.group = activation_group(experts_.query.format);
    args.scales = row_scales_;
    args.scale_row_stride = 1;
    args.scale_group_stride = row_scale_stride(num_rows_);
    return args;
  }

  HopperMxGemm mx_gemm_base() const {
    HopperMxGemm args;
    args.format = experts_.query.format;
    args.num_experts = config_.num_experts;
    args.expert_offsets = plan_.expert_offsets;
    args.max_rows = num_rows_;
    args.layout = experts_.query.scale_layout;
    args.row_scales = row_scales_;
    args.row_scale_stride = row_scale_stride(num_rows_);
    args.bias_dtype = experts_.device.bias_dtype;
    return args;
  }

  void portable_products() {
    portable_gemm(portable_up(), stream_);
    portable_gemm(portable_down(), stream_);
  }

  void quantized_products() {
    const int64_t group = activation_group(experts_.query.format);
    QuantizedGemm up = {portable_up(), experts_.query.format, experts_.query.scale_layout};
    if (quantizes(experts_.query)) {
      QuantizeRows x;
      x.dtype = dtype_;
      x.x = up.gemm.x;
      x.x_stride = up.gemm.x_stride;
      x.rows = tokens_.hidden_states.dim(0);
      x.k = up.gemm.k;
      x.group = group;
      quantize_rows(x, x_codes_, stream_);
      set_codes(up, x_codes_, group);
    }
    quantized_gemm(up, stream_);

    QuantizedGemm down = {portable_down(), experts_.query.format, experts_.query.scale_layout};
    if (quantizes(experts_.query)) {
      QuantizeRows h;
      h.dtype = DType::kF32;
      h.x = h_;
      h.x_stride = h.k = down.gemm.k;
      h.rows = num_rows_;
      h.num_rows = plan_.expert_offsets + config_.num_experts;
      h.group = group;
      quantize_rows(h, h_codes_, stream_);
      set_codes(down, h_codes_, group);
    }
    quantized_gemm(down, stream_);
  }

  PortableGemm portable_up() const {
    const DeviceWeights& w = experts_.device;
    PortableGemm up = portable_gemm_base();
    up.n = config_.intermediate_size;
    up.k = config_.hidden_size;
    up.x = tokens_.hidden_states.data();
    up.x_stride = tokens_.hidden_states.stride(0);
    up.pair_of_row = plan_.pair_of_row;
    up.top_k = config_.top_k;
    up.w = config_.has_gate ? w.gate : w.up;
    up.bias = config_.has_gate ? w.gate_bias : w.up_bias;
    if (config_.has_gate) {
      up.up_w = w.up;
      up.up_bias = w.up_bias;
    }
    up.apply_gate = true;
    up.gate = gate_function(config_);
    up.out = h_;
    up.out_dtype = h_dtype(experts_.query);
    up.out_stride = config_.intermediate_size;
    return up;
  }

  PortableGemm portable_down() const {
    const DeviceWeights& w = experts_.device;
    PortableGemm down = portable_gemm_base();
    down.n = config_.hidden_size;
    down.k = config_.intermediate_size;
    down.x = h_;
    down.x_stride = config_.intermediate_size;
    down.w = w.down;
    down.bias = w.down_bias;
    down.out = wide_;
    down.out_dtype = y_dtype_;
    down.out_stride = config_.hidden_size;
    return down;
  }

  PortableGemm portable_gemm_base() const {
    PortableGemm args;
    args.dtype = dtype_;
    args.num_groups = config_.num_experts;
    args.offsets = plan_.expert_offsets;
    args.max_rows = num_rows_;
    args.bias_dtype = experts_.device.bias_dtype;
    return args;
  }

  const Prepared& experts_;
  const ExpertsConfig& config_;
  DType dtype_;
  const RoutedTokens& tokens_;
  const Stream& stream_;
  int64_t num_rows_;
  RoutingPlan plan_;
  DType y_dtype_;            // of the results of down
  void* wide_;               // [num_rows_, H]
  void* h_;                  // [num_rows_, I]
  ActivationCodes x_codes_;  // portable
  ActivationCodes h_codes_;
  float* partial_sums_ = nullptr;  // of down, where its last pieces are cut along K
  uint16_t* placed_h_ = nullptr;   // FP8 on Hopper
  float* row_scales_ = nullptr;
};

class GroupedMm : public ExpertsBackend {
 public:
  Support supports(const ExpertsQuery& query) const override {
    Support support = supports_on_gpu(query);
    if (query.config.num_experts > kMaxRoutedExperts) {
      support.reasons.push_back(str_cat("sorts pairs of up to ", kMaxRoutedExperts,
                                        " experts, these are ", query.config.num_experts));
    }
    return support;
  }

  std::unique_ptr<PreparedExperts> prepare(const ExpertsQuery& query,
                                           std::shared_ptr<const ExpertsWeights> weights) override {
    return std::make_unique<Prepared>(query, std::move(weights));
  }

  size_t workspace_bytes(const ExpertsQuery& query, int64_t max_tokens,
                         int /*num_threads*/) const override {
    const int64_t tokens = chunk_tokens(query, max_tokens);
    const int64_t pairs = tokens * query.config.top_k;
    const auto element =
        static_cast<int64_t>(size_of(quantizes(query) ? DType::kF32 : query.compute_dtype));
    const auto padded = [](int64_t bytes) { return Workspace::padded(static_cast<size_t>(bytes)); };
    return routing_plan_bytes(pairs, query.config.num_experts,
                              Call::num_counts(query.config, pairs)) +
           padded(std::max(pairs * query.config.hidden_size * element,
                           std::min(pairs * query.config.hidden_size * 4, kMaxFloatResults))) +
           padded(pairs * query.config.intermediate_size *
                  static_cast<int64_t>(size_of(h_dtype(query)))) +
           (Call::cuts_down(query.config, pairs) ? padded(kHopperPartialSums * 4) : 0) +
           codes_bytes(query, tokens, pairs);
  }

 private:
  static size_t codes_bytes(const ExpertsQuery& q, int64_t tokens, int64_t pairs) {
    if (!quantizes(q)) return 0;
    const int64_t group = activation_group(q.format);
    const size_t portable = activation_codes_bytes(tokens, q.config.hidden_size, group) +
                            activation_codes_bytes(pairs, q.config.intermediate_size, group);
    const auto padded = [](int64_t count, size_t size) {
      return Workspace::padded(static_cast<size_t>(count) * size);
    };
    const size_t hopper = padded(pairs * q.config.intermediate_size, sizeof(uint16_t)) +
                          padded(Call::num_row_scales(q.config, pairs), sizeof(float));
    return std::max(portable, hopper);
  }

 protected:
  void run(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace& workspace,
           const Stream& stream) override {
    const int64_t num_tokens = tokens.hidden_states.dim(0);
    if (num_tokens == 0) return;
    const int64_t step = chunk_tokens(experts.query, num_tokens);
    for (int64_t first = 0; first < num_tokens; first += step) {
      const int64_t last = std::min(first + step, num_tokens);
      const RoutedTokens chunk = {
          tokens.hidden_states.slice(first, last), tokens.top_k_index.slice(first, last),
          tokens.top_k_weights.slice(first, last), tokens.output.slice(first, last)};
      const Workspace::Scope scope(workspace);
      Call(static_cast<const Prepared&>(experts), chunk, workspace, stream).run();
    }
  }
};

}  // namespace

std::unique_ptr<ExpertsBackend> make_grouped_mm() { return std::make_unique<GroupedMm>(); }

}  // namespace cadre::cuda
