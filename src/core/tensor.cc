#include "cadre/tensor.h"

#include <algorithm>

#include "cadre/allocator.h"
#include "cadre/error.h"
#include "core/check.h"
#include "core/checked_math.h"
#include "core/str_cat.h"

namespace cadre {

Dims::Dims(std::initializer_list<int64_t> dims)
    : Dims(std::span<const int64_t>(dims.begin(), dims.size())) {}

Dims::Dims(std::span<const int64_t> dims) : rank_(static_cast<int>(dims.size())) {
  if (dims.size() > kMaxRank) {
    throw InvalidArgument(
        str_cat("tensor: expected at most ", kMaxRank, " dimensions, got ", dims.size()));
  }
  std::copy(dims.begin(), dims.end(), dims_.begin());
}

bool operator==(const Dims& a, const Dims& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

std::string to_string(const Dims& dims) { return str_cat("[", join(dims), "]"); }

int64_t num_elements(const Dims& shape) {
  bool is_empty = false;
  for (const int64_t dim : shape) {
    if (dim < 0)
      throw InvalidArgument(str_cat("tensor: expected dimensions >= 0, got ", to_string(shape)));
    is_empty = is_empty || dim == 0;
  }
  if (is_empty) return 0;
  int64_t count = 1;
  for (const int64_t dim : shape) {
    const auto product = checked_multiply(count, dim);
    if (!product)
      throw InvalidArgument(
          str_cat("tensor: shape ", to_string(shape), " has more than 2^63 - 1 elements"));
    count = *product;
  }
  return count;
}

Dims contiguous_strides(const Dims& shape) {
  const bool is_empty = num_elements(shape) == 0;  // no product below overflows when it is not
  Dims strides = shape;
  int64_t stride = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    strides[i] = stride;
    if (!is_empty) stride *= shape[i];
  }
  return strides;
}

TensorView::TensorView(const void* data, DType dtype, const Dims& shape, Device device)
    : TensorView(data, dtype, shape, contiguous_strides(shape), device) {}

TensorView::TensorView(const void* data, DType dtype, const Dims& shape, const Dims& strides,
                       Device device)
    : data_(data), dtype_(dtype), shape_(shape), strides_(strides), device_(device) {
  CADRE_ASSERT(shape.rank() == strides.rank());
}

bool TensorView::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t expected = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[i] != expected) return false;
    expected *= shape_[i];
  }
  return true;
}

TensorView TensorView::operator[](int64_t i) const {
  CADRE_ASSERT(rank() > 0 && i >= 0 && i < shape_[0]);
  TensorView row = *this;
  row.data_ = static_cast<const std::byte*>(data_) +
              i * strides_[0] * static_cast<int64_t>(size_of(dtype_));
  row.shape_ = Dims(std::span(shape_.begin() + 1, shape_.end()));
  row.strides_ = Dims(std::span(strides_.begin() + 1, strides_.end()));
  return row;
}

TensorView TensorView::slice(int64_t begin, int64_t end) const {
  CADRE_ASSERT(rank() > 0 && 0 <= begin && begin <= end && end <= shape_[0]);
  TensorView part = *this;
  part.data_ = static_cast<const std::byte*>(data_) +
               begin * strides_[0] * static_cast<int64_t>(size_of(dtype_));
  part.shape_[0] = end - begin;
  return part;
}

TensorView TensorView::reshape(const Dims& shape) const {
  CADRE_ASSERT(is_contiguous() && num_elements(shape) == numel());
  return {data_, dtype_, shape, device_};
}

size_t TensorView::nbytes() const {
  const auto bytes = checked_multiply(numel(), static_cast<int64_t>(size_of(dtype_)));
  if (!bytes)
    throw InvalidArgument(str_cat("tensor: shape ", to_string(shape_), " of ", name_of(dtype_),
                                  " has more than 2^63 - 1 bytes"));
  return static_cast<size_t>(*bytes);
}

void TensorView::check_element_size(size_t size) const {
  if (size != size_of(dtype_)) {
    throw InvalidArgument(str_cat("tensor: accessed with elements of ", size, " bytes, but holds ",
                                  name_of(dtype_), " ", to_string(shape_)));
  }
}

std::string describe(std::string_view name, const TensorView& tensor) {
  if (!tensor) return str_cat(name, ": absent");
  return str_cat(name, ": ", name_of(tensor.dtype()), " ", to_string(tensor.shape()), " on ",
                 to_string(tensor.device()));
}

Tensor::Tensor(DType dtype, const Dims& shape, Device device) {
  memory_ = allocate_shared_memory(device, TensorView(nullptr, dtype, shape).nbytes());
  view_ = MutableTensorView(memory_.get(), dtype, shape, device);
}

}  // namespace cadre
