// Row-wise operations against double loops on the host.
#include <cmath>

#include "backends/cuda/dense/ops_fixture.h"

namespace cadre::cuda {
namespace {

using test::to_doubles;

class GpuRowOps : public GpuOpsTest {};

std::vector<double> norm_reference(const TensorView& x, const TensorView& weight, double eps) {
  const std::vector<double> values = to_doubles(x);
  const std::vector<double> weights = to_doubles(weight);
  std::vector<double> result;
  for (size_t row = 0; row < values.size(); row += weights.size()) {
    double sum = 0;
    for (size_t i = 0; i < weights.size(); ++i) sum += values[row + i] * values[row + i];
    const double rms = std::sqrt(sum / static_cast<double>(weights.size()) + eps);
    for (size_t i = 0; i < weights.size(); ++i) {
      result.push_back(values[row + i] / rms * weights[i]);
    }
  }
  return result;
}

TEST_F(GpuRowOps, RmsNormOfAnyWidthAndDtype) {
  for (const DType dtype : kComputeDtypes) {
    for (const DType x_dtype : {DType::kF32, dtype}) {
      for (const int64_t width : {1, 5, 64, 128, 511, 1000, 2048, 2051, 7168, 12296}) {
        const Tensor x = random(x_dtype, {13, width}, 3);
        const Tensor weight = random(dtype, {width});
        const Tensor out = poisoned(dtype, {13, width});
        ops_->rms_norm(to_gpu(x.view()).view(), to_gpu(weight.view()).view(), 1e-5f, out, stream_);
        expect_near(out.view(), norm_reference(x.view(), weight.view(), 1e-5), bound(dtype));
      }
    }
  }
}

TEST_F(GpuRowOps, RmsNormInPlaceAndOnUnalignedRows) {
  for (const int64_t width : {128, 77}) {
    const Tensor x = random(DType::kBF16, {19, 3, width});
    const Tensor weight = random(DType::kBF16, {width});
    const Tensor gpu = to_gpu(x.view());
    ops_->rms_norm(gpu.view(), to_gpu(weight.view()).view(), 1e-6f, gpu, stream_);
    expect_near(gpu.view(), norm_reference(x.view(), weight.view(), 1e-6), bound(DType::kBF16));
  }
  const Tensor x = random(DType::kF16, {4 * 64 + 1});
  const Tensor weight = random(DType::kF16, {64});
  const Tensor gpu = to_gpu(x.view());
  const Dims shape{4, 64};
  const MutableTensorView odd(gpu->as<Float16>() + 1, DType::kF16, shape, kGpu);
  ops_->rms_norm(odd, to_gpu(weight.view()).view(), 1e-6f, odd, stream_);
  const TensorView source(x->as<Float16>() + 1, DType::kF16, shape);
  expect_near(odd, norm_reference(source, weight.view(), 1e-6), bound(DType::kF16));
}

TEST_F(GpuRowOps, AddAndNormInOne) {
  for (const DType dtype : kComputeDtypes) {
    for (const int64_t width : {64, 511, 2048, 12296}) {
      const Tensor residual = random(DType::kF32, {9, width}, 2);
      const Tensor x = random(dtype, {9, width});
      const Tensor weight = random(dtype, {width});
      const Tensor gpu = to_gpu(residual.view());
      const Tensor out = poisoned(dtype, {9, width});
      ops_->add_rms_norm(gpu, to_gpu(x.view()).view(), to_gpu(weight.view()).view(), 1e-5f, out,
                         stream_);
      const Tensor sum(DType::kF32, {9, width});
      const auto a = to_doubles(residual.view());
      const auto b = to_doubles(x.view());
      std::vector<double> exact;
      for (size_t i = 0; i < a.size(); ++i) {
        exact.push_back(a[i] + b[i]);
        set(sum, static_cast<int64_t>(i), static_cast<float>(exact.back()));
      }
      expect_near(gpu.view(), exact, 1e-6);
      expect_near(out.view(), norm_reference(sum.view(), weight.view(), 1e-5), bound(dtype));
    }
  }
}

TEST_F(GpuRowOps, EmbeddingAndGatherConvert) {
  for (const int64_t width : {600, 7}) {
    const Tensor table = random(DType::kF16, {11, width});
    const Tensor gpu_table = to_gpu(table.view());
    const std::vector<int32_t> ids = {10, 0, 10};
    const Tensor gpu_ids = to_gpu(vector_tensor(DType::kI32, ids).view());
    const Tensor out = poisoned(DType::kF32, {3, width});
    ops_->embedding(gpu_ids.view(), gpu_table.view(), out, stream_);
    const Tensor same = poisoned(DType::kF16, {3, width});
    ops_->gather_rows(gpu_table.view(), gpu_ids.view(), same, stream_);
    const auto expected = to_doubles(table.view());
    for (const TensorView& result : {TensorView(out.view()), TensorView(same.view())}) {
      const auto got = values(result);
      for (size_t i = 0; i < got.size(); ++i) {
        const auto w = static_cast<size_t>(width);
        ASSERT_EQ(got[i], expected[static_cast<size_t>(ids[i / w]) * w + i % w]);
      }
    }
  }
}

TEST_F(GpuRowOps, AddOfAnyDtypeAndLength) {
  for (const DType dtype : kComputeDtypes) {
    for (const int64_t width : {1025, 2048}) {
      const Tensor y = random(DType::kF32, {40, width});
      const Tensor x = random(dtype, {40, width});
      const Tensor gpu = to_gpu(y.view());
      ops_->add(gpu, to_gpu(x.view()).view(), stream_);
      std::vector<double> reference = to_doubles(y.view());
      const auto added = to_doubles(x.view());
      for (size_t i = 0; i < reference.size(); ++i) reference[i] += added[i];
      expect_near(gpu.view(), reference, 1e-6);
    }
  }
}

TEST_F(GpuRowOps, AddSigmoidGated) {
  for (const int64_t width : {700, 704}) {
    const Tensor y = random(DType::kF32, {4, width});
    const Tensor x = random(DType::kF32, {4, width});
    const Tensor gate = random(DType::kF32, {4, 1}, 4);
    const Tensor gpu = to_gpu(y.view());
    ops_->add_sigmoid_gated(gpu, to_gpu(x.view()).view(), to_gpu(gate.view()).view(), stream_);
    std::vector<double> reference = to_doubles(y.view());
    const auto added = to_doubles(x.view());
    const auto gates = to_doubles(gate.view());
    for (size_t i = 0; i < reference.size(); ++i) {
      reference[i] += added[i] / (1 + std::exp(-gates[i / static_cast<size_t>(width)]));
    }
    expect_near(gpu.view(), reference, 1e-6);
  }
}

TEST_F(GpuRowOps, ScaleMultipliesInPlace) {
  for (const DType dtype : kComputeDtypes) {
    const Tensor x = random(dtype, {7, 601});
    std::vector<double> reference = to_doubles(x.view());
    for (double& value : reference) value *= static_cast<double>(0.3f);
    const Tensor gpu = to_gpu(x.view());
    ops_->scale(gpu, 0.3f, stream_);
    expect_near(gpu.view(), reference, bound(dtype));
  }
}

TEST_F(GpuRowOps, ClampKeepsNaN) {
  const Tensor x(DType::kBF16, {1, 5});
  const float source[] = {-3, -0.5f, 0.25f, 7, NAN};
  for (int64_t i = 0; i < 5; ++i) set(x, i, source[i]);
  const Tensor gpu = to_gpu(x.view());
  ops_->clamp(gpu, 0.5f, stream_);
  const auto got = values(gpu.view());
  EXPECT_EQ(std::vector<double>(got.begin(), got.begin() + 4),
            (std::vector<double>{-0.5, -0.5, 0.25, 0.5}));
  EXPECT_TRUE(std::isnan(got[4]));
}

double activation_reference(double x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kRelu2:
      return std::max(x, 0.0) * std::max(x, 0.0);
  }
  return 0;
}

TEST_F(GpuRowOps, GatedActivations) {
  for (const Activation activation : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
                                      Activation::kRelu, Activation::kRelu2}) {
    for (const DType dtype : kComputeDtypes) {
      for (const int64_t width : {515, 768}) {
        const Tensor gate = random(DType::kF32, {9, width}, 3);
        const Tensor up = random(DType::kF32, {9, width});
        const Tensor out = poisoned(dtype, {9, width});
        ops_->gated_activation(to_gpu(gate.view()).view(), to_gpu(up.view()).view(), activation,
                               out, stream_);
        std::vector<double> reference = to_doubles(gate.view());
        const auto ups = to_doubles(up.view());
        for (size_t i = 0; i < reference.size(); ++i) {
          reference[i] = activation_reference(reference[i], activation) * ups[i];
        }
        expect_near(out.view(), reference, bound(dtype));
      }
    }
  }
}

TEST_F(GpuRowOps, RopeAnglesAreExactFarOut) {
  const std::vector<int32_t> positions = {0, 1, 77, 4095, 131071, 999999};
  const std::vector<float> frequencies = {1.0f, 0.7f, 0.01f, 1e-5f};
  const Tensor cos = poisoned(DType::kF32, {6, 4});
  const Tensor sin = poisoned(DType::kF32, {6, 4});
  ops_->rope_angles(to_gpu(vector_tensor(DType::kI32, positions).view()).view(),
                    to_gpu(vector_tensor(DType::kF32, frequencies).view()).view(), 1.5f, cos, sin,
                    stream_);
  const auto c = values(cos.view());
  const auto s = values(sin.view());
  for (size_t i = 0; i < c.size(); ++i) {
    const double angle =
        static_cast<double>(static_cast<float>(positions[i / 4]) * frequencies[i % 4]);
    EXPECT_NEAR(c[i], 1.5 * std::cos(angle), 1e-6);
    EXPECT_NEAR(s[i], 1.5 * std::sin(angle), 1e-6);
  }
}

// growth at position 39: 2 * 40 / 16 - 1 = 4
TEST_F(GpuRowOps, DynamicAnglesFallAsTheSequenceGrows) {
  const std::vector<int32_t> positions = {3, 15, 16, 39, 5000};
  const std::vector<float> frequencies = {1.0f, 0.1f, 0.01f};
  const Tensor cos(DType::kF32, {5, 3}, kGpu);
  const Tensor sin(DType::kF32, {5, 3}, kGpu);
  ops_->dynamic_rope_angles(to_gpu(vector_tensor(DType::kI32, positions).view()).view(),
                            to_gpu(vector_tensor(DType::kF32, frequencies).view()).view(),
                            {2.0f, 16}, cos, sin, stream_);
  const auto c = values(cos.view());
  const auto s = values(sin.view());
  for (size_t i = 0; i < c.size(); ++i) {
    const int position = positions[i / 3];
    const double growth = position < 16 ? 1 : 2.0 * (position + 1) / 16 - 1;
    const double frequency =
        static_cast<double>(frequencies[i % 3]) * std::pow(growth, -static_cast<double>(i % 3) / 2);
    EXPECT_NEAR(c[i], std::cos(position * frequency), 2e-5) << i;
    EXPECT_NEAR(s[i], std::sin(position * frequency), 2e-5) << i;
  }
}

// What happens to fresh heads: norm, clip, rotation; heads [tokens, heads, dim].
struct HeadReference {
  int64_t heads = 1;
  int64_t dim = 1;
  std::vector<double> weight = {};  // [dim] or [heads * dim]
  std::optional<float> clip = {};
  int64_t half = 0;
  std::vector<double> cos = {};
  std::vector<double> sin = {};

  std::vector<double> apply(std::vector<double> x) const {
    const auto row = static_cast<size_t>(heads * dim);
    const auto d = static_cast<size_t>(dim);
    const auto h = static_cast<size_t>(half);
    for (size_t first = 0; !weight.empty() && first < x.size(); first += weight.size()) {
      double sum = 0;
      for (size_t i = 0; i < weight.size(); ++i) sum += x[first + i] * x[first + i];
      const double rms = std::sqrt(sum / static_cast<double>(weight.size()) + 1e-6);
      for (size_t i = 0; i < weight.size(); ++i) x[first + i] *= weight[i] / rms;
    }
    for (double& value : x) {
      if (clip) value = std::clamp<double>(value, -*clip, *clip);
    }
    for (size_t first = 0; first < x.size(); first += d) {
      for (size_t i = 0; i < h; ++i) {
        const double a = x[first + i];
        const double b = x[first + h + i];
        const double c = cos[first / row * h + i];
        const double s = sin[first / row * h + i];
        x[first + i] = a * c - b * s;
        x[first + h + i] = b * c + a * s;
      }
    }
    return x;
  }
};

TEST_F(GpuRowOps, RopeRotatesHalvesAndLeavesTheRest) {
  for (const DType dtype : kComputeDtypes) {
    const Tensor x = random(dtype, {5, 3, 70});
    const Tensor cos = random(DType::kF32, {5, 33});
    const Tensor sin = random(DType::kF32, {5, 33});
    const Tensor gpu = to_gpu(x.view());
    ops_->rope(gpu, to_gpu(cos.view()).view(), to_gpu(sin.view()).view(), stream_);
    const HeadReference reference{
        3, 70, {}, {}, 33, to_doubles(cos.view()), to_doubles(sin.view())};
    expect_near(gpu.view(), reference.apply(to_doubles(x.view())), bound(dtype));
  }
}

class GpuFinishQkv : public GpuOpsTest {
 protected:
  static constexpr int64_t kSlots = 4;
  static constexpr int64_t kMaxTokens = 50;

  // Rows of the cache that `sequences` fill, [tokens, heads, dim]; checks that the rest is NaN.
  std::vector<double> stored(const TensorView& cache, const std::vector<SequenceSpan>& sequences) {
    const std::vector<double> all = values(cache);
    std::vector<bool> used(all.size(), false);
    std::vector<double> result;
    const int64_t heads = cache.dim(1);
    const int64_t dim = cache.dim(3);
    for (const SequenceSpan& s : sequences) {
      for (int64_t t = 0; t < s.num_tokens; ++t) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t d = 0; d < dim; ++d) {
            const auto at =
                static_cast<size_t>(((s.slot * heads + h) * kMaxTokens + s.past + t) * dim + d);
            result.push_back(all[at]);
            used[at] = true;
          }
        }
      }
    }
    for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(used[i] || std::isnan(all[i])) << i;
    return result;
  }
};

TEST_F(GpuFinishQkv, EqualsItsStepsInFloat64) {
  const std::vector<SequenceSpan> sequences = {{3, 0, 5, 0}, {1, 5, 1, 40}, {0, 6, 9, 17}};
  for (const DType dtype : kComputeDtypes) {
    for (const QkNorm norm : {QkNorm::kNone, QkNorm::kPerHead, QkNorm::kWholeProjection}) {
      for (const auto& [dim, half] :
           {std::pair<int64_t, int64_t>{128, 64}, {64, 32}, {256, 128}, {80, 20}, {6, 3}}) {
        const int64_t heads = 6;
        const int64_t kv_heads = 2;
        const Tensor q = random(dtype, {15, heads, dim});
        const Tensor k = random(dtype, {15, kv_heads, dim});
        const Tensor v = random(dtype, {15, kv_heads, dim});
        const bool whole = norm == QkNorm::kWholeProjection;
        const Tensor q_norm = random(dtype, {whole ? heads * dim : dim});
        const Tensor k_norm = random(dtype, {whole ? kv_heads * dim : dim});
        const Tensor cos = random(DType::kF32, {15, half});
        const Tensor sin = random(DType::kF32, {15, half});
        const GpuTokens tokens = gpu_tokens(sequences, stream_);
        const Tensor keys = poisoned(dtype, {kSlots, kv_heads, kMaxTokens, dim});
        const Tensor cached = poisoned(dtype, {kSlots, kv_heads, kMaxTokens, dim});
        const Tensor gpu_q = to_gpu(q.view());
        const Tensor gpu_k = to_gpu(k.view());
        const Tensor gpu_v = to_gpu(v.view());
        const Tensor gpu_q_norm = to_gpu(q_norm.view());
        const Tensor gpu_k_norm = to_gpu(k_norm.view());
        const Tensor gpu_cos = to_gpu(cos.view());
        const Tensor gpu_sin = to_gpu(sin.view());
        const std::optional<float> clip = dim == 80 ? std::optional(0.9f) : std::nullopt;
        ops_->finish_qkv({gpu_q, gpu_k, gpu_v, norm, gpu_q_norm.view(), gpu_k_norm.view(), 1e-6f,
                          clip, gpu_cos.view(), gpu_sin.view(), tokens.get(), keys, cached},
                         stream_);
        HeadReference reference{
            heads,
            dim,
            norm == QkNorm::kNone ? std::vector<double>{} : to_doubles(q_norm.view()),
            clip,
            half,
            to_doubles(cos.view()),
            to_doubles(sin.view())};
        expect_near(gpu_q.view(), reference.apply(to_doubles(q.view())), bound(dtype));
        reference.heads = kv_heads;
        if (norm != QkNorm::kNone) reference.weight = to_doubles(k_norm.view());
        EXPECT_LE(test::relative_error(stored(keys.view(), sequences),
                                       reference.apply(to_doubles(k.view()))),
                  bound(dtype));
        const HeadReference only_clip{kv_heads, dim, {}, clip, 0, {}, {}};
        EXPECT_LE(test::relative_error(stored(cached.view(), sequences),
                                       only_clip.apply(to_doubles(v.view()))),
                  bound(dtype));
      }
    }
  }
}

TEST_F(GpuFinishQkv, StoreReadsItsPlacesFromTheDevice) {
  const std::vector<SequenceSpan> first = {{1, 0, 4, 3}, {0, 4, 2, 0}};
  const std::vector<SequenceSpan> second = {{2, 0, 3, 30}, {3, 3, 3, 7}};
  const Tensor x = random(DType::kF16, {6, 2, 5});
  const Tensor gpu = to_gpu(x.view());
  const Tensor cache = poisoned(DType::kF16, {kSlots, 2, kMaxTokens, 5});
  GpuTokens tokens = gpu_tokens(first, stream_);
  const auto graph =
      runtime_->capture(stream_, [&] { ops_->store_kv(gpu.view(), tokens.get(), cache, stream_); });
  for (const auto& sequences : {first, second}) {
    poison(cache);
    write_tokens(sequences, tokens, stream_);
    graph->launch(stream_);
    EXPECT_EQ(stored(cache.view(), sequences), to_doubles(x.view()));
  }
}

TEST_F(GpuRowOps, NoTokens) {
  const Tensor none(DType::kF32, {0, 2048}, kGpu);
  const Tensor weight = to_gpu(random(DType::kF32, {2048}).view());
  const Tensor gate(DType::kF32, {0, 1}, kGpu);
  ops_->rms_norm(none.view(), weight.view(), 1e-6f, none, stream_);
  ops_->add(none, none.view(), stream_);
  ops_->add_sigmoid_gated(none, none.view(), gate.view(), stream_);
  ops_->gated_activation(none.view(), none.view(), Activation::kSilu, none, stream_);
  runtime_->synchronize(stream_);
}

}  // namespace
}  // namespace cadre::cuda
