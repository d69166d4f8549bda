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

// Pinning costs as much as copying four times the bytes, so a lane has no more than it needs: one
// huge page, half of it filled while the other half travels. On an H200 with 16 cores 2 MiB buffers
// would copy as fast, but pin twice as long; small files would feel it.
constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr size_t kBuffersPerLane = 2;
constexpr int64_t kMaxLanes = 16;  // more threads than fill the bus would only pin memory
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

/// Pinned memory for the buffers of one lane, in a huge page where the system has them: the driver
/// pins one large page much faster than many small ones.
class PinnedBlock {
 public:
  static constexpr size_t kBytes = kBufferBytes * kBuffersPerLane;

  PinnedBlock() : memory_(std::aligned_alloc(kBytes, kBytes)) {
    if (memory_ == nullptr) {
      throw DeviceError(str_cat("upload: could not allocate ", kBytes, " bytes of host memory"));
    }
    madvise(memory_, kBytes, MADV_HUGEPAGE);  // a wish
    std::memset(memory_, 0, kBytes);          // the driver pins one block at a time: be quick there
    const cudaError_t result = cudaHostRegister(memory_, kBytes, cudaHostRegisterDefault);
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

  char* buffer(size_t i) const { return static_cast<char*>(memory_) + i * kBufferBytes; }

 private:
  void* memory_ = nullptr;
};

/// A stream of one lane: copies of different lanes follow each other on the bus without a pause.
class LaneStream {
 public:
  LaneStream() { CADRE_CUDA_CHECK(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
  ~LaneStream() {
    cudaStreamSynchronize(handle_);  // after a fault too, nothing is on its way any more
    cudaStreamDestroy(handle_);
  }
  LaneStream(const LaneStream&) = delete;
  LaneStream& operator=(const LaneStream&) = delete;

  cudaStream_t get() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

/// What one thread fills in turns.
class Lane {
 public:
  /// The buffer to fill next; `arrived` grows by what it held and the device now has.
  char* next(std::atomic<int64_t>& arrived) {
    turn_ = (turn_ + 1) % kBuffersPerLane;
    wait(turn_, arrived);
    return block_.buffer(turn_);
  }
  void send(void* to, const void* from, size_t bytes) {
    CADRE_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_.get()));
    travelling_[turn_] += static_cast<int64_t>(bytes);
  }
  /// No more pieces from this buffer.
  void close() { sent_[turn_].record(stream_.get()); }
  void finish(std::atomic<int64_t>& arrived) {
    for (size_t i = 0; i < kBuffersPerLane; ++i) wait(i, arrived);
  }

 private:
  void wait(size_t i, std::atomic<int64_t>& arrived) {
    if (travelling_[i] > 0) sent_[i].synchronize();
    arrived += std::exchange(travelling_[i], 0);
  }

  PinnedBlock block_;  // goes last
  Event sent_[kBuffersPerLane] = {Event(cudaEventDisableTiming), Event(cudaEventDisableTiming)};
  int64_t travelling_[kBuffersPerLane] = {};
  size_t turn_ = 0;
  LaneStream stream_;
};

class Transfer {
 public:
  Transfer(std::span<const Upload> uploads, int index) : index_(index), plan_(uploads) {}

  void run(ThreadPool& threads, FunctionRef<void(int64_t bytes)> on_bytes) {
    const auto loads = static_cast<int64_t>(plan_.loads.size());
    const int64_t lanes = std::min({loads, int64_t{threads.num_threads()}, kMaxLanes});
    threads.parallel_for(lanes, [&](int64_t, int thread) {
      try {
        run_lane([&] {
          if (thread == 0) on_bytes(arrived_);
        });
      } catch (...) {
        next_ = plan_.loads.size();  // the other lanes end with what they have begun
        throw;
      }
    });
    on_bytes(plan_.total_bytes());
  }

 private:
  template <typename Report>
  void run_lane(const Report& report) {
    const DeviceGuard guard(index_);  // a pool's threads stand on the first device
    Lane lane;
    for (size_t i; (i = next_.fetch_add(1)) < plan_.loads.size();) {
      fill(plan_.loads[i], lane);
      report();
    }
    lane.finish(arrived_);
  }

  void fill(const Load& load, Lane& lane) {
    char* buffer = lane.next(arrived_);
    for (size_t i = load.begin; i < load.end; ++i) {
      const Piece& piece = plan_.pieces[i];
      const Upload& upload = *piece.upload;
      const auto skipped = static_cast<size_t>(piece.first);
      convert(static_cast<const char*>(upload.from) + skipped * size_of(upload.from_dtype),
              upload.from_dtype, buffer + piece.offset, upload.to_dtype, piece.count);
      lane.send(static_cast<char*>(upload.to) + skipped * size_of(upload.to_dtype),
                buffer + piece.offset, piece.bytes());
    }
    lane.close();
  }

  int index_;
  Plan plan_;
  std::atomic<size_t> next_ = 0;  // load
  std::atomic<int64_t> arrived_ = 0;
};

}  // namespace

void upload(std::span<const Upload> uploads, int index, ThreadPool& threads,
            FunctionRef<void(int64_t bytes)> on_bytes) {
  Transfer(uploads, index).run(threads, on_bytes);
}

}  // namespace cadre::cuda
