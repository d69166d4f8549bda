#include "generation/tokenizer/added_tokens.h"

#include <algorithm>

#include "core/str_cat.h"
#include "generation/tokenizer/unicode.h"
#include "generation/tokenizer/utf8.h"

namespace cadre::text {
namespace {

bool is_whole_word(std::string_view text, Span span) {
  size_t length = 0;
  if (span.begin > 0 && is_word(code_point_before(text, span.begin, length))) return false;
  return span.end == text.size() || !is_word(code_point_at(text, span.end, length));
}

size_t skip_space_back(std::string_view text, size_t end, size_t lowest) {
  size_t length = 0;
  while (end > lowest && is_space(code_point_before(text, end, length))) end -= length;
  return end;
}

size_t skip_space(std::string_view text, size_t begin) {
  size_t length = 0;
  while (begin < text.size() && is_space(code_point_at(text, begin, length))) begin += length;
  return begin;
}

AddedToken parse_token(const JsonNode& node) {
  AddedToken token;
  token.content = node.at("content").text();
  token.id = static_cast<TokenId>(node.at("id").integer(0, kMaxTokenId));
  token.special = node.boolean_or("special", false);
  token.single_word = node.boolean_or("single_word", false);
  token.lstrip = node.boolean_or("lstrip", false);
  token.rstrip = node.boolean_or("rstrip", false);
  token.normalized = node.boolean_or("normalized", !token.special);
  return token;
}

}  // namespace

void StringMatcher::add(std::string_view pattern, int32_t number) {
  starts_[static_cast<unsigned char>(pattern.front())] = true;
  uint32_t node = 0;
  for (const char c : pattern) {
    const auto byte = static_cast<unsigned char>(c);
    const Edge* known = edge(nodes_[node], byte);
    if (known != nullptr) {
      node = known->node;
      continue;
    }
    const auto next = static_cast<uint32_t>(nodes_.size());
    auto& edges = nodes_[node].edges;
    const auto place = std::lower_bound(edges.begin(), edges.end(), byte,
                                        [](const Edge& e, unsigned char b) { return e.byte < b; });
    edges.insert(place, Edge{byte, next});
    nodes_.emplace_back();
    node = next;
  }
  if (nodes_[node].pattern < 0) nodes_[node].pattern = number;
}

const StringMatcher::Edge* StringMatcher::edge(const Node& node, unsigned char byte) const {
  const auto it = std::lower_bound(node.edges.begin(), node.edges.end(), byte,
                                   [](const Edge& e, unsigned char b) { return e.byte < b; });
  return it == node.edges.end() || it->byte != byte ? nullptr : &*it;
}

StringMatcher::Hit StringMatcher::find(std::string_view text, size_t begin) const {
  for (; begin < text.size(); ++begin) {
    if (!starts_[static_cast<unsigned char>(text[begin])]) continue;
    Hit hit{begin, begin, -1};
    const Node* node = &nodes_[0];
    for (size_t i = begin; i < text.size(); ++i) {
      const Edge* next = edge(*node, static_cast<unsigned char>(text[i]));
      if (next == nullptr) break;
      node = &nodes_[next->node];
      if (node->pattern >= 0) hit = {begin, i + 1, node->pattern};
    }
    if (hit.pattern >= 0) return hit;
  }
  return {text.size(), text.size(), -1};
}

AddedTokens AddedTokens::parse(const JsonNode& list, const Vocabulary& model,
                               const Normalizer& normalizer) {
  AddedTokens added;
  for (size_t i = 0; i < list.array_size(); ++i) {
    const JsonNode node = list.element(i);
    AddedToken token = parse_token(node);
    if (token.content.empty()) continue;
    added.add_to_vocabulary(node, token, model);
    const auto id = static_cast<size_t>(token.id);
    if (token.special) {
      if (id >= added.special_.size()) added.special_.resize(id + 1);
      added.special_[id] = true;
    }
    added.tokens_.push_back(std::move(token));
  }
  added.add_to_matchers(normalizer);
  return added;
}

// A token of the model may be listed again under the same id.
void AddedTokens::add_to_vocabulary(const JsonNode& node, const AddedToken& token,
                                    const Vocabulary& model) {
  for (const Vocabulary* known : {&model, static_cast<const Vocabulary*>(&vocabulary_)}) {
    const TokenId id = known->find(token.content);
    if (id == token.id) return;
    if (id != kNoToken) {
      node.fail_with(str_cat("token \"", token.content, "\" has id ", token.id, " here and ", id,
                             " elsewhere in the file"));
    }
    if (known->has(token.id)) {
      node.fail_with(str_cat("id ", token.id, " of token \"", token.content,
                             "\" belongs to token \"", known->token(token.id), "\" already"));
    }
  }
  vocabulary_.add(token.content, token.id);
}

// Special ones come first: among equal strings they win, as in the reference.
void AddedTokens::add_to_matchers(const Normalizer& normalizer) {
  std::stable_partition(tokens_.begin(), tokens_.end(),
                        [](const AddedToken& token) { return token.special; });
  std::string buffer;
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const AddedToken& token = tokens_[i];
    const std::string_view pattern =
        token.normalized ? normalizer.apply(token.content, buffer) : token.content;
    if (pattern != token.content) respelled_[token.id] = pattern;
    if (pattern.empty()) continue;
    (token.normalized ? normalized_ : raw_).add(pattern, static_cast<int32_t>(i));
  }
}

void AddedTokens::split(std::string_view text, const StringMatcher& matcher,
                        std::vector<Section>& out) const {
  out.clear();
  size_t done = 0;
  for (size_t from = 0; !matcher.empty();) {
    const StringMatcher::Hit hit = matcher.find(text, from);
    if (hit.pattern < 0) break;
    from = hit.end;
    const AddedToken& token = tokens_[static_cast<size_t>(hit.pattern)];
    Span span{hit.begin, hit.end};
    if (token.single_word && !is_whole_word(text, span)) continue;
    if (token.lstrip) span.begin = skip_space_back(text, span.begin, std::min(done, span.begin));
    // Inside space that the token before took, that token's end is known to be right.
    if (token.rstrip) span.end = span.end <= done ? done : skip_space(text, span.end);
    if (done < span.begin) out.push_back({{done, span.begin}});
    out.push_back({span, token.id});
    done = span.end;
  }
  if (done < text.size()) out.push_back({{done, text.size()}});
}

const std::string* AddedTokens::respelled(TokenId id) const {
  const auto it = respelled_.find(id);
  return it == respelled_.end() ? nullptr : &it->second;
}

bool AddedTokens::is_special(TokenId id) const {
  return id >= 0 && static_cast<size_t>(id) < special_.size() && special_[static_cast<size_t>(id)];
}

}  // namespace cadre::text
