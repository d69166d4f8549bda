#include "generation/tokenizer/vocabulary.h"

#include <bit>
#include <functional>

#include "core/check.h"

namespace cadre::text {

void Vocabulary::reserve(size_t num_tokens) {
  const size_t wanted = std::bit_ceil(2 * num_tokens + 16);
  if (wanted <= slots_.size()) return;
  slots_.assign(wanted, kNoToken);
  for (size_t id = 0; id < entries_.size(); ++id) {
    const auto token_id = static_cast<TokenId>(id);
    if (has(token_id)) index(token_id, token(token_id));
  }
}

void Vocabulary::add(std::string_view token, TokenId id) {
  CADRE_ASSERT(id >= 0 && id <= kMaxTokenId && !has(id));
  reserve(static_cast<size_t>(size_) + 1);
  if (static_cast<size_t>(id) >= entries_.size()) entries_.resize(static_cast<size_t>(id) + 1);
  entries_[static_cast<size_t>(id)] = {block_.size(), static_cast<int64_t>(token.size())};
  block_ += token;
  ++size_;
  index(id, token);
}

void Vocabulary::index(TokenId id, std::string_view token) {
  const size_t mask = slots_.size() - 1;
  size_t slot = std::hash<std::string_view>{}(token)&mask;
  while (slots_[slot] != kNoToken) slot = (slot + 1) & mask;
  slots_[slot] = id;
}

TokenId Vocabulary::find(std::string_view token_text) const {
  if (slots_.empty()) return kNoToken;
  const size_t mask = slots_.size() - 1;
  for (size_t slot = std::hash<std::string_view>{}(token_text)&mask;; slot = (slot + 1) & mask) {
    const TokenId id = slots_[slot];
    if (id == kNoToken || token(id) == token_text) return id;
  }
}

bool Vocabulary::has(TokenId id) const {
  return id >= 0 && static_cast<size_t>(id) < entries_.size() &&
         entries_[static_cast<size_t>(id)].length >= 0;
}

std::string_view Vocabulary::token(TokenId id) const {
  if (!has(id)) return {};
  const Entry& entry = entries_[static_cast<size_t>(id)];
  return std::string_view(block_).substr(entry.offset, static_cast<size_t>(entry.length));
}

}  // namespace cadre::text
