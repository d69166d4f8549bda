#include "backends/cuda/batched_mm/fast.cuh"

namespace cadre::cuda {

#ifdef CADRE_DECODE_TRACE
void read_trace(unsigned long long* to) {
  cudaMemcpyFromSymbol(to, trace_times, sizeof(trace_times));
}
#endif

bool decode_fast_bf16(const DecodeArgs& args, const DecodeDevice& device) {
  return launch_fast<__nv_bfloat16>(args, device);
}

}  // namespace cadre::cuda
