#include "io/json.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "io/file_handle.h"

namespace cadre {
namespace {

constexpr size_t kMaxDepth = 100;

// Reads a text and tells how far the parser has come: the only way to give an offset for what the
// grammar allows and we do not.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* position, const char** furthest)
      : position_(position), furthest_(furthest) {}
  reference operator*() const { return *position_; }
  CountingIterator& operator++() {
    *furthest_ = ++position_;
    return *this;
  }
  CountingIterator operator++(int) {
    const CountingIterator old = *this;
    ++*this;
    return old;
  }
  friend bool operator==(const CountingIterator& a, const CountingIterator& b) {
    return a.position_ == b.position_;
  }

 private:
  const char* position_;
  const char** furthest_;
};

[[noreturn]] void fail(const std::string& origin, size_t offset, std::string_view what) {
  throw CheckpointError(str_cat(origin, ": malformed JSON at byte ", offset, ": ", what,
                                "; the file is damaged or incomplete, fetch it again"));
}

// Builds the document; refuses duplicate keys and deep nesting as soon as they are seen.
class DocumentBuilder final : public nlohmann::json_sax<Json> {
 public:
  DocumentBuilder(const char* begin, const char* const* position, const std::string& origin)
      : begin_(begin), position_(position), origin_(origin) {}

  Json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& /*text*/) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t& /*value*/) override { return false; }  // not in JSON text
  bool start_object(size_t /*elements*/) override { return open(Json::object()); }
  bool start_array(size_t /*elements*/) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    auto& object = open_.back()->get_ref<Json::object_t&>();
    const auto [slot, is_new] = object.try_emplace(std::move(name));
    if (!is_new) fail(origin_, offset(), str_cat("the key ", quote(slot->first), " occurs twice"));
    value_ = &slot->second;
    return true;
  }

  bool parse_error(size_t position, const std::string& /*token*/,
                   const Json::exception& error) override {
    std::string_view text = error.what();  // "[json.exception...] parse error at ...: reason"
    if (const size_t end = text.find("] "); end != text.npos) text.remove_prefix(end + 2);
    constexpr size_t kMaxText = 300;  // it quotes the token, however long that is
    fail(origin_, position, text.substr(0, kMaxText));
  }

 private:
  size_t offset() const { return static_cast<size_t>(*position_ - begin_); }

  // Puts a value at its place and returns where it lies.
  Json* place(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      return &open_.back()->back();
    }
    *value_ = std::move(value);
    return value_;
  }
  bool add(Json value) {
    place(std::move(value));
    return true;
  }
  bool open(Json value) {
    if (open_.size() == kMaxDepth)
      fail(origin_, offset(), str_cat("nested deeper than ", kMaxDepth, " levels"));
    open_.push_back(place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const char* begin_;
  const char* const* position_;
  const std::string& origin_;
  Json root_;
  std::vector<Json*> open_;  // from the root to the container that is being filled
  Json* value_ = nullptr;    // of the key that was read last
};

}  // namespace

Json parse_json_object(std::string_view text, const std::string& origin) {
  // The parser takes a NUL for the end of the text and would not look at what follows.
  if (const size_t nul = text.find('\0'); nul != text.npos) fail(origin, nul, "a NUL byte");
  const char* const end = text.data() + text.size();
  const char* position = text.data();
  DocumentBuilder builder(text.data(), &position, origin);
  Json::sax_parse(CountingIterator(text.data(), &position), CountingIterator(end, &position),
                  &builder);
  Json document = builder.take();
  if (!document.is_object())
    fail(origin, 0, str_cat("expected an object at the top level, got ", document.type_name()));
  return document;
}

Json read_json_file(const std::filesystem::path& path, int64_t max_bytes) {
  return parse_json_object(read_file(path, max_bytes, "JSON"), path.string());
}

}  // namespace cadre
