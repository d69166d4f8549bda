// The writer of safetensors.h.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "io/file_writer.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace cadre {
namespace {

constexpr size_t kHeaderAlignment = 8;  // padding with spaces, so that the data starts aligned
constexpr size_t kMaxHeaderBytes = 100'000'000;

[[noreturn]] void refuse(const std::filesystem::path& path, std::string_view what) {
  throw InvalidArgument(str_cat("write_safetensors: ", path.string(), ": ", what));
}

void check(const std::filesystem::path& path, std::span<const NamedTensor> tensors) {
  std::set<std::string_view> names;
  for (const NamedTensor& named : tensors) {
    if (named.name == "__metadata__" || !names.insert(named.name).second) {
      refuse(path, str_cat("tensor ", quote(named.name),
                           named.name == "__metadata__" ? ": the name is reserved by the format"
                                                        : ": expected one of that name, got two"));
    }
    if (named.tensor.data() == nullptr && (!named.tensor || named.tensor.numel() != 0))
      refuse(path, str_cat("tensor ", quote(named.name), ": expected data, got none"));
    if (named.tensor.device().type != DeviceType::kCpu || !named.tensor.is_contiguous()) {
      refuse(path,
             str_cat("expected contiguous tensors on the cpu, got ",
                     describe(named.name, named.tensor), " with strides ", named.tensor.strides()));
    }
  }
}

// The widest element types first, as the reference implementation does: every tensor is aligned to
// its own element size then.
std::vector<const NamedTensor*> file_order(std::span<const NamedTensor> tensors) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& named : tensors) order.push_back(&named);
  std::stable_sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return size_of(a->tensor.dtype()) > size_of(b->tensor.dtype());
  });
  return order;
}

struct Layout {
  std::string header;  // padded
  size_t data_bytes = 0;
};

Layout make_layout(const std::filesystem::path& path, std::span<const NamedTensor* const> order,
                   const std::map<std::string, std::string>& metadata) {
  Layout layout;
  std::string& header = layout.header;
  try {
    header = metadata.empty() ? "{" : str_cat("{\"__metadata__\":", Json(metadata).dump());
    for (const NamedTensor* named : order) {
      const size_t end = layout.data_bytes + named->tensor.nbytes();
      header += str_cat(header.size() > 1 ? "," : "", Json(named->name).dump(), ":{\"dtype\":\"",
                        safetensors_name(named->tensor.dtype()), "\",\"shape\":[",
                        join(named->tensor.shape(), ","), "],\"data_offsets\":[", layout.data_bytes,
                        ",", end, "]}");
      layout.data_bytes = end;
    }
  } catch (const Json::exception&) {
    refuse(path, "expected names and metadata in UTF-8, got other bytes");
  }
  header += "}";
  const size_t padded =
      (header.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment;
  header.resize(padded, ' ');
  if (padded > kMaxHeaderBytes)
    refuse(path, str_cat("expected a header of at most ", kMaxHeaderBytes, " bytes, got ", padded));
  return layout;
}

std::span<const std::byte> bytes_of(const TensorView& tensor) {
  return {static_cast<const std::byte*>(tensor.data()), tensor.nbytes()};
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  check(path, tensors);
  const std::vector<const NamedTensor*> order = file_order(tensors);
  const Layout layout = make_layout(path, order, metadata);

  std::array<std::byte, 8> length{};
  for (size_t i = 0; i < length.size(); ++i)
    length[i] = static_cast<std::byte>(static_cast<uint64_t>(layout.header.size()) >> (8 * i));

  FileWriter writer(path, length.size() + layout.header.size() + layout.data_bytes);
  writer.write(length);
  writer.write(std::as_bytes(std::span(layout.header)));
  for (const NamedTensor* named : order) writer.write(bytes_of(named->tensor));
  writer.commit();
}

}  // namespace cadre
