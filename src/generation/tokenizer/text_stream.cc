#include "cadre/tokenizer.h"
#include "generation/tokenizer/tokenizer_impl.h"

namespace cadre {

struct TextStream::State {
  text::Decoder::State decoder;
};

TextStream::TextStream(const Tokenizer& tokenizer, bool skip_special_tokens)
    : tokenizer_(&tokenizer),
      skip_special_tokens_(skip_special_tokens),
      state_(std::make_unique<State>()) {}
TextStream::TextStream(TextStream&&) noexcept = default;
TextStream& TextStream::operator=(TextStream&&) noexcept = default;
TextStream::~TextStream() = default;

std::string TextStream::push(TokenId id) {
  std::string out;
  std::string_view token;
  const Tokenizer::Impl& tokenizer = *tokenizer_->impl_;
  if (skip_special_tokens_ && tokenizer.added_tokens.is_special(id)) return out;
  if (tokenizer.find_token(id, token)) tokenizer.decoder.push(token, state_->decoder, out);
  return out;
}

std::string TextStream::finish() {
  std::string out;
  tokenizer_->impl_->decoder.finish(state_->decoder, out);
  return out;
}

}  // namespace cadre
