#include "backends/cuda/device/check.h"

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

std::string current_device() {
  int index = 0;
  return cudaGetDevice(&index) == cudaSuccess ? str_cat("cuda:", index) : std::string("cuda");
}

}  // namespace

void check(cudaError_t result, const char* call, const char* file, int line) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // so that the next check does not report it again
  throw DeviceError(str_cat(current_device(), ": ", call, " failed at ", file, ":", line, ": ",
                            cudaGetErrorName(result), " (", cudaGetErrorString(result), ")"));
}

void check_launch(const char* kernel) {
  const cudaError_t result = cudaGetLastError();
  if (result == cudaSuccess) return;
  throw DeviceError(str_cat(current_device(), ": launch of ", kernel, " failed: ",
                            cudaGetErrorName(result), " (", cudaGetErrorString(result), ")"));
}

DeviceGuard::DeviceGuard(int index) {
  CADRE_CUDA_CHECK(cudaGetDevice(&before_));
  if (index != before_) CADRE_CUDA_CHECK(cudaSetDevice(index));
}

DeviceGuard::~DeviceGuard() { cudaSetDevice(before_); }

}  // namespace cadre::cuda
