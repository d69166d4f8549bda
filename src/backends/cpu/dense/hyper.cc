// Hyper-connections, a token at a time.
#include <algorithm>
#include <array>
#include <cmath>

#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/dense/rows.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

constexpr int64_t kMaxStreams = kMaxHyperStreams;
constexpr int64_t kChannels = 128;  // at a time

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// What a token's logits become.
struct Connection {
  std::array<float, kMaxStreams> pre;
  std::array<float, kMaxStreams> post;
  std::array<float, kMaxStreams * kMaxStreams> mix;  // [n, n]
};

float value(const TensorView& tensor, int64_t i) {
  float result;
  load_floats(at(tensor.data(), tensor.dtype(), i), tensor.dtype(), 1, &result);
  return result;
}

// softmax(row) + eps, in place.
void soften(float* row, int64_t n, float eps) {
  const float max = *std::max_element(row, row + n);
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += row[i] = std::exp(row[i] - max);
  for (int64_t i = 0; i < n; ++i) row[i] = row[i] / sum + eps;
}

// Divides n values, `stride` apart, by their sum + eps.
void divide_by_sum(float* values, int64_t n, int64_t stride, float eps) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += values[i * stride];
  for (int64_t i = 0; i < n; ++i) values[i * stride] /= sum + eps;
}

void sinkhorn(float* mix, int64_t n, int64_t iterations, float eps) {
  for (int64_t i = 0; i < n; ++i) soften(mix + i * n, n, eps);
  for (int64_t iteration = 0; iteration < iterations; ++iteration) {
    for (int64_t i = 0; iteration > 0 && i < n; ++i) divide_by_sum(mix + i * n, n, 1, eps);
    for (int64_t i = 0; i < n; ++i) divide_by_sum(mix + i, n, n, eps);
  }
}

// The number of residual streams is args.streams.dim(1); the head has no post and mix.
void connect(const HyperCollapseArgs& args, int64_t token, Connection& connection) {
  const int64_t n = args.streams.dim(1);
  const int64_t width = n * args.streams.dim(2);
  const float* streams = args.streams.as<float>() + token * width;
  const float mean = sum_of_squares(streams, DType::kF32, width) / static_cast<float>(width);
  const float factor = 1.0f / std::sqrt(mean + args.norm_eps);
  const float* logits = args.logits.as<float>() + token * args.logits.dim(1);
  const auto part = [&](int64_t i, int64_t scale) {
    return logits[i] * factor * value(args.scale, scale) + value(args.base, i);
  };
  for (int64_t i = 0; i < n; ++i) {
    connection.pre[static_cast<size_t>(i)] = sigmoid(part(i, 0)) + args.eps;
  }
  if (!args.post) return;
  for (int64_t i = 0; i < n; ++i) {
    connection.post[static_cast<size_t>(i)] = 2.0f * sigmoid(part(n + i, 1));
  }
  for (int64_t i = 0; i < n * n; ++i) {
    connection.mix[static_cast<size_t>(i)] = part(2 * n + i, 2);
  }
  sinkhorn(connection.mix.data(), n, args.sinkhorn_iterations, args.eps);
}

void collapse_token(const HyperCollapseArgs& args, int64_t token) {
  const int64_t n = args.streams.dim(1);
  const int64_t width = args.streams.dim(2);
  Connection connection;
  connect(args, token, connection);
  float* out = args.collapsed.as<float>() + token * width;
  std::fill_n(out, width, 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    const float* stream = args.streams.as<float>() + (token * n + i) * width;
    const float weight = connection.pre[static_cast<size_t>(i)];
    for (int64_t c = 0; c < width; ++c) out[c] += weight * stream[c];
  }
  if (!args.post) return;
  std::copy_n(connection.post.begin(), n, args.post.as<float>() + token * n);
  std::copy_n(connection.mix.begin(), n * n, args.mix.as<float>() + token * n * n);
}

void expand_token(const HyperExpandArgs& args, int64_t token) {
  const int64_t n = args.streams.dim(1);
  const int64_t width = args.streams.dim(2);
  float* streams = args.streams.as<float>() + token * n * width;
  const float* x = args.x.as<float>() + token * width;
  if (!args.post) {
    for (int64_t k = 0; k < n; ++k) std::copy_n(x, width, streams + k * width);
    return;
  }
  const float* post = args.post.as<float>() + token * n;
  const float* mix = args.mix.as<float>() + token * n * n;
  std::array<std::array<float, kChannels>, kMaxStreams> before;
  for (int64_t c = 0; c < width; c += kChannels) {
    const int64_t count = std::min(kChannels, width - c);
    for (int64_t j = 0; j < n; ++j) {
      std::copy_n(streams + j * width + c, count, before[static_cast<size_t>(j)].data());
    }
    for (int64_t k = 0; k < n; ++k) {
      float* out = streams + k * width + c;
      for (int64_t i = 0; i < count; ++i) out[i] = post[k] * x[c + i];
      for (int64_t j = 0; j < n; ++j) {
        const float weight = mix[j * n + k];
        const float* from = before[static_cast<size_t>(j)].data();
        for (int64_t i = 0; i < count; ++i) out[i] += weight * from[i];
      }
    }
  }
}

}  // namespace

void CpuDenseOps::hyper_collapse(const HyperCollapseArgs& args, const Stream& stream) {
  const int64_t n = args.streams.dim(1);
  CADRE_ASSERT(n <= kMaxStreams && args.logits.dim(1) == (args.post ? (2 + n) * n : n) &&
               args.base.numel() == args.logits.dim(1));
  const int64_t cost = 4 * n * args.streams.dim(2);
  for_row_ranges(stream, args.streams.dim(0), cost, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) collapse_token(args, t);
  });
}

void CpuDenseOps::hyper_expand(const HyperExpandArgs& args, const Stream& stream) {
  const int64_t n = args.streams.dim(1);
  CADRE_ASSERT(n <= kMaxStreams && args.x.dim(1) == args.streams.dim(2));
  const int64_t cost = 2 * n * n * args.streams.dim(2);
  for_row_ranges(stream, args.streams.dim(0), cost, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) expand_token(args, t);
  });
}

}  // namespace cadre::cpu
