// For tests that need a GPU: skipped where there is none, and tensors to and from it.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "cadre/tensor.h"
#include "cadre/thread_pool.h"
#include "core/device_runtime.h"
#include "support/test_device.h"

/// First line of a test: skips it, with the reason, where no GPU can be used.
#define CADRE_REQUIRE_GPU()                                                 \
  do {                                                                      \
    const std::string why_no_gpu = ::cadre::test::why_no_gpu();             \
    if (!why_no_gpu.empty()) GTEST_SKIP() << "needs a GPU; " << why_no_gpu; \
  } while (false)

namespace cadre::test {

/// A stream of the first GPU with a small pool of threads.
class Gpu {
 public:
  Gpu() : stream_(runtime().make_stream(0, &threads_)) {}

  static DeviceRuntime& runtime() { return device_runtime({DeviceType::kCuda, 0}); }
  static Device device() { return {DeviceType::kCuda, 0}; }
  const Stream& stream() const { return stream_->get(); }
  ThreadPool& threads() { return threads_; }
  void synchronize() const { runtime().synchronize(stream()); }

  /// Host bytes on the device. Contiguous.
  Tensor to_device(const TensorView& host) const {
    Tensor tensor(host.dtype(), host.shape(), device());
    copy_tensor(host, tensor, stream());
    synchronize();
    return tensor;
  }
  Tensor to_host(const TensorView& on_device) const {
    Tensor tensor(on_device.dtype(), on_device.shape());
    copy_tensor(on_device, tensor, stream());
    synchronize();
    return tensor;
  }

 private:
  ThreadPool threads_{2};
  std::unique_ptr<DeviceStream> stream_;
};

}  // namespace cadre::test
