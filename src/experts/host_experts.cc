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

class Copier {
 public:
  Copier(std::vector<Tensor>& copies, const Stream& stream) : copies_(copies), stream_(stream) {}

  /// The bytes from the first to the last element; `data` then points to their copy.
  void bring(const void*& data, int64_t last_element, size_t element) {
    const auto bytes = static_cast<int64_t>(element) * (last_element + 1);
    const Tensor& copy = copies_.emplace_back(DType::kU8, Dims{bytes});
    device_runtime(stream_.device)
        .copy(copy->mutable_data(), data, static_cast<size_t>(bytes), stream_);
    data = copy->data();
  }

  void matrices(std::vector<ExpertMatrix>& all, const std::set<int64_t>& named, int64_t rows,
                int64_t cols, size_t element) {
    for (size_t e = 0; e < all.size(); ++e) {
      ExpertMatrix& m = all[e];
      if (named.count(static_cast<int64_t>(e)) == 0) {
        m.data = nullptr;
      } else {
        bring(m.data, (rows - 1) * m.row_stride + (cols - 1) * m.col_stride, element);
      }
    }
  }

  void vectors(std::vector<ExpertVector>& all, const std::set<int64_t>& named, int64_t count,
               size_t element) {
    for (size_t e = 0; e < all.size(); ++e) {
      if (named.count(static_cast<int64_t>(e)) == 0) {
        all[e].data = nullptr;
      } else {
        bring(all[e].data, (count - 1) * all[e].stride, element);
      }
    }
  }

 private:
  std::vector<Tensor>& copies_;
  const Stream& stream_;
};

}  // namespace

HostExperts::HostExperts(const ExpertsConfig& config, const ExpertsWeights& weights,
                         const TensorView& top_k_index, const Stream& stream)
    : weights_(weights) {
  if (weights.device.type == DeviceType::kCpu) return;
  const std::set<int64_t> named = named_experts(top_k_index, config.num_experts);
  const size_t element = size_of(plain_dtype(weights.format).value());
  const size_t bias = size_of(weights.bias_dtype);
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  Copier copier(copies_, stream);
  copier.matrices(weights_.gate, named, inner, hidden, element);
  copier.matrices(weights_.up, named, inner, hidden, element);
  copier.matrices(weights_.down, named, hidden, inner, element);
  copier.vectors(weights_.gate_bias, named, inner, bias);
  copier.vectors(weights_.up_bias, named, inner, bias);
  copier.vectors(weights_.down_bias, named, hidden, bias);
  weights_.device = {};
  synchronize(stream);
}

}  // namespace cadre
