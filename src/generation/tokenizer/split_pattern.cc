#define PCRE2_CODE_UNIT_WIDTH 8
#include "generation/tokenizer/split_pattern.h"

#include <pcre2.h>

#include <new>
#include <stdexcept>

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre::text {
namespace {

constexpr size_t kJitStackStart = size_t{32} << 10;
constexpr size_t kJitStackMax = size_t{64} << 20;  // reserved as address space, used on demand
constexpr uint32_t kMatchLimit = 50'000'000;       // steps of one match, then Error
constexpr uint32_t kHeapLimitKib = 256 << 10;      // without machine code

std::string message_of(int code) {
  PCRE2_UCHAR buffer[256] = {};
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

}  // namespace

MatchScratch::MatchScratch()
    : data_(pcre2_match_data_create(1, nullptr)),
      context_(pcre2_match_context_create(nullptr)),
      stack_(pcre2_jit_stack_create(kJitStackStart, kJitStackMax, nullptr)) {
  if (data_ == nullptr || context_ == nullptr) throw std::bad_alloc();
  pcre2_set_match_limit(context_, kMatchLimit);
  pcre2_set_heap_limit(context_, kHeapLimitKib);
  if (stack_ != nullptr) pcre2_jit_stack_assign(context_, nullptr, stack_);
}

MatchScratch::~MatchScratch() {
  pcre2_match_data_free(data_);
  pcre2_match_context_free(context_);
  pcre2_jit_stack_free(stack_);
}

void SplitPattern::Free::operator()(pcre2_real_code_8* code) const { pcre2_code_free(code); }

SplitPattern::SplitPattern(const std::string& pattern) : source_(pattern) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  constexpr uint32_t kOptions =
      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_AUTO_CAPTURE;
  code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), kOptions,
                            &error, &offset, nullptr));
  if (!code_) throw std::invalid_argument(str_cat(message_of(error), " at offset ", offset));
  compiled_to_machine_code_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0;
}

std::optional<Span> SplitPattern::find(std::string_view subject, size_t begin,
                                       MatchScratch& scratch) const {
  const auto* text = reinterpret_cast<PCRE2_SPTR>(subject.data());
  const auto match = compiled_to_machine_code_ ? pcre2_jit_match : pcre2_match;
  const int result = match(code_.get(), text, subject.size(), begin, PCRE2_NO_UTF_CHECK,
                           scratch.data_, scratch.context_);
  if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (result < 0) {
    throw Error(str_cat("encode: the split pattern gave up at byte ", begin, " of a piece of ",
                        subject.size(), " bytes: ", message_of(result), "; pattern ", source_,
                        "; encode the text in shorter parts"));
  }
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(scratch.data_);
  return Span{ends[0], ends[1]};
}

}  // namespace cadre::text
