// Tensors: non-owning views that carry dtype, shape, strides and device, and one owning class.
// Strides count elements. A view of rank 0 with null data means "absent" (an optional bias, say)
// and nothing else.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "cadre/device.h"
#include "cadre/dtype.h"

namespace cadre {

inline constexpr int kMaxRank = 6;

/// Up to kMaxRank dimensions, each >= 0. Also used for strides.
class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<int64_t> dims);
  explicit Dims(std::span<const int64_t> dims);

  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[static_cast<size_t>(i)]; }
  int64_t& operator[](int i) { return dims_[static_cast<size_t>(i)]; }
  const int64_t* begin() const { return dims_.data(); }
  const int64_t* end() const { return dims_.data() + rank_; }

  friend bool operator==(const Dims& a, const Dims& b);

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

/// "[2, 17, 256]"
std::string to_string(const Dims& dims);

/// The product of the dimensions. Throws InvalidArgument when it does not fit in int64 or a
/// dimension is negative.
int64_t num_elements(const Dims& shape);

/// Row-major strides of a contiguous tensor of this shape. Throws as num_elements does; strides of
/// an empty shape mean nothing.
Dims contiguous_strides(const Dims& shape);

/// A read-only view of memory that somebody else owns.
class TensorView {
 public:
  TensorView() = default;
  /// A contiguous view.
  TensorView(const void* data, DType dtype, const Dims& shape, Device device = {});
  TensorView(const void* data, DType dtype, const Dims& shape, const Dims& strides,
             Device device = {});

  explicit operator bool() const { return data_ != nullptr || shape_.rank() != 0; }
  const void* data() const { return data_; }
  DType dtype() const { return dtype_; }
  const Dims& shape() const { return shape_; }
  const Dims& strides() const { return strides_; }
  Device device() const { return device_; }
  int rank() const { return shape_.rank(); }
  int64_t dim(int i) const { return shape_[i]; }
  int64_t stride(int i) const { return strides_[i]; }
  int64_t numel() const { return num_elements(shape_); }
  /// Bytes of the elements, as if contiguous. Throws InvalidArgument above 2^63 - 1.
  size_t nbytes() const;
  bool is_contiguous() const;

  /// The data as T; throws InvalidArgument when T has another size than the dtype.
  template <typename T>
  const T* as() const {
    check_element_size(sizeof(T));
    return static_cast<const T*>(data_);
  }

  /// The sub-tensor at index i of the first dimension.
  TensorView operator[](int64_t i) const;
  /// Rows [begin, end) of the first dimension.
  TensorView slice(int64_t begin, int64_t end) const;
  /// The same elements in another shape; the view must be contiguous.
  TensorView reshape(const Dims& shape) const;

 protected:
  void check_element_size(size_t size) const;

  const void* data_ = nullptr;
  DType dtype_ = DType::kF32;
  Dims shape_;
  Dims strides_;
  Device device_;
};

/// A view that may be written through.
class MutableTensorView : public TensorView {
 public:
  MutableTensorView() = default;
  MutableTensorView(void* data, DType dtype, const Dims& shape, Device device = {})
      : TensorView(data, dtype, shape, device) {}
  MutableTensorView(void* data, DType dtype, const Dims& shape, const Dims& strides,
                    Device device = {})
      : TensorView(data, dtype, shape, strides, device) {}

  void* mutable_data() const { return const_cast<void*>(data_); }
  template <typename T>
  T* as() const {
    check_element_size(sizeof(T));
    return static_cast<T*>(mutable_data());
  }
  MutableTensorView operator[](int64_t i) const { return from(TensorView::operator[](i)); }
  MutableTensorView slice(int64_t begin, int64_t end) const {
    return from(TensorView::slice(begin, end));
  }
  MutableTensorView reshape(const Dims& shape) const { return from(TensorView::reshape(shape)); }

 private:
  static MutableTensorView from(const TensorView& view) {
    return {const_cast<void*>(view.data()), view.dtype(), view.shape(), view.strides(),
            view.device()};
  }
};

/// "hidden_states: bfloat16 [3, 64] on cpu", for messages.
std::string describe(std::string_view name, const TensorView& tensor);

/// An owning, contiguous tensor; its memory comes from the device's allocator and is 64-byte
/// aligned. Not initialised.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, const Dims& shape, Device device = {});

  const MutableTensorView& view() const { return view_; }
  operator const MutableTensorView&() const {
    return view_;
  }  // NOLINT(google-explicit-constructor)
  const MutableTensorView* operator->() const { return &view_; }
  explicit operator bool() const { return static_cast<bool>(view_); }

 private:
  std::shared_ptr<void> memory_;
  MutableTensorView view_;
};

}  // namespace cadre
