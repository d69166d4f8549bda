#include "io/json.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <string>

#include "cadre/error.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace cadre {
namespace {

using test::expect_error;
using test::TempDir;

void expect_refused(const std::string& text, std::initializer_list<std::string> parts) {
  expect_error<CheckpointError>([&] { parse_json_object(text, "some.json"); }, parts);
}

std::string nested(int depth) {  // arrays inside the object: depth levels in all
  return "{\"a\":" + std::string(static_cast<size_t>(depth - 1), '[') +
         std::string(static_cast<size_t>(depth - 1), ']') + "}";
}

TEST(ParseJson, ReadsAllKindsOfValues) {
  const Json json = parse_json_object(
      " {\"a\": [1, -2, 2.5, \"x\\u00e4\", true, false, null, {}, []], \"b\": {\"c\": {\"d\": 1}},"
      " \"e\": 18446744073709551615}\n",
      "some.json");
  EXPECT_EQ(json, Json::parse("{\"a\":[1,-2,2.5,\"x\\u00e4\",true,false,null,{},[]],"
                              "\"b\":{\"c\":{\"d\":1}},\"e\":18446744073709551615}"));
  EXPECT_EQ(parse_json_object("{}", "some.json").size(), 0u);
}

TEST(ParseJson, MalformedTextNamesFileAndOffset) {
  expect_refused("{\"a\": }", {"some.json", "malformed JSON at byte 7", "fetch it again"});
  expect_refused("", {"some.json", "malformed JSON"});
  expect_refused("{\"a\": 1", {"malformed JSON at byte 8"});
  expect_refused("{\"a\": 1} x", {"malformed JSON at byte 10"});
  expect_refused("{\"a\": 1,}", {"malformed JSON"});
  expect_refused("{'a': 1}", {"malformed JSON"});
  expect_refused("{\"a\": NaN}", {"malformed JSON"});
  expect_refused("{\"a\": 01}", {"malformed JSON"});
  expect_refused("{\"a\": 1} // comment", {"malformed JSON"});
}

TEST(ParseJson, NumbersThatFitNoDoubleAreRefused) {
  expect_refused("{\"a\": 1e999}", {"malformed JSON at byte", "1e999"});
}

TEST(ParseJson, InvalidUtf8IsRefused) {
  expect_refused("{\"a\": \"\xff\"}", {"malformed JSON at byte", "UTF-8"});
  expect_refused("{\"\xc0\x80\": 1}", {"malformed JSON at byte", "UTF-8"});
}

TEST(ParseJson, ANulByteDoesNotHideWhatFollows) {
  expect_refused(std::string("{}\0garbage", 10), {"malformed JSON at byte 2", "NUL"});
  expect_refused(std::string("{\"a\0\":1}", 8), {"malformed JSON at byte 3", "NUL"});
}

TEST(ParseJson, DuplicateKeysAreRefusedWithNameAndOffset) {
  expect_refused("{\"a\": 1, \"a\": 2}", {"malformed JSON at byte 12", "\"a\" occurs twice"});
  expect_refused("{\"b\": {\"x\": 1, \"y\": [], \"x\": {}}}", {"\"x\" occurs twice"});
  expect_refused("{\"a\": 1, \"\\u0061\": 2}", {"\"a\" occurs twice"});
}

TEST(ParseJson, TheSameKeyInTwoObjectsIsFine) {
  EXPECT_EQ(parse_json_object("{\"a\": {\"a\": 1}, \"b\": [{\"a\": 2}, {\"a\": 3}]}", "x").size(),
            2u);
}

TEST(ParseJson, NestingIsBounded) {
  EXPECT_NO_THROW(parse_json_object(nested(100), "some.json"));
  expect_refused(nested(101), {"malformed JSON at byte 105", "deeper than 100"});
  expect_refused(std::string(1'000'000, '['), {"deeper than 100"});
  std::string objects;
  for (int i = 0; i < 200; ++i) objects += "{\"a\":";
  expect_refused(objects, {"deeper than 100"});
}

TEST(ParseJson, TheTopLevelMustBeAnObject) {
  expect_refused("[1]", {"expected an object", "got array"});
  expect_refused("3", {"expected an object", "got number"});
  expect_refused("null", {"expected an object", "got null"});
}

TEST(ParseJson, MessagesStayShortWhateverTheInput) {
  const std::string text = "{\"" + std::string(100'000, 'x') + "\": }";
  try {
    parse_json_object(text, "some.json");
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_LT(std::string(error.what()).size(), 600u);
  }
}

TEST(ReadJsonFile, ReadsAndNamesTheFileInErrors) {
  const TempDir dir;
  EXPECT_EQ(read_json_file(dir.write("good.json", "{\"a\": 1}"))["a"], 1);
  expect_error<CheckpointError>([&] { read_json_file(dir / "none.json"); },
                                {"none.json", "No such file", "check the path"});
  expect_error<CheckpointError>([&] { read_json_file(dir.write("bad.json", "{")); },
                                {"bad.json", "malformed JSON"});
  expect_error<CheckpointError>([&] { read_json_file(dir.path()); }, {"regular file", "a folder"});
}

TEST(ReadJsonFile, RefusesWhatIsTooLarge) {
  const TempDir dir;
  const auto path = dir.write("big.json", "{\"a\": 1}");
  EXPECT_NO_THROW(read_json_file(path, 8));
  expect_error<CheckpointError>([&] { read_json_file(path, 7); },
                                {"big.json", "at most 7 bytes", "got 8"});
}

TEST(ReadJsonFile, DoesNotWaitForAPipe) {
  const TempDir dir;
  ASSERT_EQ(mkfifo((dir / "pipe").c_str(), 0600), 0);
  expect_error<CheckpointError>([&] { read_json_file(dir / "pipe"); },
                                {"pipe", "expected a regular file"});
}

ConfigReader reader(const std::string& text) {
  return ConfigReader(parse_json_object(text, "config.json"), "config.json");
}

// What every accessor says about a wrong or missing value.
template <typename Access>
void expect_key_error(Access access, std::initializer_list<std::string> parts) {
  expect_error<CheckpointError>(access, parts);
}

TEST(ConfigReader, TellsNullFromAbsentAndGivesTheWholePathOfAKey) {
  const ConfigReader config(parse_json_object(R"({"a": null, "b": {"c": null, "d": 1}})", "f"),
                            "f");
  EXPECT_TRUE(config.is_null("a"));
  EXPECT_FALSE(config.has("a"));
  EXPECT_FALSE(config.is_null("b"));
  EXPECT_FALSE(config.is_null("c"));
  EXPECT_TRUE(config.object("b").is_null("c"));
  EXPECT_FALSE(config.object("b").is_null("d"));
  EXPECT_EQ(config.path("a"), "a");
  EXPECT_EQ(config.object("b").path("c"), "b.c");
}

TEST(ConfigReader, ReadsEveryType) {
  const ConfigReader config = reader(
      "{\"i\": 7, \"f\": 1e-6, \"b\": true, \"t\": \"silu\", \"l\": [1, 2], \"s\": [\"x\"],"
      " \"o\": {\"k\": -3}}");
  EXPECT_EQ(config.integer("i"), 7);
  EXPECT_EQ(config.number("f"), 1e-6);
  EXPECT_EQ(config.number("i"), 7.0);
  EXPECT_TRUE(config.boolean("b"));
  EXPECT_EQ(config.text("t"), "silu");
  EXPECT_EQ(config.integers("l"), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(config.integers("i"), (std::vector<int64_t>{7}));
  EXPECT_EQ(config.texts("s"), (std::vector<std::string>{"x"}));
  EXPECT_EQ(config.object("o").integer("k"), -3);
  EXPECT_EQ(config.origin(), "config.json");
  EXPECT_EQ(config.json()["t"], "silu");
}

TEST(ConfigReader, NullCountsAsAbsent) {
  const ConfigReader config = reader("{\"n\": null}");
  EXPECT_FALSE(config.has("n"));
  EXPECT_FALSE(config.has("x"));
  EXPECT_EQ(config.integer_or("n", 5), 5);
  EXPECT_EQ(config.number_or("n", 0.5), 0.5);
  EXPECT_TRUE(config.boolean_or("n", true));
  EXPECT_EQ(config.text_or("n", "d"), "d");
  expect_key_error([&] { config.integer("n"); }, {"config.json", "\"n\"", "missing or null"});
}

TEST(ConfigReader, AFallbackDoesNotExcuseAWrongValue) {
  const ConfigReader config = reader("{\"a\": \"x\", \"b\": 1}");
  expect_key_error([&] { config.integer_or("a", 1); }, {"\"a\"", "an integer", "\"x\""});
  expect_key_error([&] { config.number_or("a", 1); }, {"\"a\"", "a number"});
  expect_key_error([&] { config.boolean_or("b", true); }, {"\"b\"", "true or false", "number 1"});
  expect_key_error([&] { config.text_or("b", "d"); }, {"\"b\"", "a text", "number 1"});
}

TEST(ConfigReader, WrongTypesNameFileKeyExpectedAndGot) {
  const ConfigReader config = reader("{\"a\": [1, \"x\"], \"o\": {}, \"f\": 2.5, \"t\": true}");
  expect_key_error([&] { config.integer("f"); }, {"config.json", "\"f\"", "an integer", "2.5"});
  expect_key_error([&] { config.integer("t"); }, {"an integer", "true"});
  expect_key_error([&] { config.number("a"); }, {"a number", "a list of 2"});
  expect_key_error([&] { config.boolean("o"); }, {"true or false", "an object"});
  expect_key_error([&] { config.text("o"); }, {"a text", "an object"});
  expect_key_error([&] { config.integers("a"); }, {"list of integers", "the text \"x\""});
  expect_key_error([&] { config.integers("o"); }, {"list of integers", "an object"});
  expect_key_error([&] { config.texts("a"); }, {"list of texts", "the number 1"});
  expect_key_error([&] { config.texts("f"); }, {"list of texts", "2.5"});
  expect_key_error([&] { config.object("a"); }, {"an object", "a list of 2"});
}

TEST(ConfigReader, IntegersAreHeldToTheirRange) {
  const ConfigReader config = reader(
      "{\"a\": 0, \"big\": 9223372036854775808, \"top\": 9223372036854775807,"
      " \"low\": -9223372036854775808}");
  expect_key_error([&] { config.integer("a", 1); }, {"\"a\"", "an integer >= 1", "number 0"});
  expect_key_error([&] { config.integer("a", 1, 8); }, {"an integer from 1 to 8", "number 0"});
  expect_key_error([&] { config.integer("top", INT64_MIN, 8); }, {"an integer <= 8"});
  expect_key_error([&] { config.integer_or("a", 5, 1); }, {"an integer >= 1"});
  expect_key_error([&] { config.integer("big"); }, {"an integer", "9223372036854775808"});
  EXPECT_EQ(config.integer("top"), INT64_MAX);
  EXPECT_EQ(config.integer("low"), INT64_MIN);
}

TEST(ConfigReader, NestedKeysAreNamedByTheirPath) {
  const ConfigReader config = reader("{\"rope\": {\"inner\": {\"theta\": \"x\"}}}");
  const ConfigReader inner = config.object("rope").object("inner");
  expect_key_error([&] { inner.number("theta"); }, {"\"rope.inner.theta\""});
  expect_key_error(
      [&] {
        inner.first_of({"p", "q"});
      },
      {"\"rope.inner.p\"", "\"rope.inner.q\"", "none of them"});
}

TEST(ConfigReader, NestedReadersOutliveTheirParent) {
  std::optional<ConfigReader> inner;
  inner = reader("{\"o\": {\"k\": 1}}").object("o");
  EXPECT_EQ(inner->integer("k"), 1);
}

TEST(ConfigReader, FirstOfPicksTheFirstPresentName) {
  const ConfigReader config = reader("{\"num_local_experts\": 8, \"num_experts\": null}");
  EXPECT_EQ(config.first_of({"num_experts", "num_local_experts"}), "num_local_experts");
}

TEST(ConfigReader, TheDocumentMustBeAnObject) {
  expect_error<CheckpointError>([] { ConfigReader(Json::array({1}), "config.json"); },
                                {"config.json", "expected an object", "a list of 1"});
}

}  // namespace
}  // namespace cadre
