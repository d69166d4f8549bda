#include "generation/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <utility>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "generation/tokenizer/byte_alphabet.h"
#include "generation/tokenizer/utf8.h"

namespace cadre::text {
namespace {

constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();
constexpr size_t kShort = 48;  // up to here scanning all pairs beats a heap

std::string byte_token(unsigned byte) {
  constexpr std::string_view kHex = "0123456789ABCDEF";
  return str_cat("<0x", kHex[byte >> 4], kHex[byte & 15], ">");
}

uint64_t key_of(TokenId left, TokenId right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

// The two halves of a merge: ["a", "b"], or in older files "a b". Empty when it is neither.
using Halves = std::pair<std::string_view, std::string_view>;
std::optional<Halves> halves_of(const Json& json) {
  if (json.is_array() && json.size() == 2 && json[0].is_string() && json[1].is_string()) {
    return Halves{json[0].get_ref<const std::string&>(), json[1].get_ref<const std::string&>()};
  }
  if (!json.is_string()) return std::nullopt;
  const std::string_view text = json.get_ref<const std::string&>();
  const size_t space = text.find(' ');
  if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) {
    return std::nullopt;
  }
  return Halves{text.substr(0, space), text.substr(space + 1)};
}

}  // namespace

Bpe Bpe::parse(const JsonNode& model, bool byte_level) {
  const std::string type = model.text_or("type", "BPE");
  if (type != "BPE") model.unsupported(str_cat("model \"", type, "\""), "BPE");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!model.text_or(key, "").empty()) model.unsupported(key, "none");
  }
  if (const auto dropout = model.find("dropout"); dropout && dropout->json() != 0) {
    dropout->unsupported("dropout, which makes ids random,", "none");
  }
  Bpe bpe;
  bpe.byte_level_ = byte_level;
  bpe.ignore_merges_ = model.boolean_or("ignore_merges", false);
  bpe.fuse_unknown_ = model.boolean_or("fuse_unk", false);
  bpe.byte_fallback_ = model.boolean_or("byte_fallback", false);
  bpe.read_vocabulary(model.at("vocab"));
  bpe.read_merges(model.at("merges"));
  if (const auto unknown = model.find("unk_token")) {
    bpe.unknown_ = bpe.vocabulary_.find(unknown->text());
    if (bpe.unknown_ == kNoToken) unknown->fail("a token of the vocabulary");
  }
  bpe.read_single_bytes();
  return bpe;
}

void Bpe::read_vocabulary(const JsonNode& node) {
  if (!node.json().is_object()) node.fail("an object of token: id");
  vocabulary_.reserve(node.json().size());
  for (const auto& item : node.json().items()) {
    const Json& id = item.value();
    const bool fits = id.is_number_integer() && id >= 0 && id <= kMaxTokenId;
    if (!fits) {
      node.fail_with(str_cat("token \"", item.key(), "\" has id ", id.dump(),
                             ", expected an integer from 0 to ", kMaxTokenId));
    }
    const auto token_id = id.get<TokenId>();
    if (vocabulary_.has(token_id)) {
      node.fail_with(str_cat("tokens \"", vocabulary_.token(token_id), "\" and \"", item.key(),
                             "\" both have id ", token_id));
    }
    vocabulary_.add(item.key(), token_id);
  }
}

void Bpe::read_merges(const JsonNode& node) {
  const size_t count = node.array_size();
  if (count >= kNoRank) node.fail("fewer merges");
  merges_.reserve(count);
  std::string joined;
  for (size_t i = 0; i < count; ++i) {
    const Json& entry = node.json()[i];
    if (entry.is_string() && entry.get_ref<const std::string&>().starts_with("#version")) continue;
    const auto halves = halves_of(entry);
    if (!halves) node.element(i).fail("a pair of strings or \"left right\" with one space");
    joined.assign(halves->first).append(halves->second);
    const TokenId left = vocabulary_.find(halves->first);
    const TokenId right = vocabulary_.find(halves->second);
    const TokenId id = vocabulary_.find(joined);
    if (left == kNoToken || right == kNoToken || id == kNoToken) {
      const std::string_view missing = left == kNoToken    ? halves->first
                                       : right == kNoToken ? halves->second
                                                           : std::string_view(joined);
      node.element(i).fail_with(
          str_cat("token \"", missing, "\" of the merge is not in the vocabulary"));
    }
    merges_.set(left, right, {static_cast<uint32_t>(i), id});
  }
}

void Bpe::read_single_bytes() {
  byte_ids_.resize(256);
  for (unsigned byte = 0; byte < 256; ++byte) {
    std::string token;
    if (byte_level_) {
      append_code_point(character_of_byte(static_cast<uint8_t>(byte)), token);
    } else {
      token = byte_token(byte);
    }
    byte_ids_[byte] = vocabulary_.find(token);
  }
}

void MergeTable::reserve(size_t num_merges) { slots_.resize(std::bit_ceil(2 * num_merges + 2)); }

size_t MergeTable::place_of(uint64_t key) const {
  const size_t mask = slots_.size() - 1;
  uint64_t mixed = key * 0x9E3779B97F4A7C15u;
  mixed ^= mixed >> 32;
  size_t place = mixed & mask;
  while (slots_[place].key != key && slots_[place].key != ~uint64_t{0}) place = (place + 1) & mask;
  return place;
}

void MergeTable::set(TokenId left, TokenId right, Merge merge) {
  const uint64_t key = key_of(left, right);
  slots_[place_of(key)] = {key, merge};
}

const MergeTable::Merge* MergeTable::find(TokenId left, TokenId right) const {
  const uint64_t key = key_of(left, right);
  const Slot& slot = slots_[place_of(key)];
  return slot.key == key ? &slot.merge : nullptr;
}

void Bpe::encode(std::string_view piece, Scratch& scratch, std::vector<TokenId>& out) const {
  if (scratch.cache.find(piece, out)) return;
  encode_uncached(piece, scratch);
  scratch.cache.insert(piece, scratch.ids);
  out.insert(out.end(), scratch.ids.begin(), scratch.ids.end());
}

void Bpe::encode_uncached(std::string_view piece, Scratch& scratch) const {
  auto& ids = scratch.ids;
  ids.clear();
  if (ignore_merges_) {
    scratch.spelled.clear();
    if (byte_level_) append_in_alphabet(piece, scratch.spelled);
    const TokenId whole = vocabulary_.find(byte_level_ ? scratch.spelled : piece);
    if (whole != kNoToken) {
      ids.push_back(whole);
      return;
    }
  }
  spell_characters(piece, ids);
  if (ids.size() <= kShort) {
    merge_short(scratch);
  } else {
    merge_long(scratch);
  }
}

// One id per character; what the vocabulary lacks becomes bytes, the unknown token or nothing.
void Bpe::spell_characters(std::string_view piece, std::vector<TokenId>& ids) const {
  bool unknown_waits = false;
  const auto flush_unknown = [&] {
    if (unknown_waits) ids.push_back(unknown_);
    unknown_waits = false;
  };
  for (size_t i = 0, length = 1; i < piece.size(); i += length) {
    if (!byte_level_) code_point_at(piece, i, length);
    const std::string_view character = piece.substr(i, length);
    const TokenId id =
        byte_level_ ? byte_ids_[static_cast<uint8_t>(piece[i])] : vocabulary_.find(character);
    if (id != kNoToken) {
      flush_unknown();
      ids.push_back(id);
      continue;
    }
    if (byte_fallback_ && !byte_level_ && spell_as_bytes(character, ids)) continue;
    if (unknown_ == kNoToken) continue;
    if (!fuse_unknown_) flush_unknown();
    unknown_waits = true;
  }
  flush_unknown();
}

bool Bpe::spell_as_bytes(std::string_view character, std::vector<TokenId>& ids) const {
  const auto id_of = [&](char byte) { return byte_ids_[static_cast<uint8_t>(byte)]; };
  const bool all_known = std::all_of(character.begin(), character.end(),
                                     [&](char byte) { return id_of(byte) != kNoToken; });
  if (!all_known) return false;
  for (const char byte : character) ids.push_back(id_of(byte));
  return true;
}

uint32_t Bpe::rank_of(TokenId left, TokenId right) const {
  const auto* merge = merges_.find(left, right);
  return merge == nullptr ? kNoRank : merge->rank;
}

void Bpe::merge_short(Scratch& scratch) const {
  auto& ids = scratch.ids;
  auto& ranks = scratch.ranks;  // [i]: of the pair i, i + 1
  ranks.assign(ids.size(), kNoRank);
  for (size_t i = 0; i + 1 < ids.size(); ++i) ranks[i] = rank_of(ids[i], ids[i + 1]);
  while (ids.size() > 1) {
    const auto best = std::min_element(ranks.begin(), ranks.end());
    if (*best == kNoRank) return;
    const size_t i = best - ranks.begin();
    ids[i] = merges_.find(ids[i], ids[i + 1])->id;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    ranks.erase(best);  // the last one stays kNoRank
    if (i > 0) ranks[i - 1] = rank_of(ids[i - 1], ids[i]);
    ranks[i] = i + 1 < ids.size() ? rank_of(ids[i], ids[i + 1]) : kNoRank;
  }
}

void Bpe::push_candidate(Scratch& scratch, int64_t position) const {
  const int64_t right = position < 0 ? -1 : scratch.next[static_cast<size_t>(position)];
  if (right < 0) return;
  const auto* merge = merges_.find(scratch.ids[static_cast<size_t>(position)],
                                   scratch.ids[static_cast<size_t>(right)]);
  if (merge == nullptr) return;
  scratch.heap.push_back({merge->rank, merge->id, position});
  std::push_heap(scratch.heap.begin(), scratch.heap.end(), [](const auto& a, const auto& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  });
}

// A linked list of symbols and a heap of candidates; candidates that no longer hold are dropped
// when they come up.
void Bpe::merge_long(Scratch& scratch) const {
  auto& ids = scratch.ids;
  const auto count = static_cast<int64_t>(ids.size());
  scratch.previous.resize(ids.size());
  scratch.next.resize(ids.size());
  scratch.heap.clear();
  for (int64_t i = 0; i < count; ++i) {
    scratch.previous[static_cast<size_t>(i)] = i - 1;
    scratch.next[static_cast<size_t>(i)] = i + 1 < count ? i + 1 : -1;
  }
  for (int64_t i = 0; i < count; ++i) push_candidate(scratch, i);
  while (!scratch.heap.empty()) {
    std::pop_heap(scratch.heap.begin(), scratch.heap.end(), [](const auto& a, const auto& b) {
      return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
    });
    const Scratch::Candidate top = scratch.heap.back();
    scratch.heap.pop_back();
    const auto left = static_cast<size_t>(top.position);
    const int64_t right = scratch.next[left];
    if (ids[left] == kNoToken || right < 0) continue;
    const auto* merge = merges_.find(ids[left], ids[static_cast<size_t>(right)]);
    if (merge == nullptr || merge->id != top.id) continue;
    ids[left] = top.id;
    ids[static_cast<size_t>(right)] = kNoToken;
    const int64_t after = scratch.next[static_cast<size_t>(right)];
    scratch.next[left] = after;
    if (after >= 0) scratch.previous[static_cast<size_t>(after)] = top.position;
    push_candidate(scratch, scratch.previous[left]);
    push_candidate(scratch, top.position);
  }
  ids.erase(std::remove(ids.begin(), ids.end(), kNoToken), ids.end());
}

}  // namespace cadre::text
