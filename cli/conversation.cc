#include "conversation.h"

#include <utility>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "session.h"

namespace cadre::cli {

Conversation::Conversation(Model& model, Tokenizer tokenizer, ChatTemplate chat_template,
                           std::string system)
    : model_(model),
      tokenizer_(std::move(tokenizer)),
      chat_template_(std::move(chat_template)),
      session_(model),
      system_(std::move(system)) {}

std::vector<TokenId> Conversation::encode(const std::string& text) {
  std::vector<ChatMessage> messages;
  if (!system_.empty()) messages.push_back({.role = "system", .content = system_});
  messages.insert(messages.end(), history_.begin(), history_.end());
  messages.push_back({.role = "user", .content = text});
  std::vector<TokenId> ids = encode_text(tokenizer_, model_, chat_template_.render(messages),
                                         /*add_special_tokens=*/false);
  const int64_t context = model_.info().max_position_embeddings;
  if (static_cast<int64_t>(ids.size()) >= context) {
    throw InvalidArgument(str_cat("the conversation is full: with this message it has ", ids.size(),
                                  " tokens, the context of ", model_.info().path, " holds ",
                                  context,
                                  " with the answer; /reset begins a new one, or say less"));
  }
  return ids;
}

Conversation::Answer Conversation::ask(const std::string& text, const GenerationOptions& options,
                                       const Sink& sink) {
  const std::vector<TokenId> prompt = encode(text);
  Answer answer;
  TextStream stream(tokenizer_);
  const auto give = [&](const std::string& piece) {
    answer.text += piece;
    return sink(piece);
  };
  answer.result = session_.generate(prompt, options,
                                    [&](int64_t, TokenId id) { return give(stream.push(id)); });
  give(stream.finish());
  history_.push_back({.role = "user", .content = text});
  history_.push_back({.role = "assistant", .content = answer.text});
  ++num_turns_;
  return answer;
}

void Conversation::reset() {
  session_.reset();
  history_.clear();
  num_turns_ = 0;
}

}  // namespace cadre::cli
