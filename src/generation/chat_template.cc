// Messages and options to the variables of a template.
#include <ctime>
#include <nlohmann/json.hpp>

#include "cadre/chat.h"
#include "cadre/error.h"
#include "generation/chat_template_files.h"
#include "generation/jinja/template.h"
#include "generation/jinja/value_text.h"
#include "generation/tokenizer/utf8.h"

namespace cadre {
namespace {

using jinja::Dict;
using jinja::Value;
using jinja::Values;
using OrderedJson = nlohmann::ordered_json;

constexpr int kMaxDepth = 100;

// JSON of the caller, as a value. `what` names it in messages.
Value parse_value(std::string_view text, std::string_view what) {
  const auto refuse = [&](std::string_view why) {
    throw InvalidArgument(str_cat(what, ": expected JSON, got ", quote(text), " (", why, ")"));
  };
  const auto check_depth = [&](int depth, OrderedJson::parse_event_t, OrderedJson&) {
    if (depth > kMaxDepth) refuse(str_cat("nested deeper than ", kMaxDepth, " levels"));
    return true;
  };
  try {
    return jinja::from_json(OrderedJson::parse(text, check_depth));
  } catch (const OrderedJson::exception& error) {
    refuse(error.what());
  } catch (const jinja::Fault& fault) {
    refuse(fault.message);
  }
  return {};
}

Value text_value(std::string_view text) {
  std::string valid;
  text::append_lossy(text, /*at_end=*/true, valid);
  return valid;
}

Value part_value(const ChatPart& part) {
  Dict dict;
  const bool is_text = part.type == ChatPart::Type::kText;
  dict.set(Value(std::string("type")), std::string(is_text ? "text" : "image"));
  if (is_text) dict.set(Value(std::string("text")), text_value(part.text));
  return make_dict(std::move(dict));
}

// {"type": "function", "function": {"name": ..., "arguments": ...}}, and the id where there is one.
Value call_value(const ToolCall& call) {
  Dict function;
  function.set(Value(std::string("name")), text_value(call.name));
  function.set(Value(std::string("arguments")),
               parse_value(call.arguments, str_cat("the arguments of ", call.name)));
  Dict dict;
  if (!call.id.empty()) dict.set(Value(std::string("id")), text_value(call.id));
  dict.set(Value(std::string("type")), std::string("function"));
  dict.set(Value(std::string("function")), make_dict(std::move(function)));
  return make_dict(std::move(dict));
}

Value content_value(const ChatMessage& message) {
  if (message.parts.empty()) {
    return message.content ? text_value(*message.content) : Value(jinja::None{});
  }
  Values parts;
  for (const ChatPart& part : message.parts) parts.push_back(part_value(part));
  return jinja::make_array(std::move(parts));
}

Value message_value(const ChatMessage& message) {
  Dict dict;
  const auto set = [&](const char* key, Value value) {
    dict.set(Value(std::string(key)), std::move(value));
  };
  set("role", text_value(message.role));
  set("content", content_value(message));
  if (message.reasoning_content) set("reasoning_content", text_value(*message.reasoning_content));
  if (!message.tool_calls.empty()) {
    Values calls;
    for (const ToolCall& call : message.tool_calls) calls.push_back(call_value(call));
    set("tool_calls", jinja::make_array(std::move(calls)));
  }
  if (!message.tool_call_id.empty()) set("tool_call_id", text_value(message.tool_call_id));
  return make_dict(std::move(dict));
}

std::tm local_time(std::optional<int64_t> seconds) {
  const auto time = seconds ? static_cast<std::time_t>(*seconds) : std::time(nullptr);
  std::tm parts{};
  localtime_r(&time, &parts);
  return parts;
}

}  // namespace

struct ChatTemplate::Impl {
  jinja::Template plain;
  std::optional<jinja::Template> with_tools;  // else the plain one serves both
  std::map<std::string, std::string> special_tokens;

  std::string render(Value messages, const ChatOptions& options) const;
};

std::string ChatTemplate::Impl::render(Value messages, const ChatOptions& options) const {
  Value tools = jinja::None{};
  if (!options.tools.empty()) tools = parse_value(options.tools, "tools");
  if (!tools.is_none() && !tools.is_array()) {
    throw InvalidArgument(str_cat("tools: expected a JSON array, got ", quote(options.tools)));
  }
  const jinja::Template& chosen = with_tools && !tools.is_none() ? *with_tools : plain;
  Dict variables;
  const auto set = [&](std::string_view key, Value value) {
    variables.set(Value(key), std::move(value));
  };
  for (const auto& [name, token] : special_tokens) set(name, text_value(token));
  set("messages", std::move(messages));
  set("tools", std::move(tools));
  set("documents", jinja::None{});
  set("add_generation_prompt", options.add_generation_prompt);
  if (!options.variables.empty()) {
    const Value more = parse_value(options.variables, "variables");
    if (!more.is_dict()) {
      throw InvalidArgument(
          str_cat("variables: expected a JSON object, got ", quote(options.variables)));
    }
    for (const auto& [key, value] : more.dict().entries) set(key.string(), value);
  }
  return chosen.render(variables, local_time(options.now));
}

ChatTemplate ChatTemplate::from_model_folder(const std::filesystem::path& folder) {
  ChatTemplateFiles files = read_chat_template_files(folder);
  auto impl = std::make_shared<Impl>(Impl{jinja::Template(files.plain.source, files.plain.origin),
                                          {},
                                          std::move(files.special_tokens)});
  if (files.with_tools)
    impl->with_tools.emplace(files.with_tools->source, files.with_tools->origin);
  return ChatTemplate(std::move(impl));
}

ChatTemplate ChatTemplate::from_text(std::string_view source,
                                     const std::map<std::string, std::string>& special_tokens,
                                     const std::string& origin) {
  return ChatTemplate(
      std::make_shared<Impl>(Impl{jinja::Template(source, origin), {}, special_tokens}));
}

std::string ChatTemplate::render(std::span<const ChatMessage> messages,
                                 const ChatOptions& options) const {
  Values values;
  for (const ChatMessage& message : messages) values.push_back(message_value(message));
  return impl_->render(jinja::make_array(std::move(values)), options);
}

std::string ChatTemplate::render_json(std::string_view messages, const ChatOptions& options) const {
  Value values = parse_value(messages, "messages");
  if (!values.is_array()) {
    throw InvalidArgument(str_cat("messages: expected a JSON array, got ", quote(messages)));
  }
  return impl_->render(std::move(values), options);
}

}  // namespace cadre
