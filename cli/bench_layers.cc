#include "bench_layers.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cadre/error.h"
#include "cadre/float16.h"
#include "core/device_runtime.h"
#include "core/str_cat.h"
#include "experts/host_experts.h"
#include "experts/relative_error.h"
#include "models/host_memory.h"

namespace cadre::cli {

namespace {

/// Random values are drawn once and repeated. Their number is a prime, so that no two rows of a
/// matrix and no two experts begin at the same one.
constexpr size_t kPatternValues = 1048573;

template <typename T>
std::vector<char> pattern_of(float scale, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<char> bytes(kPatternValues * sizeof(T));
  for (size_t i = 0; i < kPatternValues; ++i) {
    const T value(normal(random));
    std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  }
  return bytes;
}

std::vector<char> pattern_of(DType dtype, float scale, uint64_t seed) {
  if (dtype == DType::kF32) return pattern_of<float>(scale, seed);
  if (dtype == DType::kF16) return pattern_of<Float16>(scale, seed);
  return pattern_of<BFloat16>(scale, seed);
}

void fill_on_host(const Tensor& tensor, const std::vector<char>& pattern, size_t first,
                  ThreadPool& pool) {
  auto* bytes = static_cast<char*>(tensor->mutable_data());
  const auto size = static_cast<int64_t>(tensor->nbytes());
  pool.parallel_ranges(size, 4096, [&](int64_t begin, int64_t end, int) {
    for (auto at = static_cast<size_t>(begin); at < static_cast<size_t>(end);) {
      const size_t from = (first + at) % pattern.size();
      const size_t count = std::min(pattern.size() - from, static_cast<size_t>(end) - at);
      std::memcpy(bytes + at, pattern.data() + from, count);
      at += count;
    }
  });
}

// The pattern once from the host, then again and again from where it lies.
void fill_on_gpu(const Tensor& tensor, const std::vector<char>& pattern, size_t first,
                 const Stream& stream) {
  DeviceRuntime& runtime = device_runtime(stream.device);
  const Tensor source(DType::kU8, {static_cast<int64_t>(pattern.size())}, stream.device);
  runtime.copy(source->mutable_data(), pattern.data(), pattern.size(), stream);
  auto* bytes = static_cast<char*>(tensor->mutable_data());
  const size_t size = tensor->nbytes();
  for (size_t at = 0; at < size;) {
    const size_t from = (first + at) % pattern.size();
    const size_t count = std::min(pattern.size() - from, size - at);
    runtime.copy(bytes + at, static_cast<const char*>(source->data()) + from, count, stream);
    at += count;
  }
  runtime.synchronize(stream);
}

void fill(const Tensor& tensor, const std::vector<char>& pattern, size_t first,
          const Stream& stream) {
  if (stream.device.type == DeviceType::kCpu) {
    fill_on_host(tensor, pattern, first, *stream.threads);
  } else {
    fill_on_gpu(tensor, pattern, first, stream);
  }
}

float scale_of(int64_t summands) { return 1 / std::sqrt(static_cast<float>(summands)); }

void require_memory(size_t bytes, Device device) {
  const std::optional<size_t> available =
      device.type == DeviceType::kCpu ? available_host_memory()
                                      : device_runtime(device).memory(device.index).free_bytes;
  if (!available || bytes <= *available) return;
  throw DeviceError(str_cat("experts of this shape need ", format_bytes(bytes), " of memory on ",
                            to_string(device),
                            " (two layers at least, their packed form with --prepack on, and "
                            "what ceilings are read from), ",
                            format_bytes(*available),
                            " is available; use fewer experts (--shape E,k,H,I) or a smaller "
                            "--memory"));
}

}  // namespace

std::string_view name_of(Routing routing) {
  switch (routing) {
    case Routing::kUniform:
      return "uniform";
    case Routing::kSkewed:
      return "skewed";
    case Routing::kOne:
      break;
  }
  return "one";
}

size_t expert_bytes(const ExpertsConfig& config, StorageFormat format) {
  return static_cast<size_t>(3 * config.hidden_size * config.intermediate_size) *
         size_of(plain_dtype(format).value());
}

int64_t num_layers(const ExpertsQuery& query, size_t rotate_bytes, int64_t num_calls) {
  const size_t layer_bytes =
      expert_bytes(query.config, query.format) * static_cast<size_t>(query.config.num_experts);
  const auto wanted = static_cast<int64_t>((rotate_bytes + layer_bytes - 1) / layer_bytes);
  return std::max<int64_t>(2, std::min(wanted, num_calls));
}

std::vector<std::shared_ptr<const ExpertsWeights>> make_layers(const ExpertsQuery& query,
                                                               int64_t count, size_t more_bytes,
                                                               uint64_t seed, const Stream& stream,
                                                               const ProgressCallback& progress) {
  const ExpertsConfig& c = query.config;
  const DType dtype = plain_dtype(query.format).value();
  require_memory(
      more_bytes + expert_bytes(c, query.format) * static_cast<size_t>(c.num_experts * count),
      query.device);
  const std::vector<char> gate_up = pattern_of(dtype, scale_of(c.hidden_size), seed);
  const std::vector<char> down = pattern_of(dtype, scale_of(c.intermediate_size), seed + 1);
  std::vector<std::shared_ptr<const ExpertsWeights>> layers;
  for (int64_t i = 0; i < count; ++i) {
    const Tensor tensors[] = {
        Tensor(dtype, {c.num_experts, 2 * c.intermediate_size, c.hidden_size}, query.device),
        Tensor(dtype, {c.num_experts, c.hidden_size, c.intermediate_size}, query.device)};
    const size_t first = static_cast<size_t>(i) * 4096 * size_of(dtype);  // another layer
    fill(tensors[0], gate_up, first, stream);
    fill(tensors[1], down, first, stream);
    const auto owner =
        std::make_shared<std::vector<Tensor>>(std::begin(tensors), std::end(tensors));
    layers.push_back(std::make_shared<ExpertsWeights>(
        make_experts_weights(c, FusedExperts{tensors[0], tensors[1], {}, {}}, owner)));
    if (progress) progress("making weights", i + 1, count);
  }
  return layers;
}

std::vector<std::shared_ptr<const ExpertsWeights>> pack_layers(
    const ExpertsConfig& config, const std::vector<std::shared_ptr<const ExpertsWeights>>& layers,
    ThreadPool& pool, const ProgressCallback& progress) {
  std::vector<std::shared_ptr<const ExpertsWeights>> packed;
  for (const auto& layer : layers) {
    auto weights = std::make_shared<ExpertsWeights>(*layer);
    prepack(config, *weights, pool);
    packed.push_back(std::move(weights));
    if (progress) {
      progress("packing weights", static_cast<int64_t>(packed.size()),
               static_cast<int64_t>(layers.size()));
    }
  }
  return packed;
}

BenchCall::BenchCall(const ExpertsConfig& config, DType compute_dtype, int64_t num_tokens,
                     uint64_t seed, const Stream& stream)
    : config_(config),
      stream_(stream),
      random_(seed),
      hidden_states_(compute_dtype, {num_tokens, config.hidden_size}),
      top_k_index_(DType::kI32, {num_tokens, config.top_k}),
      top_k_weights_(DType::kF32, {num_tokens, config.top_k}) {
  fill_on_host(hidden_states_, pattern_of(compute_dtype, 1, seed), 0, *stream.threads);
  const auto on_device = [&](const Tensor& host) -> const MutableTensorView& {
    if (stream.device.type == DeviceType::kCpu) return host.view();
    return on_device_.emplace_back(host->dtype(), host->shape(), stream.device).view();
  };
  tokens_.hidden_states = on_device(hidden_states_);
  tokens_.top_k_index = on_device(top_k_index_);
  tokens_.top_k_weights = on_device(top_k_weights_);
  tokens_.output =
      on_device_.emplace_back(compute_dtype, hidden_states_->shape(), stream.device).view();
  if (stream.device.type != DeviceType::kCpu) {
    copy_tensor(hidden_states_.view(), on_device_[0], stream);
    synchronize(stream);
  }
}

void BenchCall::draw_experts(Routing routing, int32_t* ids) {
  // The k smallest of exponential variables, each with its expert's rate: k different experts, the
  // first drawn by rate, the next by rate among the others, and so on.
  std::uniform_real_distribution<double> uniform(0, 1);
  keys_.clear();
  for (int64_t e = 0; e < config_.num_experts; ++e) {
    const double rate = routing == Routing::kSkewed ? 1.0 / static_cast<double>(e + 1) : 1.0;
    keys_.emplace_back(-std::log1p(-uniform(random_)) / rate, static_cast<int32_t>(e));
  }
  std::partial_sort(keys_.begin(), keys_.begin() + config_.top_k, keys_.end());
  for (int64_t s = 0; s < config_.top_k; ++s) ids[s] = keys_[static_cast<size_t>(s)].second;
}

int64_t BenchCall::route(Routing routing) {
  std::uniform_real_distribution<float> uniform(0.5f, 1.5f);
  const int64_t k = config_.top_k;
  auto* ids = top_k_index_->as<int32_t>();
  auto* weights = top_k_weights_->as<float>();
  for (int64_t t = 0; t < top_k_index_->dim(0); ++t) {
    if (t == 0 || routing != Routing::kOne) {
      draw_experts(routing, ids + t * k);
    } else {
      std::copy_n(ids, k, ids + t * k);
    }
    for (int64_t s = 0; s < k; ++s) weights[t * k + s] = uniform(random_) / static_cast<float>(k);
  }
  if (stream_.device.type != DeviceType::kCpu) {
    copy_tensor(top_k_index_.view(), on_device_[1], stream_);
    copy_tensor(top_k_weights_.view(), on_device_[2], stream_);
    synchronize(stream_);
  }
  std::vector<char> hit(static_cast<size_t>(config_.num_experts));
  for (int64_t i = 0; i < top_k_index_->numel(); ++i) hit[static_cast<size_t>(ids[i])] = 1;
  return std::count(hit.begin(), hit.end(), 1);
}

double BenchCall::error_of_sample(const ExpertsWeights& weights, int64_t max_tokens) const {
  const int64_t count = hidden_states_->dim(0);
  const int64_t sample = std::min(count, max_tokens);
  const int64_t hidden = config_.hidden_size;
  std::vector<double> truth(static_cast<size_t>(sample * hidden));
  const Tensor out(tokens_.output.dtype(), {sample, hidden});
  const auto token = [&](int64_t i) { return sample == 1 ? 0 : i * (count - 1) / (sample - 1); };
  std::vector<HostExperts> on_host;
  for (int64_t i = 0; i < sample; ++i) {
    const int64_t t = token(i);
    on_host.emplace_back(config_, weights, top_k_index_.view().slice(t, t + 1), stream_);
    copy_tensor(tokens_.output[t], out.view()[i], stream_);
  }
  // The reference takes one thread; tokens do not depend on each other.
  stream_.threads->parallel_for(sample, [&](int64_t i, int) {
    const int64_t t = token(i);
    const RoutedTokens one{hidden_states_.view().slice(t, t + 1),
                           top_k_index_.view().slice(t, t + 1),
                           top_k_weights_.view().slice(t, t + 1),
                           {}};
    reference_forward(config_, on_host[static_cast<size_t>(i)].get(), one,
                      truth.data() + i * hidden);
  });
  synchronize(stream_);
  return relative_error(out, truth);
}

}  // namespace cadre::cli
