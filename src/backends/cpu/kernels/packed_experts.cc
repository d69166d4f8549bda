#include "backends/cpu/kernels/packed_experts.h"

#include <algorithm>
#include <memory>

#include "backends/cpu/kernels/isa.h"
#include "cadre/error.h"
#include "cadre/thread_pool.h"
#include "core/checked_math.h"
#include "core/str_cat.h"
#include "experts/check_tokens.h"

namespace cadre::cpu {
namespace {

constexpr int kGateColumns = kPanelColumns / 2;

constexpr int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

constexpr int64_t bytes_of_element(Element type) { return type == Element::kF32 ? 4 : 2; }

PackedPanels panels_of(int64_t columns, int64_t columns_per_panel, int64_t k, Element type) {
  const int64_t elements = divide_up(k, 2) * 2 * kPanelColumns;
  return {divide_up(columns, columns_per_panel),
          static_cast<size_t>(elements * bytes_of_element(type))};
}

/// Columns [first, first + width) of a matrix of `columns` columns.
StoredColumns columns_of(const ExpertMatrix& matrix, Element type, int64_t first, int width,
                         int64_t columns) {
  const int64_t left = std::clamp<int64_t>(columns - first, 0, width);
  return {static_cast<const std::byte*>(matrix.data) +
              first * matrix.row_stride * bytes_of_element(type),
          matrix.row_stride, matrix.col_stride, static_cast<int>(left)};
}

void pack_gate_up(const KernelTable& kernels, const ExpertsConfig& config,
                  const ExpertsWeights& weights, size_t expert, int64_t panel, Element type,
                  void* to) {
  const int64_t columns = config.intermediate_size;
  StoredColumns parts[2];
  int num_parts = 0;
  const int width = config.has_gate ? kGateColumns : kPanelColumns;
  if (config.has_gate) {
    parts[num_parts++] = columns_of(weights.gate[expert], type, panel * width, width, columns);
  }
  parts[num_parts++] = columns_of(weights.up[expert], type, panel * width, width, columns);
  kernels.pack_stored({parts, num_parts, type, config.hidden_size, to});
}

void pack_down(const KernelTable& kernels, const ExpertsConfig& config,
               const ExpertsWeights& weights, size_t expert, int64_t panel, Element type,
               void* to) {
  const StoredColumns part = columns_of(weights.down[expert], type, panel * kPanelColumns,
                                        kPanelColumns, config.hidden_size);
  kernels.pack_stored({&part, 1, type, config.intermediate_size, to});
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
         same(a.gate_up, b.gate_up) && same(a.down, b.down);
}

Element element_of(StorageFormat format) {
  switch (format) {
    case StorageFormat::kF32:
      return Element::kF32;
    case StorageFormat::kF16:
      return Element::kF16;
    case StorageFormat::kBF16:
      return Element::kBF16;
    default:
      throw Unsupported(str_cat("prepack experts: expected float32, float16 or bfloat16 weights, ",
                                name_of(format), " has no packed form on the CPU yet"));
  }
}

PackedLayout packed_layout(const ExpertsConfig& config, StorageFormat format) {
  validate(config);
  PackedLayout layout;
  layout.num_experts = config.num_experts;
  layout.type = element_of(format);
  layout.has_gate = config.has_gate;
  layout.gate_up =
      panels_of(config.intermediate_size, config.has_gate ? kGateColumns : kPanelColumns,
                config.hidden_size, layout.type);
  layout.down = panels_of(config.hidden_size, kPanelColumns, config.intermediate_size, layout.type);
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
  // Panels that begin in one range of bytes go to one thread: two threads that first touch a huge
  // page at the same time would both clear one.
  const auto bytes = static_cast<int64_t>(layout_.expert_bytes());
  threads.parallel_ranges(bytes, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t panel = layout_.first_panel(begin); panel < layout_.first_panel(end); ++panel) {
      std::byte* const to = expert_at + layout_.panel_offset(panel);
      if (panel < layout_.gate_up.count) {
        pack_gate_up(kernels, config, weights, index, panel, layout_.type, to);
      } else {
        pack_down(kernels, config, weights, index, panel - layout_.gate_up.count, layout_.type, to);
      }
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
  check_weights("prepack experts", query, weights);
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
