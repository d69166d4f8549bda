// The tokenizer against what the PyPI package `tokenizers` made of the same texts, whole and as
// streams. tests/data/make/make_tokenizer_vectors.py and make_sentencepiece_vectors.py made all but
// tiny_moe.jsonl and real/, the tokenizers of Qwen3, DeepSeek-V3 and GPT-OSS.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "cadre/tokenizer.h"
#include "generation/tokenizer/utf8.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

struct Vectors {
  std::string name;
  fs::path tokenizer;
  fs::path lines;
  size_t least_lines;
};

constexpr const char* kFamilies[] = {"mixtral",       "metaspace_first",       "metaspace_never",
                                     "metaspace_old", "metaspace_split_first", "deepseek_v2"};

void PrintTo(const Vectors& vectors, std::ostream* out) { *out << vectors.name; }

std::vector<Vectors> all_vectors() {
  const fs::path folder = fs::path(CADRE_TEST_DATA) / "tokenizers";
  const fs::path tiny = fs::path(CADRE_ASSETS) / "tiny-moe" / "tokenizer.json";
  std::vector<Vectors> all = {{"tiny_moe", tiny, folder / "tiny_moe.jsonl", 347},
                              {"tiny_moe_extra", tiny, folder / "tiny_moe_extra.jsonl", 300}};
  for (const char* name :
       {"string_merges", "ignore_merges", "prefix_space", "digits_prefix", "bos_template",
        "added_rules", "sentencepiece", "unknowns", "split_removed", "split_removed_inverted",
        "split_isolated", "split_isolated_inverted", "split_merged_with_previous",
        "split_merged_with_previous_inverted", "split_merged_with_next",
        "split_merged_with_next_inverted", "split_contiguous", "split_contiguous_inverted"}) {
    const fs::path stem = folder / "synthetic" / name;
    all.push_back({name, stem.string() + ".tokenizer.json", stem.string() + ".jsonl", 20});
  }
  for (const char* name : kFamilies) {
    const fs::path stem = folder / "families" / name;
    all.push_back({name, stem.string() + ".tokenizer.json", stem.string() + ".jsonl", 118});
  }
  for (const char* name : {"qwen3", "deepseek_v3", "gptoss"}) {
    const fs::path stem = folder / "real" / name;
    all.push_back({name, stem.string() + ".tokenizer.json.xz", stem.string() + ".jsonl", 347});
  }
  return all;
}

std::string unpack(const fs::path& path) {
  FILE* pipe = popen(("xz -dc '" + path.string() + "'").c_str(), "r");
  if (pipe == nullptr) return "";
  std::string content;
  char buffer[1 << 16];
  for (size_t got; (got = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    content.append(buffer, got);
  }
  if (pclose(pipe) != 0) ADD_FAILURE() << "cannot unpack " << path << "; is xz installed?";
  return content;
}

Tokenizer load(const fs::path& path) {
  if (path.extension() != ".xz") return Tokenizer::from_file(path);
  return Tokenizer::from_json(unpack(path), path.string());
}

std::vector<nlohmann::json> read_lines(const fs::path& path) {
  std::ifstream in(path);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

std::string stream_text(const Tokenizer& tokenizer, const std::vector<TokenId>& ids,
                        bool skip_special) {
  TextStream stream(tokenizer, skip_special);
  std::string whole;
  for (const TokenId id : ids) {
    const std::string piece = stream.push(id);
    EXPECT_TRUE(text::is_valid_utf8(piece)) << "id " << id;
    whole += piece;
  }
  return whole + stream.finish();
}

class TokenizerVectors : public testing::TestWithParam<Vectors> {
 protected:
  void SetUp() override {
    lines_ = read_lines(GetParam().lines);
    ASSERT_GE(lines_.size(), GetParam().least_lines);
  }

  std::vector<nlohmann::json> lines_;
};

TEST_P(TokenizerVectors, IdsEqualTheReference) {
  const Tokenizer tokenizer = load(GetParam().tokenizer);
  for (const auto& line : lines_) {
    const auto text = line["text"].get<std::string>();
    EXPECT_EQ(tokenizer.encode(text, false), line["ids"].get<std::vector<TokenId>>())
        << line["text"];
    EXPECT_EQ(tokenizer.encode(text), line["ids_with_special"].get<std::vector<TokenId>>())
        << line["text"];
  }
}

TEST_P(TokenizerVectors, TextEqualsTheReferenceWholeAndStreamed) {
  const Tokenizer tokenizer = load(GetParam().tokenizer);
  for (const auto& line : lines_) {
    const auto ids = line["ids_with_special"].get<std::vector<TokenId>>();
    for (const bool skip_special : {false, true}) {
      const auto expected =
          line[skip_special ? "decoded_skip_special" : "decoded"].get<std::string>();
      EXPECT_EQ(tokenizer.decode(ids, skip_special), expected) << line["text"];
      EXPECT_EQ(stream_text(tokenizer, ids, skip_special), expected) << line["text"];
    }
  }
}

TEST_P(TokenizerVectors, StreamOfRandomIdsEqualsDecode) {
  const Tokenizer tokenizer = load(GetParam().tokenizer);
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<TokenId> ids(random() % 40);
    for (TokenId& id : ids) {
      // Single bytes lie at the front of the vocabulary: half of the ids from there; some outside.
      const auto size = static_cast<uint64_t>(tokenizer.vocab_size());
      id = static_cast<TokenId>(random() % (random() % 2 == 0 ? size + 5 : 260)) - 2;
    }
    for (const bool skip_special : {false, true}) {
      const std::string whole = tokenizer.decode(ids, skip_special);
      EXPECT_TRUE(text::is_valid_utf8(whole));
      EXPECT_EQ(stream_text(tokenizer, ids, skip_special), whole);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Reference, TokenizerVectors, testing::ValuesIn(all_vectors()),
                         [](const auto& test) { return test.param.name; });

// Random ids, many of them single bytes: characters cut in two, bytes that are none.
TEST(TokenizerDecodeVectors, RandomIdsDecodeAsTheReferenceDoes) {
  const fs::path folder = fs::path(CADRE_TEST_DATA) / "tokenizers" / "families";
  for (const std::string name : kFamilies) {
    const Tokenizer tokenizer = load(folder / (name + ".tokenizer.json"));
    const auto lines = read_lines(folder / (name + ".decode.jsonl"));
    EXPECT_EQ(lines.size(), 80u) << name;
    for (const auto& line : lines) {
      const auto ids = line["ids"].get<std::vector<TokenId>>();
      for (const bool skip_special : {false, true}) {
        const auto expected =
            line[skip_special ? "decoded_skip_special" : "decoded"].get<std::string>();
        EXPECT_EQ(tokenizer.decode(ids, skip_special), expected) << name << line["ids"];
        EXPECT_EQ(stream_text(tokenizer, ids, skip_special), expected) << name << line["ids"];
      }
    }
  }
}

}  // namespace
}  // namespace cadre
