#include "backends/cuda/device/check.h"

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

std::string current_device() {
  int index = 0;
  return cudaGetDevice(&index) == cudaSuccess ? str_cat("cuda:", index) : std::string("cuda");
}

// Faults of a kernel that ran before the call which reports them; no later call works either.
const char* hint(cudaError_t result) {
  switch (result) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
      return "; an earlier kernel failed, CUDA_LAUNCH_BLOCKING=1 with --no-graph shows which; this "
             "process cannot use the device any more";
    case cudaErrorNoKernelImageForDevice:
      return "; Cadre's kernels need compute capability 8.0 or later";
    default:
      return "";
  }
}

}  // namespace

void check(cudaError_t result, const char* call, const char* file, int line) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // so that the next check does not report it again
  throw DeviceError(str_cat(current_device(), ": ", call, " failed at ", file, ":", line, ": ",
                            cudaGetErrorName(result), " (", cudaGetErrorString(result), ")",
                            hint(result)));
}

void check_launch(const char* kernel) {
  const cudaError_t result = cudaGetLastError();
  if (result == cudaSuccess) return;
  throw DeviceError(str_cat(current_device(), ": launch of ", kernel,
                            " failed: ", cudaGetErrorName(result), " (", cudaGetErrorString(result),
                            ")", hint(result)));
}

DeviceGuard::DeviceGuard(int index) {
  CADRE_CUDA_CHECK(cudaGetDevice(&before_));
  if (index != before_) CADRE_CUDA_CHECK(cudaSetDevice(index));
}

DeviceGuard::~DeviceGuard() { cudaSetDevice(before_); }

}  // namespace cadre::cuda
