// Fresh rows of latent attention on their way into the cache.
#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/dense/rows.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

void store_row(const LatentRowArgs& args, int64_t token, std::byte* row) {
  const int64_t rank = args.norm.numel();
  const int64_t half = args.cos.dim(1);
  const float* fresh = args.fresh.as<float>() + token * args.fresh.dim(1);
  const DType dtype = args.rows.dtype();
  norm_row(fresh, DType::kF32, args.norm, args.norm_eps, rank, row, dtype);
  rotate_head(fresh + rank, DType::kF32, at(row, dtype, rank), dtype, half,
              args.cos.as<float>() + token * half, args.sin.as<float>() + token * half,
              args.interleaved ? RopePairs::kNeighbours : RopePairs::kHalves);
}

void rotate_queries(const LatentRowArgs& args, int64_t token) {
  const MutableTensorView& q = args.q_rope;
  const int64_t half = args.cos.dim(1);
  for (int64_t head = 0; head < q.dim(1); ++head) {
    std::byte* x = at(q.mutable_data(), q.dtype(), token * q.stride(0) + head * q.stride(1));
    rotate_head(x, q.dtype(), x, q.dtype(), half, args.cos.as<float>() + token * half,
                args.sin.as<float>() + token * half,
                args.interleaved ? RopePairs::kNeighbours : RopePairs::kHalves);
  }
}

}  // namespace

void CpuDenseOps::finish_latent(const LatentRowArgs& args, const Stream& stream) {
  const MutableTensorView& rows = args.rows;
  const int64_t width = args.fresh.dim(1);
  const int64_t rope_dim = args.q_rope.dim(2);
  CADRE_ASSERT(args.norm.numel() + rope_dim == width && rows.dim(3) == width && rows.dim(1) == 1 &&
               2 * args.cos.dim(1) == rope_dim && args.q_rope.stride(2) == 1);
  const int64_t cost = 6 * (width + args.q_rope.dim(1) * rope_dim);
  for (const SequenceSpan& s : args.tokens.sequences) {
    for_row_ranges(stream, s.num_tokens, cost, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t place = (s.slot * rows.dim(2) + s.past + t) * width;
        store_row(args, s.first_row + t, at(rows.mutable_data(), rows.dtype(), place));
        rotate_queries(args, s.first_row + t);
      }
    });
  }
}

}  // namespace cadre::cpu
