// Hyper-connections and the small operations around DeepSeek-V4's blocks against float64.
#include <cmath>
#include <cstring>

#include "backends/cpu/dense/ops_fixture.h"

namespace cadre::cpu {
namespace {

using test::to_doubles;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

class Hyper : public OpsTest {
 protected:
  static constexpr int64_t kTokens = 4;

  void fill(int64_t n, int64_t width, int64_t outputs, int64_t parts) {
    n_ = n;
    width_ = width;
    streams_ = random(DType::kF32, {kTokens, n, width}, 3);
    logits_ = random(DType::kF32, {kTokens, outputs}, 4);
    base_ = random(DType::kBF16, {outputs});
    scale_ = random(DType::kF32, {parts});
  }

  double rms(int64_t t) const {
    double sum = 0;
    for (const double x : to_doubles(streams_.view()[t])) sum += x * x;
    return std::sqrt(sum / static_cast<double>(n_ * width_) + 1e-5);
  }
  double part(int64_t t, int64_t i, size_t scale) const {
    return to_doubles(logits_.view()[t])[static_cast<size_t>(i)] / rms(t) *
               to_doubles(scale_.view())[scale] +
           to_doubles(base_.view())[static_cast<size_t>(i)];
  }

  // [n][n]
  std::vector<std::vector<double>> mix(int64_t t, int64_t iterations, double eps) const {
    const auto n = static_cast<size_t>(n_);
    std::vector<std::vector<double>> m(n, std::vector<double>(n));
    for (size_t i = 0; i < n; ++i) {
      double sum = 0;
      for (size_t j = 0; j < n; ++j) {
        m[i][j] = std::exp(part(t, 2 * n_ + static_cast<int64_t>(i * n + j), 2));
        sum += m[i][j];
      }
      for (double& x : m[i]) x = x / sum + eps;
    }
    const auto columns = [&] {
      for (size_t j = 0; j < n; ++j) {
        double sum = eps;
        for (size_t i = 0; i < n; ++i) sum += m[i][j];
        for (size_t i = 0; i < n; ++i) m[i][j] /= sum;
      }
    };
    columns();
    for (int64_t iteration = 1; iteration < iterations; ++iteration) {
      for (size_t i = 0; i < n; ++i) {
        double sum = eps;
        for (const double x : m[i]) sum += x;
        for (double& x : m[i]) x /= sum;
      }
      columns();
    }
    return m;
  }

  std::vector<double> collapsed(int64_t t, double eps) const {
    const std::vector<double> rows = to_doubles(streams_.view()[t]);
    std::vector<double> result(static_cast<size_t>(width_), 0);
    for (int64_t i = 0; i < n_; ++i) {
      const double pre = sigmoid(part(t, i, 0)) + eps;
      for (size_t c = 0; c < result.size(); ++c) {
        result[c] += pre * rows[static_cast<size_t>(i * width_) + c];
      }
    }
    return result;
  }

  int64_t n_ = 0;
  int64_t width_ = 0;
  Tensor streams_;
  Tensor logits_;
  Tensor base_;
  Tensor scale_;
};

TEST_F(Hyper, CollapseEqualsTheReference) {
  for (const int64_t n : {1, 2, 4, 16}) {
    for (const int64_t iterations : {1, 20}) {
      const double eps = 1e-3;
      fill(n, 37, (2 + n) * n, 3);
      const Tensor out(DType::kF32, {kTokens, 37});
      const Tensor post(DType::kF32, {kTokens, n});
      const Tensor mixed(DType::kF32, {kTokens, n, n});
      ops_.hyper_collapse({streams_.view(), logits_.view(), base_.view(), scale_.view(), 1e-5f,
                           1e-3f, iterations, out, post, mixed},
                          stream_);
      for (int64_t t = 0; t < kTokens; ++t) {
        expect_near(out.view()[t], collapsed(t, eps), 1e-6);
        std::vector<double> posts;
        std::vector<double> mixes;
        for (int64_t i = 0; i < n; ++i) posts.push_back(2 * sigmoid(part(t, n + i, 1)));
        for (const auto& row : mix(t, iterations, eps)) {
          mixes.insert(mixes.end(), row.begin(), row.end());
        }
        expect_near(post.view()[t], posts, 1e-6);
        expect_near(mixed.view()[t], mixes, 2e-6);
      }
    }
  }
}

TEST_F(Hyper, TheHeadHasWeightsForReadingAlone) {
  fill(4, 130, 4, 1);
  const Tensor out(DType::kF32, {kTokens, 130});
  ops_.hyper_collapse(
      {streams_.view(), logits_.view(), base_.view(), scale_.view(), 1e-5f, 1e-3f, 1, out, {}, {}},
      stream_);
  for (int64_t t = 0; t < kTokens; ++t) expect_near(out.view()[t], collapsed(t, 1e-3), 1e-6);
}

TEST_F(Hyper, ExpandEqualsTheReference) {
  for (const int64_t n : {1, 2, 4, 16}) {
    fill(n, 300, 1, 1);
    const std::vector<double> before = to_doubles(streams_.view());
    const Tensor x = random(DType::kF32, {kTokens, 300});
    const Tensor post = random(DType::kF32, {kTokens, n});
    const Tensor mix = random(DType::kF32, {kTokens, n, n});
    const std::vector<double> posts = to_doubles(post.view());
    const std::vector<double> mixes = to_doubles(mix.view());
    const std::vector<double> inputs = to_doubles(x.view());
    std::vector<double> expected;
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t k = 0; k < n; ++k) {
        for (int64_t c = 0; c < 300; ++c) {
          double sum =
              posts[static_cast<size_t>(t * n + k)] * inputs[static_cast<size_t>(t * 300 + c)];
          for (int64_t j = 0; j < n; ++j) {
            sum += mixes[static_cast<size_t>((t * n + j) * n + k)] *
                   before[static_cast<size_t>((t * n + j) * 300 + c)];
          }
          expected.push_back(sum);
        }
      }
    }
    ops_.hyper_expand({streams_, x.view(), post.view(), mix.view()}, stream_);
    expect_near(streams_.view(), expected, 1e-6);
  }
}

TEST_F(Hyper, ExpandWithoutWeightsCopies) {
  fill(3, 50, 1, 1);
  const Tensor x = random(DType::kF32, {kTokens, 50});
  ops_.hyper_expand({streams_, x.view(), {}, {}}, stream_);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t k = 0; k < 3; ++k) {
      EXPECT_EQ(to_doubles(streams_.view()[t][k]), to_doubles(x.view()[t]));
    }
  }
}

class V4Ops : public OpsTest {};

TEST_F(V4Ops, RmsNormWithoutAWeight) {
  for (const DType dtype : kComputeDtypes) {
    const Tensor x = random(dtype, {3, 700}, 5);
    const Tensor ones(DType::kF32, {700});
    std::fill_n(ones->as<float>(), 700, 1.0f);
    const Tensor expected(dtype, {3, 700});
    const Tensor out(dtype, {3, 700});
    ops_.rms_norm(x.view(), ones.view(), 1e-5f, expected, stream_);
    ops_.rms_norm(x.view(), {}, 1e-5f, out, stream_);
    EXPECT_EQ(to_doubles(out.view()), to_doubles(expected.view()));
  }
}

TEST_F(V4Ops, RopePairsRotatesNeighboursFromAnyElementOn) {
  for (const DType dtype : kComputeDtypes) {
    for (const auto& [dim, first, half] :
         {std::array<int64_t, 3>{20, 8, 6}, {6, 0, 2}, {1500, 100, 700}}) {
      const Tensor x = random(dtype, {5, 3, dim});
      const Tensor cos = random(DType::kF32, {5, half});
      const Tensor sin = random(DType::kF32, {5, half});
      const std::vector<double> before = to_doubles(x.view());
      std::vector<double> expected = before;
      for (int64_t row = 0; row < 15; ++row) {
        for (int64_t i = 0; i < half; ++i) {
          const double c = to_doubles(cos.view()[row / 3])[static_cast<size_t>(i)];
          const double s = to_doubles(sin.view()[row / 3])[static_cast<size_t>(i)];
          const auto at = static_cast<size_t>(row * dim + first + 2 * i);
          expected[at] = before[at] * c - before[at + 1] * s;
          expected[at + 1] = before[at + 1] * c + before[at] * s;
        }
      }
      ops_.rope_pairs(x, first, cos.view(), sin.view(), false, stream_);
      expect_near(x.view(), expected, bound(dtype));
    }
  }
}

TEST_F(V4Ops, TheInverseRotationUndoes) {
  const Tensor x = random(DType::kF32, {4, 2, 10});
  const std::vector<double> before = to_doubles(x.view());
  const Tensor cos(DType::kF32, {4, 3});
  const Tensor sin(DType::kF32, {4, 3});
  for (int64_t i = 0; i < 12; ++i) {
    set(cos, i, std::cos(static_cast<float>(i)));
    set(sin, i, std::sin(static_cast<float>(i)));
  }
  ops_.rope_pairs(x, 4, cos.view(), sin.view(), false, stream_);
  EXPECT_GT(test::relative_error(to_doubles(x.view()), before), 0.1);
  ops_.rope_pairs(x, 4, cos.view(), sin.view(), true, stream_);
  expect_near(x.view(), before, 1e-6);
}

TEST_F(V4Ops, ClampGatedCutsTheGateAboveAlone) {
  const std::vector<float> values = {-9, -2, 0, 2, 9, std::nanf("")};
  const Tensor gate(DType::kF32, {2, 3});
  const Tensor up(DType::kF32, {2, 3});
  std::copy(values.begin(), values.end(), gate->as<float>());
  std::copy(values.begin(), values.end(), up->as<float>());
  ops_.clamp_gated(gate, up, 3, stream_);
  const std::vector<double> gates = to_doubles(gate.view());
  const std::vector<double> ups = to_doubles(up.view());
  EXPECT_EQ(std::vector(gates.begin(), gates.begin() + 5), (std::vector<double>{-9, -2, 0, 2, 3}));
  EXPECT_EQ(std::vector(ups.begin(), ups.begin() + 5), (std::vector<double>{-3, -2, 0, 2, 3}));
  EXPECT_TRUE(std::isnan(gates[5]) && std::isnan(ups[5]));
}

TEST_F(V4Ops, RouteByTableTakesTheTokensExpertsAndWeighsThem) {
  const Tensor logits = random(DType::kF32, {4, 6}, 2);
  const std::vector<int32_t> tokens = {2, 0, 2, 1};
  const std::vector<int64_t> wide = {5, 1, 0, 2, 4, 4};
  const std::vector<int32_t> narrow(wide.begin(), wide.end());
  std::vector<std::byte> unaligned(wide.size() * sizeof(int64_t) + 1);
  std::memcpy(unaligned.data() + 1, wide.data(), wide.size() * sizeof(int64_t));
  RouterOptions options;
  options.score = RouterScore::kSqrtSoftplus;
  options.normalize = true;
  options.scaling_factor = 1.5f;
  Workspace exact({}, ops_.route_workspace_bytes(6, threads_.num_threads()));
  for (const TensorView& table : {TensorView(unaligned.data() + 1, DType::kI64, {3, 2}),
                                  TensorView(narrow.data(), DType::kI32, {3, 2})}) {
    const Tensor ids(DType::kI32, {4, 2});
    const Tensor weights(DType::kF32, {4, 2});
    ops_.route_by_table(logits.view(), {tokens.data(), DType::kI32, {4}}, table, options, ids,
                        weights, exact, stream_);
    for (int64_t t = 0; t < 4; ++t) {
      std::vector<double> scores;
      for (size_t j = 0; j < 2; ++j) {
        const auto id =
            static_cast<size_t>(wide[static_cast<size_t>(tokens[static_cast<size_t>(t)]) * 2 + j]);
        EXPECT_EQ(ids->as<int32_t>()[static_cast<size_t>(t) * 2 + j], static_cast<int32_t>(id));
        const double logit = to_doubles(logits.view()[t])[id];
        scores.push_back(std::sqrt(std::log1p(std::exp(logit))));
      }
      for (size_t j = 0; j < 2; ++j) {
        EXPECT_NEAR(weights->as<float>()[static_cast<size_t>(t) * 2 + j],
                    1.5 * scores[j] / (scores[0] + scores[1]), 1e-6);
      }
    }
  }
}

}  // namespace
}  // namespace cadre::cpu
