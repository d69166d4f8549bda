#include "backends/cuda/device/upload.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
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

// On an H200 with 16 cores: buffers of 1 MiB copy at 47, of 2 MiB at 51, of 4 MiB at 52 of 55 GB/s;
// lanes with a stream each are slower than one stream for all, and 8 lanes as fast as 16 where
// nothing is converted.
constexpr size_t kBufferBytes = size_t{2} << 20;
constexpr size_t kBuffersPerLane = 2;  // one is filled while the other travels
constexpr int64_t kMaxLanes = 16;
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

  int64_t total_bytes() const {
    int64_t total = 0;
    for (const Piece& piece : pieces) total += static_cast<int64_t>(piece.bytes());
    return total;
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

/// Pinned memory for the buffers of all lanes. In huge pages, touched by all threads and pinned at
/// once, 64 MiB take some 4 ms; cudaHostAlloc takes 35, and pinning from several threads is slower
/// than from one.
class PinnedBlock {
 public:
  PinnedBlock(int64_t lanes, ThreadPool& threads) {
    constexpr size_t kLaneBytes = kBufferBytes * kBuffersPerLane;
    const size_t bytes = static_cast<size_t>(lanes) * kLaneBytes;
    memory_ = std::aligned_alloc(kBufferBytes, bytes);
    if (memory_ == nullptr) {
      throw DeviceError(str_cat("upload: could not allocate ", bytes, " bytes of host memory"));
    }
    madvise(memory_, bytes, MADV_HUGEPAGE);  // a wish
    threads.parallel_for(lanes, [&](int64_t i, int) { std::memset(buffer(i, 0), 0, kLaneBytes); });
    const cudaError_t result = cudaHostRegister(memory_, bytes, cudaHostRegisterPortable);
    if (result == cudaSuccess) return;
    std::free(memory_);
    check(result, "cudaHostRegister", __FILE__, __LINE__);
  }
  ~PinnedBlock() {
    cudaHostUnregister(memory_);
    std::free(memory_);
  }
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;

  char* buffer(int64_t lane, size_t i) const {
    return static_cast<char*>(memory_) +
           (static_cast<size_t>(lane) * kBuffersPerLane + i) * kBufferBytes;
  }

 private:
  void* memory_ = nullptr;
};

class CopyStream {
 public:
  CopyStream() { CADRE_CUDA_CHECK(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
  ~CopyStream() {
    cudaStreamSynchronize(handle_);  // after a fault too, nothing is on its way any more
    cudaStreamDestroy(handle_);
  }
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  cudaStream_t get() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

/// What one thread fills in turns.
class Lane {
 public:
  /// The buffer to fill next; `arrived` grows by what it held and the device now has.
  size_t next(std::atomic<int64_t>& arrived) {
    turn_ = (turn_ + 1) % kBuffersPerLane;
    wait(turn_, arrived);
    return turn_;
  }
  /// All that is in that buffer has been put into the stream.
  void sent(cudaStream_t stream, int64_t bytes) {
    sent_[turn_].record(stream);
    travelling_[turn_] = bytes;
  }
  void finish(std::atomic<int64_t>& arrived) {
    for (size_t i = 0; i < kBuffersPerLane; ++i) wait(i, arrived);
  }

 private:
  void wait(size_t i, std::atomic<int64_t>& arrived) {
    if (travelling_[i] > 0) sent_[i].synchronize();
    arrived += std::exchange(travelling_[i], 0);
  }

  Event sent_[kBuffersPerLane] = {Event(cudaEventDisableTiming), Event(cudaEventDisableTiming)};
  int64_t travelling_[kBuffersPerLane] = {};
  size_t turn_ = 0;
};

class Transfer {
 public:
  Transfer(const Plan& plan, int index, int64_t lanes, ThreadPool& threads)
      : plan_(plan), index_(index), lanes_(lanes), threads_(threads), block_(lanes, threads) {}

  void run(FunctionRef<void(int64_t bytes)> on_bytes) {
    threads_.parallel_for(lanes_, [&](int64_t lane, int thread) {
      try {
        run_lane(lane, [&] {
          if (thread == 0) on_bytes(arrived_);
        });
      } catch (...) {
        next_ = plan_.loads.size();  // the other lanes end with what they have begun
        throw;
      }
    });
  }

 private:
  template <typename Report>
  void run_lane(int64_t index, const Report& report) {
    const DeviceGuard guard(index_);  // a pool's threads stand on the first device
    Lane lane;
    for (size_t i; (i = next_.fetch_add(1)) < plan_.loads.size();) {
      const int64_t bytes =
          fill_and_send(plan_.loads[i], block_.buffer(index, lane.next(arrived_)));
      lane.sent(stream_.get(), bytes);
      report();
    }
    lane.finish(arrived_);
  }

  int64_t fill_and_send(const Load& load, char* buffer) {
    int64_t bytes = 0;
    for (size_t i = load.begin; i < load.end; ++i) {
      const Piece& piece = plan_.pieces[i];
      const Upload& upload = *piece.upload;
      const auto skipped = static_cast<size_t>(piece.first);
      convert(static_cast<const char*>(upload.from) + skipped * size_of(upload.from_dtype),
              upload.from_dtype, buffer + piece.offset, upload.to_dtype, piece.count);
      CADRE_CUDA_CHECK(cudaMemcpyAsync(
          static_cast<char*>(upload.to) + skipped * size_of(upload.to_dtype), buffer + piece.offset,
          piece.bytes(), cudaMemcpyHostToDevice, stream_.get()));
      bytes += static_cast<int64_t>(piece.bytes());
    }
    return bytes;
  }

  const Plan& plan_;
  int index_;
  int64_t lanes_;
  ThreadPool& threads_;
  PinnedBlock block_;
  CopyStream stream_;             // goes before the block
  std::atomic<size_t> next_ = 0;  // load
  std::atomic<int64_t> arrived_ = 0;
};

}  // namespace

void upload(std::span<const Upload> uploads, int index, ThreadPool& threads,
            FunctionRef<void(int64_t bytes)> on_bytes) {
  const Plan plan(uploads);
  const auto loads = static_cast<int64_t>(plan.loads.size());
  const int64_t lanes = std::min({loads, int64_t{threads.num_threads()}, kMaxLanes});
  if (lanes > 0) {
    const DeviceGuard guard(index);
    Transfer(plan, index, lanes, threads).run(on_bytes);
  }
  on_bytes(plan.total_bytes());
}

}  // namespace cadre::cuda
