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
#include "quant/float8.h"

namespace cadre::cli {

namespace {

/// Random values are drawn once and repeated. Their number is a prime, so that no two rows of a
/// matrix and no two experts begin at the same one.
constexpr size_t kPatternValues = 1048573;

// Bytes of kPatternValues values, each made by `next(random)`.
template <typename Next>
std::vector<char> pattern_by(const Next& next, uint64_t seed) {
  std::mt19937_64 random(seed);
  using T = decltype(next(random));
  std::vector<char> bytes(kPatternValues * sizeof(T));
  for (size_t i = 0; i < kPatternValues; ++i) {
    const T value = next(random);
    std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  }
  return bytes;
}

template <typename T>
std::vector<char> pattern_of(float scale, uint64_t seed) {
  std::normal_distribution<float> normal(0, scale);
  return pattern_by([&](auto& random) { return T(normal(random)); }, seed);
}

std::vector<char> pattern_of(DType dtype, float scale, uint64_t seed) {
  if (dtype == DType::kF32) return pattern_of<float>(scale, seed);
  if (dtype == DType::kF16) return pattern_of<Float16>(scale, seed);
  return pattern_of<BFloat16>(scale, seed);
}

// Standard deviation of stored values: few reach the largest code.
float spread_of(StorageFormat format) {
  if (!is_quantized(format)) return 1;
  return (format == StorageFormat::kFp4 ? kMaxE2m1 : kMaxE4m3) / 4;
}

std::vector<char> values_of(StorageFormat format, float scale, uint64_t seed) {
  if (const std::optional<DType> plain = plain_dtype(format)) {
    return pattern_of(*plain, scale, seed);
  }
  std::normal_distribution<float> normal(0, spread_of(format));
  if (format != StorageFormat::kFp4) {
    return pattern_by([&](auto& random) { return float_to_e4m3(normal(random)); }, seed);
  }
  return pattern_by(
      [&](auto& random) {
        const uint8_t even = float_to_e2m1(normal(random));
        return static_cast<uint8_t>(even | float_to_e2m1(normal(random)) << 4);
      },
      seed);
}

// Scales around `scale`, from half of it to twice as much.
std::vector<char> scales_of(DType dtype, float scale, uint64_t seed) {
  if (dtype == DType::kF32) {
    std::uniform_real_distribution<float> exponent(-1, 1);
    return pattern_by([&](auto& random) { return scale * std::exp2(exponent(random)); }, seed);
  }
  std::uniform_int_distribution<int> step(-1, 1);
  const int exponent = 127 + std::ilogb(scale);
  return pattern_by([&](auto& random) { return static_cast<uint8_t>(exponent + step(random)); },
                    seed);
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

int64_t blocks(int64_t size, int64_t block) { return block == 0 ? 1 : (size + block - 1) / block; }

/// What one [rows, cols] matrix takes.
struct Storage {
  Storage(const ExpertsQuery& query, int64_t rows, int64_t cols)
      : row_bytes(cadre::row_bytes(query.format, cols)), value_bytes(rows * row_bytes) {
    if (!is_quantized(query.format)) return;
    const ScaleLayout& layout = query.scale_layout;
    scale_cols = blocks(cols, layout.block_cols);
    scale_bytes =
        blocks(rows, layout.block_rows) * scale_cols * static_cast<int64_t>(size_of(layout.dtype));
  }

  size_t bytes() const { return static_cast<size_t>(value_bytes + scale_bytes); }

  int64_t row_bytes;
  int64_t value_bytes;
  int64_t scale_cols = 0;
  int64_t scale_bytes = 0;
};

/// Matrices that lie beside each other in every expert: gate and up, or down alone.
class Projection {
 public:
  Projection(const ExpertsQuery& query, int64_t parts, int64_t rows, int64_t cols, uint64_t seed)
      : query_(query), parts_(parts), storage_(query, rows, cols) {
    const float scale = scale_of(cols);
    values_ = values_of(query.format, scale, seed);
    if (!is_quantized(query.format)) return;
    scales_ = scales_of(query.scale_layout.dtype, scale / spread_of(query.format), seed + 1);
  }

  void make(int64_t layer, const std::vector<std::vector<ExpertMatrix>*>& parts,
            std::vector<Tensor>& owner, const Stream& stream) const {
    const char* values = filled(storage_.value_bytes, values_, layer, owner, stream);
    const char* scales =
        scales_.empty() ? nullptr : filled(storage_.scale_bytes, scales_, layer, owner, stream);
    for (int64_t i = 0; i < query_.config.num_experts * parts_; ++i) {
      ExpertMatrix matrix;
      matrix.data = values + i * storage_.value_bytes;
      matrix.row_stride = storage_.row_bytes / row_bytes(query_.format, 1);
      if (scales != nullptr) {
        matrix.scales = scales + i * storage_.scale_bytes;
        matrix.scale_row_stride = storage_.scale_cols;
      }
      parts[static_cast<size_t>(i % parts_)]->push_back(matrix);
    }
  }

 private:
  // Memory of the parts of all experts. Layers begin at other places of the pattern.
  const char* filled(int64_t bytes_each, const std::vector<char>& pattern, int64_t layer,
                     std::vector<Tensor>& owner, const Stream& stream) const {
    const int64_t count = query_.config.num_experts * parts_;
    const Tensor& tensor = owner.emplace_back(DType::kU8, Dims{count, bytes_each}, query_.device);
    fill(tensor, pattern, static_cast<size_t>(layer) * 4096 * (pattern.size() / kPatternValues),
         stream);
    return static_cast<const char*>(tensor->data());
  }

  const ExpertsQuery& query_;
  int64_t parts_;
  Storage storage_;
  std::vector<char> values_;
  std::vector<char> scales_;  // empty for plain formats
};

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

size_t expert_bytes(const ExpertsQuery& query) {
  const int64_t hidden = query.config.hidden_size, inner = query.config.intermediate_size;
  return 2 * Storage(query, inner, hidden).bytes() + Storage(query, hidden, inner).bytes();
}

int64_t num_layers(const ExpertsQuery& query, size_t rotate_bytes, int64_t num_calls) {
  const size_t layer_bytes = expert_bytes(query) * static_cast<size_t>(query.config.num_experts);
  const auto wanted = static_cast<int64_t>((rotate_bytes + layer_bytes - 1) / layer_bytes);
  return std::max<int64_t>(2, std::min(wanted, num_calls));
}

std::vector<std::shared_ptr<const ExpertsWeights>> make_layers(const ExpertsQuery& query,
                                                               int64_t count, size_t more_bytes,
                                                               uint64_t seed, const Stream& stream,
                                                               const ProgressCallback& progress) {
  const ExpertsConfig& c = query.config;
  require_memory(more_bytes + expert_bytes(query) * static_cast<size_t>(c.num_experts * count),
                 query.device);
  const Projection gate_up(query, 2, c.intermediate_size, c.hidden_size, seed);
  const Projection down(query, 1, c.hidden_size, c.intermediate_size, seed + 2);
  std::vector<std::shared_ptr<const ExpertsWeights>> layers;
  for (int64_t i = 0; i < count; ++i) {
    auto layer = std::make_shared<ExpertsWeights>();
    const auto owner = std::make_shared<std::vector<Tensor>>();
    layer->device = query.device;
    layer->format = query.format;
    layer->scale_layout = query.scale_layout;
    layer->owner = owner;
    gate_up.make(i, {&layer->gate, &layer->up}, *owner, stream);
    down.make(i, {&layer->down}, *owner, stream);
    layers.push_back(std::move(layer));
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

double BenchCall::error_of_sample(const ExpertsWeights& weights, ActivationScheme activations,
                                  int64_t max_tokens) const {
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
                      truth.data() + i * hidden, activations);
  });
  synchronize(stream_);
  return relative_error(out, truth);
}

}  // namespace cadre::cli
