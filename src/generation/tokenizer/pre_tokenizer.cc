#include "generation/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <stdexcept>

#include "core/str_cat.h"
#include "generation/tokenizer/pattern_syntax.h"
#include "generation/tokenizer/unicode.h"
#include "generation/tokenizer/utf8.h"

namespace cadre::text {
namespace {

constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr size_t kMaxStages = 64;

}  // namespace

PreTokenizer PreTokenizer::parse(const JsonNode& node) {
  PreTokenizer pre_tokenizer;
  pre_tokenizer.add(node);
  return pre_tokenizer;
}

void PreTokenizer::add(const JsonNode& node) {
  const std::string type = node.at("type").text();
  if (type == "Sequence") {
    const JsonNode parts = node.at("pretokenizers");
    for (size_t i = 0; i < parts.array_size(); ++i) add(parts.element(i));
    return;
  }
  if (is_byte_level_) {
    node.unsupported(str_cat("pre-tokenizer \"", type, "\" after ByteLevel"), "ByteLevel last");
  }
  if (stages_.size() >= kMaxStages) {
    node.unsupported("a longer Sequence", str_cat("up to ", kMaxStages, " stages"));
  }
  if (type == "Split") {
    add_split(node);
  } else if (type == "ByteLevel") {
    add_byte_level(node);
  } else if (type == "Digits") {
    const bool individual = node.boolean_or("individual_digits", false);
    add_pattern(node, individual ? "\\p{N}" : "\\p{N}+", Behavior::kIsolated, false);
  } else if (type == "Metaspace") {
    add_metaspace(node);
  } else {
    node.unsupported(str_cat("pre-tokenizer \"", type, "\""),
                     "Split, Digits, Metaspace, ByteLevel, Sequence");
  }
}

void PreTokenizer::add_split(const JsonNode& node) {
  const JsonNode pattern = node.at("pattern");
  const auto literal = pattern.find("String");
  const std::string regex = literal ? quote_pattern(literal->text()) : pattern.at("Regex").text();
  add_pattern(pattern, regex, parse_behavior(node.at("behavior")),
              node.boolean_or("invert", false));
}

// One: with several that differ, the number of pieces could double with each.
void PreTokenizer::add_metaspace(const JsonNode& node) {
  const bool has_one = std::any_of(stages_.begin(), stages_.end(), [](const Stage& stage) {
    return stage.kind == Kind::kMetaspace;
  });
  if (has_one) node.unsupported("a second Metaspace", "one");
  Stage stage;
  stage.kind = Kind::kMetaspace;
  stage.metaspace = Metaspace::parse(node);
  stages_.push_back(std::move(stage));
}

void PreTokenizer::add_byte_level(const JsonNode& node) {
  is_byte_level_ = true;
  if (node.boolean_or("add_prefix_space", true)) stages_.emplace_back().kind = Kind::kPrefixSpace;
  if (node.boolean_or("use_regex", true)) {
    add_pattern(node, kGpt2Pattern, Behavior::kIsolated, false);
  }
}

void PreTokenizer::add_pattern(const JsonNode& node, const std::string& pattern, Behavior behavior,
                               bool invert) {
  if (const auto foreign = find_foreign_syntax(pattern)) {
    node.unsupported(str_cat("regular expression syntax ", *foreign),
                     "what Oniguruma and PCRE2 read alike");
  }
  Stage stage;
  stage.behavior = behavior;
  stage.invert = invert;
  try {
    stage.pattern.emplace_back(pattern);
  } catch (const std::invalid_argument& error) {
    node.fail_with(str_cat("malformed regular expression: ", error.what()));
  }
  stages_.push_back(std::move(stage));
  has_patterns_ = true;
}

PreTokenizer::Behavior PreTokenizer::parse_behavior(const JsonNode& node) {
  const std::string name = node.text();
  if (name == "Removed") return Behavior::kRemoved;
  if (name == "Isolated") return Behavior::kIsolated;
  if (name == "MergedWithPrevious") return Behavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return Behavior::kMergedWithNext;
  if (name == "Contiguous") return Behavior::kContiguous;
  node.fail("Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

std::string_view PreTokenizer::split(std::string_view text, bool starts_text,
                                     Scratch& scratch) const {
  scratch.pieces.assign(1, Span{0, text.size()});
  if (text.empty()) scratch.pieces.clear();
  scratch.starts_text = starts_text;
  bool has_shadow = has_patterns_ && replace_newer(text, scratch.shadow);
  for (const Stage& stage : stages_) {
    if (stage.kind == Kind::kPattern) {
      split_pieces(stage, has_shadow ? std::string_view(scratch.shadow) : text, scratch);
      const bool kept_start = !scratch.pieces.empty() && scratch.pieces.front().begin == 0;
      scratch.starts_text = scratch.starts_text && kept_start;
      continue;
    }
    scratch.buffer.clear();
    if (stage.kind == Kind::kPrefixSpace) {
      put_spaces(text, scratch);
    } else {
      put_metaspaces(stage.metaspace, text, scratch);
    }
    scratch.text.swap(scratch.buffer);
    text = scratch.text;
    has_shadow = has_patterns_ && replace_newer(text, scratch.shadow);
  }
  return text;
}

// Writes the pieces of `text` to the buffer, each with a space in front; the pieces move along.
void PreTokenizer::put_spaces(std::string_view text, Scratch& scratch) {
  std::string& out = scratch.buffer;
  for (Span& piece : scratch.pieces) {
    const size_t begin = out.size();
    if (text[piece.begin] != ' ') out += ' ';
    out.append(text, piece.begin, piece.end - piece.begin);
    piece = {begin, out.size()};
  }
}

// The same with every space replaced, and pieces cut where one stands.
void PreTokenizer::put_metaspaces(const Metaspace& metaspace, std::string_view text,
                                  Scratch& scratch) {
  const std::string& mark = metaspace.replacement;
  std::string& out = scratch.buffer;
  scratch.next_pieces.clear();
  bool is_first = scratch.starts_text;
  for (const Span& piece : scratch.pieces) {
    const std::string_view words = text.substr(piece.begin, piece.end - piece.begin);
    const bool prepends = metaspace.prepend == Metaspace::Prepend::kAlways ||
                          (metaspace.prepend == Metaspace::Prepend::kFirst && is_first);
    is_first = false;
    size_t begin = out.size();
    if (prepends && words.front() != ' ' && !words.starts_with(mark)) out += mark;
    for (size_t i = 0; i < words.size();) {
      const bool is_space = words[i] == ' ';
      const bool is_mark = is_space || words.substr(i).starts_with(mark);
      if (is_mark && metaspace.split && out.size() > begin) {
        scratch.next_pieces.push_back({begin, out.size()});
        begin = out.size();
      }
      if (is_mark) {
        out += mark;
        i += is_space ? 1 : mark.size();
      } else {
        out += words[i++];
      }
    }
    scratch.next_pieces.push_back({begin, out.size()});
  }
  scratch.pieces.swap(scratch.next_pieces);
}

void PreTokenizer::split_pieces(const Stage& stage, std::string_view text, Scratch& scratch) {
  scratch.next_pieces.clear();
  for (const Span& piece : scratch.pieces) {
    find_cuts(stage, text.substr(piece.begin, piece.end - piece.begin), scratch);
    merge_cuts(stage.behavior, scratch.cuts);
    for (const Scratch::Cut& cut : scratch.cuts) {
      if (cut.span.begin == cut.span.end) continue;
      if (stage.behavior == Behavior::kRemoved && cut.is_match) continue;
      scratch.next_pieces.push_back({piece.begin + cut.span.begin, piece.begin + cut.span.end});
    }
  }
  scratch.pieces.swap(scratch.next_pieces);
}

// Matches and what lies between them, in order. An empty match right after a match does not count.
void PreTokenizer::find_cuts(const Stage& stage, std::string_view piece, Scratch& scratch) {
  auto& cuts = scratch.cuts;
  cuts.clear();
  size_t done = 0;
  bool has_match = false;
  for (size_t from = 0; from <= piece.size();) {
    const auto hit = stage.pattern.front().find(piece, from, scratch.match);
    if (!hit) break;
    if (hit->begin == hit->end && has_match && hit->end == done) {
      if (from == piece.size()) break;
      size_t length = 0;
      code_point_at(piece, from, length);
      from += length;
      continue;
    }
    if (done < hit->begin) cuts.push_back({{done, hit->begin}, stage.invert});
    cuts.push_back({*hit, !stage.invert});
    done = from = hit->end;
    has_match = true;
  }
  if (done < piece.size()) cuts.push_back({{done, piece.size()}, stage.invert});
}

void PreTokenizer::merge_cuts(Behavior behavior, std::vector<Scratch::Cut>& cuts) {
  if (behavior == Behavior::kRemoved || behavior == Behavior::kIsolated) return;
  const bool backwards = behavior == Behavior::kMergedWithNext;
  if (backwards) std::reverse(cuts.begin(), cuts.end());
  bool previous = false;
  size_t count = 0;
  for (size_t i = 0; i < cuts.size(); ++i) {
    const Scratch::Cut cut = cuts[i];
    const bool joins =
        behavior == Behavior::kContiguous ? cut.is_match == previous : cut.is_match && !previous;
    previous = cut.is_match;
    if (joins && count > 0) {
      Span& last = cuts[count - 1].span;
      (backwards ? last.begin : last.end) = backwards ? cut.span.begin : cut.span.end;
    } else {
      cuts[count++] = cut;
    }
  }
  cuts.resize(count);
  if (backwards) std::reverse(cuts.begin(), cuts.end());
}

}  // namespace cadre::text
