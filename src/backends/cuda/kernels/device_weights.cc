#include "backends/cuda/kernels/device_weights.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <vector>

#include "backends/cuda/device/check.h"
#include "backends/cuda/device/device_runtime.h"
#include "cadre/allocator.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

int64_t element_bytes(StorageFormat format) {
  return is_quantized(format) ? 1 : static_cast<int64_t>(size_of(plain_dtype(format).value()));
}

int64_t byte_distance(const void* from, const void* to) {
  return static_cast<const char*>(to) - static_cast<const char*>(from);
}

bool same_strides(const ExpertMatrix& a, const ExpertMatrix& b) {
  return a.row_stride == b.row_stride && a.col_stride == b.col_stride &&
         a.scale_row_stride == b.scale_row_stride && a.scale_col_stride == b.scale_col_stride &&
         a.scale_row_offset == b.scale_row_offset && a.input_scale == b.input_scale;
}
bool same_strides(const ExpertVector& a, const ExpertVector& b) { return a.stride == b.stride; }

DeviceMatrix to_device(const ExpertMatrix& m) { return device_matrix(m); }
DeviceVector to_device(const ExpertVector& v) { return {v.data, v.stride}; }

// Bytes between neighbours.
template <typename T>
int64_t step_of(const T& a, const T& b) {
  return byte_distance(a.data, b.data);
}
int64_t scale_step_of(const ExpertVector& /*a*/, const ExpertVector& /*b*/) { return 0; }
int64_t scale_step_of(const ExpertMatrix& a, const ExpertMatrix& b) {
  return byte_distance(a.scales, b.scales);
}

// Elements and bytes of scales between neighbours.
struct EvenStep {
  int64_t elements = 0;
  int64_t scale_bytes = 0;
};

// When all experts lie evenly; empty otherwise.
template <typename T>
std::optional<EvenStep> even_step(const std::vector<T>& experts, int64_t element) {
  if (experts.size() < 2) return EvenStep{};
  const int64_t step = step_of(experts[0], experts[1]);
  const int64_t scale_step = scale_step_of(experts[0], experts[1]);
  if (step % element != 0) return std::nullopt;
  for (size_t e = 1; e < experts.size(); ++e) {
    const bool even = step_of(experts[e - 1], experts[e]) == step &&
                      scale_step_of(experts[e - 1], experts[e]) == scale_step &&
                      same_strides(experts[e], experts[0]);
    if (!even) return std::nullopt;
  }
  return EvenStep{step / element, scale_step};
}

void set_step(const EvenStep& step, DeviceMatrices& result) {
  result.expert_stride = step.elements;
  result.scale_expert_bytes = step.scale_bytes;
}
void set_step(const EvenStep& step, DeviceVectors& result) { result.expert_stride = step.elements; }

// Gathers the tables of a layer, to be copied to the device in one piece.
class Tables {
 public:
  template <typename Result, typename T>
  void add(const std::vector<T>& experts, int64_t element, Result& result) {
    if (experts.empty()) return;
    result.first = to_device(experts[0]);
    if (const std::optional<EvenStep> step = even_step(experts, element)) {
      set_step(*step, result);
      return;
    }
    const size_t offset = bytes_.size();
    using Entry = decltype(to_device(experts[0]));
    bytes_.resize(offset + experts.size() * sizeof(Entry));
    for (size_t e = 0; e < experts.size(); ++e) {
      const Entry entry = to_device(experts[e]);
      std::memcpy(bytes_.data() + offset + e * sizeof(Entry), &entry, sizeof(Entry));
    }
    places_.push_back({reinterpret_cast<const void**>(&result.table), offset});
  }

  std::shared_ptr<void> place(Device device) const {
    if (bytes_.empty()) return nullptr;
    std::shared_ptr<void> memory = allocate_shared_memory(device, bytes_.size());
    const DeviceGuard guard(device.index);
    CADRE_CUDA_CHECK(
        cudaMemcpy(memory.get(), bytes_.data(), bytes_.size(), cudaMemcpyHostToDevice));
    for (const auto& [target, offset] : places_) {
      *target = static_cast<const char*>(memory.get()) + offset;
    }
    return memory;
  }

 private:
  std::vector<char> bytes_;
  std::vector<std::pair<const void**, size_t>> places_;
};

void check_device(Device device, Support& support) {
  DeviceRuntime& runtime = device_runtime();
  if (runtime.device_count() == 0) {
    support.reasons.push_back(str_cat("needs an NVIDIA GPU: ", runtime.why_none()));
  } else if (device.index < 0 || device.index >= runtime.device_count()) {
    support.reasons.push_back(str_cat("this machine has no ", to_string(device), ", only ",
                                      runtime.device_count(), " GPUs"));
  } else if (runtime.kernels(device.index).empty()) {
    const DeviceProperties& p = properties_of(device.index);
    support.reasons.push_back(str_cat("needs compute capability 8.0 or later, ", to_string(device),
                                      " (", p.name, ") has ", p.major, ".", p.minor));
  }
}

// The layouts that cadre/storage_format.h names.
bool is_known_layout(StorageFormat format, const ScaleLayout& layout) {
  switch (format) {
    case StorageFormat::kFp8Block:
      return (layout.dtype == DType::kF32 || layout.dtype == DType::kF8E8M0) &&
             layout.block_rows >= 0 && layout.block_cols >= 0;
    case StorageFormat::kFp8Tensor:
      return layout == ScaleLayout{DType::kF32, 0, 0};
    default:
      return layout == ScaleLayout{DType::kF8E8M0, 1, 32};
  }
}

void check_quantized(const ExpertsQuery& query, const QuantizedActivations& takes,
                     Support& support) {
  if (!is_known_layout(query.format, query.scale_layout)) {
    support.reasons.push_back(str_cat(
        "scales of ", name_of(query.format), " weights are not ", name_of(query.scale_layout.dtype),
        " of blocks of ", query.scale_layout.block_rows, " x ", query.scale_layout.block_cols));
  }
  const bool is_mx = query.format == StorageFormat::kMxFp8 || query.format == StorageFormat::kFp4;
  if (query.activation_scheme == ActivationScheme::kStatic && !takes.with_static_scales) {
    support.reasons.push_back(
        "activations with static scales (activation_scheme static) are served by eager alone");
  } else if (query.activation_scheme == ActivationScheme::kDynamic && is_mx &&
             !takes.dynamic_with_mx) {
    support.reasons.push_back(str_cat("keeps activations in the compute dtype with ",
                                      name_of(query.format), " weights: activations none"));
  }
  if (query.format == StorageFormat::kFp4 && query.config.is_transposed) {
    support.reasons.push_back("fp4 weights pack two values along K and cannot be transposed");
  }
}

}  // namespace

DeviceMatrix device_matrix(const ExpertMatrix& m) {
  return {m.data,
          m.row_stride,
          m.col_stride,
          m.scales,
          m.scale_row_stride,
          m.scale_col_stride,
          m.scale_row_offset,
          m.input_scale};
}

CudaPrepared::CudaPrepared(const ExpertsQuery& q, std::shared_ptr<const ExpertsWeights> w)
    : PreparedExperts(q, std::move(w)) {
  const int64_t element = element_bytes(weights->format);
  const auto bias = static_cast<int64_t>(size_of(weights->bias_dtype));
  Tables tables;
  tables.add(weights->gate, element, device.gate);
  tables.add(weights->up, element, device.up);
  tables.add(weights->down, element, device.down);
  tables.add(weights->gate_bias, bias, device.gate_bias);
  tables.add(weights->up_bias, bias, device.up_bias);
  tables.add(weights->down_bias, bias, device.down_bias);
  device.bias_dtype = weights->bias_dtype;
  device.tables = tables.place(query.device);
}

Support supports_on_gpu(const ExpertsQuery& query, QuantizedActivations takes) {
  Support support;
  check_device(query.device, support);
  if (is_quantized(query.format)) {
    check_quantized(query, takes, support);
  } else if (query.format != plain_format(query.compute_dtype)) {
    support.reasons.push_back(str_cat("needs weights in the compute dtype ",
                                      name_of(query.compute_dtype), " on a GPU, these are ",
                                      name_of(query.format), "; loading a model converts them"));
  }
  if (query.ep_size != 1) {
    support.reasons.push_back("expert parallelism is not part of this build yet");
  }
  return support;
}

}  // namespace cadre::cuda
