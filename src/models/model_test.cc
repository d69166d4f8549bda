// A loaded model: what it says of itself, its memory, and what it refuses.
#include "cadre/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "models/damaged_checkpoint.h"
#include "support/allocation_counter.h"

namespace cadre::test {
namespace {

std::string folder_of(const std::string& name) {
  return std::string(CADRE_TEST_DATA) + "/models/" + name;
}

class LoadedModel : public testing::Test {
 protected:
  LoadedModel()
      : model_(Model::from_pretrained(folder_of("qwen2_moe"), {.num_threads = 2})),
        logits_(DType::kF32, {2, 256}) {}

  void forward(KvCache& cache, const std::vector<TokenId>& ids, const std::vector<int64_t>& counts,
               const MoeHooks* hooks = nullptr) {
    model_->forward({ids, counts}, cache, logits_, hooks);
  }
  std::string refusal(const std::function<void()>& action) {
    return message_of<InvalidArgument>(action);
  }

  std::unique_ptr<Model> model_;
  Tensor logits_;
};

TEST_F(LoadedModel, InfoSaysWhatConfigAndGenerationConfigSay) {
  const ModelInfo& info = model_->info();
  EXPECT_EQ(info.architecture, "Qwen2MoeForCausalLM");
  EXPECT_EQ(info.model_type, "qwen2_moe");
  EXPECT_EQ(std::filesystem::path(info.path), std::filesystem::path(folder_of("qwen2_moe")));
  EXPECT_EQ(info.compute_dtype, DType::kBF16);
  EXPECT_EQ(info.device, Device{});
  EXPECT_EQ(info.vocab_size, 256);
  EXPECT_EQ(info.hidden_size, 64);
  EXPECT_EQ(info.num_layers, 3);
  EXPECT_EQ(info.num_moe_layers, 3);
  EXPECT_EQ(info.max_position_embeddings, 512);
  EXPECT_EQ(info.eos_token_ids, std::vector<TokenId>{2});
  EXPECT_TRUE(info.sub_configs.empty());
}

TEST(LatentCache, ATokenTakesItsCompressedRowAlone) {
  // kv_lora_rank 32, qk_rope_head_dim 16, 2 layers; keys and values of 4 heads would take 288.
  const auto model = Model::from_pretrained(folder_of("deepseek_v3"), {.dtype = DType::kBF16});
  EXPECT_EQ(model->new_cache(2, 256)->bytes(), size_t{2} * 256 * 2 * (32 + 16) * 2);
}

TEST_F(LoadedModel, EosIdsComeFromGenerationConfigFirst) {
  DamagedCheckpoint checkpoint("qwen3_moe");
  checkpoint.config["eos_token_id"] = {4, 5};
  EXPECT_EQ(Model::from_pretrained(checkpoint.write())->info().eos_token_ids,
            (std::vector<TokenId>{4, 5}));
  checkpoint.folder().write("generation_config.json", R"({"eos_token_id": 7})");
  EXPECT_EQ(Model::from_pretrained(checkpoint.write())->info().eos_token_ids,
            (std::vector<TokenId>{7}));
}

TEST_F(LoadedModel, LoadingTellsOfEveryLayer) {
  std::vector<int64_t> seen;
  const auto progress = [&](std::string_view what, int64_t done, int64_t total) {
    EXPECT_EQ(what, "loading layers");
    EXPECT_EQ(total, 3);
    seen.push_back(done);
  };
  Model::from_pretrained(folder_of("qwen2_moe"), {.progress = progress});
  EXPECT_EQ(seen, (std::vector<int64_t>{1, 2, 3}));
}

TEST_F(LoadedModel, MemoryReportIsTrue) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_of("qwen2_moe"))) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("model-", 0) == 0) files += entry.file_size();
  }
  EXPECT_EQ(model_->memory().mapped_bytes, files);
  EXPECT_EQ(model_->memory().added_bytes, 0u);
  EXPECT_EQ(model_->memory().workspace_bytes, 0u);
  EXPECT_EQ(model_->memory().kv_cache_bytes, 0u);
  {
    const auto cache = model_->new_cache(2, 10);
    // keys and values of 3 layers, 2 sequences, 2 heads, 10 tokens, 16 elements, bfloat16
    EXPECT_EQ(cache->bytes(), size_t{2} * 3 * 2 * 2 * 10 * 16 * 2);
    EXPECT_EQ(model_->memory().kv_cache_bytes, cache->bytes());
    const auto another = model_->new_cache(1, 10);
    EXPECT_EQ(model_->memory().kv_cache_bytes, cache->bytes() + another->bytes());
  }
  EXPECT_EQ(model_->memory().kv_cache_bytes, 0u);
  model_->reserve(100);
  EXPECT_GT(model_->memory().workspace_bytes, 0u);
}

TEST_F(LoadedModel, ReserveIsCappedAndNeverShrinks) {
  model_->reserve(int64_t{1} << 40);
  const size_t bytes = model_->memory().workspace_bytes;
  EXPECT_LT(bytes, size_t{64} << 20);
  model_->reserve(1);
  EXPECT_EQ(model_->memory().workspace_bytes, bytes);
  EXPECT_THROW(model_->reserve(0), InvalidArgument);
}

TEST_F(LoadedModel, ForwardAllocatesNothingOnceReserved) {
  for (const char* backend : {"eager", "batched_mm", "grouped_mm"}) {
    model_->set_experts_implementation(backend);
    const auto cache = model_->new_cache(2, 40);
    model_->reserve(16);
    const std::vector<TokenId> prompt(30, 9);
    const std::vector<int64_t> counts = {20, 10};
    const std::vector<TokenId> next = {1, 2};
    const std::vector<int64_t> ones = {1, 1};
    const AllocationCounter counter;
    forward(*cache, prompt, counts);
    forward(*cache, next, ones);
    const int64_t allocations = counter.count();
    EXPECT_EQ(allocations, 0) << backend;
  }
}

TEST_F(LoadedModel, CachesThatCannotBeAreRefused) {
  EXPECT_NE(refusal([&] { model_->new_cache(0, 5); }).find("at least 1 sequence"),
            std::string::npos);
  EXPECT_NE(refusal([&] { model_->new_cache(1, 0); }).find("[1, 512]"), std::string::npos);
  EXPECT_NE(refusal([&] { model_->new_cache(1, 513); }).find("513"), std::string::npos);
  const std::string message =
      message_of<DeviceError>([&] { model_->new_cache(int64_t{1} << 40, 512); });
  EXPECT_NE(message.find("need"), std::string::npos) << message;
  EXPECT_NE(message.find("available"), std::string::npos) << message;
  EXPECT_THROW(model_->new_cache(int64_t{1} << 62, 512), DeviceError);  // overflows
}

TEST_F(LoadedModel, InputsThatCannotBeAreRefusedAndChangeNothing) {
  const auto cache = model_->new_cache(2, 4);
  forward(*cache, {1, 2}, {1, 1});
  const auto expect = [&](const std::vector<TokenId>& ids, const std::vector<int64_t>& counts,
                          const std::string& part) {
    EXPECT_NE(refusal([&] { forward(*cache, ids, counts); }).find(part), std::string::npos) << part;
  };
  expect({1}, {1}, "2 sequences");
  expect({1, 2, 3}, {1, 1}, "adds up to 2");
  expect({1, 2, 3, 4}, {4, 0}, "room for 3 of 4");
  expect({1}, {2, -1}, "-1 new tokens");
  expect({1, 256}, {1, 1}, "256");
  expect({-1, 2}, {1, 1}, "index 0");
  const Tensor narrow(DType::kF32, {2, 255});
  EXPECT_NE(
      refusal([&] {
        model_->forward({std::vector<TokenId>{1, 2}, std::vector<int64_t>{1, 1}}, *cache, narrow);
      }).find("[2, 256]"),
      std::string::npos);
  const auto other = Model::from_pretrained(folder_of("mixtral"));
  const auto foreign = other->new_cache(2, 4);
  EXPECT_NE(refusal([&] {
              forward(*foreign, {1, 2}, {1, 1});
            }).find("another model"),
            std::string::npos);
  EXPECT_EQ(cache->length(0), 1);
  EXPECT_EQ(cache->length(1), 1);
}

TEST_F(LoadedModel, AForwardThatThrowsLeavesTheCacheAsItWas) {
  const auto cache = model_->new_cache(1, 8);
  MoeHooks hooks;
  hooks.on_output = [](const MoeLayerRecord& record) {
    if (record.layer == 1) throw std::runtime_error("stop");
  };
  const Tensor one(DType::kF32, {1, 256});
  const std::vector<TokenId> ids = {5, 6};
  const std::vector<int64_t> counts = {2};
  EXPECT_THROW(model_->forward({ids, counts}, *cache, one, &hooks), std::runtime_error);
  EXPECT_EQ(cache->length(0), 0);
  EXPECT_NO_THROW(model_->forward({ids, counts}, *cache, one));
  EXPECT_EQ(cache->length(0), 2);
}

TEST_F(LoadedModel, NoNewTokensIsNoWork) {
  const auto cache = model_->new_cache(2, 4);
  EXPECT_NO_THROW(forward(*cache, {}, {0, 0}));
  EXPECT_EQ(cache->length(0), 0);
}

TEST_F(LoadedModel, CacheChecksItsArguments) {
  const auto cache = model_->new_cache(2, 4);
  EXPECT_EQ(cache->num_sequences(), 2);
  EXPECT_EQ(cache->max_tokens(), 4);
  EXPECT_THROW(cache->length(2), InvalidArgument);
  EXPECT_THROW(cache->truncate(-1, 0), InvalidArgument);
  EXPECT_THROW(cache->truncate(0, 1), InvalidArgument);
}

TEST_F(LoadedModel, CacheMayOutliveItsModelAndFitsNoOther) {
  const auto cache = model_->new_cache(2, 4);
  for (int i = 0; i < 4; ++i) {  // often at the address of the one before
    model_.reset();
    model_ = Model::from_pretrained(folder_of("mixtral"));
    EXPECT_NE(refusal([&] {
                forward(*cache, {1, 2}, {1, 1});
              }).find("another model"),
              std::string::npos);
  }
}

TEST(KnownArchitectures, NameArchitectureAndModelType) {
  const auto names = known_architectures();
  EXPECT_EQ(std::count(names.begin(), names.end(), "Qwen3MoeForCausalLM (qwen3_moe)"), 1);
  EXPECT_EQ(std::count(names.begin(), names.end(), "Glm4MoeForCausalLM (glm4_moe)"), 1);
}

}  // namespace
}  // namespace cadre::test
