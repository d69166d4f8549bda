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

void check_names(const std::filesystem::path& path, std::span<const TensorSpec> tensors) {
  std::set<std::string_view> names;
  for (const TensorSpec& spec : tensors) {
    if (spec.name == "__metadata__" || !names.insert(spec.name).second) {
      refuse(path, str_cat("tensor ", quote(spec.name),
                           spec.name == "__metadata__" ? ": the name is reserved by the format"
                                                       : ": expected one of that name, got two"));
    }
  }
}

void check_memory(const std::filesystem::path& path, const std::string& name,
                  const TensorView& tensor) {
  if (tensor.data() == nullptr && (!tensor || tensor.numel() != 0)) {
    refuse(path, str_cat("tensor ", quote(name), ": expected data, got none"));
  }
  if (tensor.device().type != DeviceType::kCpu || !tensor.is_contiguous()) {
    refuse(path, str_cat("expected contiguous tensors on the cpu, got ", describe(name, tensor),
                         " with strides ", tensor.strides()));
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

size_t bytes_of(const TensorSpec& spec) {
  return TensorView(nullptr, spec.dtype, spec.shape).nbytes();
}

Layout make_layout(const std::filesystem::path& path, std::span<const TensorSpec> tensors,
                   const std::map<std::string, std::string>& metadata) {
  Layout layout;
  std::string& header = layout.header;
  try {
    header = metadata.empty() ? "{" : str_cat("{\"__metadata__\":", Json(metadata).dump());
    for (const TensorSpec& spec : tensors) {
      const size_t end = layout.data_bytes + bytes_of(spec);
      header += str_cat(header.size() > 1 ? "," : "", Json(spec.name).dump(), ":{\"dtype\":\"",
                        safetensors_name(spec.dtype), "\",\"shape\":[", join(spec.shape, ","),
                        "],\"data_offsets\":[", layout.data_bytes, ",", end, "]}");
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

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::vector<TensorSpec> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), tensors_(std::move(tensors)) {
  check_names(path, tensors_);
  const Layout layout = make_layout(path, tensors_, metadata);
  std::array<std::byte, 8> length{};
  for (size_t i = 0; i < length.size(); ++i)
    length[i] = static_cast<std::byte>(static_cast<uint64_t>(layout.header.size()) >> (8 * i));
  writer_.emplace(path, length.size() + layout.header.size() + layout.data_bytes);
  writer_->write(length);
  writer_->write(std::as_bytes(std::span(layout.header)));
}

void SafetensorsWriter::write(const std::string& name, const TensorView& tensor) {
  check_memory(path_, name, tensor);
  if (next_ == tensors_.size() || tensors_[next_].name != name ||
      tensors_[next_].dtype != tensor.dtype() || !(tensors_[next_].shape == tensor.shape())) {
    refuse(path_, str_cat("expected ",
                          next_ == tensors_.size()
                              ? "no more tensors"
                              : str_cat(tensors_[next_].name, " ", tensors_[next_].dtype, " ",
                                        tensors_[next_].shape),
                          ", got ", describe(name, tensor)));
  }
  writer_->write(bytes_of(tensor));
  ++next_;
}

void SafetensorsWriter::commit() {
  if (next_ != tensors_.size()) {
    refuse(path_, str_cat("expected ", tensors_.size(), " tensors before the end, got ", next_));
  }
  writer_->commit();
}

void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::vector<const NamedTensor*> order = file_order(tensors);
  std::vector<TensorSpec> specs;
  for (const NamedTensor* named : order) {
    specs.push_back({named->name, named->tensor.dtype(), named->tensor.shape()});
  }
  check_names(path, specs);
  for (const NamedTensor* named : order) check_memory(path, named->name, named->tensor);
  SafetensorsWriter writer(path, std::move(specs), metadata);
  for (const NamedTensor* named : order) writer.write(named->name, named->tensor);
  writer.commit();
}

}  // namespace cadre
