// A chat with a model: what was said, and the tokens of it that the model has run already.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/chat.h"
#include "cadre/generation.h"

namespace cadre::cli {

class Conversation {
 public:
  /// The model must outlive the conversation.
  Conversation(Model& model, Tokenizer tokenizer, ChatTemplate chat_template, std::string system);

  struct Answer {
    std::string text;
    GenerationResult result;
  };
  /// Gets the text as it is produced; false stops the answer.
  using Sink = std::function<bool(std::string_view piece)>;

  /// Says `text` as the user; what the model answers joins the conversation, a stopped answer too.
  /// Throws InvalidArgument, and then nothing was said, when the context has no room for an answer
  /// and when the template refuses the message.
  Answer ask(const std::string& text, const GenerationOptions& options, const Sink& sink);

  /// Forgets what was said; the system text stays.
  void reset();
  /// Empty: none. What was said stays.
  void set_system(std::string system) { system_ = std::move(system); }

  int64_t num_turns() const { return num_turns_; }
  /// Of the conversation as the model has run it.
  int64_t num_tokens() const { return session_.cached_tokens(); }

 private:
  std::vector<TokenId> encode(const std::string& text);

  Model& model_;
  Tokenizer tokenizer_;
  ChatTemplate chat_template_;
  GenerationSession session_;
  std::string system_;
  std::vector<ChatMessage> history_;  // without the system text
  int64_t num_turns_ = 0;
};

}  // namespace cadre::cli
