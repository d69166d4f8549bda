// A template as its users see it: parsed once, rendered as often as needed, faults as cadre::Error.
#pragma once

#include <ctime>
#include <string>
#include <string_view>

#include "generation/jinja/tree.h"

namespace cadre::jinja {

class Template {
 public:
  /// `origin` names the template in messages. Bytes of `source` that are not UTF-8 become U+FFFD.
  /// Throws CheckpointError for wrong syntax and Unsupported for a statement that is not served,
  /// with line and column.
  Template(std::string_view source, std::string origin);

  /// The text for these variables: Jinja's (3.1, sandboxed, immutable) with trim_blocks,
  /// lstrip_blocks, loop controls and what Transformers adds. Throws InvalidArgument for what the
  /// template refuses itself (raise_exception), Unsupported for a filter, test or statement that is
  /// not served, and CheckpointError for any other fault and for one that takes too long.
  std::string render(const Dict& variables, const std::tm& now, const Limits& limits = {}) const;

  const std::string& source() const { return source_; }

 private:
  [[noreturn]] void fail(const Fault& fault, Position at) const;

  std::string source_;
  std::string origin_;
  Block body_;
};

}  // namespace cadre::jinja
