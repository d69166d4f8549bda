// The tokenizer's parts: UTF-8, the byte alphabet, Unicode classes, pattern syntax, added tokens,
// NFC; and whole tokenizers on long and invalid input and from several threads.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "cadre/error.h"
#include "cadre/tokenizer.h"
#include "generation/tokenizer/added_tokens.h"
#include "generation/tokenizer/byte_alphabet.h"
#include "generation/tokenizer/normalizer.h"
#include "generation/tokenizer/pattern_syntax.h"
#include "generation/tokenizer/split_pattern.h"
#include "generation/tokenizer/unicode.h"
#include "generation/tokenizer/utf8.h"

namespace cadre::text {
namespace {

Json read_json(const std::string& name) {
  std::ifstream in(std::string(CADRE_TEST_DATA) + "/tokenizers/" + name);
  return Json::parse(in);
}

std::vector<bool> members(const Json& ranges) {
  std::vector<bool> set(0x110000);
  for (const auto& range : ranges) {
    for (size_t c = range[0]; c <= range[1].get<size_t>(); ++c) set[c] = true;
  }
  return set;
}

template <typename F>
void for_each_scalar(F&& visit) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c < 0xD800 || c > 0xDFFF) visit(c);
  }
}

std::string lossy(std::string_view bytes) {
  std::string out;
  EXPECT_EQ(append_lossy(bytes, true, out), bytes.size());
  return out;
}

const std::string kBad = "\xEF\xBF\xBD";

TEST(Utf8, EveryScalarRoundTrips) {
  for_each_scalar([](char32_t c) {
    std::string text;
    append_code_point(c, text);
    size_t length = 0;
    ASSERT_TRUE(is_valid_utf8(text)) << static_cast<uint32_t>(c);
    ASSERT_EQ(code_point_at(text, 0, length), c);
    ASSERT_EQ(length, text.size());
    ASSERT_EQ(code_point_before("x" + text, text.size() + 1, length), c);
  });
}

// Table 3-8 of the Unicode standard and its like: one U+FFFD per maximal ill-formed part.
TEST(Utf8, IllFormedPartsBecomeOneReplacementEach) {
  EXPECT_EQ(lossy("\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64"),
            "a" + kBad + kBad + kBad + "b" + kBad + "c" + kBad + kBad + "d");
  EXPECT_EQ(lossy("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"),
            kBad + kBad + kBad + kBad + kBad + kBad + kBad + kBad + "A");
  EXPECT_EQ(lossy("\xED\xA0\x80"), kBad + kBad + kBad);
  EXPECT_EQ(lossy("\xF4\x91\x92\x93\xFF\x41"), kBad + kBad + kBad + kBad + kBad + "A");
  EXPECT_EQ(lossy("\xE2\x82"), kBad);
  EXPECT_FALSE(is_valid_utf8("abcdefgh\xE2\x82"));
}

TEST(Utf8, AnUnfinishedEndWaits) {
  std::string out;
  EXPECT_EQ(append_lossy("a\xE2\x82", false, out), 1u);
  EXPECT_EQ(out, "a");
}

TEST(ByteAlphabet, EveryByteRoundTripsAndOtherCharactersAreRefused) {
  std::string bytes;
  for (int b = 0; b < 256; ++b) bytes += static_cast<char>(b);
  std::string spelled;
  append_in_alphabet(bytes, spelled);
  std::string back = "kept";
  EXPECT_TRUE(append_bytes_of_token(spelled, back));
  EXPECT_EQ(back, "kept" + bytes);
  EXPECT_EQ(character_of_byte(' '), U'\u0120');
  EXPECT_EQ(character_of_byte('\n'), U'\u010A');
  back = "kept";
  EXPECT_FALSE(append_bytes_of_token("a b", back));
  EXPECT_FALSE(append_bytes_of_token("\u0144", back));
  EXPECT_EQ(back, "kept");
}

TEST(Unicode, WordAndSpaceEqualTheReferenceOnEveryCodePoint) {
  const Json json = read_json("word_and_space.json");
  const auto word = members(json["word"]);
  const auto space = members(json["space"]);
  for_each_scalar([&](char32_t c) {
    EXPECT_EQ(is_word(c), word[c]) << std::hex << static_cast<uint32_t>(c);
    EXPECT_EQ(is_space(c), space[c]) << std::hex << static_cast<uint32_t>(c);
  });
}

TEST(Unicode, RegexClassesEqualTheReferenceOnEveryCodePoint) {
  const Json classes = read_json("hf_unicode_classes.json");
  ASSERT_GE(classes.size(), 12u);
  MatchScratch scratch;
  for (const auto& item : classes.items()) {
    const SplitPattern pattern(item.key());
    const auto expected = members(item.value());
    std::string shadow;
    for_each_scalar([&](char32_t c) {
      std::string text;
      append_code_point(c, text);
      const bool replaced = replace_newer(text, shadow);
      ASSERT_EQ(replaced ? shadow.size() : text.size(), text.size());
      const auto hit = pattern.find(replaced ? shadow : text, 0, scratch);
      EXPECT_EQ(hit.has_value(), expected[c])
          << item.key() << " " << std::hex << static_cast<uint32_t>(c);
    });
  }
}

TEST(Unicode, ReplacingNewerOnesKeepsTheRest) {
  std::string shadow;
  EXPECT_FALSE(replace_newer("plain \u00e9 \u4e00", shadow));
  EXPECT_TRUE(replace_newer("a\u0897b\U00031350c", shadow));
  EXPECT_EQ(shadow.size(), std::string("a\u0897b\U00031350c").size());
  EXPECT_EQ(shadow.front(), 'a');
  EXPECT_EQ(shadow.back(), 'c');
  EXPECT_TRUE(is_newer(0x31350));
  EXPECT_FALSE(is_newer(0x4E00));
}

TEST(PatternSyntax, WhatBothEnginesReadAlikePasses) {
  for (const char* pattern :
       {R"((?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}]+[\r\n/]*|\s+(?!\S)|\s+)",
        R"((?i)a|[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+)", R"(\x{1F600}|\x41|(?<=a)b)"}) {
    EXPECT_EQ(find_foreign_syntax(pattern), std::nullopt) << pattern;
  }
}

TEST(PatternSyntax, WhatTheyReadDifferentlyIsNamed) {
  for (const char* pattern : {R"(\w+)", R"(a\b)", R"(\h)", R"([a-z&&[^b]])", R"([[:alpha:]])",
                              R"(\p{L}{1,3}+)", R"((?m:.))", R"(a(?i)b)", R"((*UTF)a)", R"(\1)",
                              R"([]a])", R"([a)", R"(\pL)", R"(a{,3})"}) {
    const auto foreign = find_foreign_syntax(pattern);
    ASSERT_TRUE(foreign) << pattern;
    EXPECT_NE(foreign->find("at offset"), std::string::npos);
  }
}

TEST(PatternSyntax, QuotedTextMatchesItself) {
  const std::string text = "a.b*[c]\\(d)^$ {2}|?+#-\u00e9";
  MatchScratch scratch;
  const auto hit = SplitPattern(quote_pattern(text)).find("x" + text, 0, scratch);
  ASSERT_TRUE(hit);
  EXPECT_EQ(hit->begin, 1u);
  EXPECT_EQ(hit->end, text.size() + 1);
}

TEST(SplitPattern, ReachingALimitIsAnErrorThatSaysWhere) {
  const SplitPattern pattern("(?:a+)+(?=[bc])");
  MatchScratch scratch;
  try {
    pattern.find(std::string(40, 'a'), 0, scratch);
    FAIL() << "no limit was reached";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("gave up at byte 0 of a piece of 40 bytes"),
              std::string::npos)
        << error.what();
  }
}

TEST(StringMatcher, FindsTheLeftmostThenTheLongest) {
  StringMatcher matcher;
  EXPECT_TRUE(matcher.empty());
  matcher.add("ab", 0);
  matcher.add("abcd", 1);
  matcher.add("bc", 2);
  matcher.add("ab", 3);
  EXPECT_FALSE(matcher.empty());
  const auto expect = [&](std::string_view text, size_t from, int32_t pattern, size_t begin) {
    const auto hit = matcher.find(text, from);
    EXPECT_EQ(hit.pattern, pattern);
    EXPECT_EQ(hit.begin, begin);
  };
  expect("xabcde", 0, 1, 1);
  expect("xabce", 0, 0, 1);
  expect("xabce", 2, 2, 2);
  expect("xyz", 0, -1, 3);
}

TEST(Normalizer, NfcComposesReordersAndStopsAtMarksUnknownToTheReference) {
  EXPECT_EQ(to_nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(to_nfc("a\u0301\u0327"), "\u00e1\u0327");
  EXPECT_EQ(to_nfc("\u1100\u1161\u11a8"), "\uac01");
  EXPECT_EQ(to_nfc("\u2126"), "\u03a9");
  EXPECT_EQ(to_nfc("\u1e42\u0c3c"), "\u1e42\u0c3c");  // U+0C3C is a mark since Unicode 14
  EXPECT_EQ(to_nfc("\U00011935\U00011930"), "\U00011935\U00011930");  // composes since 13
}

// apply() takes a short cut for characters that it holds to be stable: is every one of them?
TEST(Normalizer, NfcOfEveryCharacterAfterLettersIsTheSameWithoutShortCuts) {
  const Json json = {{"type", "NFC"}};
  const std::string origin = "test";
  const Normalizer normalizer = Normalizer::parse(JsonNode(json, origin));
  std::string buffer;
  for (const std::string before : {"", "e", "\u03b1", "\u0438", "\u304b", "\uac00", "\u2190"}) {
    for (char32_t c = 0; c < 0x20000; ++c) {
      if (c >= 0xD800 && c <= 0xDFFF) continue;
      std::string text = before;
      append_code_point(c, text);
      ASSERT_EQ(normalizer.apply(text, buffer), to_nfc(text)) << std::hex << uint32_t{c};
    }
  }
}

TEST(Normalizer, RefusesToGrowATextBeyondReason) {
  const Json replace = {
      {"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(100, 'a')}};
  const Json json = {{"type", "Sequence"}, {"normalizers", {replace, replace, replace, replace}}};
  const std::string origin = "test";
  const Normalizer normalizer = Normalizer::parse(JsonNode(json, origin));
  std::string buffer;
  EXPECT_EQ(normalizer.apply("b", buffer), "b");
  EXPECT_THROW(normalizer.apply("a", buffer), Error);
}

TEST(Tokenizer, InvalidUtf8IsReplacedFirst) {
  const auto tokenizer =
      Tokenizer::from_file(std::string(CADRE_ASSETS) + "/tiny-moe/tokenizer.json");
  EXPECT_EQ(tokenizer.encode("a\xFF"
                             "b\xE2\x82"),
            tokenizer.encode("a" + kBad + "b" + kBad));
}

TEST(Tokenizer, TellsItsVocabulary) {
  const auto tokenizer =
      Tokenizer::from_file(std::string(CADRE_ASSETS) + "/tiny-moe/tokenizer.json");
  EXPECT_EQ(tokenizer.vocab_size(), 4096);
  EXPECT_EQ(tokenizer.token_to_id("<|im_start|>"), 1);
  EXPECT_EQ(tokenizer.token_to_id("no such token"), std::nullopt);
  EXPECT_EQ(tokenizer.id_to_token(67), "a");
  EXPECT_EQ(tokenizer.id_to_token(4096), std::nullopt);
  EXPECT_EQ(tokenizer.id_to_token(-1), std::nullopt);
  EXPECT_TRUE(tokenizer.is_special(2));
  EXPECT_FALSE(tokenizer.is_special(67));
  EXPECT_FALSE(tokenizer.is_special(-7));
}

// Each took minutes if any part were quadratic; ctest's time limit is the guard.
TEST(Tokenizer, LongRunsOfOneKindAreLinear) {
  const std::string tiny = std::string(CADRE_ASSETS) + "/tiny-moe/tokenizer.json";
  const std::string nfc =
      std::string(CADRE_TEST_DATA) + "/tokenizers/synthetic/added_rules.tokenizer.json";
  std::string marks = "e";
  for (int i = 0; i < 100000; ++i) marks += "\u0301\u0327";
  for (const std::string& file : {tiny, nfc}) {
    const auto tokenizer = Tokenizer::from_file(file);
    for (const std::string& text : {std::string(300000, 'a'), std::string(300000, ' '),
                                    std::string(300000, '!'), std::string(300000, '\n'), marks}) {
      const auto ids = tokenizer.encode(text);
      EXPECT_GT(ids.size(), 1000u);
      EXPECT_TRUE(file != tiny || tokenizer.decode(ids) == text);
    }
  }
}

TEST(Tokenizer, ThreadsEncodeAtTheSameTime) {
  const auto tokenizer =
      Tokenizer::from_file(std::string(CADRE_ASSETS) + "/tiny-moe/tokenizer.json");
  const std::string text = "The king said unto his servants, \u00e9\u4e00 12345";
  const auto expected = tokenizer.encode(text);
  std::vector<int> equal(4);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < equal.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) equal[t] += tokenizer.encode(text) == expected ? 1 : 0;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(equal, std::vector<int>(4, 200));
}

TEST(TextStream, HoldsBackUnfinishedCharactersOnly) {
  const auto tokenizer =
      Tokenizer::from_file(std::string(CADRE_ASSETS) + "/tiny-moe/tokenizer.json");
  const auto id = [&](uint8_t byte) {
    std::string token;
    append_code_point(character_of_byte(byte), token);
    return tokenizer.token_to_id(token).value();
  };
  TextStream stream(tokenizer);
  EXPECT_EQ(stream.push(id('a')), "a");
  EXPECT_EQ(stream.push(id(0xE2)), "");
  EXPECT_EQ(stream.push(id(0x82)), "");
  EXPECT_EQ(stream.push(id(0xAC)), "\u20ac");
  EXPECT_EQ(stream.push(id(0xE2)), "");
  EXPECT_EQ(stream.push(id('b')), kBad + "b");
  EXPECT_EQ(stream.push(id(0xF0)), "");
  EXPECT_EQ(stream.push(0), "");  // special, skipped
  EXPECT_EQ(stream.finish(), kBad);
  EXPECT_EQ(stream.push(id('c')), "c");
  EXPECT_EQ(stream.finish(), "");
}

TEST(TextStream, HoldsBackBytesOfByteFallbackUntilTheirRunEnds) {
  const auto tokenizer = Tokenizer::from_file(std::string(CADRE_TEST_DATA) +
                                              "/tokenizers/families/mixtral.tokenizer.json");
  const auto id = [&](std::string_view token) { return tokenizer.token_to_id(token).value(); };
  TextStream stream(tokenizer);
  EXPECT_EQ(stream.push(id("<s>")), "");           // special, skipped
  EXPECT_EQ(stream.push(id("\u2581the")), "the");  // the space before all text goes
  EXPECT_EQ(stream.push(id("\u2581a")), " a");
  for (const char* byte : {"<0xF0>", "<0x9F>", "<0x91>", "<0x8D>"}) {
    EXPECT_EQ(stream.push(id(byte)), "");
  }
  EXPECT_EQ(stream.push(id("\u2581a")), "\U0001f44d a");
  EXPECT_EQ(stream.push(id("<0xE2>")), "");
  EXPECT_EQ(stream.push(id("<0x82>")), "");
  EXPECT_EQ(stream.push(id("a")), kBad + kBad + "a");
  EXPECT_EQ(stream.push(id("<0x41>")), "");
  EXPECT_EQ(stream.finish(), "A");
}

}  // namespace
}  // namespace cadre::text
