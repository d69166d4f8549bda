// An event of the CUDA runtime that ends with the object.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/device/check.h"

namespace cadre::cuda {

class Event {
 public:
  /// cudaEventDefault measures time; cudaEventDisableTiming is cheaper where only order matters.
  explicit Event(unsigned flags = cudaEventDefault) {
    CADRE_CUDA_CHECK(cudaEventCreateWithFlags(&handle_, flags));
  }
  ~Event() { cudaEventDestroy(handle_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { CADRE_CUDA_CHECK(cudaEventRecord(handle_, stream)); }
  void synchronize() const { CADRE_CUDA_CHECK(cudaEventSynchronize(handle_)); }
  /// Both have been reached.
  double seconds_since(const Event& start) const {
    float milliseconds = 0;
    CADRE_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start.handle_, handle_));
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  cudaEvent_t handle_ = nullptr;
};

}  // namespace cadre::cuda
