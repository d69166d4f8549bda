#include "core/device_runtime.h"

#include <cstring>

#include "cadre/error.h"
#include "core/check.h"
#include "core/compiled_device_runtimes.h"
#include "core/str_cat.h"

namespace cadre {

DeviceRuntime* find_device_runtime(DeviceType type) {
  for (const CompiledDeviceRuntime& entry : compiled_device_runtimes()) {
    if (entry.type == type) return &entry.get();
  }
  return nullptr;
}

DeviceRuntime& device_runtime(Device device) {
  DeviceRuntime* runtime = find_device_runtime(device.type);
  if (runtime == nullptr) {
    throw Unsupported(str_cat("device ", to_string(device),
                              ": this build of Cadre has nothing for ", name_of(device.type),
                              "; use the cpu, or build where nvcc is found"));
  }
  const int count = runtime->device_count();
  if (count == 0) {
    throw DeviceError(str_cat("device ", to_string(device), ": ", runtime->why_none()));
  }
  if (device.index < 0 || device.index >= count) {
    throw DeviceError(str_cat("device ", to_string(device), ": expected a number from 0 to ",
                              count - 1, ", this machine has ", count, " of them"));
  }
  return *runtime;
}

CurrentDevice::CurrentDevice(Device device) {
  if (device.type == DeviceType::kCpu) return;
  runtime_ = &device_runtime(device);
  before_ = runtime_->make_current(device.index);
}

CurrentDevice::~CurrentDevice() {
  if (runtime_ == nullptr) return;
  try {
    runtime_->make_current(before_);
  } catch (const DeviceError&) {  // of a fault that the call which met it has reported
  }
}

OwnedStream::OwnedStream(Device device, ThreadPool& threads) : cpu_(Stream::cpu(threads)) {
  if (device.type == DeviceType::kCpu) return;
  gpu_ = device_runtime(device).make_stream(device.index, &threads);
}

void copy_tensor(const TensorView& from, const MutableTensorView& to, const Stream& stream) {
  CADRE_ASSERT(from.dtype() == to.dtype() && from.shape() == to.shape() && from.is_contiguous() &&
               to.is_contiguous());
  const size_t bytes = from.nbytes();
  if (bytes == 0) return;
  if (stream.device.type == DeviceType::kCpu) {
    std::memcpy(to.mutable_data(), from.data(), bytes);
  } else {
    device_runtime(stream.device).copy(to.mutable_data(), from.data(), bytes, stream);
  }
}

void clear_tensor(const MutableTensorView& tensor, const Stream& stream) {
  CADRE_ASSERT(tensor.is_contiguous());
  const size_t bytes = tensor.nbytes();
  if (bytes == 0) return;
  if (stream.device.type == DeviceType::kCpu) {
    std::memset(tensor.mutable_data(), 0, bytes);
  } else {
    device_runtime(stream.device).fill(tensor.mutable_data(), 0, bytes, stream);
  }
}

Tensor to_device_of(const Stream& stream, const TensorView& host) {
  Tensor copy(host.dtype(), host.shape(), stream.device);
  copy_tensor(host, copy, stream);
  return copy;
}

Tensor to_host(const Stream& stream, const TensorView& tensor) {
  Tensor copy(tensor.dtype(), tensor.shape());
  copy_tensor(tensor, copy, stream);
  return copy;
}

void synchronize(const Stream& stream) {
  if (stream.device.type != DeviceType::kCpu) device_runtime(stream.device).synchronize(stream);
}

}  // namespace cadre
