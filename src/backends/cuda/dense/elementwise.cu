// Row copies and element-wise operations: eight elements a thread where alignment allows, else one
// by one.
#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/values.cuh"
#include "backends/cuda/kernels/gate_function.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 256;

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

__device__ int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

struct GatherArgs {
  const void* x;
  DType x_dtype;
  const int32_t* rows;
  void* out;
  DType out_dtype;
  int64_t count;  // of rows
  int64_t width;
};

template <bool kVectors>
__global__ void __launch_bounds__(kThreads) gather_kernel(GatherArgs args) {
  begin_short();
  const int64_t per_row = kVectors ? args.width / 8 : args.width;
  const int64_t index = thread_index();
  if (index >= args.count * per_row) return;
  const int64_t row = index / per_row;
  const int64_t column = index % per_row;
  const int64_t source = args.rows[row] * args.width;
  if constexpr (kVectors) {
    float x[8];
    load_eight(args.x, args.x_dtype, source + 8 * column, x);
    store_eight(x, args.out, args.out_dtype, row * args.width + 8 * column);
  } else {
    store_one(load_one(args.x, args.x_dtype, source + column), args.out, args.out_dtype,
              row * args.width + column);
  }
}

__global__ void __launch_bounds__(kThreads)
    clamp_gated_kernel(void* gate, DType gate_dtype, void* up, DType up_dtype, float limit,
                       int64_t count) {
  begin_dependent();
  const int64_t i = thread_index();
  if (i >= count) return;
  const float g = load_one(gate, gate_dtype, i);
  const float u = load_one(up, up_dtype, i);
  store_one(g > limit ? limit : g, gate, gate_dtype, i);  // keeps NaN
  store_one(u < -limit ? -limit : (u > limit ? limit : u), up, up_dtype, i);
}

enum class Map : uint8_t { kAdd, kAddGated, kScale, kClamp, kActivate };

// Whether the second operand counts.
constexpr bool is_binary(Map map) { return map != Map::kClamp && map != Map::kScale; }

struct MapArgs {
  const void* a;
  DType a_dtype;
  const void* b;
  DType b_dtype;
  void* out;
  DType out_dtype;
  int64_t count;
  int64_t width;      // kAddGated: elements that share a gate
  const float* gate;  // kAddGated
  float limit;        // kClamp; kScale: the factor
  Activation activation;
};

template <Map kMap>
__device__ float map_one(const MapArgs& args, float a, float b, float gate) {
  if constexpr (kMap == Map::kAdd) return a + b;
  if constexpr (kMap == Map::kAddGated) return a + b * gate;
  if constexpr (kMap == Map::kScale) return a * args.limit;
  if constexpr (kMap == Map::kClamp) {
    return a < -args.limit ? -args.limit : (a > args.limit ? args.limit : a);  // keeps NaN
  }
  if (args.activation == Activation::kSilu) return a / (1.0f + expf(-a)) * b;
  return activate_on_device(a, args.activation) * b;
}

template <Map kMap, bool kVectors>
__global__ void __launch_bounds__(kThreads) map_kernel(MapArgs args) {
  begin_dependent();
  constexpr int kCount = kVectors ? 8 : 1;
  const int64_t first = thread_index() * kCount;
  if (first >= args.count) return;
  float gate = 0;
  if constexpr (kMap == Map::kAddGated) {
    gate = 1.0f / (1.0f + expf(-args.gate[first / args.width]));
  }
  if constexpr (kVectors) {
    float a[8];
    float b[8] = {};
    load_eight(args.a, args.a_dtype, first, a);
    if constexpr (is_binary(kMap)) load_eight(args.b, args.b_dtype, first, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = map_one<kMap>(args, a[i], b[i], gate);
    store_eight(a, args.out, args.out_dtype, first);
  } else {
    const float a = load_one(args.a, args.a_dtype, first);
    const float b = is_binary(kMap) ? load_one(args.b, args.b_dtype, first) : 0.0f;
    store_one(map_one<kMap>(args, a, b, gate), args.out, args.out_dtype, first);
  }
}

template <Map kMap>
void map(MapArgs args, const Stream& stream) {
  if (args.count == 0) return;
  const bool vectors = allows_vectors(args.a, args.count) && allows_vectors(args.b, args.count) &&
                       allows_vectors(args.out, args.width);
  const Launch mode = dependent_launch(stream);
  if (vectors) {
    launch("map_kernel", map_kernel<kMap, true>, blocks_for(args.count / 8), kThreads, 0,
           stream_of(stream), mode, args);
  } else {
    launch("map_kernel", map_kernel<kMap, false>, blocks_for(args.count), kThreads, 0,
           stream_of(stream), mode, args);
  }
}

MapArgs map_args(const TensorView& a, const TensorView& b, const MutableTensorView& out) {
  CADRE_ASSERT(a.numel() == out.numel() && b.numel() == out.numel());
  return {.a = a.data(),
          .a_dtype = a.dtype(),
          .b = b.data(),
          .b_dtype = b.dtype(),
          .out = out.mutable_data(),
          .out_dtype = out.dtype(),
          .count = out.numel(),
          .width = row_width(out),
          .gate = nullptr,
          .limit = 0,
          .activation = Activation::kSilu};
}

}  // namespace

void CudaDenseOps::embedding(const TensorView& ids, const TensorView& table, MutableTensorView out,
                             const Stream& stream) {
  gather_rows(table, ids, out, stream);
}

void CudaDenseOps::gather_rows(const TensorView& x, const TensorView& rows, MutableTensorView out,
                               const Stream& stream) {
  const GatherArgs args{x.data(),    x.dtype(),   rows.as<int32_t>(), out.mutable_data(),
                        out.dtype(), rows.dim(0), row_width(x)};
  CADRE_ASSERT(out.dim(0) >= args.count && row_width(out) == args.width);
  const int64_t elements = args.count * args.width;
  if (elements == 0) return;
  const Launch mode = dependent_launch(stream);
  if (allows_vectors(x.data(), args.width) && allows_vectors(out.data(), args.width)) {
    launch("gather_kernel", gather_kernel<true>, blocks_for(elements / 8), kThreads, 0,
           stream_of(stream), mode, args);
  } else {
    launch("gather_kernel", gather_kernel<false>, blocks_for(elements), kThreads, 0,
           stream_of(stream), mode, args);
  }
}

void CudaDenseOps::add(MutableTensorView y, const TensorView& x, const Stream& stream) {
  map<Map::kAdd>(map_args(y, x, y), stream);
}

void CudaDenseOps::add_sigmoid_gated(MutableTensorView y, const TensorView& x,
                                     const TensorView& gate, const Stream& stream) {
  CADRE_ASSERT(gate.numel() == num_rows(y));
  MapArgs args = map_args(y, x, y);
  args.gate = gate.as<float>();
  map<Map::kAddGated>(args, stream);
}

void CudaDenseOps::scale(MutableTensorView x, float factor, const Stream& stream) {
  MapArgs args = map_args(x, x, x);
  args.limit = factor;
  map<Map::kScale>(args, stream);
}

void CudaDenseOps::clamp(MutableTensorView x, float limit, const Stream& stream) {
  MapArgs args = map_args(x, x, x);
  args.limit = limit;
  map<Map::kClamp>(args, stream);
}

void CudaDenseOps::clamp_gated(MutableTensorView gate, MutableTensorView up, float limit,
                               const Stream& stream) {
  CADRE_ASSERT(gate.numel() == up.numel());
  if (gate.numel() == 0) return;
  launch("clamp_gated_kernel", clamp_gated_kernel, blocks_for(gate.numel()), kThreads, 0,
         stream_of(stream), dependent_launch(stream), gate.mutable_data(), gate.dtype(),
         up.mutable_data(), up.dtype(), limit, gate.numel());
}

void CudaDenseOps::gated_activation(const TensorView& gate, const TensorView& up,
                                    Activation activation, MutableTensorView out,
                                    const Stream& stream) {
  MapArgs args = map_args(gate, up, out);
  args.activation = activation;
  map<Map::kActivate>(args, stream);
}

}  // namespace cadre::cuda
