// Launching kernels: one call that checks, and programmatic dependent launch (PDL) where a kernel
// is written for it. For .cu files.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "backends/cuda/device/check.h"

namespace cadre::cuda {

/// Dependent: the kernel may start before the one ahead of it in the stream has ended, and calls
/// cudaGridDependencySynchronize() before it reads what that one writes (and before it writes what
/// that one reads).
enum class Launch : bool { kPlain, kDependent };

#ifdef __CUDACC__
/// In a dependent kernel: waits until the kernel ahead has ended and its writes are visible. GPUs
/// before Hopper have started it only then.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
/// Asks for a line to be in L2, as a hint, and reads nothing: also for what the kernel ahead may
/// still write.
__device__ inline void bring_to_l2(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}
/// In any kernel: a dependent one behind it may start its first, independent work.
__device__ inline void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
#endif

template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            size_t shared_bytes, cudaStream_t stream, Launch mode, Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = mode == Launch::kDependent ? 1 : 0;
  const cudaError_t result =
      cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  check(result, name, __FILE__, __LINE__);
}

/// A dependent launch of clusters of blocks, on GPUs that have them. More than eight blocks must be
/// allowed before (cudaFuncAttributeNonPortableClusterSizeAllowed).
template <typename... Parameters, typename... Arguments>
void launch_cluster(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                    size_t shared_bytes, cudaStream_t stream, dim3 cluster,
                    Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster.x, cluster.y, cluster.z};
  config.attrs = attributes;
  config.numAttrs = 2;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), name, __FILE__,
        __LINE__);
}

/// More than 48 KiB of shared memory must be asked for once per kernel and device; call it before
/// each launch, it remembers nothing and is cheap.
template <typename Kernel>
void allow_shared_memory(Kernel kernel, size_t bytes) {
  if (bytes <= 48 * 1024) return;
  CADRE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(bytes)));
}

}  // namespace cadre::cuda
