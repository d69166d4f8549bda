// Compressed attention and hyper-connections, against the CPU's operations in float32 on the same
// numbers, over sequences that come in pieces and beside each other.
#include <cmath>

#include "backends/cuda/dense/ops_fixture.h"

namespace cadre::cuda {
namespace {

using test::to_doubles;

class GpuCompressedOps : public GpuOpsTest {
 protected:
  static constexpr int64_t kSlots = 3;
  static constexpr int64_t kLength = 150;

  /// Steps of two sequences of 150 and 90 tokens, in pieces.
  static std::vector<std::vector<SequenceSpan>> steps(int64_t piece) {
    std::vector<std::vector<SequenceSpan>> result;
    for (int64_t begin = 0; begin < kLength; begin += piece) {
      const int64_t count = std::min(piece, kLength - begin);
      std::vector<SequenceSpan> step{{1, 0, count, begin}};
      if (begin < 90) step.push_back({0, count, std::min(piece, 90 - begin), begin});
      result.push_back(step);
    }
    return result;
  }
  static StepTokens host_tokens(const std::vector<SequenceSpan>& sequences,
                                const std::vector<int32_t>& slots,
                                const std::vector<int32_t>& positions) {
    const Dims shape{static_cast<int64_t>(slots.size())};
    return {
        sequences, {slots.data(), DType::kI32, shape}, {positions.data(), DType::kI32, shape}, {}};
  }
  static int64_t rows_of(const std::vector<SequenceSpan>& step) {
    return step.back().first_row + step.back().num_tokens;
  }
  /// A cache of zeros on both sides, the host's in float32.
  struct Cache {
    Tensor host;
    Tensor gpu;
  };
  Cache cache(DType dtype, int64_t rows, int64_t width) {
    const Dims shape{kSlots, 1, rows, width};
    Cache result{Tensor(DType::kF32, shape), Tensor(dtype, shape, kGpu)};
    std::memset(result.host->mutable_data(), 0, result.host->nbytes());
    runtime_->fill(result.gpu->mutable_data(), 0, result.gpu->nbytes(), stream_);
    return result;
  }
  Workspace room_{Device{}, size_t{16} << 20};
};

TEST_F(GpuCompressedOps, TheGpuHasThem) { EXPECT_TRUE(ops_->has_compressed_ops()); }

TEST_F(GpuCompressedOps, RingsAndEntries) {
  struct Shape {
    int64_t series, rate, width, half;
  };
  for (const DType dtype : kComputeDtypes) {
    for (const Shape& s : {Shape{2, 4, 48, 8}, Shape{1, 16, 300, 10}, Shape{2, 3, 7, 2}}) {
      for (const int64_t piece : {1, 5, 40, 150}) {
        const Tensor bias = random(DType::kBF16, {s.rate, s.series * s.width});
        const Tensor norm = random(DType::kBF16, {s.width});
        const Tensor inverse = random(DType::kF32, {s.half}, 0.1f);
        const Tensor gpu_bias = to_gpu(bias.view());
        const Tensor gpu_norm = to_gpu(norm.view());
        const Tensor gpu_inverse = to_gpu(inverse.view());
        const Cache value_ring = cache(DType::kF32, s.series * s.rate, s.series * s.width);
        const Cache gate_ring = cache(DType::kF32, s.series * s.rate, s.series * s.width);
        const Cache entries = cache(dtype, kLength / s.rate + 1, s.width);
        for (const auto& step : steps(piece)) {
          const Tensor values = random(DType::kF32, {rows_of(step), s.series * s.width});
          const Tensor gates = random(DType::kF32, {rows_of(step), s.series * s.width}, 2);
          const auto slots = token_slots(step);
          const auto positions = token_positions(step);
          const StepTokens host = host_tokens(step, slots, positions);
          cpu_.compress({values.view(), gates.view(), value_ring.host.view(), gate_ring.host.view(),
                         bias.view(), norm.view(), 1e-5f, inverse.view(), 0.9f, host, entries.host},
                        room_, host_);
          cpu_.store_ring(values.view(), host, value_ring.host, host_);
          cpu_.store_ring(gates.view(), host, gate_ring.host, host_);
          const GpuTokens tokens = gpu_tokens(step, stream_);
          const Tensor gpu_values = to_gpu(values.view());
          const Tensor gpu_gates = to_gpu(gates.view());
          ops_->compress({gpu_values.view(), gpu_gates.view(), value_ring.gpu.view(),
                          gate_ring.gpu.view(), gpu_bias.view(), gpu_norm.view(), 1e-5f,
                          gpu_inverse.view(), 0.9f, tokens.get(), entries.gpu},
                         *workspace_, stream_);
          ops_->store_ring(gpu_values.view(), tokens.get(), value_ring.gpu, stream_);
          ops_->store_ring(gpu_gates.view(), tokens.get(), gate_ring.gpu, stream_);
          runtime_->synchronize(stream_);
        }
        expect_as(entries.gpu.view(), entries.host, dtype == DType::kF32 ? 1e-5 : bound(dtype));
        EXPECT_EQ(values(value_ring.gpu.view()), to_doubles(value_ring.host.view()));
        EXPECT_EQ(values(gate_ring.gpu.view()), to_doubles(gate_ring.host.view()));
      }
    }
  }
}

TEST_F(GpuCompressedOps, TheBestEntriesArePicked) {
  for (const DType dtype : kComputeDtypes) {
    for (const auto& [heads, width, rate, k] :
         {std::tuple<int64_t, int64_t, int64_t, int64_t>{4, 32, 1, 16},
          {3, 20, 2, 30},
          {64, 128, 1, 40}}) {
      const std::vector<SequenceSpan> step = {{1, 0, 70, 80}, {0, 70, 1, 0}, {2, 71, 3, 100}};
      const Tensor queries = random(dtype, {74, heads, width});
      const Tensor weights = random(DType::kF32, {74, heads});
      const Tensor keys = random(dtype, {kSlots, 1, 160, width});
      for (int64_t i = 0; i < 40 * width; ++i) {  // equals
        set(keys, (160 + 60) * width + i, static_cast<float>(i % width == 0));
      }
      const auto slots = token_slots(step);
      const auto positions = token_positions(step);
      const Tensor expected(DType::kI32, {74, k});
      const Tensor wide_queries = wide(queries.view());
      const Tensor wide_keys = wide(keys.view());
      cpu_.pick_entries({wide_queries.view(), weights.view(), 0.5f, wide_keys.view(), rate,
                         host_tokens(step, slots, positions), expected},
                        room_, host_);
      const GpuTokens tokens = gpu_tokens(step, stream_);
      const Tensor picks = poisoned(DType::kI32, {74, k});
      ops_->pick_entries({to_gpu(queries.view()).view(), to_gpu(weights.view()).view(), 0.5f,
                          to_gpu(keys.view()).view(), rate, tokens.get(), picks},
                         *workspace_, stream_);
      EXPECT_EQ(values(picks.view()), to_doubles(expected.view())) << heads << " " << width;
    }
  }
}

TEST_F(GpuCompressedOps, AttentionOverWindowAndEntries) {
  struct Shape {
    int64_t heads, dim, window, rate, picks;  // rate 0: no entries; picks 0: all closed
  };
  for (const DType dtype : kComputeDtypes) {
    for (const Shape& s : {Shape{4, 64, 8, 4, 0}, Shape{3, 20, 33, 2, 10}, Shape{2, 512, 128, 0, 0},
                           Shape{5, 40, 1, 3, 7}}) {
      const std::vector<SequenceSpan> step = {{1, 0, 30, 60}, {0, 30, 1, 0}, {2, 31, 3, 100}};
      const Tensor q = random(dtype, {34, s.heads, s.dim});
      const Tensor kv = random(dtype, {34, s.dim});
      const Tensor ring = random(dtype, {kSlots, 1, s.window, s.dim});
      const Tensor entries = random(dtype, {kSlots, 1, 60, s.dim});
      const Tensor sinks = random(DType::kF32, {s.heads});
      Tensor picks;
      if (s.picks > 0) {
        picks = Tensor(DType::kI32, {34, s.picks});
        for (int64_t i = 0; i < picks->numel(); ++i) {
          const int64_t j = i % s.picks;
          picks->as<int32_t>()[i] =
              i / s.picks % 3 == 0 && j > 4 ? -1 : static_cast<int32_t>(2 * j);
        }
      }
      const auto slots = token_slots(step);
      const auto positions = token_positions(step);
      const float scale = 1.2f / std::sqrt(static_cast<float>(s.dim));
      const Tensor wide_q = wide(q.view());
      const Tensor wide_kv = wide(kv.view());
      const Tensor wide_ring = wide(ring.view());
      const Tensor wide_entries = wide(entries.view());
      const Tensor expected(DType::kF32, q->shape());
      SharedKvAttentionArgs args;
      args.q = wide_q.view();
      args.kv = wide_kv.view();
      args.kv_ring = wide_ring.view();
      args.sliding_window = s.window;
      if (s.rate > 0) args.entries = wide_entries.view();
      args.rate = std::max<int64_t>(s.rate, 1);
      if (picks) args.picks = picks.view();
      args.sinks = sinks.view();
      args.scale = scale;
      args.tokens = host_tokens(step, slots, positions);
      args.out = expected;
      cpu_.shared_kv_attention(args, room_, host_);
      const GpuTokens tokens = gpu_tokens(step, stream_);
      const Tensor gpu_q = to_gpu(q.view());
      const Tensor gpu_kv = to_gpu(kv.view());
      const Tensor gpu_ring = to_gpu(ring.view());
      const Tensor gpu_entries = to_gpu(entries.view());
      const Tensor gpu_sinks = to_gpu(sinks.view());
      const Tensor gpu_picks = picks ? to_gpu(picks.view()) : Tensor();
      const Tensor out = poisoned(dtype, q->shape());
      args.q = gpu_q.view();
      args.kv = gpu_kv.view();
      args.kv_ring = gpu_ring.view();
      if (s.rate > 0) args.entries = gpu_entries.view();
      if (picks) args.picks = gpu_picks.view();
      args.sinks = gpu_sinks.view();
      args.tokens = tokens.get();
      args.out = out;
      ops_->shared_kv_attention(args, *workspace_, stream_);
      expect_as(out.view(), expected, dtype == DType::kF32 ? 2e-6 : bound(dtype));
    }
  }
}

TEST_F(GpuCompressedOps, HyperConnections) {
  for (const auto& [n, width, iterations] :
       {std::tuple<int64_t, int64_t, int64_t>{4, 700, 20}, {16, 64, 3}, {1, 5, 1}}) {
    const Tensor streams = random(DType::kF32, {5, n, width}, 2);
    const Tensor logits = random(DType::kF32, {5, (2 + n) * n}, 2);
    const Tensor base = random(DType::kF32, {(2 + n) * n});
    const Tensor scale = random(DType::kF32, {3});
    const Tensor x = random(DType::kF32, {5, width});
    const Tensor collapsed(DType::kF32, {5, width});
    const Tensor post(DType::kF32, {5, n});
    const Tensor mix(DType::kF32, {5, n, n});
    const Tensor gpu_streams = to_gpu(streams.view());
    const Tensor gpu_collapsed = poisoned(DType::kF32, {5, width});
    const Tensor gpu_post = poisoned(DType::kF32, {5, n});
    const Tensor gpu_mix = poisoned(DType::kF32, {5, n, n});
    cpu_.hyper_collapse({streams.view(), logits.view(), base.view(), scale.view(), 1e-6f, 1e-4f,
                         iterations, collapsed, post, mix},
                        host_);
    const Tensor gpu_logits = to_gpu(logits.view());
    const Tensor gpu_base = to_gpu(base.view());
    const Tensor gpu_scale = to_gpu(scale.view());
    ops_->hyper_collapse({gpu_streams.view(), gpu_logits.view(), gpu_base.view(), gpu_scale.view(),
                          1e-6f, 1e-4f, iterations, gpu_collapsed, gpu_post, gpu_mix},
                         stream_);
    expect_as(gpu_collapsed.view(), collapsed, 1e-5);
    expect_as(gpu_post.view(), post, 1e-5);
    expect_as(gpu_mix.view(), mix, 1e-5);
    cpu_.hyper_expand({streams, x.view(), post.view(), mix.view()}, host_);
    ops_->hyper_expand({gpu_streams, to_gpu(x.view()).view(), gpu_post.view(), gpu_mix.view()},
                       stream_);
    expect_as(gpu_streams.view(), streams, 1e-5);
    cpu_.hyper_expand({streams, x.view(), {}, {}}, host_);
    ops_->hyper_expand({gpu_streams, to_gpu(x.view()).view(), {}, {}}, stream_);
    EXPECT_EQ(values(gpu_streams.view()), to_doubles(streams.view()));
    // The head.
    const Tensor few = random(DType::kF32, {5, n});
    const Tensor few_base = random(DType::kF32, {n});
    cpu_.hyper_collapse({streams.view(),
                         few.view(),
                         few_base.view(),
                         scale.view(),
                         1e-6f,
                         1e-4f,
                         1,
                         collapsed,
                         {},
                         {}},
                        host_);
    ops_->hyper_collapse({gpu_streams.view(),
                          to_gpu(few.view()).view(),
                          to_gpu(few_base.view()).view(),
                          gpu_scale.view(),
                          1e-6f,
                          1e-4f,
                          1,
                          gpu_collapsed,
                          {},
                          {}},
                         stream_);
    expect_as(gpu_collapsed.view(), collapsed, 1e-5);
  }
}

TEST_F(GpuCompressedOps, SmallOperations) {
  for (const DType dtype : kComputeDtypes) {
    for (const bool inverse : {false, true}) {
      const Tensor x = random(dtype, {5, 3, 20});
      const Tensor cos = random(DType::kF32, {5, 4});
      const Tensor sin = random(DType::kF32, {5, 4});
      const Tensor gpu = to_gpu(x.view());
      const Tensor expected = wide(x.view());
      cpu_.rope_pairs(expected, 9, cos.view(), sin.view(), inverse, host_);
      ops_->rope_pairs(gpu, 9, to_gpu(cos.view()).view(), to_gpu(sin.view()).view(), inverse,
                       stream_);
      expect_as(gpu.view(), expected, bound(dtype));
    }
    const Tensor x = random(dtype, {7, 300});
    const Tensor plain(DType::kF32, {7, 300});
    cpu_.rms_norm(wide(x.view()).view(), {}, 1e-6f, plain, host_);
    const Tensor out = poisoned(dtype, {7, 300});
    ops_->rms_norm(to_gpu(x.view()).view(), {}, 1e-6f, out, stream_);
    expect_as(out.view(), plain, bound(dtype));
  }
  const Tensor gate = random(DType::kF32, {3, 100}, 4);
  const Tensor up = random(DType::kF32, {3, 100}, 4);
  gate->as<float>()[5] = NAN;
  const Tensor gpu_gate = to_gpu(gate.view());
  const Tensor gpu_up = to_gpu(up.view());
  cpu_.clamp_gated(gate, up, 2.0f, host_);
  ops_->clamp_gated(gpu_gate, gpu_up, 2.0f, stream_);
  EXPECT_EQ(bits(gpu_gate.view()), bits(to_gpu(gate.view()).view()));
  EXPECT_EQ(values(gpu_up.view()), to_doubles(up.view()));
}

TEST_F(GpuCompressedOps, ExpertsFromATable) {
  const Tensor logits = random(DType::kF32, {4, 70}, 2);
  const Tensor tokens = integers({5, 0, 2, 5}, {4});
  const Tensor table =
      integers({1, 2, 3, 69, 0, 7, 4, 5, 6, 8, 9, 10, 11, 12, 13, 40, 50, 60}, {6, 3});
  const Tensor long_table(DType::kI64, {6, 3});
  for (int64_t i = 0; i < 18; ++i) long_table->as<int64_t>()[i] = table->as<int32_t>()[i];
  for (const RouterOptions& options :
       {RouterOptions{
            .score = RouterScore::kSqrtSoftplus, .normalize = true, .scaling_factor = 2.5f},
        {.score = RouterScore::kSigmoid},
        {.score = RouterScore::kSoftmaxThenTopK}}) {
    const Tensor index(DType::kI32, {4, 3});
    const Tensor weights(DType::kF32, {4, 3});
    cpu_.route_by_table(logits.view(), tokens.view(), table.view(), options, index, weights, room_,
                        host_);
    for (const TensorView& source : {TensorView(table.view()), TensorView(long_table.view())}) {
      const Tensor gpu_index = poisoned(DType::kI32, {4, 3});
      const Tensor gpu_weights = poisoned(DType::kF32, {4, 3});
      ops_->route_by_table(to_gpu(logits.view()).view(), to_gpu(tokens.view()).view(),
                           to_gpu(source).view(), options, gpu_index, gpu_weights, *workspace_,
                           stream_);
      EXPECT_EQ(values(gpu_index.view()), to_doubles(index.view()));
      expect_as(gpu_weights.view(), weights, 1e-6);
    }
  }
}

}  // namespace
}  // namespace cadre::cuda
