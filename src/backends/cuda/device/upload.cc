#include "backends/cuda/device/upload.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "backends/cuda/device/check.h"
#include "backends/cuda/device/convert.h"
#include "backends/cuda/device/event.h"
#include "cadre/error.h"
#include "cadre/thread_pool.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

// Large enough that a copy costs its bytes and not its start, small enough that all threads soon
// have their first one.
constexpr size_t kBufferBytes = size_t{4} << 20;
constexpr size_t kBuffersPerThread = 2;  // one is filled while the other travels
constexpr size_t kAlignment = 64;

/// A part of one tensor, and where it stands in a buffer.
struct Piece {
  const Upload* upload;
  int64_t first;  // elements
  int64_t count;
  size_t offset;

  size_t bytes() const { return static_cast<size_t>(count) * size_of(upload->to_dtype); }
};

/// What fills one buffer: pieces [begin, end).
struct Load {
  size_t begin;
  size_t end;
};

struct Plan {
  std::vector<Piece> pieces;
  std::vector<Load> loads;

  explicit Plan(std::span<const Upload> uploads) {
    for (const Upload& upload : uploads) {
      if (!can_convert(upload.from_dtype, upload.to_dtype)) {
        throw Unsupported(str_cat("upload: expected equal dtypes, or two of float32, bfloat16 and ",
                                  "float16, got ", name_of(upload.from_dtype), " to ",
                                  name_of(upload.to_dtype)));
      }
      cut(upload);
    }
    close();
  }

 private:
  void cut(const Upload& upload) {
    const auto element = static_cast<int64_t>(size_of(upload.to_dtype));
    for (int64_t first = 0; first < upload.count;) {
      if (kBufferBytes - used_ < kAlignment) close();
      const int64_t room = static_cast<int64_t>(kBufferBytes - used_) / element;
      const int64_t count = std::min(room, upload.count - first);
      pieces.push_back({&upload, first, count, used_});
      const size_t end = used_ + pieces.back().bytes();
      used_ = (end + kAlignment - 1) / kAlignment * kAlignment;
      first += count;
    }
  }
  void close() {
    if (pieces.size() > begin_) loads.push_back({begin_, pieces.size()});
    begin_ = pieces.size();
    used_ = 0;
  }

  size_t begin_ = 0;
  size_t used_ = 0;
};

/// Pinned memory and the event after which it may be filled again.
class Buffer {
 public:
  Buffer() : sent_(cudaEventDisableTiming) {
    CADRE_CUDA_CHECK(cudaHostAlloc(&memory_, kBufferBytes, cudaHostAllocDefault));
  }
  ~Buffer() { cudaFreeHost(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  /// Returns how many bytes of the load before have come to the device.
  size_t wait() {
    if (travelling_ > 0) sent_.synchronize();
    return std::exchange(travelling_, 0);
  }
  char* memory() { return static_cast<char*>(memory_); }
  void sent(cudaStream_t stream, size_t bytes) {
    sent_.record(stream);
    travelling_ = bytes;
  }

 private:
  void* memory_ = nullptr;
  Event sent_;
  size_t travelling_ = 0;
};

class Transfer {
 public:
  Transfer(std::span<const Upload> uploads, int index, int num_threads)
      : index_(index), plan_(uploads), guard_(index) {
    CADRE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    lanes_.resize(static_cast<size_t>(num_threads));
  }
  // Nothing may be on its way any more when buffers go, also after a fault.
  ~Transfer() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  void run(ThreadPool& threads, FunctionRef<void(int64_t bytes)> on_bytes) {
    const auto num_loads = static_cast<int64_t>(plan_.loads.size());
    threads.parallel_for(num_loads, [&](int64_t i, int thread) {
      if (failed_) return;  // the pool hands out all that is left
      try {
        send(plan_.loads[static_cast<size_t>(i)], lanes_[static_cast<size_t>(thread)]);
        if (thread == 0) on_bytes(arrived_);
      } catch (...) {
        failed_ = true;
        throw;
      }
    });
    CADRE_CUDA_CHECK(cudaStreamSynchronize(stream_));
    size_t total = 0;
    for (const Piece& piece : plan_.pieces) total += piece.bytes();
    on_bytes(static_cast<int64_t>(total));
  }

 private:
  /// The buffers of one thread, made when it first comes here.
  struct Lane {
    std::unique_ptr<Buffer> buffers[kBuffersPerThread];
    size_t next = 0;
  };

  void send(const Load& load, Lane& lane) {
    const DeviceGuard guard(index_);  // a pool's threads stand on the first device
    std::unique_ptr<Buffer>& slot = lane.buffers[lane.next++ % kBuffersPerThread];
    if (slot == nullptr) slot = std::make_unique<Buffer>();
    Buffer& buffer = *slot;
    arrived_ += static_cast<int64_t>(buffer.wait());
    size_t bytes = 0;
    for (size_t i = load.begin; i < load.end; ++i) {
      const Piece& piece = plan_.pieces[i];
      const Upload& upload = *piece.upload;
      const auto skipped = static_cast<size_t>(piece.first);
      convert(static_cast<const char*>(upload.from) + skipped * size_of(upload.from_dtype),
              upload.from_dtype, buffer.memory() + piece.offset, upload.to_dtype, piece.count);
      CADRE_CUDA_CHECK(cudaMemcpyAsync(
          static_cast<char*>(upload.to) + skipped * size_of(upload.to_dtype),
          buffer.memory() + piece.offset, piece.bytes(), cudaMemcpyHostToDevice, stream_));
      bytes += piece.bytes();
    }
    buffer.sent(stream_, bytes);
  }

  int index_;
  Plan plan_;
  DeviceGuard guard_;
  std::vector<Lane> lanes_;
  cudaStream_t stream_ = nullptr;
  std::atomic<int64_t> arrived_ = 0;
  std::atomic<bool> failed_ = false;
};

}  // namespace

void upload(std::span<const Upload> uploads, int index, ThreadPool& threads,
            FunctionRef<void(int64_t bytes)> on_bytes) {
  Transfer(uploads, index, threads.num_threads()).run(threads, on_bytes);
}

}  // namespace cadre::cuda
