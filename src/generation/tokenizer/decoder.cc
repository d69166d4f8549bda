#include "generation/tokenizer/decoder.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "core/str_cat.h"
#include "generation/tokenizer/byte_alphabet.h"
#include "generation/tokenizer/metaspace.h"
#include "generation/tokenizer/normalizer.h"
#include "generation/tokenizer/utf8.h"

namespace cadre::text {
namespace {

constexpr size_t kMaxSteps = 32;  // run() calls itself once a step

// "<0x0A>" -> 10
std::optional<uint8_t> byte_of_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return std::nullopt;
  uint8_t byte = 0;
  const char* end = token.data() + 5;
  const auto result = std::from_chars(token.data() + 3, end, byte, 16);
  if (result.ec != std::errc() || result.ptr != end) return std::nullopt;
  return byte;
}

}  // namespace

Decoder Decoder::parse(const JsonNode& node) {
  Decoder decoder;
  decoder.steps_.clear();
  decoder.add(node);
  return decoder;
}

void Decoder::add(const JsonNode& node) {
  const std::string type = node.at("type").text();
  if (type == "Sequence") {
    const JsonNode parts = node.at("decoders");
    for (size_t i = 0; i < parts.array_size(); ++i) add(parts.element(i));
  } else if (type == "ByteLevel") {
    add_step(node, {Kind::kByteLevel, "", "", 0, 0, false});
    is_fused_ = true;
  } else if (type == "Fuse") {
    is_fused_ = true;
  } else if (type == "ByteFallback") {
    add_step(node, {Kind::kByteFallback, "", "", 0, 0, false});
  } else if (type == "Metaspace") {
    const Metaspace metaspace = Metaspace::parse(node);
    const bool strips = metaspace.prepend != Metaspace::Prepend::kNever;
    add_step(node,
             {Kind::kMetaspace, metaspace.replacement, " ", strips ? size_t{1} : 0, 0, false});
  } else if (type == "Replace") {
    const JsonNode pattern = node.at("pattern");
    const auto literal = pattern.find("String");
    if (!literal) pattern.unsupported("decoder Replace with a Regex", "a String");
    if (literal->text().empty()) literal->fail("a string that is not empty");
    add_step(node, {Kind::kReplace, literal->text(), node.at("content").text(), 0, 0, false});
  } else if (type == "Strip") {
    Step step{Kind::kStrip, "", node.at("content").text(), 0, 0, is_fused_};
    step.strip_begin = static_cast<size_t>(node.at("start").integer(0, 1 << 20));
    step.strip_end = static_cast<size_t>(node.at("stop").integer(0, 1 << 20));
    if (step.content.empty()) node.at("content").fail("a character");
    add_step(node, std::move(step));
  } else {
    node.unsupported(str_cat("decoder \"", type, "\""),
                     "ByteLevel, ByteFallback, Metaspace, Replace, Strip, Fuse, Sequence");
  }
}

void Decoder::add_step(const JsonNode& node, Step step) {
  const bool works_fused = step.kind == Kind::kStrip && step.strip_end == 0;
  if (is_fused_ && !works_fused) {
    node.unsupported("this decoder after Fuse or ByteLevel", "Strip at the start");
  }
  if (steps_.size() >= kMaxSteps) {
    node.unsupported("a longer Sequence", str_cat("up to ", kMaxSteps, " decoders"));
  }
  steps_.push_back(std::move(step));
}

void Decoder::push(std::string_view token, State& state, std::string& out) const {
  state.steps.resize(steps_.size());
  state.longest_token = std::max(state.longest_token, token.size());
  run(0, std::string(token), state, out);
}

void Decoder::finish(State& state, std::string& out) const {
  state.steps.resize(steps_.size());
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (state.steps[i].pending.empty()) continue;
    if (steps_[i].kind == Kind::kByteFallback) {
      emit_bytes(i, state, out);
    } else {
      std::string rest;
      append_lossy(state.steps[i].pending, true, rest);
      run(i + 1, std::move(rest), state, out);
    }
  }
  state.steps.clear();
}

// Hands `token` through the steps from `index` on.
void Decoder::run(size_t index, std::string token, State& state, std::string& out) const {
  if (index == steps_.size()) {
    out += token;
    return;
  }
  const Step& step = steps_[index];
  State::Step& own = state.steps[index];
  const size_t max_size = max_replaced_size(state.longest_token);
  switch (step.kind) {
    case Kind::kJoin:
      if (own.count++ > 0) token.insert(0, 1, ' ');
      break;
    case Kind::kByteLevel: {
      if (!append_bytes_of_token(token, own.pending)) own.pending += token;
      token.clear();
      own.pending.erase(0, append_lossy(own.pending, false, token));
      break;
    }
    case Kind::kByteFallback:
      if (const auto byte = byte_of_token(token)) {
        own.pending += static_cast<char>(*byte);
        return;
      }
      emit_bytes(index, state, out);
      break;
    case Kind::kMetaspace:  // all marks of the first token go
      replace_all(token, step.pattern, own.count++ < step.strip_begin ? "" : step.content,
                  max_size);
      break;
    case Kind::kReplace:
      replace_all(token, step.pattern, step.content, max_size);
      break;
    case Kind::kStrip:
      strip(step, own, token);
      break;
  }
  run(index + 1, std::move(token), state, out);
}

// A run of byte tokens is text when all of it is; otherwise each byte is one U+FFFD.
void Decoder::emit_bytes(size_t index, State& state, std::string& out) const {
  std::string bytes;
  bytes.swap(state.steps[index].pending);
  if (bytes.empty()) return;
  state.longest_token = std::max(state.longest_token, bytes.size());
  if (is_valid_utf8(bytes)) {
    run(index + 1, std::move(bytes), state, out);
    return;
  }
  for (size_t i = 0; i < bytes.size(); ++i) run(index + 1, "\xEF\xBF\xBD", state, out);
}

// Up to strip_begin and strip_end times `content` off the ends; of all text when fused.
void Decoder::strip(const Step& step, State::Step& state, std::string& token) {
  size_t& stripped = state.count;
  if (!step.fused) stripped = 0;
  size_t begin = 0;
  while (stripped < step.strip_begin &&
         token.compare(begin, step.content.size(), step.content) == 0) {
    begin += step.content.size();
    ++stripped;
  }
  if (step.fused && begin < token.size()) stripped = step.strip_begin;  // text has begun
  size_t end = token.size();
  for (size_t i = 0;
       i < step.strip_end && end >= begin + step.content.size() &&
       token.compare(end - step.content.size(), step.content.size(), step.content) == 0;
       ++i) {
    end -= step.content.size();
  }
  token = token.substr(begin, end - begin);
}

}  // namespace cadre::text
