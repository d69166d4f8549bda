// Reading; the writer is in safetensors_write.cc.
#include "io/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cadre/error.h"
#include "core/checked_math.h"
#include "core/str_cat.h"
#include "io/json.h"

namespace cadre {
namespace {

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr std::string_view kMetadataKey = "__metadata__";

[[noreturn]] void fail(const std::string& origin, std::string_view what) {
  throw CheckpointError(
      str_cat(origin, ": ", what, "; the file is damaged or incomplete, fetch it again"));
}

[[noreturn]] void fail_tensor(const std::string& origin, std::string_view name,
                              std::string_view what) {
  fail(origin, str_cat("tensor ", quote(name), ": ", what));
}

std::string_view header_text(std::span<const std::byte> file, const std::string& origin) {
  if (file.size() < kLengthBytes) {
    fail(origin, str_cat("not a safetensors file: expected 8 bytes of header length, got ",
                         file.size(), " bytes in all"));
  }
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) length = length << 8 | std::to_integer<uint64_t>(file[i]);
  const size_t available = file.size() - kLengthBytes;
  if (length > kMaxHeaderBytes || length > available) {
    fail(origin, str_cat("not a safetensors file: expected a header length of at most ",
                         std::min<uint64_t>(kMaxHeaderBytes, available), " bytes, got ", length));
  }
  return {reinterpret_cast<const char*>(file.data()) + kLengthBytes, static_cast<size_t>(length)};
}

// One tensor's JSON, checked key by key.
class EntryParser {
 public:
  EntryParser(const std::string& origin, const std::string& name, const Json& json)
      : origin_(origin), name_(name), json_(json) {}

  /// Offsets are still relative to the data.
  SafetensorsEntry parse(size_t data_bytes) const {
    if (!json_.is_object())
      fail_tensor(origin_, name_, str_cat("expected an object, got ", json_.type_name()));
    SafetensorsEntry entry;
    entry.name = name_;
    entry.dtype = dtype();
    entry.shape = shape();
    const auto [begin, end] = offsets(data_bytes);
    entry.offset = begin;
    entry.bytes = end - begin;
    check_bytes(entry);
    return entry;
  }

 private:
  const Json& at(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end())
      fail_tensor(origin_, name_, str_cat("the key ", quote(key), " is missing"));
    return *found;
  }

  DType dtype() const {
    const Json& value = at("dtype");
    if (!value.is_string())
      fail_tensor(origin_, name_, str_cat("expected dtype to be a text, got ", value.type_name()));
    const auto& text = value.get_ref<const std::string&>();
    if (const auto dtype = parse_safetensors_dtype(text)) return *dtype;
    std::vector<std::string_view> known;
    for (int i = 0; i < kNumDTypes; ++i) known.push_back(safetensors_name(static_cast<DType>(i)));
    throw CheckpointError(str_cat(origin_, ": tensor ", quote(name_), ": dtype ", quote(text),
                                  " is not known; expected one of ", join(known),
                                  "; convert the tensor or use a newer version of Cadre"));
  }

  int64_t non_negative(const Json& value, std::string_view what) const {
    if (value.is_number_unsigned()) {
      const auto number = value.get<uint64_t>();
      if (number <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
        return static_cast<int64_t>(number);
    }
    fail_tensor(origin_, name_,
                str_cat("expected ", what, " to hold integers from 0 to 2^63 - 1, got ",
                        value.is_number() ? value.dump() : value.type_name()));
  }

  Dims shape() const {
    const Json& value = at("shape");
    if (!value.is_array())
      fail_tensor(origin_, name_, str_cat("expected shape to be a list, got ", value.type_name()));
    if (value.size() > static_cast<size_t>(kMaxRank)) {
      fail_tensor(origin_, name_,
                  str_cat("expected at most ", kMaxRank, " dimensions, got ", value.size()));
    }
    std::vector<int64_t> dims;
    for (const Json& dim : value) dims.push_back(non_negative(dim, "shape"));
    return Dims(std::span<const int64_t>(dims));
  }

  std::pair<size_t, size_t> offsets(size_t data_bytes) const {
    const Json& value = at("data_offsets");
    if (!value.is_array() || value.size() != 2)
      fail_tensor(origin_, name_, "expected data_offsets to be a list of two integers");
    const auto begin = static_cast<size_t>(non_negative(value[0], "data_offsets"));
    const auto end = static_cast<size_t>(non_negative(value[1], "data_offsets"));
    if (begin > end || end > data_bytes) {
      fail_tensor(origin_, name_,
                  str_cat("expected data_offsets [begin, end] with begin <= end <= ", data_bytes,
                          " (the data bytes of the file), got [", begin, ", ", end, "]"));
    }
    return {begin, end};
  }

  // A product that overflows is refused even when another dimension is 0: no writer makes one.
  void check_bytes(const SafetensorsEntry& entry) const {
    int64_t bytes = static_cast<int64_t>(size_of(entry.dtype));
    bool is_empty = false;
    for (const int64_t dim : entry.shape) {
      is_empty = is_empty || dim == 0;
      const auto product = checked_multiply(bytes, std::max<int64_t>(dim, 1));
      if (!product)
        fail_tensor(origin_, name_, str_cat("shape ", entry.shape, " overflows 64 bits"));
      bytes = *product;
    }
    if (is_empty) bytes = 0;
    if (static_cast<size_t>(bytes) != entry.bytes) {
      fail_tensor(origin_, name_,
                  str_cat(safetensors_name(entry.dtype), " ", entry.shape, " needs ", bytes,
                          " bytes, data_offsets give ", entry.bytes));
    }
  }

  const std::string& origin_;
  const std::string& name_;
  const Json& json_;
};

void read_metadata(const Json& json, const std::string& origin,
                   std::map<std::string, std::string>& metadata) {
  if (!json.is_object())
    fail(origin, str_cat("expected __metadata__ to be an object, got ", json.type_name()));
  for (const auto& [key, value] : json.get_ref<const Json::object_t&>()) {
    if (!value.is_string()) {
      fail(origin, str_cat("expected __metadata__ to hold texts, got ", value.type_name(),
                           " for the key ", quote(key)));
    }
    metadata.emplace(key, value.get<std::string>());
  }
}

// The tensors must cover the data exactly: no byte twice, none left out.
void check_coverage(const std::vector<SafetensorsEntry>& entries, size_t data_bytes,
                    const std::string& origin) {
  size_t covered = 0;
  const SafetensorsEntry* previous = nullptr;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.offset < covered) {
      fail_tensor(origin, entry.name,
                  str_cat("starts at data byte ", entry.offset, " and overlaps tensor ",
                          quote(previous->name), ", which ends at ", covered));
    }
    if (entry.offset > covered) {
      fail_tensor(origin, entry.name,
                  str_cat("expected it to start at data byte ", covered, ", got ", entry.offset,
                          ": the bytes between belong to no tensor"));
    }
    covered += entry.bytes;
    previous = &entry;
  }
  if (covered != data_bytes) {
    fail(origin, str_cat("expected ", covered, " bytes of data (all tensors), got ", data_bytes,
                         ": the bytes after the last tensor belong to none"));
  }
}

std::string list_names(const SafetensorsHeader& header) {
  constexpr size_t kShown = 20;
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(kShown, header.entries.size()); ++i)
    names.push_back(quote(header.entries[i].name));
  if (header.entries.size() > kShown)
    names.push_back(str_cat("and ", header.entries.size() - kShown, " more"));
  return names.empty() ? "none" : join(names);
}

}  // namespace

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& origin) {
  const std::string_view text = header_text(file, origin);
  if (!text.starts_with('{'))
    fail(origin, "not a safetensors file: the header does not start with '{'");
  const Json json = parse_json_object(text, origin);
  const size_t data_begin = kLengthBytes + text.size();
  const size_t data_bytes = file.size() - data_begin;

  SafetensorsHeader header;
  for (const auto& [name, value] : json.get_ref<const Json::object_t&>()) {
    if (name == kMetadataKey) {
      read_metadata(value, origin, header.metadata);
    } else {
      header.entries.push_back(EntryParser(origin, name, value).parse(data_bytes));
    }
  }
  std::stable_sort(header.entries.begin(), header.entries.end(),
                   [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
                     return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
                   });
  check_coverage(header.entries, data_bytes, origin);
  for (SafetensorsEntry& entry : header.entries) entry.offset += data_begin;
  return header;
}

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile file;
  file.map_ = FileMap::open(path);
  file.header_ = parse_safetensors(file.map_->bytes(), path.string());
  for (size_t i = 0; i < file.header_.entries.size(); ++i)
    file.index_.emplace(file.header_.entries[i].name, i);
  return file;
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.entries[found->second];
}

TensorView SafetensorsFile::view(const SafetensorsEntry& entry) const {
  return {map_->bytes().data() + entry.offset, entry.dtype, entry.shape};
}

TensorView SafetensorsFile::tensor(std::string_view name) const {
  const SafetensorsEntry* entry = find(name);
  if (entry == nullptr) {
    throw CheckpointError(str_cat(path().string(), ": expected a tensor ", quote(name),
                                  ", got only: ", list_names(header_)));
  }
  return view(*entry);
}

}  // namespace cadre
