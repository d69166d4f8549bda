// A compiled regular expression (PCRE2 with just-in-time code) and what a thread needs to match
// with it.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace cadre::text {

struct Span {
  size_t begin = 0;
  size_t end = 0;
};

/// Buffers of one thread; grown at creation, reused by every match.
class MatchScratch {
 public:
  MatchScratch();
  MatchScratch(MatchScratch&&) = delete;
  ~MatchScratch();

 private:
  friend class SplitPattern;
  pcre2_real_match_data_8* data_;
  pcre2_real_match_context_8* context_;
  pcre2_real_jit_stack_8* stack_;
};

class SplitPattern {
 public:
  /// Throws std::invalid_argument with the engine's words when the pattern is malformed.
  explicit SplitPattern(const std::string& pattern);

  const std::string& source() const { return source_; }

  /// First match at or after `begin`. `subject` is valid UTF-8
  /// of Unicode 14 (see replace_newer). Throws Error when the engine reaches its limits.
  std::optional<Span> find(std::string_view subject, size_t begin, MatchScratch& scratch) const;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };
  std::string source_;
  std::unique_ptr<pcre2_real_code_8, Free> code_;
  bool compiled_to_machine_code_ = false;
};

}  // namespace cadre::text
