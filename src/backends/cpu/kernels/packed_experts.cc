#include "backends/cpu/kernels/packed_experts.h"

#include <algorithm>
#include <memory>

#include "backends/cpu/kernels/isa.h"
#include "backends/cpu/kernels/quantized_product.h"
#include "backends/cpu/kernels/scalars.h"
#include "backends/cpu/kernels/weight_matrix.h"
#include "cadre/error.h"
#include "cadre/thread_pool.h"
#include "core/checked_math.h"
#include "core/str_cat.h"
#include "experts/check_tokens.h"

namespace cadre::cpu {
namespace {

constexpr int kGateColumns = kPanelColumns / 2;

constexpr int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

PackedPanels panels_of(int64_t columns, int64_t columns_per_panel, int64_t k,
                       const PackedLayout& layout) {
  int64_t bytes = layout.has_scale_words ? scale_word_bytes(k) : 0;
  if (is_code(layout.type)) {
    bytes += divide_up(k, codes_per_word(layout.type)) * kPanelColumns * 4;
  } else {
    bytes += divide_up(k, 2) * 2 * kPanelColumns * bytes_of(layout.type);
  }
  return {divide_up(columns, columns_per_panel), static_cast<size_t>(bytes)};
}

// What goes into panels of one expert: gate and up, or up alone, or down.
struct Source {
  const ExpertMatrix* matrices[2];
  int count;
  int64_t columns;  // of each
  int64_t k;
};

void pack_panel(const KernelTable& kernels, const ExpertsWeights& weights,
                const PackedLayout& layout, const Source& source, int64_t panel, std::byte* to) {
  const int width = kPanelColumns / source.count;
  const int64_t first = panel * width;
  const auto count = static_cast<int>(std::clamp<int64_t>(source.columns - first, 0, width));
  StoredColumns values[2], scales[2];
  for (int i = 0; i < source.count; ++i) {
    const WeightMatrix m = weight_matrix(weights, *source.matrices[i]);
    values[i] = {static_cast<const std::byte*>(m.data) + byte_offset(m, first, 0), m.row_stride,
                 m.col_stride, count};
    scales[i] = {static_cast<const std::byte*>(m.scales.data) +
                     (first + m.scales.row_offset) * m.scales.row_stride,
                 m.scales.row_stride, m.scales.col_stride, count};
  }
  if (layout.has_scale_words) {
    const int64_t blocks = divide_up(source.k, 32);
    kernels.pack_stored({scales, source.count, Element::kE4m3, blocks, to});
    to += scale_word_bytes(source.k);
  }
  kernels.pack_stored({values, source.count, layout.type, source.k, to});
}

}  // namespace

int64_t PackedLayout::panel_offset(int64_t panel) const {
  const auto size = [](const PackedPanels& p) { return static_cast<int64_t>(p.panel_bytes); };
  return std::min(panel, gate_up.count) * size(gate_up) +
         std::max<int64_t>(0, panel - gate_up.count) * size(down);
}

int64_t PackedLayout::first_panel(int64_t offset) const {
  const int64_t down_offset = panel_offset(gate_up.count);
  if (offset <= down_offset) {
    return divide_up(offset, static_cast<int64_t>(gate_up.panel_bytes));
  }
  return gate_up.count + divide_up(offset - down_offset, static_cast<int64_t>(down.panel_bytes));
}

bool operator==(const PackedLayout& a, const PackedLayout& b) {
  const auto same = [](const PackedPanels& x, const PackedPanels& y) {
    return x.count == y.count && x.panel_bytes == y.panel_bytes;
  };
  return a.num_experts == b.num_experts && a.type == b.type && a.has_gate == b.has_gate &&
         a.has_scale_words == b.has_scale_words && same(a.gate_up, b.gate_up) &&
         same(a.down, b.down);
}

PackedLayout packed_layout(const ExpertsConfig& config, StorageFormat format) {
  validate(config);
  PackedLayout layout;
  layout.num_experts = config.num_experts;
  layout.type = element_of(format);
  layout.has_gate = config.has_gate;
  layout.has_scale_words = has_scale_words(format);
  layout.gate_up =
      panels_of(config.intermediate_size, config.has_gate ? kGateColumns : kPanelColumns,
                config.hidden_size, layout);
  layout.down = panels_of(config.hidden_size, kPanelColumns, config.intermediate_size, layout);
  const auto gate_up =
      checked_multiply(layout.gate_up.count, static_cast<int64_t>(layout.gate_up.panel_bytes));
  const auto down =
      checked_multiply(layout.down.count, static_cast<int64_t>(layout.down.panel_bytes));
  const auto expert = gate_up && down ? checked_add(*gate_up, *down) : std::nullopt;
  if (!expert || !checked_multiply(*expert, layout.num_experts)) {
    throw InvalidArgument(str_cat("prepack experts: ", config.num_experts, " experts of ",
                                  config.hidden_size, " x ", config.intermediate_size,
                                  ": expected sizes whose bytes fit in 63 bits"));
  }
  return layout;
}

void PackedExperts::pack(const KernelTable& kernels, const ExpertsConfig& config,
                         const ExpertsWeights& weights, int64_t expert, ThreadPool& threads) {
  std::byte* const expert_at = expert_begin(expert);
  const auto index = static_cast<size_t>(expert);
  const ExpertMatrix* const up = &weights.up[index];
  const Source gate_up{{config.has_gate ? &weights.gate[index] : up, up},
                       config.has_gate ? 2 : 1,
                       config.intermediate_size,
                       config.hidden_size};
  const Source down{{&weights.down[index]}, 1, config.hidden_size, config.intermediate_size};
  // Panels that begin in one range of bytes go to one thread: two threads that first touch a huge
  // page at the same time would both clear one.
  const auto bytes = static_cast<int64_t>(layout_.expert_bytes());
  threads.parallel_ranges(bytes, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t panel = layout_.first_panel(begin); panel < layout_.first_panel(end); ++panel) {
      std::byte* const to = expert_at + layout_.panel_offset(panel);
      const bool is_down = panel >= layout_.gate_up.count;
      pack_panel(kernels, weights, layout_, is_down ? down : gate_up,
                 is_down ? panel - layout_.gate_up.count : panel, to);
    }
  });
}

}  // namespace cadre::cpu

namespace cadre {
namespace {

void check_data(const char* name, const std::vector<ExpertMatrix>& matrices) {
  for (size_t e = 0; e < matrices.size(); ++e) {
    if (matrices[e].data != nullptr) continue;
    throw InvalidArgument(str_cat("prepack experts: weights: ", name, " of expert ", e,
                                  ": expected its values, got null"));
  }
}

void check(const ExpertsConfig& config, const ExpertsWeights& weights) {
  if (weights.device.type != DeviceType::kCpu) {
    throw Unsupported(str_cat("prepack experts: expected weights in CPU memory, got weights on ",
                              to_string(weights.device)));
  }
  ExpertsQuery query;
  query.config = config;
  query.format = weights.format;
  query.scale_layout = weights.scale_layout;
  check_weights("prepack experts", query, weights);
  const std::string fault = cpu::scale_layout_fault(weights.format, weights.scale_layout);
  if (is_quantized(weights.format) && !fault.empty()) {
    throw InvalidArgument(str_cat("prepack experts: weights.scale_layout: ", fault));
  }
  check_data("gate", weights.gate);
  check_data("up", weights.up);
  check_data("down", weights.down);
}

}  // namespace

size_t prepacked_bytes(const ExpertsConfig& config, StorageFormat format) {
  return cpu::packed_layout(config, format).bytes();
}

size_t packed_bytes(const ExpertsWeights& weights) {
  return weights.packed == nullptr ? 0 : weights.packed->bytes();
}

void prepack(const ExpertsConfig& config, ExpertsWeights& weights, ThreadPool& threads,
             const std::function<void(int64_t expert)>& on_expert) {
  weights.packed = nullptr;  // an earlier one goes first, whatever comes
  const cpu::PackedLayout layout = cpu::packed_layout(config, weights.format);
  check(config, weights);
  const auto packed = std::make_shared<cpu::PackedExperts>(layout);
  const cpu::KernelTable& kernels = cpu::kernels_for(cpu::active_isa(), DType::kF32);
  for (int64_t e = 0; e < layout.num_experts; ++e) {
    packed->pack(kernels, config, weights, e, threads);
    if (on_expert) on_expert(e);
  }
  weights.packed = packed;
}

}  // namespace cadre
