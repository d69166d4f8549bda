#include "generation/tokenizer/json_node.h"

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre::text {
namespace {

// The value as text, cut short: it may be a whole vocabulary.
std::string excerpt(const Json& json) {
  if (json.is_array() || json.is_object()) {
    return str_cat(json.type_name(), " of ", json.size(), " elements");
  }
  std::string text = json.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 60) text = str_cat(text.substr(0, 60), "...");
  return text;
}

}  // namespace

std::string JsonNode::where() const {
  return str_cat("reading tokenizer: ", *origin_, path_.empty() ? "" : ": ", path_);
}

void JsonNode::fail(std::string_view expected) const {
  throw CheckpointError(str_cat(where(), ": expected ", expected, ", found ", excerpt(*json_),
                                "; the file is damaged, fetch it again"));
}

void JsonNode::fail_with(std::string_view finding) const {
  throw CheckpointError(str_cat(where(), ": ", finding, "; the file is damaged, fetch it again"));
}

void JsonNode::unsupported(std::string_view component, std::string_view supported) const {
  throw Unsupported(
      str_cat(where(), ": ", component, " is not implemented; supported: ", supported));
}

std::optional<JsonNode> JsonNode::find(std::string_view key) const {
  if (!json_->is_object()) fail("an object");
  const auto it = json_->find(key);
  if (it == json_->end() || it->is_null()) return std::nullopt;
  return JsonNode(*it, *origin_, path_.empty() ? std::string(key) : str_cat(path_, ".", key));
}

JsonNode JsonNode::at(std::string_view key) const {
  auto node = find(key);
  if (!node) fail_with(str_cat("expected key \"", key, "\", which is missing"));
  return *node;
}

JsonNode JsonNode::element(size_t index) const {
  return JsonNode((*json_)[index], *origin_, str_cat(path_, "[", index, "]"));
}

size_t JsonNode::array_size() const {
  if (!json_->is_array()) fail("an array");
  return json_->size();
}

std::string JsonNode::text() const {
  if (!json_->is_string()) fail("a string");
  return json_->get<std::string>();
}

int64_t JsonNode::integer(int64_t min, int64_t max) const {
  const bool fits = json_->is_number_unsigned()
                        ? json_->get<uint64_t>() <= static_cast<uint64_t>(max)
                        : json_->is_number_integer();
  if (!fits || json_->get<int64_t>() < min || json_->get<int64_t>() > max) {
    fail(str_cat("an integer from ", min, " to ", max));
  }
  return json_->get<int64_t>();
}

std::string JsonNode::text_or(std::string_view key, std::string_view fallback) const {
  const auto node = find(key);
  return node ? node->text() : std::string(fallback);
}

bool JsonNode::boolean_or(std::string_view key, bool fallback) const {
  const auto node = find(key);
  if (!node) return fallback;
  if (!node->json().is_boolean()) node->fail("true or false");
  return node->json().get<bool>();
}

}  // namespace cadre::text
