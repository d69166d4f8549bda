// Chat templates: the conversations of tests/data/chat as jinja2 renders them (make_chat.py), where
// templates are found, and what typed messages become.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cadre/chat.h"
#include "cadre/error.h"
#include "support/temp_dir.h"

namespace cadre {
namespace {

using OrderedJson = nlohmann::ordered_json;
using test::TempDir;

const std::string kData = CADRE_TEST_DATA "/chat/";

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

uint64_t fnv1a(const std::string& text) {
  uint64_t value = 0xCBF29CE484222325;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return value;
}

ChatOptions options_of(const OrderedJson& conversation, int64_t now) {
  ChatOptions options{.add_generation_prompt = conversation.value("add_generation_prompt", false),
                      .now = now};
  if (conversation.contains("tools")) options.tools = conversation["tools"].dump();
  OrderedJson variables = conversation.value("variables", OrderedJson::object());
  if (conversation.contains("documents")) variables["documents"] = conversation["documents"];
  options.variables = variables.dump();
  return options;
}

class Conversations : public testing::TestWithParam<const char*> {};

TEST_P(Conversations, RenderAsJinja2RendersThem) {
  const auto data = OrderedJson::parse(read_text(kData + "conversations.json"));
  const std::string name = GetParam();
  const bool is_tiny = name == "tiny_moe";
  const std::map<std::string, std::string> special =
      is_tiny ? std::map<std::string, std::string>{{"eos_token", "<|endoftext|>"},
                                                   {"pad_token", "<|endoftext|>"}}
              : data["special_tokens"].get<std::map<std::string, std::string>>();
  const ChatTemplate chat =
      ChatTemplate::from_text(is_tiny ? data["tiny_moe"].get<std::string>()
                                      : read_text(kData + "templates/" + name + ".jinja"),
                              special, name);
  int count = 0;
  for (const auto& row : data["cases"]) {
    if (row["template"] != name) continue;
    const auto& conversation = data["conversations"][row["conversation"].get<size_t>()];
    SCOPED_TRACE("conversation " + row["conversation"].dump());
    ++count;
    std::string text;
    std::string error;
    try {
      text =
          chat.render_json(conversation["messages"].dump(), options_of(conversation, data["now"]));
    } catch (const Error& caught) {
      error = caught.what();
    }
    if (row.contains("error")) {
      EXPECT_NE(error, "") << "jinja2: " << row["error"] << ", ours: " << text;
    } else if (row.contains("text")) {
      EXPECT_EQ(text, row["text"].get<std::string>()) << error;
    } else {
      EXPECT_EQ(text.size(), row["bytes"].get<size_t>()) << error;
      EXPECT_EQ(std::to_string(fnv1a(text)), row["fnv1a"].get<std::string>());
    }
  }
  EXPECT_GE(count, 30);
}

INSTANTIATE_TEST_SUITE_P(Templates, Conversations,
                         testing::Values("qwen3", "deepseek_v3", "tiny_moe", "think_tools",
                                         "alternating", "typed_tools", "visible_text", "documents",
                                         "xml_calls", "plain_tags", "images", "sections"),
                         [](const auto& test) { return std::string(test.param); });

/// The message of the error of family `Family` that `call` throws.
template <typename Family>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "no error";
  } catch (const Family& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another family of error: " << error.what();
  }
  return "";
}

void expect_parts(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << message << "\nlacks: " << part;
  }
}

const std::vector<ChatMessage> kHello = {{.role = "user", .content = "Hi"}};
const std::string kMark = "{{ bos_token }}{{ messages[0].content }}";

std::string rendered(const std::filesystem::path& folder, const ChatOptions& options = {}) {
  return ChatTemplate::from_model_folder(folder).render(kHello, options);
}

TEST(ChatTemplate, TypedMessagesBecomeTheUsualDicts) {
  const ChatTemplate chat = ChatTemplate::from_text("{{ messages | tojson }}");
  const std::vector<ChatMessage> messages = {
      {.role = "system", .content = "S\xff"},
      {.role = "user", .parts = {{.text = "see"}, {.type = ChatPart::Type::kImage}, {.text = ""}}},
      {.role = "assistant",
       .content = {},
       .reasoning_content = "hm",
       .tool_calls = {{.name = "f", .arguments = R"({"b": 1, "a": [2.0]})", .id = "c1"},
                      {.name = "g"}}},
      {.role = "tool", .content = "42", .tool_call_id = "c1"}};
  EXPECT_EQ(chat.render(messages),
            R"([{"role": "system", "content": "S�"}, )"
            R"({"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image"}, )"
            R"({"type": "text", "text": ""}]}, )"
            R"({"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [)"
            R"({"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, )"
            R"("a": [2.0]}}}, {"type": "function", "function": {"name": "g", "arguments": {}}}]}, )"
            R"({"role": "tool", "content": "42", "tool_call_id": "c1"}])");
}

TEST(ChatTemplate, OptionsReachTheTemplate) {
  const ChatTemplate chat = ChatTemplate::from_text(
      "{{ add_generation_prompt }} {{ tools }} {{ documents }} {{ mode }} {{ bos_token }} "
      "{{ strftime_now('%Y') }}",
      {{"bos_token", "<s>"}});
  EXPECT_EQ(chat.render(kHello, {.now = 86400 * 200}), "True None None  <s> 1970");
  EXPECT_EQ(chat.render(kHello, {.add_generation_prompt = false,
                                 .tools = R"([{"a": 1}])",
                                 .variables = R"({"mode": "x", "bos_token": "!"})",
                                 .now = 86400 * 200}),
            "False [{'a': 1}] None x ! 1970");
  // Without a time it is now.
  EXPECT_GE(ChatTemplate::from_text("{{ strftime_now('%Y') }}").render(kHello), "2024");
}

TEST(ChatTemplate, ArgumentsThatAreNoJsonAreRefused) {
  const ChatTemplate chat = ChatTemplate::from_text("{{ messages }}");
  const auto refusal = [&](const ChatOptions& options) {
    return error_of<InvalidArgument>([&] { chat.render(kHello, options); });
  };
  expect_parts(refusal({.tools = "{"}), {"tools", "JSON", "\"{\""});
  expect_parts(refusal({.tools = "{}"}), {"tools", "array"});
  expect_parts(refusal({.variables = "[]"}), {"variables", "object"});
  expect_parts(refusal({.variables = R"({"a": 18446744073709551615})"}), {"64 bits"});
  expect_parts(error_of<InvalidArgument>([&] { chat.render_json("{}"); }), {"messages", "array"});
  expect_parts(error_of<InvalidArgument>([&] { chat.render_json("[\xff]"); }), {"messages"});
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  expect_parts(error_of<InvalidArgument>([&] { chat.render_json(deep); }), {"100 levels"});
  const std::vector<ChatMessage> call = {
      {.role = "assistant", .content = {}, .tool_calls = {{.name = "f", .arguments = "x"}}}};
  expect_parts(error_of<InvalidArgument>([&] { chat.render(call); }), {"arguments of f"});
}

TEST(ChatTemplate, WhatATemplateRefusesIsTheCallersFault) {
  const ChatTemplate chat =
      ChatTemplate::from_text("\n{{ raise_exception('no system text') }}", {}, "x.jinja");
  expect_parts(error_of<InvalidArgument>([&] { chat.render(kHello); }),
               {"no system text", "x.jinja", "line 2"});
}

TEST(ChatTemplate, FilesAreLookedForInTheOrderOfTransformers) {
  const TempDir folder;
  folder.write("tokenizer_config.json",
               R"({"bos_token": {"content": "<b>"}, "chat_template": "config {{ bos_token }}"})");
  EXPECT_EQ(rendered(folder.path()), "config <b>");
  folder.write("chat_template.json", R"({"chat_template": "processor {{ bos_token }}"})");
  EXPECT_EQ(rendered(folder.path()), "processor <b>");
  folder.write("chat_template.jinja", "file {{ bos_token }}");
  EXPECT_EQ(rendered(folder.path()), "file <b>");
}

TEST(ChatTemplate, NamedTemplatesServeToolsAndTheRest) {
  const TempDir folder;
  folder.write("tokenizer_config.json",
               R"({"chat_template": [{"name": "default", "template": "plain"},
                                     {"name": "tool_use", "template": "tools"},
                                     {"name": "rag", "template": "{{ broken"}]})");
  EXPECT_EQ(rendered(folder.path()), "plain");
  EXPECT_EQ(rendered(folder.path(), {.tools = "[]"}), "tools");

  const TempDir other;
  std::filesystem::create_directory(other / "additional_chat_templates");
  other.write("chat_template.jinja", "plain file");
  other.write("additional_chat_templates/tool_use.jinja", "tools file");
  other.write("additional_chat_templates/notes.txt", "{{ broken");
  EXPECT_EQ(rendered(other.path()), "plain file");
  EXPECT_EQ(rendered(other.path(), {.tools = "[]"}), "tools file");
}

TEST(ChatTemplate, SpecialTokensComeFromEveryPlaceThatHasThem) {
  const TempDir folder;
  folder.write("chat_template.jinja",
               "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ image_token }}{{ name }}");
  folder.write("tokenizer_config.json",
               R"({"bos_token": "<b>", "unk_token": null, "name": "x", "pad_token": 5,
                   "extra_special_tokens": {"image_token": "<i>"}})");
  folder.write("special_tokens_map.json", R"({"eos_token": {"content": "<e>"}})");
  EXPECT_EQ(rendered(folder.path()), "<b><e><i>");
  // A tokenizer that lists its added tokens needs no map.
  folder.write("tokenizer_config.json", R"({"bos_token": "<b>", "added_tokens_decoder": {}})");
  EXPECT_EQ(rendered(folder.path()), "<b>");
}

TEST(ChatTemplate, AFolderWithoutOneIsNotServedAndSaysWhatToDo) {
  const TempDir folder;
  const auto load = [&] { ChatTemplate::from_model_folder(folder.path()); };
  expect_parts(error_of<Unsupported>(load),
               {folder.path().string(), "no chat template", "chat_template.jinja", "base model"});
  folder.write("tokenizer_config.json", R"({"chat_template": null})");
  expect_parts(error_of<Unsupported>(load), {"no chat template"});
  folder.write("tokenizer_config.json", R"({"chat_template": [{"name": "rag", "template": "x"}]})");
  expect_parts(error_of<Unsupported>(load), {"default", "rag"});
}

TEST(ChatTemplate, DamagedFilesAreNamed) {
  const TempDir folder;
  const auto load = [&] { ChatTemplate::from_model_folder(folder.path()); };
  folder.write("tokenizer_config.json", R"({"chat_template": 5})");
  expect_parts(error_of<CheckpointError>(load),
               {"tokenizer_config.json", "chat_template", "number"});
  folder.write("tokenizer_config.json", R"({"chat_template": [{"name": 5}]})");
  expect_parts(error_of<CheckpointError>(load), {"tokenizer_config.json", "name and template"});
  folder.write("tokenizer_config.json", "{");
  expect_parts(error_of<CheckpointError>(load), {"tokenizer_config.json", "malformed"});
  folder.write("tokenizer_config.json", R"({"chat_template": "a\n{% if %}"})");
  expect_parts(error_of<CheckpointError>(load), {"tokenizer_config.json", "line 2, column 7"});
  folder.write("chat_template.jinja", "{% nosuch %}");
  expect_parts(error_of<Unsupported>(load), {"chat_template.jinja, line 1", "nosuch"});
  folder.write("chat_template.jinja", std::string((4 << 20) + 1, 'x'));
  expect_parts(error_of<CheckpointError>(load), {"chat_template.jinja", "4194304"});
}

}  // namespace
}  // namespace cadre
