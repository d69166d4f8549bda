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

Json model_json(const Names& ranked = kMerges) {
  Json vocab = {{"a", 0}, {"b", 1}, {"c", 2}};
  Json merges = Json::array();
  for (const std::string& merge : ranked) {
    merges.push_back(merge);
    std::string joined = merge;
    joined.erase(joined.find(' '), 1);
    if (!vocab.contains(joined)) vocab[joined] = vocab.size();
  }
  return {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}};
}

Names merge_plainly(const std::string& word, const Names& ranked = kMerges) {
  Names symbols;
  for (const char c : word) symbols.emplace_back(1, c);
  while (true) {
    size_t best_rank = ranked.size();
    size_t best = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto it = std::find(ranked.begin(), ranked.end(), symbols[i] + " " + symbols[i + 1]);
      const auto rank = static_cast<size_t>(it - ranked.begin());
      if (rank < best_rank) best_rank = rank, best = i;
    }
    if (best_rank == ranked.size()) return symbols;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

Names encode_names(const Bpe& bpe, Bpe::Scratch& scratch, const std::string& piece) {
  std::vector<TokenId> ids;
  bpe.encode(piece, scratch, ids);
  Names tokens;
  for (const TokenId id : ids) tokens.emplace_back(bpe.vocabulary().token(id));
  return tokens;
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
      ASSERT_EQ(encode_names(bpe, scratch, word), merge_plainly(word)) << word;
    }
  }
}

// Several merges that make the same token, and merges that come before those that make their
// halves.
TEST(Bpe, LongWordsMergeByRankWhateverTheOrderOfMerges) {
  Names ranked = kMerges;
  for (const char* merge : {"a ab", "aa b", "aab aab", "ab a", "a ba", "aba b", "b c", "bc a"}) {
    ranked.emplace_back(merge);
  }
  const std::string origin = "test";
  std::mt19937_64 random(4);
  for (int round = 0; round < 200; ++round) {
    std::shuffle(ranked.begin(), ranked.end(), random);
    const Json json = model_json(ranked);
    const Bpe bpe = Bpe::parse(JsonNode(json, origin), false);
    Bpe::Scratch scratch;
    std::string word(60 + random() % 200, 'a');
    for (char& c : word) c = "aaabbc"[random() % 6];
    ASSERT_EQ(encode_names(bpe, scratch, word), merge_plainly(word, ranked)) << json;
  }
}

// A vocabulary of all bytes, letters and the mark, where words start with the mark.
Json word_model_json() {
  Json vocab;
  const auto add = [&vocab](const std::string& token) { vocab[token] = vocab.size(); };
  for (int byte = 0; byte < 256; ++byte) {
    const char* hex = "0123456789ABCDEF";
    add(std::string("<0x") + hex[byte >> 4] + hex[byte & 15] + ">");
  }
  for (const char* token : {"_", "a", "b", "c", "ab", "_a", "_ab", "__", "_abc"}) add(token);
  const Json merges = {"a b", "_ a", "_ ab", "_ _", "_ab c"};
  return {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}, {"byte_fallback", true}};
}

std::string repeat(const std::string& text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

TEST(Bpe, LongPiecesAreCutWhereNoMergeJoins) {
  Json json = word_model_json();
  const std::string origin = "test";
  const std::string text = repeat("_abc__ab?c", 30);
  const Names once = {"_abc", "_", "_ab", "<0x3F>", "c"};
  Names expected;
  for (int i = 0; i < 30; ++i) expected.insert(expected.end(), once.begin(), once.end());

  const Bpe bpe = Bpe::parse(JsonNode(json, origin), false);
  Bpe::Scratch scratch;
  EXPECT_EQ(encode_names(bpe, scratch, text), expected);
  EXPECT_EQ(scratch.num_candidates, 0u);  // every part was short

  // A merge across the start of words, and no place is left to cut at.
  json["vocab"]["c_"] = 1000;
  json["vocab"]["b?"] = 1001;
  json["vocab"]["?"] = 1002;
  json["vocab"]["?c"] = 1003;
  for (const char* merge : {"c _", "b ?", "? c"}) json["merges"].push_back(merge);
  const Bpe joined = Bpe::parse(JsonNode(json, origin), false);
  encode_names(joined, scratch = {}, text);
  EXPECT_GT(scratch.num_candidates, 0u);
}

TEST(Bpe, PiecesAreNotCutWhereCharactersMayBeMissing) {
  const std::string origin = "test";
  const std::string text = repeat("a?b", 40);  // without "?", a and b meet
  Json json = word_model_json();
  json["vocab"].erase("<0x3F>");
  const Bpe dropping = Bpe::parse(JsonNode(json, origin), false);
  Bpe::Scratch scratch;
  EXPECT_EQ(encode_names(dropping, scratch, text), Names(40, "ab"));

  json["vocab"]["<unk>"] = 2000;
  json["unk_token"] = "<unk>";
  json["fuse_unk"] = true;
  const Bpe fusing = Bpe::parse(JsonNode(json, origin), false);
  EXPECT_EQ(encode_names(fusing, scratch = {}, std::string(100, '?')), Names(1, "<unk>"));

  // Byte tokens that merge: their characters are not those of the text.
  json = word_model_json();
  json["vocab"]["<0x3F>b"] = 2000;
  json["merges"] = {"<0x3F> b"};
  const Bpe merging = Bpe::parse(JsonNode(json, origin), false);
  const Names names = encode_names(merging, scratch = {}, text);
  EXPECT_EQ(std::count(names.begin(), names.end(), "<0x3F>b"), 40);
}

TEST(Bpe, WorkOnLongPiecesIsLinear) {
  const Json json = model_json();
  const std::string origin = "test";
  const Bpe bpe = Bpe::parse(JsonNode(json, origin), false);
  std::mt19937_64 random(5);
  for (const size_t size : {1000u, 10000u, 100000u}) {
    std::string mixed(size, 'a');
    for (char& c : mixed) c = "aaabbc"[random() % 6];
    for (const std::string& text : {std::string(size, 'a'), mixed}) {
      Bpe::Scratch scratch;
      std::vector<TokenId> ids;
      bpe.encode(text, scratch, ids);
      // No two neighbours at first, and for each merge at most one of the pairs that it changes or
      // frees at either side, and its own.
      EXPECT_LE(scratch.num_candidates, size / 2 + 1 + 3 * (size - ids.size()));
      EXPECT_GE(scratch.num_candidates, size - ids.size());  // each merge came from the heap
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
  table.set(1, 2, make_merge(0, 5));
  table.set(2, 1, make_merge(1, 6));
  table.set(1, 2, make_merge(2, 7));
  EXPECT_EQ(id_of(table.find(1, 2)), 7);
  EXPECT_EQ(rank_of(table.find(2, 1)), 1u);
  EXPECT_EQ(table.find(2, 2), kNoMerge);
}

TEST(MergeTable, FindsAllOfManyAndNothingElse) {
  MergeTable table;
  table.reserve(5000);
  for (TokenId i = 0; i < 5000; ++i) table.set(i, i * 7 % 5000, make_merge(1, i));
  for (TokenId i = 0; i < 5000; ++i) {
    EXPECT_EQ(id_of(table.find(i, i * 7 % 5000)), i);
    EXPECT_EQ(table.find(i, i * 7 % 5000 + 1), kNoMerge);
  }
}

TEST(JoinFilter, KnowsWhatWasAddedAndLittleElse) {
  JoinFilter filter;
  for (char32_t c = 0; c < 1000; ++c) filter.add(c, c * 31);
  size_t others = 0;
  for (char32_t c = 0; c < 1000; ++c) {
    EXPECT_TRUE(filter.may_join(c, c * 31));
    others += filter.may_join(c, c * 31 + 1) ? 1 : 0;
  }
  EXPECT_LT(others, 100u);
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
