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

int64_t block_of(int64_t index, int64_t block) { return block == 0 ? 0 : index / block; }

// All matrices of a projection as one tensor [E, rows, cols] on the device.
class Uploader {
 public:
  Uploader(const ExpertsQuery& query, const ExpertsWeights& from, const Stream& stream)
      : query_(query), from_(from), stream_(stream) {}

  std::vector<ExpertMatrix> matrices(const std::vector<ExpertMatrix>& all, int64_t rows,
                                     int64_t cols) {
    if (all.empty()) return {};
    return is_quantized(from_.format) ? quantized(all, rows, cols) : plain(all, rows, cols);
  }

  std::vector<ExpertVector> vectors(const std::vector<ExpertVector>& all, int64_t size) {
    if (all.empty()) return {};
    const auto count = static_cast<int64_t>(all.size());
    const MutableTensorView target = new_tensor(DType::kF32, {count, size});
    std::vector<float> host(static_cast<size_t>(size));
    std::vector<ExpertVector> result;
    for (int64_t e = 0; e < count; ++e) {
      const ExpertVector& v = all[static_cast<size_t>(e)];
      for (int64_t n = 0; n < size; ++n) {
        host[static_cast<size_t>(n)] = load_float(v.data, from_.bias_dtype, n * v.stride);
      }
      upload(host.data(), DType::kF32, target[e]);
      result.push_back({target[e].data(), 1});
    }
    return result;
  }

  std::shared_ptr<const void> owner() const { return tensors_; }

 private:
  std::vector<ExpertMatrix> plain(const std::vector<ExpertMatrix>& all, int64_t rows,
                                  int64_t cols) {
    const auto count = static_cast<int64_t>(all.size());
    const DType dtype = plain_dtype(from_.format).value();
    const MutableTensorView target = new_tensor(query_.compute_dtype, {count, rows, cols});
    std::vector<float> host(static_cast<size_t>(rows * cols));
    std::vector<ExpertMatrix> result;
    for (int64_t e = 0; e < count; ++e) {
      const ExpertMatrix& m = all[static_cast<size_t>(e)];
      for (int64_t n = 0; n < rows; ++n) {
        for (int64_t k = 0; k < cols; ++k) {
          host[static_cast<size_t>(n * cols + k)] =
              load_float(m.data, dtype, n * m.row_stride + k * m.col_stride);
        }
      }
      upload(host.data(), DType::kF32, target[e]);
      result.push_back({target[e].data(), cols, 1});
    }
    return result;
  }

  // Values as they are stored in rows of whole 16 bytes, which the memory of a GPU is read in.
  std::vector<ExpertMatrix> quantized(const std::vector<ExpertMatrix>& all, int64_t rows,
                                      int64_t cols) {
    const auto count = static_cast<int64_t>(all.size());
    const int64_t bytes = row_bytes(from_.format, cols);
    const int64_t stride = (bytes + 15) / 16 * 16;
    const MutableTensorView target = new_tensor(DType::kU8, {count, rows, stride});
    std::vector<uint8_t> host(static_cast<size_t>(rows * stride));
    std::vector<ExpertMatrix> result;
    for (int64_t e = 0; e < count; ++e) {
      const ExpertMatrix& m = all[static_cast<size_t>(e)];
      const auto* data = static_cast<const uint8_t*>(m.data);
      for (int64_t n = 0; n < rows; ++n) {
        for (int64_t i = 0; i < bytes; ++i) {
          host[static_cast<size_t>(n * stride + i)] = data[n * m.row_stride + i * m.col_stride];
        }
      }
      upload(host.data(), DType::kU8, target[e]);
      result.push_back(m);
      result.back().data = target[e].data();
      result.back().row_stride = stride;
      result.back().col_stride = 1;
    }
    upload_scales(all, rows, cols, result);
    return result;
  }

  // [E, block rows, block columns]; a block that is cut by row 0 stays cut.
  void upload_scales(const std::vector<ExpertMatrix>& all, int64_t rows, int64_t cols,
                     std::vector<ExpertMatrix>& result) {
    const ScaleLayout& layout = from_.scale_layout;
    const auto size = static_cast<int64_t>(size_of(layout.dtype));
    const int64_t scale_cols = block_of(cols - 1, layout.block_cols) + 1;
    const int64_t scale_rows = block_of(rows - 1 + all[0].scale_row_offset, layout.block_rows) + 1;
    const MutableTensorView target =
        new_tensor(layout.dtype, {static_cast<int64_t>(all.size()), scale_rows, scale_cols});
    std::vector<uint8_t> host(static_cast<size_t>(scale_rows * scale_cols * size));
    for (size_t e = 0; e < all.size(); ++e) {
      const ExpertMatrix& m = all[e];
      const auto* scales = static_cast<const uint8_t*>(m.scales);
      for (int64_t i = 0; i < scale_rows * scale_cols; ++i) {
        const int64_t at =
            i / scale_cols * m.scale_row_stride + i % scale_cols * m.scale_col_stride;
        std::memcpy(host.data() + i * size, scales + at * size, static_cast<size_t>(size));
      }
      const MutableTensorView to = target[static_cast<int64_t>(e)];
      upload(host.data(), layout.dtype, to);
      result[e].scales = to.data();
      result[e].scale_row_stride = scale_cols;
      result[e].scale_col_stride = 1;
    }
  }

  MutableTensorView new_tensor(DType dtype, const Dims& shape) {
    return tensors_->emplace_back(dtype, shape, query_.device).view();
  }
  void upload(const void* host, DType dtype, const MutableTensorView& target) {
    const Upload item{host, dtype, target.mutable_data(), target.dtype(), target.numel()};
    device_runtime(query_.device)
        .upload({&item, 1}, query_.device.index, *stream_.threads, [](int64_t) {});
  }

  const ExpertsQuery& query_;
  const ExpertsWeights& from_;
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
  Uploader uploader(query, from, stream);
  auto copy = std::make_shared<ExpertsWeights>();
  copy->device = query.device;
  copy->format = is_quantized(from.format) ? from.format : *plain_format(query.compute_dtype);
  copy->scale_layout = from.scale_layout;
  copy->gate = uploader.matrices(from.gate, inner, hidden);
  copy->up = uploader.matrices(from.up, inner, hidden);
  copy->down = uploader.matrices(from.down, hidden, inner);
  copy->bias_dtype = DType::kF32;
  copy->gate_bias = uploader.vectors(from.gate_bias, inner);
  copy->up_bias = uploader.vectors(from.up_bias, inner);
  copy->down_bias = uploader.vectors(from.down_bias, hidden);
  copy->owner = uploader.owner();
  return copy;
}

}  // namespace cadre
