// Activations beside MX weights as float16 in the order of the products, where they do not fit into
// a block's shared memory as a whole.
#include "backends/cuda/kernels/decode/decode_kernels.h"
#include "backends/cuda/kernels/decode/half_rows.cuh"
#include "backends/cuda/kernels/launch.h"

namespace cadre::cuda {
namespace {

constexpr int kWarps = 8;

struct Rows {
  const char* from = nullptr;
  int64_t stride = 0;  // bytes
  int rows = 0;
  int k = 0;
  bool is_f16 = false;
  HalfRows to;
  int warps_each = 1;
  bool next_starts_first = false;
};

template <Kind kKind>
__global__ void __launch_bounds__(kWarps * 32) half_rows_kernel(const __grid_constant__ Rows args) {
  if (args.next_starts_first) let_next_kernel_start();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row =
      static_cast<int>(blockIdx.x) * (kWarps / args.warps_each) + warp / args.warps_each;
  if (row >= args.rows) return;
  const auto* const from = reinterpret_cast<const uint4*>(args.from + row * args.stride);
  const auto piece = [&](int i) { return __ldcg(from + i); };
  const HalfScale scale =
      half_scale<kKind>(largest_of_row(args.k / 8, args.is_f16, piece), args.is_f16);
  place_half_row<kKind>(args.k, static_cast<int>(args.to.stride) / 2, scale.of_row, args.is_f16,
                        static_cast<char*>(args.to.data) + row * args.to.stride,
                        warp % args.warps_each, args.warps_each, piece);
  if (threadIdx.x % 32 == 0) args.to.factors[row] = scale.of_sums;
}

void launch_rows(const DecodeArgs& a, Rows rows, const DecodeDevice& device) {
  rows.is_f16 = a.compute_dtype == DType::kF16;
  // As many warps as multiprocessors can well have.
  while (rows.warps_each < kWarps && rows.rows * rows.warps_each < device.num_sms * kWarps) {
    rows.warps_each *= 2;
  }
  const int each = kWarps / rows.warps_each;
  const auto grid = static_cast<unsigned>((rows.rows + each - 1) / each);
  const bool is_fp4 = a.format.format == StorageFormat::kFp4;
  launch("batched_mm half_rows",
         is_fp4 ? half_rows_kernel<Kind::kFp4> : half_rows_kernel<Kind::kMxFp8>, grid, kWarps * 32,
         0, stream_of(*device.stream),
         device.has_dependent_launch ? Launch::kDependent : Launch::kPlain, rows);
}

}  // namespace

void make_x_halves(const DecodeArgs& a, const DecodeDevice& device) {
  Rows rows;
  rows.from = static_cast<const char*>(a.x);
  rows.stride = a.x_stride * 2;
  rows.rows = a.num_tokens;
  rows.k = a.hidden;
  rows.to = a.x_halves;
  launch_rows(a, rows, device);
}

void make_h_halves(const DecodeArgs& a, const DecodeDevice& device) {
  Rows rows;
  rows.from = static_cast<const char*>(a.h);
  rows.stride = a.h_stride * 2;
  rows.rows = a.num_tokens * a.top_k;
  rows.k = a.intermediate;
  rows.to = a.h_halves;
  rows.next_starts_first = true;  // `down` reads no more than weights and routing before it waits
  launch_rows(a, rows, device);
}

}  // namespace cadre::cuda
