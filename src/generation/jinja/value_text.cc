#include "generation/jinja/value_text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "generation/jinja/callable.h"
#include "generation/jinja/python_text.h"
#include "generation/tokenizer/utf8.h"

namespace cadre::jinja {
namespace {

// Builds one text and counts it.
class Writer {
 public:
  explicit Writer(Budget& budget) : budget_(budget) {}

  void put(std::string_view text) {
    budget_.bytes(text.size());
    out_ += text;
  }

  void put_repr(const Value& value) {
    budget_.step();
    if (value.is_string()) return put(repr_text(value.string()));
    if (value.is_array()) return put_array(value.array());
    if (value.is_dict()) return put_dict(value.dict());
    put_plain(value);
  }

  // All whose str() is their repr().
  void put_plain(const Value& value) {
    if (value.is_undefined()) {
      put("Undefined");
    } else if (value.is_none()) {
      put("None");
    } else if (value.is_bool()) {
      put(value.boolean() ? "True" : "False");
    } else if (value.is_integer()) {
      put(std::to_string(value.integer()));
    } else if (value.is_float()) {
      put(float_text(value.number()));
    } else {
      fail("a value of type ", type_name(value), " cannot be printed");
    }
  }

  std::string take() { return std::move(out_); }

 private:
  void put_items(const Values& items) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) put(", ");
      put_repr(items[i]);
    }
  }

  void put_array(const Array& array) {
    switch (array.kind) {
      case ArrayKind::kList:
        put("[");
        put_items(array.items);
        return put("]");
      case ArrayKind::kTuple:
        put("(");
        put_items(array.items);
        return put(array.items.size() == 1 ? ",)" : ")");
      case ArrayKind::kKeys:
      case ArrayKind::kValues:
      case ArrayKind::kItems:
        put(array.kind == ArrayKind::kKeys     ? "dict_keys(["
            : array.kind == ArrayKind::kValues ? "dict_values(["
                                               : "dict_items([");
        put_items(array.items);
        return put("])");
      case ArrayKind::kRange:
      case ArrayKind::kGenerator:
        break;
    }
    fail("a range or the result of a filter like map cannot be printed; make it a list first");
  }

  void put_dict(const Dict& dict) {
    put("{");
    bool first = true;
    for (const auto& [key, value] : dict.entries) {
      if (!first) put(", ");
      first = false;
      put_repr(key);
      put(": ");
      put_repr(value);
    }
    put("}");
  }

  Budget& budget_;
  std::string out_;
};

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, Budget& budget) : style_(style), budget_(budget) {}

  void put(const Value& value, size_t level) {
    budget_.step();
    if (value.is_string()) return put_string(value.string());
    if (value.is_dict()) return put_dict(value.dict(), level);
    if (value.is_array() && value.array().kind <= ArrayKind::kTuple) {
      return put_array(value.array().items, level);
    }
    if (value.is_undefined() && value.undefined().why) {
      fail("tojson: ", *value.undefined().why);
    }
    write(scalar(value));
  }

  std::string take() { return std::move(out_); }

 private:
  static std::string scalar(const Value& value) {
    if (value.is_none()) return "null";
    if (value.is_bool()) return value.boolean() ? "true" : "false";
    if (value.is_integer()) return std::to_string(value.integer());
    if (!value.is_float()) fail("tojson: a value of type ", type_name(value), " has no JSON");
    const double number = value.number();
    if (std::isnan(number)) return "NaN";
    if (std::isinf(number)) return number < 0 ? "-Infinity" : "Infinity";
    return float_text(number);
  }

  void write(std::string_view text) {
    budget_.bytes(text.size());
    out_ += text;
  }

  void new_line(size_t level) {
    if (!style_.indent) return;
    write("\n");
    for (size_t i = 0; i < level; ++i) write(*style_.indent);
  }

  void put_array(const Values& items, size_t level) {
    if (items.empty()) return write("[]");
    write("[");
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) write(style_.item_separator);
      new_line(level + 1);
      put(items[i], level + 1);
    }
    new_line(level);
    write("]");
  }

  std::vector<const std::pair<Value, Value>*> ordered(const Dict& dict) {
    std::vector<const std::pair<Value, Value>*> entries;
    for (const auto& entry : dict.entries) entries.push_back(&entry);
    if (style_.sort_keys) {
      std::stable_sort(entries.begin(), entries.end(), [&](const auto* a, const auto* b) {
        return compare(a->first, b->first, budget_) < 0;
      });
    }
    return entries;
  }

  void put_dict(const Dict& dict, size_t level) {
    if (dict.entries.empty()) return write("{}");
    write("{");
    bool first = true;
    for (const auto* entry : ordered(dict)) {
      if (!first) write(style_.item_separator);
      first = false;
      new_line(level + 1);
      const Value& key = entry->first;
      put_string(key.is_string() ? key.string() : scalar(key));
      write(style_.key_separator);
      put(entry->second, level + 1);
    }
    new_line(level);
    write("}");
  }

  void put_string(std::string_view text) {
    budget_.bytes(text.size());
    out_ += '"';
    for (size_t i = 0, size = 0; i < text.size(); i += size) {
      const char32_t c = text::code_point_at(text, i, size);
      if (!put_short_escape(c)) {
        if (c < 0x20 || (style_.ascii_only && c > 0x7e)) {
          put_escape(c);
        } else {
          out_ += text.substr(i, size);
        }
      }
    }
    out_ += '"';
  }

  bool put_short_escape(char32_t c) {
    constexpr std::string_view kFrom = "\"\\\n\r\t\f\b";
    constexpr std::string_view kTo = "\"\\nrtfb";
    const size_t at = c < 0x80 ? kFrom.find(static_cast<char>(c)) : kFrom.npos;
    if (at == kFrom.npos) return false;
    out_ += '\\';
    out_ += kTo[at];
    return true;
  }

  void put_escape(char32_t c) {
    budget_.bytes(12);
    char text[16];
    if (c >= 0x10000) {
      const auto rest = static_cast<unsigned>(c - 0x10000);
      std::snprintf(text, sizeof text, "\\u%04x\\u%04x", 0xd800 + (rest >> 10),
                    0xdc00 + (rest & 0x3ff));
    } else {
      std::snprintf(text, sizeof text, "\\u%04x", static_cast<unsigned>(c));
    }
    out_ += text;
  }

  const JsonStyle& style_;
  Budget& budget_;
  std::string out_;
};

}  // namespace

std::string to_text(const Value& value, Budget& budget) {
  if (value.is_undefined()) return {};
  if (value.is_string()) {
    budget.bytes(value.string().size());
    return value.string();
  }
  return to_repr(value, budget);
}

std::string to_repr(const Value& value, Budget& budget) {
  Writer writer(budget);
  writer.put_repr(value);
  return writer.take();
}

std::string to_json(const Value& value, const JsonStyle& style, Budget& budget) {
  JsonWriter writer(style, budget);
  writer.put(value, 0);
  return writer.take();
}

Value from_json(const nlohmann::ordered_json& json) {
  using Type = nlohmann::ordered_json::value_t;
  switch (json.type()) {
    case Type::boolean:
      return json.get<bool>();
    case Type::number_integer:
      return json.get<int64_t>();
    case Type::number_unsigned:
      if (json.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()}) {
        fail("the number ", json.get<uint64_t>(), " is beyond 64 bits with a sign");
      }
      return json.get<int64_t>();
    case Type::number_float:
      return json.get<double>();
    case Type::string:
      return json.get_ref<const std::string&>();
    case Type::array: {
      Values items;
      for (const auto& item : json) items.push_back(from_json(item));
      return make_array(std::move(items));
    }
    case Type::object: {
      Dict dict;
      for (const auto& [key, value] : json.items()) dict.set(Value(key), from_json(value));
      return make_dict(std::move(dict));
    }
    default:
      return None{};
  }
}

}  // namespace cadre::jinja
