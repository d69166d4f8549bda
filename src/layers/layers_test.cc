// What whole models do not show of the layers: RoPE parameters against Transformers' values, sizes
// of key and value stores.
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/json.h"
#include "layers/kv_store.h"
#include "layers/rope.h"
#include "support/compare.h"

namespace cadre {
namespace {

RopeConfig config_of(const Json& row) {
  RopeConfig config;
  const std::string type = row.at("rope_type");
  const std::map<std::string, RopeType> types = {{"linear", RopeType::kLinear},
                                                 {"llama3", RopeType::kLlama3},
                                                 {"yarn", RopeType::kYarn},
                                                 {"proportional", RopeType::kProportional}};
  config.type = types.at(type);
  config.theta = row.at("rope_theta");
  const int64_t head_dim = row.at("head_dim");
  const double part = row.value("partial_rotary_factor", 1.0);
  const auto elements = static_cast<int64_t>(static_cast<double>(head_dim) * part);
  config.rotary_dim = config.type == RopeType::kProportional ? head_dim : elements;
  config.turning_dim = elements / 2 * 2;
  config.factor = row.value("factor", 1.0);
  config.original_max_position = row.value("original_max_position_embeddings", 0.0);
  config.low_freq_factor = row.value("low_freq_factor", 1.0);
  config.high_freq_factor = row.value("high_freq_factor", 4.0);
  config.beta_fast = row.value("beta_fast", 32.0);
  config.beta_slow = row.value("beta_slow", 1.0);
  config.truncate = row.value("truncate", true);
  if (row.contains("attention_factor")) config.attention_factor = row.at("attention_factor");
  if (row.contains("mscale")) config.mscale = row.at("mscale");
  if (row.contains("mscale_all_dim")) config.mscale_all_dim = row.at("mscale_all_dim");
  return config;
}

TEST(Rope, ScaledFrequenciesEqualTransformers) {
  const Json file = read_json_file(std::filesystem::path(CADRE_TEST_DATA) / "models" / "rope.json");
  ASSERT_GE(file.at("cases").size(), 11u);
  for (const Json& row : file.at("cases")) {
    const RopeFrequencies got = rope_frequencies(config_of(row));
    const std::vector<double> expected = row.at("inverse_frequencies");
    ASSERT_EQ(got.inverse.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(static_cast<double>(got.inverse[i]), expected[i], 1e-5 * expected[i])
          << row.at("rope_type") << " " << i;
    }
    EXPECT_NEAR(got.scale, row.at("scale").get<double>(), 1e-6) << row.at("rope_type");
  }
}

TEST(Rope, DefaultFrequenciesArePowersOfTheta) {
  const RopeFrequencies got =
      rope_frequencies({.type = RopeType::kDefault, .theta = 10000, .rotary_dim = 8});
  ASSERT_EQ(got.inverse.size(), 4u);
  EXPECT_EQ(got.inverse[0], 1.0f);
  EXPECT_NEAR(got.inverse[1], 0.1f, 1e-7f);
  EXPECT_NEAR(got.inverse[3], 0.001f, 1e-9f);
  EXPECT_EQ(got.scale, 1.0f);
}

TEST(Rope, DynamicKeepsTheFrequenciesAndSaysHowTheyFall) {
  RopeConfig config{.type = RopeType::kDynamic, .theta = 10000, .rotary_dim = 8, .factor = 3};
  config.original_max_position = 16;
  const RopeFrequencies got = rope_frequencies(config);
  config.type = RopeType::kDefault;
  EXPECT_EQ(got.inverse, rope_frequencies(config).inverse);
  EXPECT_FALSE(rope_frequencies(config).ntk.has_value());
  ASSERT_TRUE(got.ntk.has_value());
  EXPECT_EQ(got.ntk->factor, 3.0f);
  EXPECT_EQ(got.ntk->context, 16);
}

TEST(KvStore, BytesCountKeysAndValuesOfAllLayers) {
  const CacheTensor heads{.num_heads = 4, .width = 16, .dtype = DType::kBF16};
  const KvShape shape{2, 10, {{heads, heads}, {heads, heads}, {heads, heads}}};
  EXPECT_EQ(kv_bytes(shape), size_t{2} * 3 * 2 * 4 * 10 * 16 * 2);
  EXPECT_EQ(KvStore(shape, {}).bytes(), *kv_bytes(shape));
}

TEST(KvStore, BytesThatOverflowAreNone) {
  const CacheTensor one{.width = 1};
  KvShape shape{int64_t{1} << 59, 1, {{one, one}}};
  EXPECT_TRUE(kv_bytes(shape).has_value());
  shape.num_sequences = int64_t{1} << 60;  // each tensor fits, both together do not
  EXPECT_FALSE(kv_bytes(shape).has_value());
  shape = {int64_t{1} << 40, int64_t{1} << 40, {{one}}};
  EXPECT_FALSE(kv_bytes(shape).has_value());
}

TEST(KvStore, ALayerMayKeepRowsOfSeveralTokensOrSoManyRows) {
  const CacheTensor compressed{.width = 8, .tokens_per_row = 4};
  const CacheTensor window{.width = 16, .fixed_rows = 5};
  const KvStore store({2, 10, {{compressed}, {window, compressed}}}, {});
  EXPECT_EQ(store.tensor(0, 0).shape(), (Dims{2, 1, 3, 8}));  // 10 tokens: three rows
  EXPECT_EQ(store.tensor(1, 0).shape(), (Dims{2, 1, 5, 16}));
  EXPECT_EQ(store.tensor(1, 1).shape(), (Dims{2, 1, 3, 8}));
}

TEST(KvStore, ARingServesALengthWhenWhatItNeedsIsStillThere) {
  const CacheTensor window{.width = 1, .fixed_rows = 8, .before = 7};
  EXPECT_TRUE(window.can_resume(100, 100));
  EXPECT_TRUE(window.can_resume(99, 100));   // needs 92 to 98 of 92 to 99
  EXPECT_FALSE(window.can_resume(98, 100));  // needs 91
  EXPECT_TRUE(window.can_resume(0, 100));
  EXPECT_TRUE(window.can_resume(3, 8));
  EXPECT_FALSE(window.can_resume(3, 9));
  const CacheTensor block{.width = 1, .fixed_rows = 4, .block = 4};  // the rows of an open entry
  EXPECT_TRUE(block.can_resume(10, 12));                             // needs 8 and 9 of 8 to 11
  EXPECT_FALSE(block.can_resume(10, 13));                            // 8 was replaced
  EXPECT_TRUE(block.can_resume(8, 100));                             // needs none
  const CacheTensor overlapping{.width = 1, .fixed_rows = 8, .block = 4, .before = 4};
  EXPECT_TRUE(overlapping.can_resume(11, 12));
  EXPECT_FALSE(overlapping.can_resume(7, 12));  // needs 0
  EXPECT_TRUE(overlapping.can_resume(8, 12));   // needs 4 to 7
  const CacheTensor all{.width = 1};
  EXPECT_TRUE(all.can_resume(1, 1000));
}

TEST(KvStore, RemembersHowFarASequenceWasWritten) {
  KvStore store({2, 20, {{{.width = 1, .fixed_rows = 4, .before = 3}}}}, {});
  store.note_written(1, 5, 10);
  EXPECT_FALSE(store.can_resume(1, 6));
  store.set_length(1, 10);
  store.set_length(1, 9);
  EXPECT_EQ(store.written(1), 10);
  EXPECT_TRUE(store.can_resume(1, 9));
  EXPECT_FALSE(store.can_resume(1, 8));
  store.set_length(1, 0);
  EXPECT_EQ(store.written(1), 0);
  store.note_written(0, 0, 17);  // and failed
  EXPECT_TRUE(store.can_resume(0, 0));
  store.note_written(0, 0, 3);
  EXPECT_EQ(store.written(0), 3);
}

TEST(KvStore, LayersDoNotOverlapAndLengthsStartAtZero) {
  const CacheTensor heads{.width = 4};
  KvStore store({2, 3, {{heads, heads}, {heads, heads}}}, {});
  EXPECT_EQ(store.keys(0).shape(), (Dims{2, 1, 3, 4}));
  const auto* begin = store.keys(0).as<float>();
  EXPECT_EQ(store.data(), begin);
  EXPECT_EQ(store.values(0).as<float>() - begin, 64);  // 24 values, then up to 256 bytes
  EXPECT_EQ(store.keys(1).as<float>() - begin, 128);
  EXPECT_EQ(store.values(1).as<float>() - begin, 192);
  EXPECT_EQ(store.bytes(), size_t{4 * 256});
  EXPECT_EQ(store.length(1), 0);
  store.set_length(1, 2);
  EXPECT_EQ(store.length(1), 2);
  EXPECT_EQ(store.length(0), 0);
}

}  // namespace
}  // namespace cadre
