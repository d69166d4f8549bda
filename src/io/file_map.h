// A read-only memory mapping of a whole file.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>

namespace cadre {

class FileMap {
 public:
  /// Throws DeviceError when memory runs out, CheckpointError when the path is missing, not a
  /// regular file, empty or cannot be mapped.
  static std::shared_ptr<const FileMap> open(const std::filesystem::path& path);
  ~FileMap();
  FileMap(const FileMap&) = delete;
  FileMap& operator=(const FileMap&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  /// Gives the memory of `part` (of bytes()) and its surroundings back to the system. The bytes
  /// stay valid: they are read from the file again when they are next needed.
  void release(std::span<const std::byte> part) const;
  const std::filesystem::path& path() const { return path_; }

 private:
  FileMap(std::filesystem::path path, std::span<const std::byte> bytes)
      : path_(std::move(path)), bytes_(bytes) {}
  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
};

}  // namespace cadre
