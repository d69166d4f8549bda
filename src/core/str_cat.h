// Builds messages: str_cat("expected ", n, " rows"). Numbers print as operator<< does; to_string
// overloads of cadre types are used.
#pragma once

#include <locale>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/device.h"
#include "cadre/dtype.h"
#include "cadre/tensor.h"

namespace cadre {

namespace detail {

template <typename T>
void append(std::ostringstream& out, const T& value) {
  if constexpr (requires { out << value; }) {
    out << value;
  } else if constexpr (requires { name_of(value); }) {
    out << name_of(value);
  } else {
    out << to_string(value);
  }
}

}  // namespace detail

template <typename... Args>
std::string str_cat(const Args&... args) {
  std::ostringstream out;
  out.imbue(std::locale::classic());  // digits without a program's own grouping
  (detail::append(out, args), ...);
  return out.str();
}

/// "a, b, c"
template <typename Range>
std::string join(const Range& items, std::string_view separator = ", ") {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  bool first = true;
  for (const auto& item : items) {
    if (!first) out << separator;
    first = false;
    detail::append(out, item);
  }
  return out.str();
}

/// A text from outside as a message shows it: in double quotes, control characters as "\\x1b", cut
/// after 200 bytes ("...").
std::string quote(std::string_view text);

/// Bytes for people: "512 bytes", "1.50 GiB".
std::string format_bytes(size_t bytes);

}  // namespace cadre
