// Damaged and foreign tokenizer.json: what is wrong is named, nothing crashes.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "cadre/error.h"
#include "cadre/generation.h"
#include "cadre/tokenizer.h"

namespace cadre {
namespace {

using json = nlohmann::json;

json sound() {
  return json::parse(R"({
    "added_tokens": [{"id": 9, "content": "<s>", "special": true}],
    "normalizer": null, "pre_tokenizer": {"type": "ByteLevel"}, "post_processor": null,
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 4}, "merges": ["a b"]}})");
}

std::string load(const json& file) {
  try {
    Tokenizer::from_json(file.dump(), "dir/tokenizer.json");
  } catch (const CheckpointError& error) {
    return std::string("CheckpointError ") + error.what();
  } catch (const Unsupported& error) {
    return std::string("Unsupported ") + error.what();
  }
  return "loaded";
}

void expect_parts(const std::string& message, std::initializer_list<const char*> parts) {
  EXPECT_NE(message.find("dir/tokenizer.json"), std::string::npos) << message;
  for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
}

void expect(const char* pointer, json value, std::initializer_list<const char*> parts) {
  json file = sound();
  file[json::json_pointer(pointer)] = std::move(value);
  expect_parts(load(file), parts);
}

TEST(MalformedTokenizer, TheSoundOneLoadsWithGapsInItsIds) {
  EXPECT_EQ(load(sound()), "loaded");
  const auto tokenizer = Tokenizer::from_json(sound().dump(), "x");
  EXPECT_EQ(tokenizer.encode("<s>ab"), (std::vector<TokenId>{9, 4}));
  EXPECT_EQ(tokenizer.vocab_size(), 4);
  EXPECT_EQ(tokenizer.decode(std::vector<TokenId>{2, 4, 8, 9999999, -5}), "ab");
}

TEST(MalformedTokenizer, IdsThatTheModelHasNoRowForAreRefused) {
  const auto tokenizer = Tokenizer::from_json(sound().dump(), "x");
  EXPECT_EQ(tokenizer.max_id(), 9);
  ModelInfo info;
  info.path = "dir";
  for (const int64_t enough : {10, 11, 1000}) {
    info.vocab_size = enough;
    EXPECT_NO_THROW(check_token_ids(tokenizer.encode("<s>ab"), tokenizer, info));
  }
  const auto refusal = [&info](const Tokenizer& other) -> std::string {
    try {
      check_token_ids(other.encode("<s>ab"), other, info);
    } catch (const CheckpointError& error) {
      return error.what();
    }
    return "accepted";
  };
  info.vocab_size = 9;
  EXPECT_NO_THROW(check_token_ids(tokenizer.encode("ab"), tokenizer, info));  // <s> does no harm
  expect_parts(refusal(tokenizer), {"vocab_size, 9", "id 9", "\"<s>\""});
  json file = sound();
  file["model"]["vocab"]["ab"] = 5000;
  info.vocab_size = 5000;
  expect_parts(refusal(Tokenizer::from_json(file.dump(), "x")), {"5000 in", "id 5000", "\"ab\""});
}

TEST(MalformedTokenizer, BadIdsAreCheckpointErrorsThatNameTheToken) {
  expect("/model/vocab/b", -1, {"CheckpointError", "\"b\" has id -1", "fetch it again"});
  expect("/model/vocab/b", 4000000000u, {"CheckpointError", "\"b\" has id 4000000000"});
  expect("/model/vocab/b", 1.5, {"CheckpointError", "\"b\" has id 1.5"});
  expect("/model/vocab/b", "1", {"CheckpointError", "\"b\" has id"});
  expect("/model/vocab/b", 0, {"CheckpointError", "both have id 0", "\"a\"", "\"b\""});
  expect("/added_tokens/0/id", -3, {"CheckpointError", "added_tokens[0].id", "-3"});
  expect("/added_tokens/0/id", uint64_t{1} << 63, {"CheckpointError", "added_tokens[0].id"});
  expect("/added_tokens/0/id", 1, {"CheckpointError", "\"<s>\"", "\"b\" already"});
  expect("/added_tokens/0/content", "a", {"CheckpointError", "\"a\" has id 9 here and 0"});
}

TEST(MalformedTokenizer, BadMergesNameTheMissingToken) {
  expect("/model/merges/0", "a x", {"CheckpointError", "merges[0]", "\"x\"", "not in the vocab"});
  expect("/model/merges/0", "b a", {"CheckpointError", "\"ba\""});
  expect("/model/merges/0", "a  b", {"CheckpointError", "merges[0]", "one space"});
  expect("/model/merges/0", json::array({"a"}), {"CheckpointError", "merges[0]"});
  expect("/model/merges/0", 7, {"CheckpointError", "merges[0]", "found 7"});
  expect("/model/merges", "a b", {"CheckpointError", "model.merges", "an array"});
}

TEST(MalformedTokenizer, WrongTypesAndMissingKeysAreNamed) {
  expect("/model/vocab", 3, {"CheckpointError", "model.vocab", "an object"});
  expect("/model", nullptr, {"CheckpointError", "\"model\""});
  expect("/added_tokens", 3, {"CheckpointError", "added_tokens", "an array"});
  expect("/added_tokens/0", 3, {"CheckpointError", "added_tokens[0]", "an object"});
  expect("/added_tokens/0/lstrip", "yes", {"CheckpointError", "lstrip", "true or false"});
  expect("/decoder", json::object(), {"CheckpointError", "decoder", "\"type\""});
  expect("/model/unk_token", "?", {"CheckpointError", "unk_token"});
  expect("/pre_tokenizer",
         {{"type", "Split"}, {"pattern", {{"Regex", "(a"}}}, {"behavior", "Isolated"}},
         {"CheckpointError", "pre_tokenizer.pattern", "malformed regular expression"});
  expect("/pre_tokenizer", {{"type", "Split"}, {"pattern", {{"String", "a"}}}, {"behavior", "Odd"}},
         {"CheckpointError", "behavior", "Odd"});
}

TEST(MalformedTokenizer, ForeignComponentsAreUnsupportedAndNamed) {
  expect("/model/type", "Unigram", {"Unsupported", "model \"Unigram\"", "BPE"});
  expect("/model/dropout", 0.1, {"Unsupported", "dropout"});
  expect("/model/end_of_word_suffix", "</w>", {"Unsupported", "end_of_word_suffix"});
  expect("/normalizer", {{"type", "Lowercase"}},
         {"Unsupported", "normalizer \"Lowercase\"", "NFC"});
  expect("/normalizer", {{"type", "Replace"}, {"pattern", {{"Regex", "a"}}}, {"content", ""}},
         {"Unsupported", "Replace with a Regex"});
  expect("/pre_tokenizer", {{"type", "BertPreTokenizer"}},
         {"Unsupported", "\"BertPreTokenizer\"", "Metaspace, ByteLevel"});
  expect("/pre_tokenizer",
         {{"type", "Split"}, {"pattern", {{"Regex", "\\w"}}}, {"behavior", "Isolated"}},
         {"Unsupported", "\\w", "Oniguruma"});
  const json byte_level = {{"type", "ByteLevel"}};
  expect("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {byte_level, byte_level}}},
         {"Unsupported", "after ByteLevel"});
  expect("/post_processor", {{"type", "BertProcessing"}}, {"Unsupported", "BertProcessing"});
  expect("/post_processor", {{"type", "TemplateProcessing"}, {"single", json::array()}},
         {"Unsupported", "without the text"});
  expect("/decoder", {{"type", "CTC"}}, {"Unsupported", "decoder \"CTC\""});
  expect("/decoder", {{"type", "Sequence"}, {"decoders", {byte_level, {{"type", "ByteFallback"}}}}},
         {"Unsupported", "after Fuse or ByteLevel"});
}

json metaspace(const char* key = "split", json value = true) {
  json node = {{"type", "Metaspace"}, {"replacement", "\u2581"}};
  node[key] = std::move(value);
  return node;
}

// Both the pre-tokenizer and the decoder of that name.
TEST(MalformedTokenizer, MetaspaceNamesWhatIsWrong) {
  for (const std::string place : {"/pre_tokenizer", "/decoder"}) {
    const auto refuses = [&](const json& node, std::initializer_list<const char*> parts) {
      expect(place.c_str(), node, parts);
      expect(place.c_str(), node, {"CheckpointError", place.c_str() + 1});
    };
    refuses({{"type", "Metaspace"}}, {"\"replacement\"", "missing"});
    for (const char* odd : {"", "ab", "\u2581\u2581"}) {
      refuses(metaspace("replacement", odd), {"replacement", "one character"});
    }
    refuses(metaspace("replacement", 9), {"replacement", "a string"});
    refuses(metaspace("split", "no"), {"split", "true or false"});
    refuses(metaspace("prepend_scheme", "odd"),
            {"prepend_scheme", "never, first or always", "odd"});
    refuses(metaspace("prepend_scheme", 1), {"prepend_scheme", "a string"});
    refuses(metaspace("add_prefix_space", 1), {"add_prefix_space", "true or false"});
    json both = metaspace("prepend_scheme", "first");
    both["add_prefix_space"] = false;
    refuses(both, {"prepend_scheme", "never, as add_prefix_space is false"});
  }
  expect("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {metaspace(), metaspace()}}},
         {"Unsupported", "pretokenizers[1]", "second Metaspace"});
}

TEST(MalformedTokenizer, NormalizersNameWhatIsWrong) {
  expect("/normalizer", {{"type", "Prepend"}}, {"CheckpointError", "\"prepend\"", "missing"});
  expect("/normalizer", {{"type", "Prepend"}, {"prepend", 3}},
         {"CheckpointError", "normalizer.prepend", "a string"});
  expect("/normalizer", {{"type", "Replace"}, {"content", ""}}, {"CheckpointError", "\"pattern\""});
  expect("/normalizer", {{"type", "Replace"}, {"pattern", {{"String", "a"}}}},
         {"CheckpointError", "\"content\"", "missing"});
  expect("/normalizer", {{"type", "Replace"}, {"pattern", {{"String", ""}}}, {"content", "a"}},
         {"CheckpointError", "normalizer.pattern.String", "not empty"});
  expect("/normalizer", {{"type", "Sequence"}, {"normalizers", 3}},
         {"CheckpointError", "normalizer.normalizers", "an array"});
  expect("/normalizer", {{"type", "Sequence"}, {"normalizers", {{{"type", "Odd"}}}}},
         {"Unsupported", "normalizers[0]", "Odd"});
}

TEST(MalformedTokenizer, DecodersNameWhatIsWrong) {
  const auto strip = [](json start, json content) -> json {
    return {{"type", "Strip"}, {"content", content}, {"start", start}, {"stop", 0}};
  };
  expect("/decoder", strip(-1, " "), {"CheckpointError", "decoder.start", "-1"});
  expect("/decoder", strip(uint64_t{1} << 40, " "), {"CheckpointError", "decoder.start"});
  expect("/decoder", strip(1, ""), {"CheckpointError", "decoder.content", "a character"});
  expect("/decoder", strip(1, nullptr), {"CheckpointError", "\"content\""});
  expect("/decoder", {{"type", "Replace"}, {"pattern", {{"Regex", "a"}}}, {"content", ""}},
         {"Unsupported", "Replace with a Regex"});
  expect("/decoder", {{"type", "Replace"}, {"pattern", {{"String", ""}}}, {"content", ""}},
         {"CheckpointError", "decoder.pattern.String", "not empty"});
  expect("/decoder", {{"type", "Sequence"}, {"decoders", {{{"type", "Fuse"}}, metaspace()}}},
         {"Unsupported", "decoders[1]", "after Fuse"});
  expect("/decoder", {{"type", "Sequence"}, {"decoders", json(40, strip(1, " "))}},
         {"Unsupported", "a longer Sequence"});
}

TEST(MalformedTokenizer, TemplatesNameWhatIsWrong) {
  const json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const json bos = {{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}};
  const auto refuses = [](const json& single, const json& specials,
                          std::initializer_list<const char*> parts) {
    expect("/post_processor",
           {{"type", "TemplateProcessing"}, {"single", single}, {"special_tokens", specials}},
           parts);
  };
  refuses({bos, text}, json::object(), {"CheckpointError", "special_tokens", "\"<s>\"", "missing"});
  refuses({bos, text}, {{"<s>", {{"ids", 9}}}}, {"CheckpointError", "<s>.ids", "an array"});
  refuses({bos, text}, {{"<s>", {{"ids", {-9}}}}}, {"CheckpointError", "ids[0]", "-9"});
  refuses({json::object(), text}, json::object(), {"CheckpointError", "single[0]", "SpecialToken"});
  refuses({text, text}, json::object(), {"Unsupported", "the text twice"});
  refuses({text, bos, bos}, {{"<s>", {{"ids", json(600, 9)}}}},
          {"Unsupported", "single[2]", "a longer template"});
}

TEST(MalformedTokenizer, ModelFlagsNameWhatIsWrong) {
  for (const char* flag : {"fuse_unk", "byte_fallback", "ignore_merges"}) {
    expect((std::string("/model/") + flag).c_str(), "yes",
           {"CheckpointError", flag, "true or false"});
  }
  expect("/model/unk_token", 3, {"CheckpointError", "unk_token", "a string"});
}

// 32 steps that each make eight of one would be more than any memory.
TEST(MalformedTokenizer, TextThatEveryStepMultipliesIsRefused) {
  const json replace = {
      {"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aaaaaaaa"}};
  json file = sound();
  file["normalizer"] = {{"type", "Sequence"}, {"normalizers", json(32, replace)}};
  EXPECT_THROW(Tokenizer::from_json(file.dump(), "x").encode("a"), Error);
  file = sound();
  file["decoder"] = {{"type", "Sequence"}, {"decoders", json(32, replace)}};
  const auto tokenizer = Tokenizer::from_json(file.dump(), "x");
  EXPECT_THROW(tokenizer.decode(std::vector<TokenId>{0}), Error);
  EXPECT_EQ(tokenizer.decode(std::vector<TokenId>{1}), "b");
}

class DamagedTokenizer : public testing::TestWithParam<const char*> {};

TEST_P(DamagedTokenizer, NeverCrashes) {
  std::ifstream in(std::string(CADRE_TEST_DATA) + "/tokenizers/" + GetParam());
  std::stringstream content;
  content << in.rdbuf();
  const std::string file = content.str();
  ASSERT_GT(file.size(), 1000u);
  std::mt19937_64 random(11);
  int loaded = 0;
  for (int round = 0; round < 400; ++round) {
    std::string damaged = file;
    for (uint64_t i = 0; i <= random() % 3; ++i) {
      const size_t place = random() % damaged.size();
      if (random() % 2 == 0) damaged[place] = "0123456789-\"[]{},:ntf\\"[random() % 23];
      if (random() % 4 == 0) damaged.erase(place, random() % 20);
      if (random() % 16 == 0) damaged.resize(place + 1);
    }
    try {
      const auto tokenizer = Tokenizer::from_json(damaged, "x");
      tokenizer.decode(tokenizer.encode("word <l> the e\u0301x  12 \u00e9\u00e9 \xFF"));
      ++loaded;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(loaded, 0);
}

INSTANTIATE_TEST_SUITE_P(Files, DamagedTokenizer,
                         testing::Values("synthetic/added_rules.tokenizer.json",
                                         "families/metaspace_first.tokenizer.json",
                                         "families/metaspace_split_first.tokenizer.json"),
                         [](const auto& test) { return "File" + std::to_string(test.index); });

TEST(MalformedTokenizer, AMissingFileIsACheckpointErrorWithItsName) {
  try {
    Tokenizer::from_file("no/such/tokenizer.json");
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find("no/such/tokenizer.json"), std::string::npos);
  }
}

}  // namespace
}  // namespace cadre
