// Text to token ids and back, from a Hugging Face tokenizer.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/token_id.h"

namespace cadre {

class Tokenizer {
 public:
  /// Reads tokenizer.json. Throws CheckpointError when the file is missing or damaged, Unsupported
  /// when it uses a component that is not implemented; both name the file and the component.
  static Tokenizer from_file(const std::filesystem::path& tokenizer_json);
  /// The same from the file's text; `origin` names it in messages.
  static Tokenizer from_json(std::string_view json, const std::string& origin);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  /// Ids of `text`. Invalid UTF-8 is replaced by U+FFFD, as the reference implementation's callers
  /// do. Special tokens written out in the text become their ids; `add_special_tokens` also applies
  /// the post-processor (BOS and the like).
  std::vector<TokenId> encode(std::string_view text, bool add_special_tokens = true) const;

  /// Text of `ids`; ids outside the vocabulary are skipped. Always valid UTF-8.
  std::string decode(std::span<const TokenId> ids, bool skip_special_tokens = true) const;

  int64_t vocab_size() const;  // added tokens included
  TokenId max_id() const;      // the largest id, which gaps put beyond vocab_size(); -1 without any
  std::optional<TokenId> token_to_id(std::string_view token) const;
  std::optional<std::string> id_to_token(TokenId id) const;
  bool is_special(TokenId id) const;

 private:
  friend class TextStream;
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Decodes a growing list of ids and gives out text as soon as it is final: never half a character,
/// and the pieces put together equal decode() of all ids. Each id costs its own length.
class TextStream {
 public:
  /// The tokenizer must outlive the stream.
  explicit TextStream(const Tokenizer& tokenizer, bool skip_special_tokens = true);
  TextStream(TextStream&&) noexcept;
  TextStream& operator=(TextStream&&) noexcept;
  ~TextStream();

  /// The text that this id completes; may be empty.
  std::string push(TokenId id);
  /// What is left at the end: an unfinished character comes out as U+FFFD. The stream is fresh
  /// again.
  std::string finish();

 private:
  struct State;  // what the decoder still waits for
  const Tokenizer* tokenizer_;
  bool skip_special_tokens_;
  std::unique_ptr<State> state_;
};

}  // namespace cadre
