// The device runtime of NVIDIA GPUs (core/device_runtime.h), and what only CUDA's own folders see.
#pragma once

#include <cuda_runtime_api.h>

#include "core/device_runtime.h"

namespace cadre::cuda {

DeviceRuntime& device_runtime();

/// Number of multiprocessors and compute capability, read once for each device; cheap.
const DeviceProperties& properties_of(int index);

/// 90 for Hopper; 0 where there is no such device.
int compute_capability(int index);

}  // namespace cadre::cuda
