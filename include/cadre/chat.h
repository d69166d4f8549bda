// Chat: messages to the text that a model was trained on, by the template of its checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cadre {

/// A function call that the model made.
struct ToolCall {
  std::string name;
  std::string arguments = "{}";  // JSON; a template gets the value, not the text
  std::string id = {};           // empty: none
};

/// One part of a message that holds more than text.
struct ChatPart {
  enum class Type : uint8_t { kText, kImage };
  Type type = Type::kText;
  std::string text = {};  // of kText
};

struct ChatMessage {
  std::string role;                         // "system", "user", "assistant", "tool"
  std::optional<std::string> content = {};  // empty: null, as beside tool calls
  std::vector<ChatPart> parts = {};         // in place of content, when there are any
  std::optional<std::string> reasoning_content = {};
  std::vector<ToolCall> tool_calls = {};
  std::string tool_call_id = {};  // which call a "tool" message answers; empty: none
};

struct ChatOptions {
  bool add_generation_prompt = true;  // the text ends where the answer begins
  std::string tools = {};             // a JSON array of function descriptions; empty: none
  std::string variables = {};  // a JSON object: more variables of the template (enable_thinking)
  std::optional<int64_t> now = {};  // seconds since 1970 that templates see; empty: the clock
};

/// A chat template: Jinja as Transformers 5.17 runs it. docs/chat_templates.md says which part of
/// the language is served.
class ChatTemplate {
 public:
  /// Looks in this order for chat_template.jinja, chat_template.json and `chat_template` in
  /// tokenizer_config.json (a text or a list of named ones), and adds the named ones of
  /// additional_chat_templates/. The variables bos_token, eos_token and the like come from
  /// tokenizer_config.json. Throws Unsupported when the model has no template, CheckpointError for
  /// a damaged one.
  static ChatTemplate from_model_folder(const std::filesystem::path& folder);

  /// `special_tokens`: values of bos_token and the like; `origin` names the template in messages.
  static ChatTemplate from_text(std::string_view source,
                                const std::map<std::string, std::string>& special_tokens = {},
                                const std::string& origin = "chat template");

  /// The text of the conversation, special tokens written out: encode it without adding any.
  /// Throws InvalidArgument for options or arguments that are no JSON and where the template
  /// refuses the messages, Unsupported for a part of Jinja that is not served, CheckpointError
  /// where the template fails.
  std::string render(std::span<const ChatMessage> messages, const ChatOptions& options = {}) const;

  /// The same for a JSON array of messages as OpenAI's interface and Transformers have them. The
  /// template sees them as they are.
  std::string render_json(std::string_view messages, const ChatOptions& options = {}) const;

 private:
  struct Impl;
  explicit ChatTemplate(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

}  // namespace cadre
