#include "generation/tokenizer/bpe.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "generation/tokenizer/byte_alphabet.h"
#include "generation/tokenizer/utf8.h"

namespace cadre::text {
namespace {

constexpr size_t kShort = 48;  // up to here scanning all pairs beats a heap
constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

std::string byte_token(unsigned byte) {
  constexpr std::string_view kHex = "0123456789ABCDEF";
  return str_cat("<0x", kHex[byte >> 4], kHex[byte & 15], ">");
}

// True when "<0xHH>" may be in there.
bool has_byte_token(std::string_view token) {
  for (size_t at = token.find("<0x"); at != token.npos; at = token.find("<0x", at + 1)) {
    if (token.size() >= at + 6 && token[at + 5] == '>') return true;
  }
  return false;
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
  bpe.read_characters();
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
  if (count >= kNone) node.fail("fewer merges");
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
    merges_.set(left, right, make_merge(static_cast<uint32_t>(i), id));
    note_join(halves->first, halves->second);
  }
}

void Bpe::note_join(std::string_view left, std::string_view right) {
  if (left.empty() || right.empty()) return;  // no character is empty: it never happens
  merges_byte_tokens_ |= has_byte_token(left) || has_byte_token(right);
  size_t length = 0;
  char32_t last = code_point_before(left, left.size(), length);
  char32_t first = code_point_at(right, 0, length);
  if (byte_level_) {
    const int last_byte = byte_of_character(last);
    const int first_byte = byte_of_character(first);
    if (last_byte < 0 || first_byte < 0) return;  // no text is spelled like that
    last = static_cast<char32_t>(last_byte);
    first = static_cast<char32_t>(first_byte);
  }
  joins_.add(last, first);
}

// Pieces may be cut where no merge joins when each character has ids whatever its neighbours are:
// without unknown ones, which may be fused or left out, and without whole pieces that are tokens.
void Bpe::read_characters() {
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
  ascii_ids_.resize(128);
  for (unsigned c = 0; c < 128; ++c) {
    ascii_ids_[c] = vocabulary_.find(std::string(1, static_cast<char>(c)));
  }
  const bool has_all_bytes =
      std::find(byte_ids_.begin(), byte_ids_.end(), kNoToken) == byte_ids_.end();
  can_cut_ =
      has_all_bytes && !ignore_merges_ && (byte_level_ || (byte_fallback_ && !merges_byte_tokens_));
}

void Bpe::encode(std::string_view piece, Scratch& scratch, std::vector<TokenId>& out) const {
  size_t begin = 0;
  if (can_cut_ && piece.size() > WordCache::kMaxBytes) {
    char32_t previous = 0;
    for (size_t i = 0, length = 1; i < piece.size(); i += length) {
      const char32_t character =
          byte_level_ ? static_cast<uint8_t>(piece[i]) : code_point_at(piece, i, length);
      if (i > 0 && !joins_.may_join(previous, character)) {
        encode_part(piece.substr(begin, i - begin), scratch, out);
        begin = i;
      }
      previous = character;
    }
  }
  encode_part(piece.substr(begin), scratch, out);
}

void Bpe::encode_part(std::string_view part, Scratch& scratch, std::vector<TokenId>& out) const {
  if (scratch.cache.find(part, out)) return;
  encode_uncached(part, scratch);
  scratch.cache.insert(part, scratch.ids);
  out.insert(out.end(), scratch.ids.begin(), scratch.ids.end());
}

void Bpe::encode_uncached(std::string_view part, Scratch& scratch) const {
  auto& ids = scratch.ids;
  ids.clear();
  if (ignore_merges_) {
    scratch.spelled.clear();
    if (byte_level_) append_in_alphabet(part, scratch.spelled);
    const TokenId whole = vocabulary_.find(byte_level_ ? scratch.spelled : part);
    if (whole != kNoToken) {
      ids.push_back(whole);
      return;
    }
  }
  spell_characters(part, ids);
  if (ids.size() <= kShort) {
    merge_short(scratch);
  } else {
    merge_long(scratch);
  }
}

// One id per character; what the vocabulary lacks becomes bytes, the unknown token or nothing.
void Bpe::spell_characters(std::string_view part, std::vector<TokenId>& ids) const {
  bool unknown_waits = false;
  const auto flush_unknown = [&] {
    if (unknown_waits) ids.push_back(unknown_);
    unknown_waits = false;
  };
  for (size_t i = 0, length = 1; i < part.size(); i += length) {
    if (!byte_level_) code_point_at(part, i, length);
    const std::string_view character = part.substr(i, length);
    const TokenId id = id_of_character(character);
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

TokenId Bpe::id_of_character(std::string_view character) const {
  const auto lead = static_cast<uint8_t>(character.front());
  if (byte_level_) return byte_ids_[lead];
  return lead < ascii_ids_.size() ? ascii_ids_[lead] : vocabulary_.find(character);
}

void Bpe::merge_short(Scratch& scratch) const {
  auto& ids = scratch.ids;
  auto& merges = scratch.merges;
  merges.assign(ids.size(), kNoMerge);
  for (size_t i = 0; i + 1 < ids.size(); ++i) merges[i] = merges_.find(ids[i], ids[i + 1]);
  while (ids.size() > 1) {
    const auto best = std::min_element(merges.begin(), merges.end());
    if (*best == kNoMerge) return;
    const auto place = best - merges.begin();
    const auto i = static_cast<size_t>(place);
    ids[i] = id_of(*best);
    ids.erase(ids.begin() + place + 1);
    merges.erase(best);  // the last one stays kNoMerge
    if (i > 0) merges[i - 1] = merges_.find(ids[i - 1], ids[i]);
    merges[i] = i + 1 < ids.size() ? merges_.find(ids[i], ids[i + 1]) : kNoMerge;
  }
}

void Bpe::look_up_merge(Scratch& scratch, uint32_t position) const {
  Scratch::Symbol& symbol = scratch.symbols[position];
  symbol.merge =
      symbol.next == kNone ? kNoMerge : merges_.find(symbol.id, scratch.symbols[symbol.next].id);
}

// Puts the merge at `position` on the heap if it comes before those at both sides.
void Bpe::push_if_lowest(Scratch& scratch, uint32_t position) {
  const auto& symbols = scratch.symbols;
  const Scratch::Symbol& symbol = symbols[position];
  if (symbol.merge == kNoMerge) return;
  if (symbol.previous != kNone && symbols[symbol.previous].merge <= symbol.merge) return;
  if (symbol.next != kNone && symbols[symbol.next].merge < symbol.merge) return;
  ++scratch.num_candidates;
  scratch.heap.push_back(static_cast<uint64_t>(rank_of(symbol.merge)) << 32 | position);
  std::push_heap(scratch.heap.begin(), scratch.heap.end(), std::greater<>());
}

// Merges the symbol at `position` with the next one; what the merge kept off the heap goes there.
void Bpe::merge_at(Scratch& scratch, uint32_t position) const {
  auto& symbols = scratch.symbols;
  Scratch::Symbol& left = symbols[position];
  Scratch::Symbol& right = symbols[left.next];
  const Merge old_after = right.merge;
  left.id = id_of(left.merge);
  left.next = right.next;
  right.merge = kNoMerge;
  look_up_merge(scratch, position);
  if (left.previous != kNone) {
    const Merge old_before = symbols[left.previous].merge;
    look_up_merge(scratch, left.previous);
    const uint32_t before = symbols[left.previous].previous;
    if (before != kNone && symbols[before].merge > old_before) push_if_lowest(scratch, before);
    push_if_lowest(scratch, left.previous);
  }
  push_if_lowest(scratch, position);
  if (left.next == kNone) return;
  symbols[left.next].previous = position;
  if (symbols[left.next].merge >= old_after) push_if_lowest(scratch, left.next);
}

// A linked list of symbols and a heap of merges, lowest rank first, then leftmost. The one to do
// next comes before its neighbours, so those that do not stay off the heap until they do. Merges
// that no longer hold are dropped when they come up.
void Bpe::merge_long(Scratch& scratch) const {
  auto& ids = scratch.ids;
  auto& symbols = scratch.symbols;
  if (ids.size() >= kNone) {
    throw Error(str_cat("encode: a piece of ", ids.size(), " characters; up to ", kNone - 1,
                        " work, encode the text in shorter parts"));
  }
  const auto count = static_cast<uint32_t>(ids.size());
  symbols.resize(count);
  scratch.heap.clear();
  for (uint32_t i = 0; i < count; ++i) {
    symbols[i] = {kNoMerge, ids[i], i == 0 ? kNone : i - 1, i + 1 < count ? i + 1 : kNone};
  }
  for (uint32_t i = 0; i < count; ++i) look_up_merge(scratch, i);
  for (uint32_t i = 0; i < count; ++i) push_if_lowest(scratch, i);
  while (!scratch.heap.empty()) {
    std::pop_heap(scratch.heap.begin(), scratch.heap.end(), std::greater<>());
    const uint64_t top = scratch.heap.back();
    scratch.heap.pop_back();
    const auto position = static_cast<uint32_t>(top);
    const Merge merge = symbols[position].merge;
    if (merge != kNoMerge && rank_of(merge) == top >> 32) merge_at(scratch, position);
  }
  ids.clear();
  for (uint32_t i = 0; i != kNone; i = symbols[i].next) ids.push_back(symbols[i].id);
}

}  // namespace cadre::text
