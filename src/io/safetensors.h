// The safetensors format: u64 little-endian header length, JSON header, data.
// Format: https://github.com/huggingface/safetensors (README, "Format").
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/tensor.h"
#include "io/file_map.h"
#include "io/file_writer.h"

namespace cadre {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  Dims shape;
  size_t offset = 0;  // from the start of the file
  size_t bytes = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;        // in file order (ascending offset)
  std::map<std::string, std::string> metadata;  // "__metadata__"
};

/// Parses and checks the header of a whole file's bytes. Nothing is trusted: header length (at most
/// 100 MB and inside the file), JSON, unknown dtypes, negative or overflowing shapes, shape x dtype
/// != bytes, offsets out of order or outside the file, overlaps, holes, bytes after the last
/// tensor, duplicate names. Throws CheckpointError naming `origin` and the tensor. Does not touch
/// the data.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& origin);

/// A mapped file. Views point into the mapping; data may be unaligned (the format does not promise
/// alignment).
class SafetensorsFile {
 public:
  static SafetensorsFile open(const std::filesystem::path& path);

  const SafetensorsHeader& header() const { return header_; }
  const std::filesystem::path& path() const { return map_->path(); }
  /// Keeps the views valid.
  std::shared_ptr<const void> owner() const { return map_; }
  const std::shared_ptr<const FileMap>& map() const { return map_; }
  size_t file_bytes() const { return map_->bytes().size(); }

  const SafetensorsEntry* find(std::string_view name) const;  // null when absent
  TensorView view(const SafetensorsEntry& entry) const;
  /// Throws CheckpointError listing the tensors there are when `name` is absent.
  TensorView tensor(std::string_view name) const;

 private:
  std::shared_ptr<const FileMap> map_;
  SafetensorsHeader header_;
  std::map<std::string, size_t, std::less<>> index_;
};

/// What a file's header says of a tensor before its bytes are there.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  Dims shape;
};

/// Writes a file tensor by tensor, so that it may be larger than memory: `tensors` are what will be
/// written, in the order of the file. Whole or nothing, and errors, as write_safetensors().
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorSpec> tensors,
                    const std::map<std::string, std::string>& metadata = {});

  /// The next tensor, contiguous on the CPU. InvalidArgument when it is another one than announced.
  void write(const std::string& name, const TensorView& tensor);
  /// After the last tensor.
  void commit();

 private:
  std::filesystem::path path_;
  std::vector<TensorSpec> tensors_;
  size_t next_ = 0;
  std::optional<FileWriter> writer_;
};

struct NamedTensor {
  std::string name;
  TensorView tensor;  // contiguous, on the CPU
};

/// Writes a file beside `path` and renames it over `path` when it is complete and flushed, so a
/// failure leaves what was there. A target that is no regular file (/dev/stdout, a pipe) is written
/// to directly. Tensors are stored widest element first, so that each is aligned to its element
/// size. Throws Error naming the path, the bytes and the system's reason (disk full, permission);
/// InvalidArgument for a name twice, a name that is not UTF-8 or a tensor that is not contiguous on
/// the CPU.
void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace cadre
