#include "generation/tokenizer/word_cache.h"

#include <algorithm>
#include <cstring>

namespace cadre::text {

uint64_t WordCache::hash(std::string_view piece) {
  constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15u;
  uint64_t state = piece.size() * kMultiplier;
  for (size_t i = 0; i < piece.size(); i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, piece.data() + i, std::min<size_t>(8, piece.size() - i));
    state = (state ^ word) * kMultiplier;
    state ^= state >> 29;
  }
  return state * kMultiplier >> 32;
}

bool WordCache::find(std::string_view piece, std::vector<TokenId>& out) const {
  if (piece.size() > kMaxBytes || slots_.empty()) return false;
  const uint64_t start = hash(piece);
  for (size_t probe = 0; probe < kProbes; ++probe) {
    const Slot& slot = slots_[(start + probe) % kSlots];
    if (slot.num_bytes != piece.size() ||
        std::memcmp(slot.bytes, piece.data(), piece.size()) != 0) {
      continue;
    }
    out.insert(out.end(), slot.ids, slot.ids + slot.num_ids);
    return true;
  }
  return false;
}

void WordCache::insert(std::string_view piece, std::span<const TokenId> ids) {
  if (piece.empty() || piece.size() > kMaxBytes || ids.size() > kMaxIds) return;
  if (slots_.empty()) slots_.resize(kSlots);
  const uint64_t start = hash(piece);
  size_t place = start % kSlots;
  for (size_t probe = 0; probe < kProbes && slots_[place].num_bytes != 0; ++probe) {
    place = (start + probe) % kSlots;
  }
  Slot& slot = slots_[place];
  slot.num_bytes = static_cast<uint8_t>(piece.size());
  slot.num_ids = static_cast<uint8_t>(ids.size());
  std::memcpy(slot.bytes, piece.data(), piece.size());
  std::copy(ids.begin(), ids.end(), slot.ids);
}

}  // namespace cadre::text
