#include "generation/jinja/template.h"

#include "cadre/error.h"
#include "generation/jinja/evaluator.h"
#include "generation/jinja/parser.h"
#include "generation/tokenizer/utf8.h"

namespace cadre::jinja {
namespace {

constexpr size_t kMaxBytes = size_t{4} << 20;  // the longest real ones have 30 KB

std::string repaired(std::string_view source) {
  std::string text;
  text::append_lossy(source, /*at_end=*/true, text);
  return text;
}

}  // namespace

Template::Template(std::string_view source, std::string origin)
    : source_(repaired(source.substr(0, kMaxBytes + 1))), origin_(std::move(origin)) {
  if (source.size() > kMaxBytes) {
    throw CheckpointError(str_cat(origin_, ": expected a chat template of at most ", kMaxBytes,
                                  " bytes, got ", source.size()));
  }
  try {
    body_ = parse(source_);
  } catch (const SyntaxFault& fault) {
    fail(fault.fault, fault.at);
  }
}

std::string Template::render(const Dict& variables, const std::tm& now,
                             const Limits& limits) const {
  Evaluator evaluator(limits, now);
  try {
    return evaluator.run(body_, variables);
  } catch (const Fault& fault) {
    fail(fault, evaluator.position());
  }
}

void Template::fail(const Fault& fault, Position at) const {
  const std::string where = str_cat(origin_, ", line ", at.line, ", column ", at.column, ": ");
  switch (fault.kind) {
    case Fault::Kind::kUnsupported:
      throw Unsupported(str_cat(where, fault.message));
    case Fault::Kind::kRaised:
      throw InvalidArgument(str_cat("the chat template refuses these messages: ", fault.message,
                                    " (", origin_, ", line ", at.line, ")"));
    case Fault::Kind::kTemplate:
      break;
  }
  throw CheckpointError(str_cat(where, fault.message));
}

}  // namespace cadre::jinja
