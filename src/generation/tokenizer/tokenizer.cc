#include "cadre/tokenizer.h"

#include <algorithm>
#include <utility>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "generation/tokenizer/tokenizer_impl.h"
#include "generation/tokenizer/utf8.h"
#include "io/json.h"

namespace cadre {
namespace {

template <typename Part>
Part parse_if_present(const text::JsonNode& root, std::string_view key) {
  const auto node = root.find(key);
  return node ? Part::parse(*node) : Part();
}

}  // namespace

Tokenizer::Impl::Impl(const text::JsonNode& root)
    : normalizer(parse_if_present<text::Normalizer>(root, "normalizer")),
      pre_tokenizer(parse_if_present<text::PreTokenizer>(root, "pre_tokenizer")),
      model(text::Bpe::parse(root.at("model"), pre_tokenizer.is_byte_level())),
      post_processor(parse_if_present<text::PostProcessor>(root, "post_processor")),
      decoder(parse_if_present<text::Decoder>(root, "decoder")) {
  if (const auto list = root.find("added_tokens")) {
    added_tokens = text::AddedTokens::parse(*list, model.vocabulary(), normalizer);
  }
}

bool Tokenizer::Impl::find_token(TokenId id, std::string_view& token) const {
  if (const std::string* respelled = added_tokens.respelled(id)) {
    token = *respelled;
    return true;
  }
  for (const text::Vocabulary* vocabulary : {&added_tokens.vocabulary(), &model.vocabulary()}) {
    if (!vocabulary->has(id)) continue;
    token = vocabulary->token(id);
    return true;
  }
  return false;
}

std::unique_ptr<Tokenizer::Impl::Scratch> Tokenizer::Impl::take_scratch() const {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return std::make_unique<Scratch>();
  auto scratch = std::move(idle_.back());
  idle_.pop_back();
  return scratch;
}

void Tokenizer::Impl::give_back(std::unique_ptr<Scratch> scratch) const {
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(scratch));
}

void Tokenizer::Impl::encode(std::string_view valid, std::vector<TokenId>& ids) const {
  auto scratch = take_scratch();
  added_tokens.split_raw(valid, scratch->raw_sections);
  for (const text::Section& section : scratch->raw_sections) {
    if (section.id != text::kNoToken) {
      ids.push_back(section.id);
    } else {
      const auto& span = section.span;
      encode_section(valid.substr(span.begin, span.end - span.begin), span.begin == 0, *scratch,
                     ids);
    }
  }
  give_back(std::move(scratch));
}

void Tokenizer::Impl::encode_section(std::string_view raw, bool starts_text, Scratch& scratch,
                                     std::vector<TokenId>& ids) const {
  const std::string_view normalized = normalizer.apply(raw, scratch.normalized);
  added_tokens.split_normalized(normalized, scratch.sections);
  for (const text::Section& section : scratch.sections) {
    if (section.id != text::kNoToken) {
      ids.push_back(section.id);
      continue;
    }
    const auto& span = section.span;
    const std::string_view split =
        pre_tokenizer.split(normalized.substr(span.begin, span.end - span.begin),
                            starts_text && span.begin == 0, scratch.pre_tokenizer);
    for (const text::Span& piece : scratch.pre_tokenizer.pieces) {
      model.encode(split.substr(piece.begin, piece.end - piece.begin), scratch.model, ids);
    }
  }
}

Tokenizer Tokenizer::from_file(const std::filesystem::path& tokenizer_json) {
  const Json json = read_json_file(tokenizer_json);
  return Tokenizer(std::make_unique<Impl>(text::JsonNode(json, tokenizer_json.string())));
}

Tokenizer Tokenizer::from_json(std::string_view json, const std::string& origin) {
  const Json parsed = parse_json_object(json, origin);
  return Tokenizer(std::make_unique<Impl>(text::JsonNode(parsed, origin)));
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

std::vector<TokenId> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  std::vector<TokenId> ids;
  ids.reserve(text.size() / 4 + 8);
  if (text::is_valid_utf8(text)) {
    impl_->encode(text, ids);
  } else {
    std::string repaired;
    text::append_lossy(text, true, repaired);
    impl_->encode(repaired, ids);
  }
  if (add_special_tokens) impl_->post_processor.apply(ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special_tokens) const {
  text::Decoder::State state;
  std::string out;
  for (const TokenId id : ids) {
    std::string_view token;
    if (skip_special_tokens && impl_->added_tokens.is_special(id)) continue;
    if (impl_->find_token(id, token)) impl_->decoder.push(token, state, out);
  }
  impl_->decoder.finish(state, out);
  return out;
}

int64_t Tokenizer::vocab_size() const {
  return impl_->model.vocabulary().size() + impl_->added_tokens.vocabulary().size();
}

std::optional<TokenId> Tokenizer::token_to_id(std::string_view token) const {
  for (const auto* vocabulary : {&impl_->added_tokens.vocabulary(), &impl_->model.vocabulary()}) {
    const TokenId id = vocabulary->find(token);
    if (id != text::kNoToken) return id;
  }
  return std::nullopt;
}

std::optional<std::string> Tokenizer::id_to_token(TokenId id) const {
  std::string_view token;
  if (!impl_->find_token(id, token)) return std::nullopt;
  return std::string(token);
}

TokenId Tokenizer::max_id() const {
  return std::max(impl_->model.vocabulary().max_id(), impl_->added_tokens.vocabulary().max_id());
}
bool Tokenizer::is_special(TokenId id) const { return impl_->added_tokens.is_special(id); }

}  // namespace cadre
