#include "conformance/device_under_test.h"

#include <algorithm>
#include <map>
#include <memory>

#include "cadre/thread_pool.h"
#include "conformance/checker.h"
#include "core/device_runtime.h"

namespace cadre::test {

const Stream& test_stream(int num_threads) {
  struct Owned {
    explicit Owned(int threads) : pool(threads), cpu(Stream::cpu(pool)) {}
    ThreadPool pool;
    Stream cpu;
    std::unique_ptr<DeviceStream> gpu;
  };
  static auto& streams = *new std::map<int, std::unique_ptr<Owned>>;
  std::unique_ptr<Owned>& owned = streams[is_gpu_under_test() ? 0 : num_threads];
  if (owned == nullptr) {
    owned = std::make_unique<Owned>(num_threads);
    if (is_gpu_under_test()) {
      const Device device = device_under_test();
      owned->gpu = device_runtime(device).make_stream(device.index, &owned->pool);
    }
  }
  return owned->gpu ? owned->gpu->get() : owned->cpu;
}

void DeviceTest::SetUp() {
  if (!is_gpu_under_test()) return;
  const DeviceRuntime* runtime = find_device_runtime(device_under_test().type);
  if (runtime == nullptr) GTEST_SKIP() << "this build has nothing for GPUs";
  if (runtime->device_count() == 0) GTEST_SKIP() << "needs a GPU: " << runtime->why_none();
  if (runnable_backends().empty()) GTEST_SKIP() << "this build has no backend for GPUs";
}

CaseParams for_device_under_test(CaseParams params) {
  if (!is_gpu_under_test()) return params;
  if (params.quantized) {
    params.whole_scale_shift = true;
    return params;
  }
  params.stored_dtype = params.compute_dtype;
  params.byte_shift *= std::max(size_of(params.stored_dtype), size_of(params.bias_dtype));
  return params;
}

}  // namespace cadre::test
