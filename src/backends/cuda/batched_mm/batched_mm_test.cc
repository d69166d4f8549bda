// batched_mm on a GPU against the float64 reference: random layers, layouts and routings, poisoned
// memory, repeats and graph replays with other routings.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "backends/cuda/batched_mm/batched_mm_case.h"
#include "backends/cuda/device/check.h"
#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/kernels/decode/decode_kernels.h"
#include "cadre/allocator.h"
#include "cadre/experts.h"
#include "cadre/float16.h"
#include "core/device_runtime.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

// Against the reference with the same arithmetic of activations.
double bound(const Case& c) {
  if (c.activations == ActivationScheme::kNone) {
    return stated_bound(c.dtype, *plain_format(c.dtype));
  }
  return c.output_f32 || c.dtype != DType::kBF16 ? 1e-3 : 3e-3;
}

class BatchedMm : public testing::Test {
 protected:
  void SetUp() override {
    DeviceRuntime* runtime = find_device_runtime(DeviceType::kCuda);
    if (runtime == nullptr || runtime->device_count() == 0) GTEST_SKIP() << "needs a GPU";
    runtime_ = runtime;
    stream_ = runtime->make_stream(0, nullptr);
    backend_ = &find_backend("batched_mm", DeviceType::kCuda);
  }

  const Stream& stream() const { return stream_->get(); }

  // As large as the backend says, all NaN.
  std::unique_ptr<Workspace> workspace(const ExpertsQuery& query, int64_t tokens) {
    const size_t bytes = backend_->workspace_bytes(query, tokens, 1);
    auto workspace = std::make_unique<Workspace>(kGpu, bytes);
    if (bytes == 0) return workspace;
    const Workspace::Scope scope(*workspace);
    runtime_->fill(workspace->allocate(bytes), 0xff, bytes, stream());
    return workspace;
  }

  void expect_close(const Case& c, const std::vector<double>& out,
                    const std::vector<double>& reference) {
    double distance = 0;
    double norm = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      distance += (out[i] - reference[i]) * (out[i] - reference[i]);
      norm += reference[i] * reference[i];
    }
    for (size_t i = 0, shown = 0; i < out.size() && shown < 3; ++i) {
      const bool is_bad = !(std::abs(out[i] - reference[i]) <= 0.1 * (1 + std::abs(reference[i])));
      if (!is_bad) continue;
      ++shown;
      ADD_FAILURE() << "token " << i / static_cast<size_t>(c.config.hidden_size) << " column "
                    << i % static_cast<size_t>(c.config.hidden_size) << ": " << out[i]
                    << ", expected " << reference[i];
    }
    const double error = norm == 0 ? std::sqrt(distance) : std::sqrt(distance / norm);
    EXPECT_LE(error, bound(c)) << describe(c);
    EXPECT_FALSE(std::isnan(error)) << describe(c);
    worst_ = std::max(worst_, std::isnan(error) ? 1e9 : error);
  }

  void check(const Case& c) {
    Data data(c, stream());
    ASSERT_TRUE(backend_->supports(data.query())) << to_string(backend_->supports(data.query()));
    const auto prepared = backend_->prepare(data.query(), data.weights());
    EXPECT_EQ(prepared->added_bytes, 0U);
    const auto scratch = workspace(data.query(), c.tokens);
    data.poison_output();
    backend_->forward(*prepared, data.tokens(true), *scratch, stream());
    expect_close(c, data.output(), data.reference());
  }

  void expect_same_bits(const Case& c, int replays = 20) {
    Data data(c, stream());
    const auto prepared = backend_->prepare(data.query(), data.weights());
    const auto scratch = workspace(data.query(), c.tokens);
    const auto forward = [&] {
      backend_->forward(*prepared, data.tokens(true), *scratch, stream());
    };
    forward();
    const std::vector<double> first = data.output();
    for (int i = 0; i < 100; ++i) {
      data.poison_output();
      forward();
      ASSERT_EQ(data.output(), first) << "repeat " << i << " " << describe(c);
    }
    const auto graph = runtime_->capture(stream(), forward);
    for (int i = 0; i < replays; ++i) {
      data.make_routing();  // replays read the new ids
      data.poison_output();
      graph->launch(stream());
      const std::vector<double> replayed = data.output();
      expect_close(c, replayed, data.reference());
      data.poison_output();
      forward();
      ASSERT_EQ(data.output(), replayed) << "replay " << i << " " << describe(c);
    }
  }

  // Token 0 becomes NaN; the others keep their bits.
  void expect_isolated(const Case& c) {
    Data data(c, stream());
    const auto prepared = backend_->prepare(data.query(), data.weights());
    const auto scratch = workspace(data.query(), c.tokens);
    const RoutedTokens tensors = data.tokens(true);
    backend_->forward(*prepared, tensors, *scratch, stream());
    const std::vector<double> clean = data.output();
    const auto columns = static_cast<size_t>(c.config.hidden_size);
    runtime_->fill(const_cast<void*>(tensors.hidden_states.data()), 0xff, columns * 2, stream());
    backend_->forward(*prepared, tensors, *scratch, stream());
    const std::vector<double> out = data.output();
    for (size_t i = 0; i < out.size(); ++i) {
      if (i < columns) {
        EXPECT_TRUE(std::isnan(out[i])) << i << " " << describe(c);
      } else {
        EXPECT_EQ(out[i], clean[i]) << i << " " << describe(c);
      }
    }
  }

  DeviceRuntime* runtime_ = nullptr;
  std::unique_ptr<DeviceStream> stream_;
  ExpertsBackend* backend_ = nullptr;
  double worst_ = 0;
};

Case random_case(std::mt19937_64& random, DType dtype) {
  const auto one_of = [&](std::initializer_list<int64_t> values) {
    return values.begin()[random() % values.size()];
  };
  Case c;
  c.seed = static_cast<uint32_t>(random());
  c.dtype = dtype;
  c.tokens = one_of({1, 1, 2, 3, 8, 9, 17, 33, 64});
  ExpertsConfig& f = c.config;
  f.num_experts = one_of({1, 2, 6, 8, 60, 128, 257});
  f.top_k = std::min(f.num_experts, one_of({1, 2, 4, 8}));
  f.hidden_size = one_of({1, 5, 8, 64, 96, 192, 320, 576});
  f.intermediate_size = one_of({1, 8, 48, 96, 129, 192});
  f.has_gate = random() % 4 != 0;
  f.has_bias = random() % 3 == 0;
  f.activation = static_cast<Activation>(random() % 5);
  if (f.has_gate && random() % 4 == 0) f.swiglu_limit = 0.7F;
  if (f.has_gate && random() % 4 == 0) f.swiglu_alpha = 1.702F;
  c.layout = kLayouts[random() % 6];
  c.bias_dtype = random() % 2 == 0 ? DType::kF32 : dtype;
  c.id_dtype = random() % 2 == 0 ? DType::kI32 : DType::kI64;
  c.weights_in_dtype = random() % 2 == 0;
  c.output_f32 = random() % 2 == 0;
  c.row_gap = one_of({0, 0, 8, 3});
  c.invalid = 0.1 * static_cast<double>(one_of({0, 0, 3}));
  c.duplicates = random() % 4 == 0;
  c.used_experts = random() % 4 == 0 ? std::min<int64_t>(f.num_experts, 2) : 0;
  return c;
}

int64_t cost(const Case& c) {
  const int64_t weights = c.config.num_experts + c.tokens * c.config.top_k;
  return weights * c.config.hidden_size * c.config.intermediate_size * 3;
}

TEST_F(BatchedMm, RandomLayersAndRoutingsHoldTheBounds) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    std::mt19937_64 random(7);
    worst_ = 0;
    for (int i = 0; i < 80; ++i) {
      Case c = random_case(random, dtype);
      while (cost(c) > 3'000'000) c = random_case(random, dtype);
      check(c);
    }
    RecordProperty(std::string(name_of(dtype)), str_cat(worst_));
    printf("%s: largest error %.2e\n", std::string(name_of(dtype)).c_str(), worst_);
  }
}

void make_quantized(Case& c, StorageFormat format, ScaleLayout scales = {}) {
  const bool is_mx = format == StorageFormat::kMxFp8 || format == StorageFormat::kFp4;
  c.quantized = format;
  c.scales = is_mx ? ScaleLayout{DType::kF8E8M0, 1, 32} : scales;
  c.activations = is_mx ? ActivationScheme::kNone : ActivationScheme::kDynamic;
}

struct Quantized {
  StorageFormat format;
  ScaleLayout scales;
};
constexpr Quantized kQuantized[] = {{StorageFormat::kFp8Block, {DType::kF32, 128, 128}},
                                    {StorageFormat::kFp8Block, {DType::kF8E8M0, 128, 128}},
                                    {StorageFormat::kFp8Tensor, {DType::kF32, 0, 0}},
                                    {StorageFormat::kFp4, {}},
                                    {StorageFormat::kMxFp8, {}},
                                    {StorageFormat::kFp8Block, {DType::kF32, 64, 256}},
                                    {StorageFormat::kFp8Block, {DType::kF8E8M0, 1, 128}},
                                    {StorageFormat::kFp8Block, {DType::kF32, 96, 96}},
                                    {StorageFormat::kFp8Block, {DType::kF8E8M0, 128, 32}},
                                    {StorageFormat::kFp8Block, {DType::kF32, 0, 128}}};

Case random_quantized_case(std::mt19937_64& random, const Quantized& quantized) {
  Case c = random_case(random, random() % 4 == 0 ? DType::kF16 : DType::kBF16);
  if (random() % 8 == 0) c.dtype = c.bias_dtype = DType::kF32;
  make_quantized(c, quantized.format, quantized.scales);
  if (c.config.hidden_size < 32) c.config.hidden_size += 32;  // a norm wants some numbers
  const bool is_odd = random() % 4 == 0;
  if (!is_odd) {  // sizes of the fast kernels, whole chunks or not
    const int64_t sizes[] = {32, 64, 96, 160, 192, 320, 576, 640};
    c.config.hidden_size = sizes[random() % 8];
    c.config.intermediate_size = sizes[random() % 6];
    c.layout = random() % 2 == 0 ? Layout::kRows : Layout::kUneven;
    if (c.row_gap == 3) c.row_gap = 8;
    c.aligned_scales = random() % 2 == 0;
  }
  if (c.quantized == StorageFormat::kFp4 && c.layout == Layout::kTransposed) {
    c.layout = Layout::kShifted;
  }
  if (c.layout == Layout::kTransposed)
    c.scales.block_rows = std::min<int64_t>(1, c.scales.block_rows);
  if (c.activations == ActivationScheme::kDynamic && random() % 8 == 0) {
    c.activations = ActivationScheme::kNone;
  }
  return c;
}

TEST_F(BatchedMm, RandomQuantizedLayersHoldTheBounds) {
  for (const Quantized& quantized : kQuantized) {
    std::mt19937_64 random(11);
    worst_ = 0;
    for (int i = 0; i < 40; ++i) {
      Case c = random_quantized_case(random, quantized);
      while (cost(c) > 4'000'000) c = random_quantized_case(random, quantized);
      check(c);
    }
    printf("%s, %s of %d x %d: largest error %.2e\n",
           std::string(name_of(quantized.format)).c_str(),
           std::string(name_of(quantized.scales.dtype)).c_str(),
           static_cast<int>(quantized.scales.block_rows),
           static_cast<int>(quantized.scales.block_cols), worst_);
  }
}

TEST_F(BatchedMm, QuantizedSizesOfModelsHoldTheBounds) {
  for (int f = 0; f < 5; ++f) {
    for (const int64_t tokens : {1, 6, 21}) {
      for (const auto& [h, i] : {std::pair{2048, 768}, {7168, 128}, {2880, 96}, {256, 2880}}) {
        Case c;
        c.tokens = tokens;
        c.seed = static_cast<uint32_t>(h + i + tokens);
        c.config = {.num_experts = 2, .hidden_size = h, .intermediate_size = i, .top_k = 1};
        c.output_f32 = tokens != 6;
        make_quantized(c, kQuantized[f].format, kQuantized[f].scales);
        check(c);
      }
    }
  }
}

TEST_F(BatchedMm, QuantizedRepeatsAndReplaysGiveTheSameBits) {
  for (int f = 0; f < 5; ++f) {
    for (const int64_t tokens : {1, 8, 40}) {
      Case c;
      c.tokens = tokens;
      c.config = {.num_experts = 6, .hidden_size = 256, .intermediate_size = 192, .top_k = 4};
      make_quantized(c, kQuantized[f].format, kQuantized[f].scales);
      expect_same_bits(c, 3);
    }
  }
}

// Scales far above one and far below it, down to the code 0, which is a subnormal float32.
TEST_F(BatchedMm, ExtremeExponents) {
  for (const StorageFormat format : {StorageFormat::kFp4, StorageFormat::kMxFp8}) {
    for (const int64_t tokens : {1, 5, 20}) {
      for (const int wanted : {1, 70, -70, 100, -100, 127, -127}) {
        Case c;
        c.tokens = tokens;
        c.config = {.num_experts = 4, .hidden_size = 160, .intermediate_size = 96, .top_k = 2};
        c.config.has_gate = false;
        c.config.activation = Activation::kRelu;
        make_quantized(c, format);
        Data data(c, stream());
        const int lowest = data.lowest_exponent();
        data.shift_exponents(std::clamp(wanted, -lowest, lowest));
        const auto prepared = backend_->prepare(data.query(), data.weights());
        const auto scratch = workspace(data.query(), c.tokens);
        const auto run = [&] {
          data.poison_output();
          backend_->forward(*prepared, data.tokens(true), *scratch, stream());
          return data.output();
        };
        expect_close(c, run(), data.reference());
        if (wanted < 0) {  // h is small
          data.set_down_scale(0, 254);
          expect_close(c, run(), data.reference());
        }
        data.set_down_scale(0, 255);  // NaN: of 32 weights of row 0 of expert 0
        const std::vector<double> out = run();
        const std::vector<double> reference = data.reference();
        for (size_t i = 0; i < out.size(); ++i) {
          EXPECT_EQ(std::isnan(out[i]), std::isnan(reference[i])) << i;
        }
      }
    }
  }
}

// Sizes that are multiples of 32 and of no chunk, all ways that tokens come, gates of all kinds.
TEST_F(BatchedMm, MxSizesAndGates) {
  int n = 0;
  for (const StorageFormat format : {StorageFormat::kFp4, StorageFormat::kMxFp8}) {
    for (const int64_t tokens : {1, 2, 8, 9, 33, 64}) {
      for (const auto& [h, i] : {std::pair{96, 32}, {288, 160}, {544, 416}, {2080, 64}}) {
        Case c;
        c.tokens = tokens;
        c.seed = static_cast<uint32_t>(++n);
        c.dtype = n % 3 == 0 ? DType::kF16 : DType::kBF16;
        c.config = {.num_experts = 3, .hidden_size = h, .intermediate_size = i, .top_k = 2};
        c.config.has_bias = n % 2 == 0;
        if (n % 4 == 1) c.config.swiglu_limit = 0.7F;
        if (n % 5 == 1) c.config.swiglu_alpha = 1.702F;
        c.aligned_scales = n % 2 == 1;
        make_quantized(c, format);
        check(c);
      }
    }
  }
}

TEST_F(BatchedMm, QuantizedTokensNeverMeetNaN) {
  for (int f = 0; f < 5; ++f) {
    for (const int64_t tokens : {4, 24}) {
      Case c;
      c.tokens = tokens;
      c.config = {.num_experts = 4, .hidden_size = 192, .intermediate_size = 96, .top_k = 2};
      make_quantized(c, kQuantized[f].format, kQuantized[f].scales);
      expect_isolated(c);
    }
  }
}

TEST_F(BatchedMm, SizesOfModelsHoldTheBounds) {
  for (const int64_t tokens : {1, 9}) {
    for (const auto& [h, i] : {std::pair{2048, 768}, {7168, 128}, {4096, 256}}) {
      Case c;
      c.tokens = tokens;
      c.seed = static_cast<uint32_t>(h + i + tokens);
      c.config = {.num_experts = 2, .hidden_size = h, .intermediate_size = i, .top_k = 1};
      c.output_f32 = false;
      check(c);
    }
  }
}

TEST_F(BatchedMm, ManyTokensRunInBlocks) {
  Case c;
  c.config = {.num_experts = 5, .hidden_size = 32, .intermediate_size = 24, .top_k = 3};
  for (const int64_t tokens : {341, 342, 500}) {
    c.tokens = tokens;
    check(c);
  }
}

TEST_F(BatchedMm, MoreSlotsThanPairsOfABlockAndMoreExpertsThanThreads) {
  Case c;
  c.tokens = 2;
  c.config = {.num_experts = 1100, .hidden_size = 16, .intermediate_size = 8, .top_k = 1100};
  check(c);
}

TEST_F(BatchedMm, AllIdsInvalidGivesZeros) {
  Case c;
  c.tokens = 5;
  c.config = {.num_experts = 8, .hidden_size = 64, .intermediate_size = 32, .top_k = 2};
  c.invalid = 1;
  check(c);
}

TEST_F(BatchedMm, NoTokensIsNoWork) {
  Case c;
  c.tokens = 1;
  c.config = {.num_experts = 2, .hidden_size = 8, .intermediate_size = 8, .top_k = 1};
  Data data(c, stream());
  const auto prepared = backend_->prepare(data.query(), data.weights());
  RoutedTokens tokens = data.tokens(true);
  tokens.hidden_states = tokens.hidden_states.slice(0, 0);
  tokens.top_k_index = tokens.top_k_index.slice(0, 0);
  tokens.top_k_weights = tokens.top_k_weights.slice(0, 0);
  tokens.output = tokens.output.slice(0, 0);
  Workspace none(kGpu, backend_->workspace_bytes(data.query(), 0, 1));
  backend_->forward(*prepared, tokens, none, stream());
  runtime_->synchronize(stream());
}

TEST_F(BatchedMm, RepeatsAndReplaysGiveTheSameBits) {
  for (const int64_t tokens : {1, 8, 40}) {
    Case c;
    c.tokens = tokens;
    c.config = {.num_experts = 16, .hidden_size = 256, .intermediate_size = 192, .top_k = 4};
    expect_same_bits(c);
  }
}

TEST_F(BatchedMm, ChainsOfForwardsInOneGraphWait) {
  // Each forward reads the output of the one before it: dependent launches must not run ahead.
  Case c;
  c.tokens = 4;
  c.config = {.num_experts = 8, .hidden_size = 512, .intermediate_size = 256, .top_k = 2};
  c.config.has_gate = false;  // keeps numbers at their size
  c.config.activation = Activation::kRelu;
  c.output_f32 = false;
  Data data(c, stream());
  const auto prepared = backend_->prepare(data.query(), data.weights());
  const auto scratch = workspace(data.query(), c.tokens);
  const RoutedTokens there = data.tokens(true);
  RoutedTokens back = there;
  back.hidden_states = there.output;
  back.output = MutableTensorView(const_cast<void*>(there.hidden_states.data()),
                                  there.hidden_states.dtype(), there.hidden_states.shape(), kGpu);
  const auto chain = [&](bool wait) {
    for (int i = 0; i < 20; ++i) {
      backend_->forward(*prepared, i % 2 == 0 ? there : back, *scratch, stream());
      if (wait) runtime_->synchronize(stream());
    }
    backend_->forward(*prepared, there, *scratch, stream());
  };
  Data same(c, stream());
  const size_t bytes = static_cast<size_t>(c.tokens * c.config.hidden_size) * 2;
  const auto restore = [&] {
    runtime_->copy(const_cast<void*>(there.hidden_states.data()),
                   same.tokens(true).hidden_states.data(), bytes, stream());
  };
  chain(true);
  const std::vector<double> expected = data.output();
  const auto graph = runtime_->capture(stream(), [&] { chain(false); });
  for (int i = 0; i < 20; ++i) {
    restore();
    data.poison_output();
    graph->launch(stream());
    ASSERT_EQ(data.output(), expected);
  }
}

TEST_F(BatchedMm, OtherTokensNeverMeetNaN) {
  for (const int64_t tokens : {4, 24}) {
    Case c;
    c.tokens = tokens;
    c.config = {.num_experts = 4, .hidden_size = 64, .intermediate_size = 40, .top_k = 2};
    expect_isolated(c);
  }
}

// The fast kernels as another GPU would run them.
TEST_F(BatchedMm, LittleSharedMemoryAndNoDependentLaunchesGiveTheSame) {
  for (const int64_t tokens : {1, 5, 40}) {
    Case c;
    c.tokens = tokens;
    c.config = {.num_experts = 6, .hidden_size = 192, .intermediate_size = 96, .top_k = 2};
    Data data(c, stream());
    const ExpertsConfig& f = c.config;
    const cuda::CudaPrepared prepared(data.query(), data.weights());
    const RoutedTokens call = data.tokens(true);
    cuda::DecodeArgs a;
    a.ids = call.top_k_index.data();
    a.ids_stride = a.routing_weights_stride = f.top_k;
    a.ids_are_64 = true;
    a.routing_weights = call.top_k_weights.data();
    a.num_tokens = static_cast<int>(tokens);
    a.top_k = static_cast<int>(f.top_k);
    a.num_experts = static_cast<int>(f.num_experts);
    a.hidden = static_cast<int>(f.hidden_size);
    a.intermediate = static_cast<int>(f.intermediate_size);
    a.x = call.hidden_states.data();
    a.x_stride = a.out_stride = f.hidden_size;
    a.out = call.output.mutable_data();
    a.out_is_f32 = true;
    a.gate_function = cuda::gate_function(f);
    a.gate = prepared.device.gate;
    a.up = prepared.device.up;
    a.down = prepared.device.down;
    a.h_stride = f.intermediate_size;
    const auto h = allocate_shared_memory(
        kGpu, static_cast<size_t>(tokens * f.top_k * f.intermediate_size) * 2);
    const auto y =
        allocate_shared_memory(kGpu, static_cast<size_t>(tokens * f.top_k * f.hidden_size) * 4);
    a.h = h.get();
    a.y = static_cast<float*>(y.get());
    cuda::DecodeDevice device;
    device.num_sms = cuda::properties_of(0).num_multiprocessors;
    device.stream = &stream();
    for (const int kib : {99, 163}) {  // compute capabilities 8.6 and 8.0
      device.shared_bytes = kib * 1024;
      data.poison_output();
      ASSERT_TRUE(cuda::decode_fast_bf16(a, device)) << kib;
      expect_close(c, data.output(), data.reference());
    }
    device.shared_bytes = 48 * 1024;
    EXPECT_FALSE(cuda::decode_fast_bf16(a, device));
  }
}

TEST_F(BatchedMm, WorkspaceIsBounded) {
  ExpertsQuery query;
  query.config = {.num_experts = 128, .hidden_size = 2048, .intermediate_size = 768, .top_k = 8};
  query.device = kGpu;
  const size_t at_most = backend_->workspace_bytes(query, 128, 1);
  EXPECT_EQ(backend_->workspace_bytes(query, 1'000'000, 1), at_most);
  EXPECT_LT(backend_->workspace_bytes(query, 1, 1), 100'000U);
}

TEST(BatchedMmSupport, NamesWhatIsTooLarge) {
  ExpertsQuery query;
  query.config = {.num_experts = 10'000, .hidden_size = 8, .intermediate_size = 8, .top_k = 5'000};
  query.device = kGpu;
  const Support support = find_backend("batched_mm", DeviceType::kCuda).supports(query);
  const std::string reasons = to_string(support);
  EXPECT_NE(reasons.find("at most 8192 experts, these are 10000"), std::string::npos) << reasons;
  EXPECT_NE(reasons.find("top_k of at most 4096, this is 5000"), std::string::npos) << reasons;
}

}  // namespace
}  // namespace cadre
