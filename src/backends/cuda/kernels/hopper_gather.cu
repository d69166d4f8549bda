// Rows of tokens in the order of experts, where hopper_gemm() cannot gather them itself.
#include "backends/cuda/kernels/hopper_gemm.h"
#include "backends/cuda/kernels/launch.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 256;

struct Gather {
  const char* x;
  int64_t x_stride;  // bytes
  int64_t row_bytes;
  int64_t num_tokens;
  int32_t top_k;
  const int32_t* row_of_pair;
  char* sorted;
};

// A token's row is read once and written once for each of its experts.
template <typename Piece>
__device__ void copy_token(const Gather& g, int64_t token) {
  const int32_t* rows = g.row_of_pair + token * g.top_k;
  const char* from = g.x + token * g.x_stride;
  for (int64_t at = threadIdx.x * sizeof(Piece); at < g.row_bytes; at += kThreads * sizeof(Piece)) {
    const Piece piece = *reinterpret_cast<const Piece*>(from + at);
    for (int slot = 0; slot < g.top_k; ++slot) {
      const int64_t row = rows[slot];
      if (row >= 0) *reinterpret_cast<Piece*>(g.sorted + row * g.row_bytes + at) = piece;
    }
  }
}

template <typename Piece>
__global__ void __launch_bounds__(kThreads) gather_kernel(const Gather g) {
  wait_for_previous_kernel();
  for (int64_t token = blockIdx.x; token < g.num_tokens; token += gridDim.x) {
    copy_token<Piece>(g, token);
  }
}

}  // namespace

bool can_gather(const TensorView& x) {
  return reinterpret_cast<uintptr_t>(x.data()) % 16 == 0 && x.stride(0) % 8 == 0;
}

void gather_rows(const GatherRows& args, const Stream& stream) {
  constexpr int64_t kMaxBlocks = 65536;
  const TensorView& x = args.hidden_states;
  const Gather g = {static_cast<const char*>(x.data()),
                    x.stride(0) * 2,
                    x.dim(1) * 2,
                    x.dim(0),
                    static_cast<int32_t>(args.top_k),
                    args.row_of_pair,
                    static_cast<char*>(args.sorted)};
  const auto blocks = static_cast<unsigned>(x.dim(0) < kMaxBlocks ? x.dim(0) : kMaxBlocks);
  const bool whole = can_gather(x) && x.dim(1) % 8 == 0;
  launch("gather_rows", whole ? gather_kernel<int4> : gather_kernel<uint16_t>, dim3(blocks),
         dim3(kThreads), 0, stream_of(stream), Launch::kDependent, g);
}

}  // namespace cadre::cuda
