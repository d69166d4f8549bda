#include "experts/host_experts.h"

#include <algorithm>
#include <set>

#include "core/device_runtime.h"

namespace cadre {
namespace {

std::set<int64_t> named_experts(const TensorView& top_k_index, int64_t num_experts) {
  std::set<int64_t> named;
  for (int64_t t = 0; t < top_k_index.dim(0); ++t) {
    for (int64_t s = 0; s < top_k_index.dim(1); ++s) {
      const TensorView row = top_k_index[t];
      const int64_t id = row.dtype() == DType::kI64 ? row.as<int64_t>()[s] : row.as<int32_t>()[s];
      if (id >= 0 && id < num_experts) named.insert(id);
    }
  }
  return named;
}

int64_t block_of(int64_t index, int64_t block) { return block == 0 ? 0 : index / block; }

class Copier {
 public:
  Copier(const ExpertsWeights& weights, std::vector<Tensor>& copies, const Stream& stream)
      : weights_(weights), copies_(copies), stream_(stream) {}

  void matrices(std::vector<ExpertMatrix>& all, const std::set<int64_t>& named, int64_t rows,
                int64_t cols) {
    for (size_t e = 0; e < all.size(); ++e) {
      ExpertMatrix& m = all[e];
      if (named.count(static_cast<int64_t>(e)) == 0) {
        m.data = m.scales = nullptr;
        continue;
      }
      bring(m.data, bytes_of_values(m, rows, cols));
      if (is_quantized(weights_.format)) bring(m.scales, bytes_of_scales(m, rows, cols));
    }
  }

  void vectors(std::vector<ExpertVector>& all, const std::set<int64_t>& named, int64_t count) {
    const auto element = static_cast<int64_t>(size_of(weights_.bias_dtype));
    for (size_t e = 0; e < all.size(); ++e) {
      if (named.count(static_cast<int64_t>(e)) == 0) {
        all[e].data = nullptr;
      } else {
        bring(all[e].data, ((count - 1) * all[e].stride + 1) * element);
      }
    }
  }

 private:
  // From the first element to the last, what lies between rows included.
  int64_t bytes_of_values(const ExpertMatrix& m, int64_t rows, int64_t cols) const {
    if (weights_.format == StorageFormat::kFp4) {
      return (rows - 1) * m.row_stride + row_bytes(weights_.format, cols);
    }
    return ((rows - 1) * m.row_stride + (cols - 1) * m.col_stride + 1) *
           row_bytes(weights_.format, 1);
  }

  int64_t bytes_of_scales(const ExpertMatrix& m, int64_t rows, int64_t cols) const {
    const ScaleLayout& layout = weights_.scale_layout;
    const int64_t last =
        block_of(rows - 1 + m.scale_row_offset, layout.block_rows) * m.scale_row_stride +
        block_of(cols - 1, layout.block_cols) * m.scale_col_stride;
    return (last + 1) * static_cast<int64_t>(size_of(layout.dtype));
  }

  // `data` then points to the copy.
  void bring(const void*& data, int64_t bytes) {
    const Tensor& copy = copies_.emplace_back(DType::kU8, Dims{bytes});
    device_runtime(stream_.device)
        .copy(copy->mutable_data(), data, static_cast<size_t>(bytes), stream_);
    data = copy->data();
  }

  const ExpertsWeights& weights_;
  std::vector<Tensor>& copies_;
  const Stream& stream_;
};

}  // namespace

HostExperts::HostExperts(const ExpertsConfig& config, const ExpertsWeights& weights,
                         const TensorView& top_k_index, const Stream& stream)
    : weights_(weights) {
  if (weights.device.type == DeviceType::kCpu) return;
  const std::set<int64_t> named = named_experts(top_k_index, config.num_experts);
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  Copier copier(weights, copies_, stream);
  copier.matrices(weights_.gate, named, inner, hidden);
  copier.matrices(weights_.up, named, inner, hidden);
  copier.matrices(weights_.down, named, hidden, inner);
  copier.vectors(weights_.gate_bias, named, inner);
  copier.vectors(weights_.up_bias, named, inner);
  copier.vectors(weights_.down_bias, named, hidden);
  weights_.device = {};
  synchronize(stream);
}

}  // namespace cadre
