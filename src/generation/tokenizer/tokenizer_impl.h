// What a Tokenizer consists of, and how a text goes through it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/tokenizer.h"
#include "generation/tokenizer/added_tokens.h"
#include "generation/tokenizer/bpe.h"
#include "generation/tokenizer/decoder.h"
#include "generation/tokenizer/normalizer.h"
#include "generation/tokenizer/post_processor.h"
#include "generation/tokenizer/pre_tokenizer.h"

namespace cadre {

struct Tokenizer::Impl {
  explicit Impl(const text::JsonNode& root);

  void encode(std::string_view valid, std::vector<TokenId>& ids) const;
  /// The token's text; empty with false when there is no such id.
  bool find_token(TokenId id, std::string_view& token) const;

  text::Normalizer normalizer;
  text::PreTokenizer pre_tokenizer;
  text::Bpe model;
  text::AddedTokens added_tokens;
  text::PostProcessor post_processor;
  text::Decoder decoder;

 private:
  struct Scratch {
    text::PreTokenizer::Scratch pre_tokenizer;
    text::Bpe::Scratch model;
    std::vector<text::Section> raw_sections;
    std::vector<text::Section> sections;
    std::string normalized;
  };
  void encode_section(std::string_view raw, bool starts_text, Scratch& scratch,
                      std::vector<TokenId>& ids) const;

  // One scratch per thread that is inside encode(); they are kept for their caches.
  std::unique_ptr<Scratch> take_scratch() const;
  void give_back(std::unique_ptr<Scratch> scratch) const;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> idle_;
};

}  // namespace cadre
