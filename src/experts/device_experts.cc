#include "experts/device_experts.h"

#include <cstring>
#include <vector>

#include "cadre/float16.h"
#include "core/device_runtime.h"

namespace cadre {
namespace {

template <typename T>
T load(const void* data, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * static_cast<int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

float load_float(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return load<float>(data, index);
  if (dtype == DType::kF16) return static_cast<float>(load<Float16>(data, index));
  return static_cast<float>(load<BFloat16>(data, index));
}

// All matrices of a projection as one tensor [E, rows, cols] on the device.
class Uploader {
 public:
  Uploader(const ExpertsQuery& query, DType from, const Stream& stream)
      : query_(query), from_(from), stream_(stream) {}

  std::vector<ExpertMatrix> matrices(const std::vector<ExpertMatrix>& all, int64_t rows,
                                     int64_t cols) {
    if (all.empty()) return {};
    const auto count = static_cast<int64_t>(all.size());
    const MutableTensorView target = new_tensor(query_.compute_dtype, {count, rows, cols});
    std::vector<float> host(static_cast<size_t>(rows * cols));
    std::vector<ExpertMatrix> result;
    for (int64_t e = 0; e < count; ++e) {
      const ExpertMatrix& m = all[static_cast<size_t>(e)];
      for (int64_t n = 0; n < rows; ++n) {
        for (int64_t k = 0; k < cols; ++k) {
          host[static_cast<size_t>(n * cols + k)] =
              load_float(m.data, from_, n * m.row_stride + k * m.col_stride);
        }
      }
      upload(host, target[e]);
      result.push_back({target[e].data(), cols, 1});
    }
    return result;
  }

  std::vector<ExpertVector> vectors(const std::vector<ExpertVector>& all, DType dtype,
                                    int64_t size) {
    if (all.empty()) return {};
    const auto count = static_cast<int64_t>(all.size());
    const MutableTensorView target = new_tensor(DType::kF32, {count, size});
    std::vector<float> host(static_cast<size_t>(size));
    std::vector<ExpertVector> result;
    for (int64_t e = 0; e < count; ++e) {
      const ExpertVector& v = all[static_cast<size_t>(e)];
      for (int64_t n = 0; n < size; ++n) {
        host[static_cast<size_t>(n)] = load_float(v.data, dtype, n * v.stride);
      }
      upload(host, target[e]);
      result.push_back({target[e].data(), 1});
    }
    return result;
  }

  std::shared_ptr<const void> owner() const { return tensors_; }

 private:
  MutableTensorView new_tensor(DType dtype, const Dims& shape) {
    return tensors_->emplace_back(dtype, shape, query_.device).view();
  }
  void upload(const std::vector<float>& host, const MutableTensorView& target) {
    const Upload item{host.data(), DType::kF32, target.mutable_data(), target.dtype(),
                      static_cast<int64_t>(host.size())};
    device_runtime(query_.device)
        .upload({&item, 1}, query_.device.index, *stream_.threads, [](int64_t) {});
  }

  const ExpertsQuery& query_;
  DType from_;
  const Stream& stream_;
  std::shared_ptr<std::vector<Tensor>> tensors_ = std::make_shared<std::vector<Tensor>>();
};

}  // namespace

std::shared_ptr<const ExpertsWeights> copy_to_device(const ExpertsQuery& query,
                                                     std::shared_ptr<const ExpertsWeights> weights,
                                                     const Stream& stream) {
  if (query.device.type == DeviceType::kCpu) return weights;
  const int64_t hidden = query.config.hidden_size;
  const int64_t inner = query.config.intermediate_size;
  const ExpertsWeights& from = *weights;
  Uploader uploader(query, plain_dtype(from.format).value(), stream);
  auto copy = std::make_shared<ExpertsWeights>();
  copy->device = query.device;
  copy->format = *plain_format(query.compute_dtype);
  copy->gate = uploader.matrices(from.gate, inner, hidden);
  copy->up = uploader.matrices(from.up, inner, hidden);
  copy->down = uploader.matrices(from.down, hidden, inner);
  copy->bias_dtype = DType::kF32;
  copy->gate_bias = uploader.vectors(from.gate_bias, from.bias_dtype, inner);
  copy->up_bias = uploader.vectors(from.up_bias, from.bias_dtype, inner);
  copy->down_bias = uploader.vectors(from.down_bias, from.bias_dtype, hidden);
  copy->owner = uploader.owner();
  return copy;
}

}  // namespace cadre
