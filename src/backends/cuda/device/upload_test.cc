// Tensors of every size through the pinned buffers: whole, in order, converted, and clean after
// faults.
#include "backends/cuda/device/upload.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/cuda/device/convert.h"
#include "cadre/error.h"
#include "support/gpu.h"

namespace cadre::cuda {
namespace {

using test::Gpu;

/// Host tensors, one block of device memory, and what must lie in it afterwards.
class Batch {
 public:
  void add(DType from, DType to, int64_t count) {
    // Sources begin at any byte, targets at any element.
    const size_t source = from_.size() + 1;
    from_.resize(source + static_cast<size_t>(count) * size_of(from));
    const size_t target = (expected_.size() + 8) / size_of(to) * size_of(to);
    expected_.resize(target + static_cast<size_t>(count) * size_of(to), char{0x5a});
    entries_.push_back({source, target, from, to, count});
  }

  void fill(DType from) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (const Entry& e : entries_) {
      for (int64_t i = 0; i < e.count; ++i) {
        const float value = normal(random);
        const size_t size = size_of(e.from);
        convert(&value, DType::kF32, from_.data() + e.source + static_cast<size_t>(i) * size, from,
                1);
      }
    }
  }

  void run(const Gpu& gpu, ThreadPool& threads, FunctionRef<void(int64_t)> on_bytes) {
    const std::vector<char> poison(expected_.size(), char{0x5a});
    device_ = gpu.to_device(bytes(poison));
    std::vector<Upload> uploads;
    for (const Entry& e : entries_) {
      uploads.push_back({from_.data() + e.source, e.from,
                         static_cast<char*>(device_->mutable_data()) + e.target, e.to, e.count});
    }
    Gpu::runtime().upload(uploads, 0, threads, on_bytes);
  }

  bool arrived(const Gpu& gpu) {
    std::fill(expected_.begin(), expected_.end(), char{0x5a});
    for (const Entry& e : entries_) {
      convert(from_.data() + e.source, e.from, expected_.data() + e.target, e.to, e.count);
    }
    const Tensor host = gpu.to_host(device_);
    return std::memcmp(host->data(), expected_.data(), expected_.size()) == 0;
  }

  int64_t total() const {
    return std::accumulate(entries_.begin(), entries_.end(), int64_t{0},
                           [](int64_t sum, const Entry& e) {
                             return sum + e.count * static_cast<int64_t>(size_of(e.to));
                           });
  }

 private:
  struct Entry {
    size_t source;
    size_t target;
    DType from;
    DType to;
    int64_t count;
  };

  static TensorView bytes(const std::vector<char>& v) {
    return {v.data(), DType::kU8, {static_cast<int64_t>(v.size())}};
  }

  std::vector<char> from_;
  std::vector<char> expected_;
  std::vector<Entry> entries_;
  Tensor device_;
};

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};

TEST(Upload, EverySizeAndConversionArrives) {
  CADRE_REQUIRE_GPU();
  const Gpu gpu;
  for (const int num_threads : {1, 4}) {
    ThreadPool threads(num_threads);
    for (const DType from : kFloats) {
      for (const DType to : kFloats) {
        Batch batch;
        for (const int64_t count : {0, 1, 3, 1000, 4096, 100001, (1 << 20) + 3, 0, 5}) {
          batch.add(from, to, count);
        }
        batch.fill(from);
        batch.run(gpu, threads, [](int64_t) {});
        EXPECT_TRUE(batch.arrived(gpu)) << name_of(from) << " to " << name_of(to);
      }
    }
  }
}

TEST(Upload, ALargeTensorGoesRoundTheBuffersManyTimes) {
  CADRE_REQUIRE_GPU();
  const Gpu gpu;
  ThreadPool threads(3);
  Batch batch;
  batch.add(DType::kF32, DType::kBF16, (int64_t{24} << 20) + 1);
  batch.fill(DType::kF32);
  std::vector<int64_t> reports;
  batch.run(gpu, threads, [&](int64_t bytes) { reports.push_back(bytes); });
  EXPECT_TRUE(batch.arrived(gpu));
  EXPECT_TRUE(std::is_sorted(reports.begin(), reports.end()));
  EXPECT_GT(reports.size(), 2u);
  EXPECT_EQ(reports.back(), batch.total());
}

TEST(Upload, NothingIsFine) {
  CADRE_REQUIRE_GPU();
  ThreadPool threads(2);
  int64_t last = -1;
  Gpu::runtime().upload({}, 0, threads, [&](int64_t bytes) { last = bytes; });
  EXPECT_EQ(last, 0);
}

TEST(Upload, AFaultOfTheCallerComesThroughAndTheNextOneWorks) {
  CADRE_REQUIRE_GPU();
  const Gpu gpu;
  ThreadPool threads(4);
  Batch batch;
  batch.add(DType::kBF16, DType::kBF16, int64_t{40} << 20);
  batch.fill(DType::kBF16);
  EXPECT_THROW(batch.run(gpu, threads, [](int64_t) { throw std::runtime_error("stop"); }),
               std::runtime_error);
  batch.run(gpu, threads, [](int64_t) {});
  EXPECT_TRUE(batch.arrived(gpu));
}

TEST(Upload, OtherConversionsAreRefusedBeforeAnythingMoves) {
  CADRE_REQUIRE_GPU();
  ThreadPool threads(1);
  const Upload wrong{nullptr, DType::kI32, nullptr, DType::kBF16, 4};
  try {
    Gpu::runtime().upload({&wrong, 1}, 0, threads, [](int64_t) { FAIL(); });
    FAIL();
  } catch (const Unsupported& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("int32 to bfloat16"), message.npos) << message;
  }
}

}  // namespace
}  // namespace cadre::cuda
