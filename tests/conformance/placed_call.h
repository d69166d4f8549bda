// One call of a backend with everything where the stream's device reads it. On a GPU, tensors and
// weights are copied there as they lie on the host: same strides, same gaps, same alignment. Around
// each copy, around the output's rows and around the workspace lie bytes that must not change.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cadre/experts.h"
#include "core/device_runtime.h"

namespace cadre::test {

/// Pieces of host memory on a GPU. Addresses keep their place within 256 bytes.
class DeviceCopies {
 public:
  explicit DeviceCopies(const Stream& stream) : stream_(stream) {}

  /// Makes [begin, begin + bytes) part of the copies; pieces close to each other become one.
  void add(const void* begin, size_t bytes);
  /// After the last add(): allocates and copies.
  void place();
  /// Copies the host's values again.
  void update();
  /// Where the byte of a piece lies on the GPU.
  void* on_device(const void* host) const;
  /// Reads back: empty when the copies and what lies around them are as they were copied, else
  /// which byte changed.
  std::string changes() const { return read_back(false); }
  /// Copies the pieces to the host; tells what changed around them.
  std::string fetch() const { return read_back(true); }

 private:
  struct Piece {
    char* begin;
    char* end;
    std::shared_ptr<void> memory;
    char* device = nullptr;
    std::vector<char> image;  // what was copied
  };
  static constexpr size_t kGuard = 1024;
  std::string read_back(bool to_host) const;
  size_t guarded_bytes(const Piece& piece) const;
  char* guarded_begin(const Piece& piece) const { return piece.device - kGuard; }

  Stream stream_;
  std::vector<Piece> pieces_;
};

class PlacedCall {
 public:
  /// `tokens` lie on the host and stay there; so do `weights`. The host's output receives results.
  PlacedCall(ExpertsBackend& backend, const ExpertsQuery& query,
             const std::shared_ptr<const ExpertsWeights>& weights, const RoutedTokens& tokens,
             const Stream& stream);
  ~PlacedCall();

  /// Runs with output and workspace full of NaN and returns the output in row-major order. Adds a
  /// failure when memory changed that is not the call's to write.
  std::vector<double> run();

  /// Records the call in a graph (GPU alone); replay() copies the host's inputs as they are now,
  /// poisons the output, and runs the graph.
  void capture();
  std::vector<double> replay();

 private:
  void poison();
  std::vector<double> result();
  bool is_cpu() const { return stream_.device.type == DeviceType::kCpu; }

  ExpertsBackend& backend_;
  Stream stream_;
  RoutedTokens host_;
  RoutedTokens tokens_;
  DeviceCopies weight_copies_;
  DeviceCopies input_copies_;
  DeviceCopies output_copy_;
  std::unique_ptr<PreparedExperts> prepared_;
  std::unique_ptr<Workspace> workspace_;
  void* workspace_begin_ = nullptr;
  size_t workspace_bytes_ = 0;
  std::unique_ptr<DeviceGraph> graph_;
};

}  // namespace cadre::test
