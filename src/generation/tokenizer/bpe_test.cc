// Merging against the plain definition: of all pairs that may merge, the lowest rank, leftmost
// first, until none is left.
#include "generation/tokenizer/bpe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace cadre::text {
namespace {

using Names = std::vector<std::string>;

const Names kMerges = {"a a", "aa aa", "a b", "b a", "ab ab", "aaaa b", "c ab", "abab c", "b b"};

Json model_json() {
  Json vocab = {{"a", 0}, {"b", 1}, {"c", 2}};
  Json merges = Json::array();
  for (const std::string& merge : kMerges) {
    merges.push_back(merge);
    std::string joined = merge;
    joined.erase(joined.find(' '), 1);
    vocab[joined] = vocab.size();
  }
  return {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}};
}

Names merge_plainly(const std::string& word) {
  Names symbols;
  for (const char c : word) symbols.emplace_back(1, c);
  while (true) {
    size_t best_rank = kMerges.size();
    size_t best = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto it = std::find(kMerges.begin(), kMerges.end(), symbols[i] + " " + symbols[i + 1]);
      const auto rank = static_cast<size_t>(it - kMerges.begin());
      if (rank < best_rank) best_rank = rank, best = i;
    }
    if (best_rank == kMerges.size()) return symbols;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

TEST(Bpe, ShortAndLongWordsMergeByRankThenPlace) {
  const Json json = model_json();
  const std::string origin = "test";
  for (const bool byte_level : {false, true}) {
    const Bpe bpe = Bpe::parse(JsonNode(json, origin), byte_level);
    Bpe::Scratch scratch;
    std::mt19937_64 random(3);
    for (int round = 0; round < 600; ++round) {
      std::string word(1 + random() % (round % 2 == 0 ? 48 : 200), 'a');
      for (char& c : word) c = "aaabbc"[random() % 6];
      std::vector<TokenId> ids;
      bpe.encode(word, scratch, ids);
      Names tokens;
      for (const TokenId id : ids) tokens.emplace_back(bpe.vocabulary().token(id));
      ASSERT_EQ(tokens, merge_plainly(word)) << word;
    }
  }
}

TEST(Bpe, RepeatedWordsComeFromTheCacheUnchanged) {
  const Json json = model_json();
  const std::string origin = "test";
  const Bpe bpe = Bpe::parse(JsonNode(json, origin), false);
  Bpe::Scratch scratch;
  std::vector<TokenId> first;
  bpe.encode("abcab", scratch, first);
  std::vector<TokenId> second = {9};
  bpe.encode("abcab", scratch, second);
  EXPECT_EQ(std::vector<TokenId>(second.begin() + 1, second.end()), first);
  EXPECT_EQ(second.front(), 9);
}

TEST(WordCache, KeepsWhatFitsAndTellsWordsApart) {
  WordCache cache;
  std::vector<TokenId> out;
  EXPECT_FALSE(cache.find("word", out));
  const std::vector<TokenId> ids = {1, 2};
  cache.insert("word", ids);
  cache.insert(std::string("wor\0", 4), std::vector<TokenId>{3});
  EXPECT_TRUE(cache.find("word", out));
  EXPECT_EQ(out, ids);
  EXPECT_FALSE(cache.find("wor", out));
  cache.insert(std::string(WordCache::kMaxBytes + 1, 'x'), ids);
  EXPECT_FALSE(cache.find(std::string(WordCache::kMaxBytes + 1, 'x'), out));
  cache.insert("many", std::vector<TokenId>(WordCache::kMaxIds + 1));
  EXPECT_FALSE(cache.find("many", out));
}

TEST(WordCache, OverflowForgetsButNeverLies) {
  WordCache cache;
  for (TokenId i = 0; i < 200000; ++i) {
    cache.insert(std::to_string(i), std::vector<TokenId>{i});
  }
  int64_t found = 0;
  for (TokenId i = 0; i < 200000; ++i) {
    std::vector<TokenId> out;
    if (!cache.find(std::to_string(i), out)) continue;
    ++found;
    EXPECT_EQ(out, std::vector<TokenId>{i});
  }
  EXPECT_GT(found, 10000);
}

TEST(MergeTable, LastOfEqualPairsCounts) {
  MergeTable table;
  table.reserve(3);
  table.set(1, 2, {0, 5});
  table.set(2, 1, {1, 6});
  table.set(1, 2, {2, 7});
  ASSERT_NE(table.find(1, 2), nullptr);
  EXPECT_EQ(table.find(1, 2)->id, 7);
  EXPECT_EQ(table.find(2, 1)->rank, 1u);
  EXPECT_EQ(table.find(2, 2), nullptr);
}

TEST(Vocabulary, FindsBothWaysAcrossGaps) {
  Vocabulary vocabulary;
  vocabulary.add("a", 3);
  vocabulary.add("", 0);
  vocabulary.reserve(1000);
  vocabulary.add("long token", 900);
  EXPECT_EQ(vocabulary.size(), 3);
  EXPECT_EQ(vocabulary.find("a"), 3);
  EXPECT_EQ(vocabulary.find(""), 0);
  EXPECT_EQ(vocabulary.find("b"), kNoToken);
  EXPECT_EQ(vocabulary.token(900), "long token");
  EXPECT_FALSE(vocabulary.has(4));
  EXPECT_FALSE(vocabulary.has(-1));
  EXPECT_FALSE(vocabulary.has(901));
  EXPECT_EQ(vocabulary.token(1), "");
}

}  // namespace
}  // namespace cadre::text
