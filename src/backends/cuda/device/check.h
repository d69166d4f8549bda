// Every call of the CUDA runtime goes through CADRE_CUDA_CHECK and every launch is followed by
// check_launch(): a fault becomes a DeviceError that names the call, the place and the device.
#pragma once

#include <cuda_runtime_api.h>

#include "cadre/stream.h"

namespace cadre::cuda {

/// Throws DeviceError when `result` is a fault; clears the runtime's last error.
void check(cudaError_t result, const char* call, const char* file, int line);

#define CADRE_CUDA_CHECK(call) ::cadre::cuda::check((call), #call, __FILE__, __LINE__)

/// After a launch: a bad configuration or an earlier fault of the device becomes a DeviceError
/// naming `kernel`.
void check_launch(const char* kernel);

inline cudaStream_t stream_of(const Stream& stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

/// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

}  // namespace cadre::cuda
