// The template language against jinja2 (tests/data/make/make_chat.py), its places and its limits.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "cadre/error.h"
#include "generation/jinja/python_text.h"
#include "generation/jinja/template.h"
#include "generation/jinja/value_text.h"
#include "generation/tokenizer/utf8.h"

namespace cadre::jinja {
namespace {

nlohmann::ordered_json read_data(const std::string& name) {
  std::ifstream file(std::string(CADRE_TEST_DATA "/chat/") + name);
  return nlohmann::ordered_json::parse(file);
}

std::tm utc(int64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  gmtime_r(&time, &parts);
  return parts;
}

Dict to_variables(const nlohmann::ordered_json& json) {
  Dict variables;
  for (const auto& [key, value] : json.items()) variables.set(Value(key), from_json(value));
  return variables;
}

std::string render(std::string_view source, const nlohmann::ordered_json& variables = {},
                   const Limits& limits = {}) {
  return Template(source, "test.jinja").render(to_variables(variables), utc(0), limits);
}

/// The message of the error that `source` gives.
template <typename Family>
std::string fault_of(std::string_view source, const Limits& limits = {}) {
  try {
    const std::string text = render(source, {{"xs", {1, 2}}}, limits);
    ADD_FAILURE() << source.substr(0, 200) << " gave " << text.substr(0, 200);
  } catch (const Family& error) {
    return error.what();
  } catch (const Error& error) {
    ADD_FAILURE() << "another family of error: " << error.what();
  }
  return "";
}

TEST(Jinja, SmallTemplatesGiveWhatJinja2Gives) {
  const auto data = read_data("expressions.json");
  const Dict variables = to_variables(data["context"]);
  const std::tm now = utc(data["now"]);
  for (const auto& row : data["rows"]) {
    const std::string source = row["source"];
    SCOPED_TRACE(source);
    std::string text;
    std::string error;
    try {
      text = Template(source, "test.jinja").render(variables, now);
    } catch (const Error& caught) {
      error = caught.what();
    }
    if (row.contains("text")) {
      EXPECT_EQ(text, row["text"].get<std::string>());
      EXPECT_EQ(error, "");
    } else {
      EXPECT_NE(error, "") << "jinja2: " << row["error"] << ", ours: " << text;
    }
  }
}

uint64_t fnv1a(std::string_view text) {
  uint64_t value = 0xCBF29CE484222325;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return value;
}

TEST(Jinja, EveryCharacterHasPythonsCaseAndClass) {
  const auto data = read_data("case_hashes.json");
  std::map<std::string, std::string> texts;
  for (const auto& range : data["known"]) {
    for (char32_t c = range[0]; c <= range[1].get<char32_t>(); ++c) {
      std::string text;
      text::append_code_point(c, text);
      const auto is = [&](CharacterClass wanted) {
        return all_are(wanted, text) ? "True" : "False";
      };
      texts["upper"] += upper(text);
      texts["lower"] += lower(text);
      texts["title"] += title(text);
      texts["capitalize"] += capitalize(text);
      texts["repr"] += repr_text(text);
      texts["isalpha"] += is(CharacterClass::kAlpha);
      texts["isdigit"] += is(CharacterClass::kDigit);
      texts["isalnum"] += is(CharacterClass::kAlnum);
      texts["isspace"] += is(CharacterClass::kSpace);
      texts["isupper"] += is(CharacterClass::kUpper);
      texts["islower"] += is(CharacterClass::kLower);
    }
  }
  ASSERT_EQ(texts.size(), data["fnv1a"].size());
  for (const auto& [name, text] : texts) {
    EXPECT_EQ(fnv1a(text), data["fnv1a"][name].get<uint64_t>()) << name;
  }
}

void expect_parts(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << message << "\nlacks: " << part;
  }
}

TEST(Jinja, FaultsTellLineAndColumn) {
  expect_parts(fault_of<CheckpointError>("a\n  {{ xs[0] + 'é' + x.y }}"),
               {"test.jinja, line 2, column 6", "+", "int", "str"});
  expect_parts(fault_of<CheckpointError>("\u00e9{{ nil.x }}"),
               {"line 1, column 8", "'nil' is undefined"});
  expect_parts(fault_of<CheckpointError>("{% if xs %}\n\n{{ 1 +* 2 }}{% endif %}"),
               {"line 3, column 7", "expected an expression, got \"*\""});
  expect_parts(fault_of<CheckpointError>("{% for x in xs %}"),
               {"endfor", "line 1", "the end of the template"});
  expect_parts(fault_of<CheckpointError>("x {{ 'abc }}"),
               {"line 1, column 6", "string is not closed"});
  expect_parts(fault_of<CheckpointError>("{{ {'a': 1}.a.b.c }}"),
               {"column 16", "no attribute", "b"});
  expect_parts(fault_of<CheckpointError>("{{ xs.append(1) }}"), {"cannot change", "namespace()"});
  expect_parts(fault_of<CheckpointError>("{% macro m(a) %}{% endmacro %}{{ m(b=1) }}"),
               {"macro m", "b"});
  expect_parts(fault_of<InvalidArgument>("\n{{ raise_exception('not so') }}"),
               {"not so", "line 2"});
}

TEST(Jinja, WhatIsNotServedIsNamedWithWhatIs) {
  expect_parts(fault_of<Unsupported>("\n{{ 1 | nosuch }}"),
               {"line 2, column 8", "filter \"nosuch\"", "tojson"});
  expect_parts(fault_of<Unsupported>("{{ 1 is nosuch }}"), {"test \"nosuch\"", "defined"});
  expect_parts(fault_of<Unsupported>("{{ xs | map('nosuch') | list }}"), {"filter \"nosuch\""});
  expect_parts(fault_of<Unsupported>("{{ xs | select('nosuch') | list }}"), {"test \"nosuch\""});
  for (const char* statement :
       {"include 'x'", "import 'x' as y", "extends 'x'", "block x", "do 1", "autoescape true"}) {
    expect_parts(fault_of<Unsupported>(std::string("{% ") + statement + " %}"),
                 {"statement", "line 1", "macro"});
  }
  expect_parts(fault_of<Unsupported>("{% for x in xs recursive %}{% endfor %}"), {"recursive"});
  expect_parts(fault_of<Unsupported>("{{ '%s' % 1 }}"), {"%", "~"});
  expect_parts(fault_of<Unsupported>("{{ '\\N{BULLET}' }}"), {"\\N"});
  // What is never reached does no harm.
  EXPECT_EQ(render("{{ 'a' if true else 1 | nosuch }}"), "a");
}

std::string repeated(const std::string& text, size_t count) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out += text;
  return out;
}

TEST(Jinja, DeepTemplatesAreRefusedWithoutHarm) {
  constexpr size_t kMany = 100'000;
  const auto around = [](const char* open, const char* close) {
    return "{{ " + repeated(open, kMany) + "1" + repeated(close, kMany) + " }}";
  };
  for (const std::string& source :
       {around("(", ")"), around("[", "]"), around("{1:", "}"), around("not ", ""), around("-", ""),
        around("", " if 1 else 1"), around("", ".a"), around("", "[0]"), around("", "()"),
        around("", "|upper"), around("", " is odd"), repeated("{% if 1 %}", kMany),
        repeated("{% for x in xs %}", kMany), repeated("{% macro m() %}", kMany),
        "{% set " + repeated("(", kMany) + "a" + repeated(")", kMany) + " = 1 %}"}) {
    const std::string message = fault_of<CheckpointError>(source);
    EXPECT_TRUE(message.find("deeper") != message.npos ||
                message.find("cannot follow") != message.npos)
        << source.substr(0, 40) << ": " << message;
  }
  // Chains of operators have no depth.
  EXPECT_EQ(render("{{ 1" + repeated(" + 1", kMany) + " }}"), std::to_string(kMany + 1));
  EXPECT_EQ(render("{{ 0" + repeated(" or 0", kMany) + " }}"), "0");
  EXPECT_EQ(render("{% if 0 %}" + repeated("{% elif 0 %}", kMany) + "{% else %}x{% endif %}"), "x");
}

TEST(Jinja, DeepRenderingIsRefusedWithoutHarm) {
  const std::string macro = "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}";
  expect_parts(fault_of<CheckpointError>(macro), {"nests deeper", "line 1"});
  expect_parts(fault_of<CheckpointError>("{% macro m() %}{% call m() %}{% endcall %}{{ caller }}{% "
                                         "endmacro %}{% call m() %}{% endcall %}"),
               {"deeper"});
  const std::string nest =
      "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}";
  expect_parts(fault_of<CheckpointError>(nest), {"nested deeper than 200"});
  expect_parts(
      fault_of<CheckpointError>("{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x }}"),
      {"Namespace", "cannot be printed"});
  EXPECT_EQ(render("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{% endif %}x{% endmacro %}{{ m(60) }}"),
            std::string(61, 'x'));
}

TEST(Jinja, WorkAndTextAreBounded) {
  const std::string loops =
      repeated("{% for a in range(100000) %}", 5) + repeated("{% endfor %}", 5);
  expect_parts(fault_of<CheckpointError>(loops), {"no usable template", "line 1"});
  const std::string doubling =
      "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% "
      "endfor %}";
  expect_parts(fault_of<CheckpointError>(doubling), {"bytes of text"});
  expect_parts(fault_of<CheckpointError>("{{ 'x' * 9000000000000000000 }}"), {"repeated"});
  expect_parts(fault_of<CheckpointError>("{{ 'x' * 1000000000 }}"), {"bytes of text"});
  expect_parts(fault_of<CheckpointError>("{{ [1] * 1000000000 }}"), {"steps"});
  expect_parts(fault_of<CheckpointError>("{{ 'x' | indent(1000000000) }}"), {"bytes of text"});
  expect_parts(fault_of<CheckpointError>("{{ xs | tojson(indent=1000000000) }}"),
               {"bytes of text"});
  expect_parts(fault_of<CheckpointError>("{{ 9223372036854775807 + 1 }}"), {"64 bits"});
  expect_parts(fault_of<CheckpointError>("{{ 3 ** 100 }}"), {"64 bits"});
  expect_parts(fault_of<CheckpointError>("{{ (-9223372036854775807 - 1) // -1 }}"), {"64 bits"});
  expect_parts(fault_of<CheckpointError>("{{ 99999999999999999999 }}"), {"64 bits", "column 4"});
  const Limits few{.steps = 100};
  expect_parts(fault_of<CheckpointError>("{% for a in range(1000) %}{% endfor %}", few),
               {"100 steps"});
}

TEST(Jinja, OddBytesOfTheSourceAreRepaired) {
  EXPECT_EQ(render("a\xff{{ '\xc3' }}"), "a\xef\xbf\xbd\xef\xbf\xbd");
  const std::string nul("a\0{{ 'b\0' }}", 12);
  EXPECT_EQ(render(nul), std::string("a\0b\0", 4));
}

}  // namespace
}  // namespace cadre::jinja
