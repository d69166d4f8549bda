// Loading with packed experts: the same logits, the memory that is told, switching, and what
// happens when memory does not suffice.
#include "models/prepack.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cadre/error.h"
#include "support/allocation_counter.h"
#include "support/expect_error.h"

namespace cadre::test {
namespace {

std::string folder_of(const std::string& name) {
  return std::string(CADRE_TEST_DATA) + "/models/" + name;
}

std::vector<float> logits_of(Model& model) {
  const std::vector<TokenId> ids = {3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62};
  const std::vector<int64_t> counts = {static_cast<int64_t>(ids.size())};
  const auto cache = model.new_cache(1, 32);
  std::vector<float> logits(ids.size() * static_cast<size_t>(model.info().vocab_size));
  model.forward({ids, counts, LogitsRows::kAll}, *cache,
                {logits.data(), DType::kF32, {counts[0], model.info().vocab_size}});
  return logits;
}

std::unique_ptr<Model> load(const std::string& name, DType dtype, Prepack prepack) {
  return Model::from_pretrained(folder_of(name), {.dtype = dtype, .prepack = prepack});
}

TEST(PrepackedModel, GivesTheSameLogitsWithEveryBackend) {
  for (const char* name : {"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      const auto in_place = load(name, dtype, Prepack::kOff);
      const auto packed = load(name, dtype, Prepack::kOn);
      for (const char* backend : {"eager", "batched_mm", "grouped_mm"}) {
        in_place->set_experts_implementation(backend);
        packed->set_experts_implementation(backend);
        EXPECT_EQ(logits_of(*packed), logits_of(*in_place)) << name << " " << backend;
      }
    }
  }
}

TEST(PrepackedModel, TellsItsBytesAndSwitchesWithoutTakingMemory) {
  const auto model = load("qwen2_moe", DType::kBF16, Prepack::kOn);
  const ExpertsQuery query = model->experts_query();
  const size_t expected = prepacked_bytes(query.config, query.format) *
                          static_cast<size_t>(model->info().num_moe_layers);
  model->reserve(64);
  EXPECT_EQ(model->memory().added_bytes, expected);
  const size_t workspace = model->memory().workspace_bytes;
  std::vector<ExpertsImplementation> maps;
  for (const char* name : {"eager", "batched_mm", "grouped_mm"}) maps.push_back({{"", name}});
  const AllocationCounter counter;
  for (const ExpertsImplementation& from : maps) {
    for (const ExpertsImplementation& to : maps) {
      model->set_experts_implementation(from);
      model->set_experts_implementation(to);
    }
  }
  const int64_t allocations = counter.count();
  EXPECT_EQ(allocations, 0);
  EXPECT_EQ(model->memory().added_bytes, expected);
  EXPECT_EQ(model->memory().workspace_bytes, workspace);
}

TEST(PrepackedModel, OffAndAutoReadInPlace) {
  for (const Prepack prepack : {Prepack::kOff, Prepack::kAuto}) {
    EXPECT_EQ(load("mixtral", DType::kBF16, prepack)->memory().added_bytes, 0u);
  }
}

TEST(PrepackedModel, TellsOfEveryExpert) {
  std::vector<int64_t> told;
  int64_t last_total = 0;
  const auto progress = [&](std::string_view what, int64_t done, int64_t total) {
    if (what != "packing experts") return;
    told.push_back(done);
    last_total = total;
  };
  const auto model = Model::from_pretrained(folder_of("qwen2_moe"),
                                            {.prepack = Prepack::kOn, .progress = progress});
  const int64_t experts = model->info().num_moe_layers * model->experts_query().config.num_experts;
  ASSERT_EQ(static_cast<int64_t>(told.size()), experts);
  for (int64_t i = 0; i < experts; ++i) EXPECT_EQ(told[static_cast<size_t>(i)], i + 1);
  EXPECT_EQ(last_total, experts);
}

TEST(PrepackedModel, NeedsItsOwnBytesAndOneExpertOfMemory) {
  ExpertsQuery query;
  query.config.num_experts = 64;
  query.config.hidden_size = query.config.intermediate_size = 1024;
  query.config.top_k = 2;
  std::vector<std::unique_ptr<ExpertsGroup>> groups;
  groups.push_back(std::make_unique<ExpertsGroup>("", query));
  for (int i = 0; i < 2; ++i) groups[0]->add_layer(std::make_shared<ExpertsWeights>());
  constexpr size_t kExpert = size_t{6} << 20;
  constexpr size_t kNeeded = 2 * 64 * kExpert + kExpert;
  EXPECT_NO_THROW(require_memory_to_prepack(groups, kNeeded));
  EXPECT_NO_THROW(require_memory_to_prepack(groups, {}));
  EXPECT_THROW(require_memory_to_prepack(groups, kNeeded - 1), DeviceError);
  expect_error<DeviceError>(
      [&] { require_memory_to_prepack(groups, size_t{500} << 20); },
      {"prepack", "768.00 MiB", "6.00 MiB", "500.00 MiB is available", "off"});
}

}  // namespace
}  // namespace cadre::test
