// The post-processor of tokenizer.json: the special tokens put around the ids of one text.
#pragma once

#include <span>
#include <vector>

#include "generation/tokenizer/json_node.h"
#include "generation/tokenizer/vocabulary.h"

namespace cadre::text {

class PostProcessor {
 public:
  PostProcessor() = default;  // adds nothing

  /// TemplateProcessing, ByteLevel (concerns offsets alone) and Sequence; else Unsupported.
  static PostProcessor parse(const JsonNode& node);

  void apply(std::vector<TokenId>& ids) const;

 private:
  struct Template {
    std::vector<TokenId> before;
    std::vector<TokenId> after;
  };
  void add(const JsonNode& node);
  static Template parse_template(const JsonNode& node);

  std::vector<Template> templates_;
};

}  // namespace cadre::text
