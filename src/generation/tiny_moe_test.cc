// The bundled model end to end: text in, text out, as Transformers gave it (tests/data/tiny-moe).
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "cadre/generation.h"

namespace cadre {
namespace {

class TinyMoe : public testing::TestWithParam<const char*> {};

TEST_P(TinyMoe, GreedyContinuationsEqualTransformers) {
  std::ifstream in(std::string(CADRE_TEST_DATA) + "/tiny-moe/expected.json");
  const auto expected = nlohmann::json::parse(in);
  const auto prompts = expected["prompts"].get<std::vector<std::string>>();
  const auto texts = expected["greedy_text"].get<std::vector<std::string>>();
  ASSERT_EQ(prompts.size(), 6u);
  const std::string folder = std::string(CADRE_ASSETS) + "/tiny-moe";
  const auto tokenizer = Tokenizer::from_file(folder + "/tokenizer.json");
  LoadOptions load;
  load.experts_implementation = {{"", GetParam()}};
  load.dtype = DType::kF32;
  const auto model = Model::from_pretrained(folder, load);
  std::vector<std::vector<TokenId>> ids;
  for (const std::string& prompt : prompts) ids.push_back(tokenizer.encode(prompt));
  GenerationOptions options;
  options.max_new_tokens = 48;
  options.eos_token_ids = model->info().eos_token_ids;
  options.ignore_eos = true;
  std::vector<TextStream> streams;
  for (size_t i = 0; i < ids.size(); ++i) streams.emplace_back(tokenizer);
  std::vector<std::string> streamed = prompts;
  const auto result = generate(*model, ids, options, [&](int64_t sequence, TokenId id) {
    streamed[static_cast<size_t>(sequence)] += streams[static_cast<size_t>(sequence)].push(id);
    return true;
  });
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(streamed[i] + streams[i].finish(), texts[i]);
    auto all = ids[i];
    all.insert(all.end(), result.token_ids[i].begin(), result.token_ids[i].end());
    EXPECT_EQ(tokenizer.decode(all), texts[i]);
  }
  EXPECT_EQ(result.prefill_experts, GetParam());
  EXPECT_EQ(result.decode_experts, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Backends, TinyMoe, testing::Values("eager", "batched_mm", "grouped_mm"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace cadre
