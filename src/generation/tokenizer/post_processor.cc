#include "generation/tokenizer/post_processor.h"

#include "core/str_cat.h"

namespace cadre::text {
namespace {

constexpr size_t kMaxAdded = 1024;  // pieces times ids of a token could be far more than the file

}  // namespace

PostProcessor PostProcessor::parse(const JsonNode& node) {
  PostProcessor processor;
  processor.add(node);
  return processor;
}

void PostProcessor::add(const JsonNode& node) {
  const std::string type = node.at("type").text();
  if (type == "Sequence") {
    const JsonNode parts = node.at("processors");
    for (size_t i = 0; i < parts.array_size(); ++i) add(parts.element(i));
  } else if (type == "TemplateProcessing") {
    templates_.push_back(parse_template(node));
  } else if (type != "ByteLevel") {
    node.unsupported(str_cat("post-processor \"", type, "\""),
                     "TemplateProcessing, ByteLevel, Sequence");
  }
}

PostProcessor::Template PostProcessor::parse_template(const JsonNode& node) {
  Template result;
  bool has_text = false;
  const JsonNode single = node.at("single");
  for (size_t i = 0; i < single.array_size(); ++i) {
    const JsonNode piece = single.element(i);
    if (piece.find("Sequence")) {
      if (has_text) piece.unsupported("a template with the text twice", "the text once");
      has_text = true;
      continue;
    }
    const std::string name = piece.at("SpecialToken").at("id").text();
    const JsonNode ids = node.at("special_tokens").at(name).at("ids");
    for (size_t k = 0; k < ids.array_size(); ++k) {
      const auto id = static_cast<TokenId>(ids.element(k).integer(0, kMaxTokenId));
      (has_text ? result.after : result.before).push_back(id);
    }
    if (result.before.size() + result.after.size() > kMaxAdded) {
      piece.unsupported("a longer template", str_cat("up to ", kMaxAdded, " ids around the text"));
    }
  }
  if (!has_text) single.unsupported("a template without the text", "the text once");
  return result;
}

void PostProcessor::apply(std::vector<TokenId>& ids) const {
  for (const Template& around : templates_) {
    ids.insert(ids.begin(), around.before.begin(), around.before.end());
    ids.insert(ids.end(), around.after.begin(), around.after.end());
  }
}

}  // namespace cadre::text
