#include "backends/cuda/device/device_runtime.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "backends/cuda/device/check.h"
#include "cadre/error.h"
#include "support/gpu.h"

namespace cadre::cuda {
namespace {

using test::Gpu;

template <typename Call>
std::string device_error(const Call& call) {
  try {
    call();
  } catch (const DeviceError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a DeviceError";
  return {};
}

// Runs on every machine: the two answers exclude each other.
TEST(CudaRuntime, EitherHasDevicesOrSaysWhyNot) {
  DeviceRuntime& runtime = cuda::device_runtime();
  EXPECT_EQ(runtime.device_count() == 0, !runtime.why_none().empty());
  EXPECT_EQ(find_device_runtime(DeviceType::kCuda), &runtime);
  if (runtime.device_count() == 0) {
    const std::string why = device_error([] { cadre::device_runtime({DeviceType::kCuda, 0}); });
    EXPECT_NE(why.find(runtime.why_none()), why.npos) << why;
    EXPECT_EQ(compute_capability(0), 0);
    EXPECT_NE(device_error([] { properties_of(0); }).find(runtime.why_none()), why.npos);
  }
}

TEST(CudaRuntime, ANumberThatIsNotThereIsRefusedNamingThoseThatAre) {
  CADRE_REQUIRE_GPU();
  const int count = Gpu::runtime().device_count();
  const std::string why = device_error([&] { cadre::device_runtime({DeviceType::kCuda, count}); });
  EXPECT_NE(why.find("cuda:" + std::to_string(count)), why.npos) << why;
  EXPECT_NE(why.find("from 0 to " + std::to_string(count - 1)), why.npos) << why;
}

TEST(CudaRuntime, TellsWhatEachDeviceIs) {
  CADRE_REQUIRE_GPU();
  for (int i = 0; i < Gpu::runtime().device_count(); ++i) {
    const DeviceProperties p = Gpu::runtime().properties(i);
    EXPECT_FALSE(p.name.empty());
    EXPECT_GE(p.major, 1);
    EXPECT_GT(p.num_multiprocessors, 0);
    EXPECT_GT(p.l2_bytes, 0u);
    const DeviceMemory memory = Gpu::runtime().memory(i);
    EXPECT_GT(memory.free_bytes, 0u);
    EXPECT_LE(memory.free_bytes, memory.total_bytes);
    EXPECT_EQ(compute_capability(i), 10 * p.major + p.minor);
  }
}

TEST(CudaRuntime, MemoryIsTakenGivenBackAndAligned) {
  CADRE_REQUIRE_GPU();
  const size_t before = Gpu::runtime().memory(0).free_bytes;
  constexpr size_t kBytes = size_t{256} << 20;
  {
    const auto memory = allocate_shared_memory(Gpu::device(), kBytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % 256, 0u);
    EXPECT_LE(Gpu::runtime().memory(0).free_bytes + kBytes, before);
  }
  EXPECT_GT(Gpu::runtime().memory(0).free_bytes + kBytes / 2, before);
  EXPECT_NE(allocate_shared_memory(Gpu::device(), 0), nullptr);
}

TEST(CudaRuntime, TooMuchMemoryNamesTheSizeAndWhatIsFree) {
  CADRE_REQUIRE_GPU();
  const std::string why =
      device_error([] { allocate_shared_memory(Gpu::device(), size_t{1} << 50); });
  EXPECT_NE(why.find("cuda:0 memory"), why.npos) << why;
  EXPECT_NE(why.find(std::to_string(size_t{1} << 50) + " bytes"), why.npos) << why;
  EXPECT_NE(why.find("is free"), why.npos) << why;
  EXPECT_NE(allocate_shared_memory(Gpu::device(), 64), nullptr);  // nothing sticks
}

TEST(CudaRuntime, CopiesAndFillsInTheOrderOfTheStream) {
  CADRE_REQUIRE_GPU();
  const Gpu gpu;
  const Tensor a(DType::kU8, {1000}, Gpu::device());
  const Tensor b(DType::kU8, {1000}, Gpu::device());
  const auto pinned = Gpu::runtime().allocate_pinned(1000);
  auto* host = static_cast<uint8_t*>(pinned.get());
  for (int i = 0; i < 1000; ++i) host[i] = static_cast<uint8_t>(i);
  Gpu::runtime().copy(a->mutable_data(), host, 1000, gpu.stream());
  Gpu::runtime().fill(static_cast<char*>(a->mutable_data()) + 100, 7, 50, gpu.stream());
  Gpu::runtime().copy(b->mutable_data(), a->data(), 1000, gpu.stream());
  const Tensor back = gpu.to_host(b);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(back->as<uint8_t>()[i], i >= 100 && i < 150 ? 7 : static_cast<uint8_t>(i)) << i;
  }
}

TEST(CudaRuntime, AGraphRepeatsWhatWasRecordedOnDataOfItsTime) {
  CADRE_REQUIRE_GPU();
  const Gpu gpu;
  const Tensor a(DType::kU8, {64}, Gpu::device());
  const Tensor b(DType::kU8, {64}, Gpu::device());
  Gpu::runtime().fill(b->mutable_data(), 9, 64, gpu.stream());
  const auto graph = Gpu::runtime().capture(gpu.stream(), [&] { copy_tensor(a, b, gpu.stream()); });
  EXPECT_EQ(gpu.to_host(b)->as<uint8_t>()[0], 9);  // recording ran nothing
  for (const uint8_t value : {uint8_t{1}, uint8_t{2}}) {
    Gpu::runtime().fill(a->mutable_data(), value, 64, gpu.stream());
    graph->launch(gpu.stream());
    EXPECT_EQ(gpu.to_host(b)->as<uint8_t>()[63], value);
  }
}

TEST(CudaRuntime, ARecordingThatThrowsLeavesTheStreamUsable) {
  CADRE_REQUIRE_GPU();
  const Gpu gpu;
  const Tensor a(DType::kU8, {64}, Gpu::device());
  const auto record = [&] {
    return Gpu::runtime().capture(gpu.stream(), [&] {
      Gpu::runtime().fill(a->mutable_data(), 1, 64, gpu.stream());
      throw std::runtime_error("stop");
    });
  };
  EXPECT_THROW(record(), std::runtime_error);
  EXPECT_THROW(Gpu::runtime().capture(gpu.stream(), [&] { gpu.synchronize(); }), DeviceError);
  Gpu::runtime().fill(a->mutable_data(), 3, 64, gpu.stream());
  EXPECT_EQ(gpu.to_host(a)->as<uint8_t>()[0], 3);
  EXPECT_NE(Gpu::runtime().capture(gpu.stream(), [] {}), nullptr);
}

TEST(CudaRuntime, TheCurrentDeviceComesBack) {
  CADRE_REQUIRE_GPU();
  const int last = Gpu::runtime().device_count() - 1;
  int current = -1;
  {
    const CurrentDevice guard({DeviceType::kCuda, last});
    CADRE_CUDA_CHECK(cudaGetDevice(&current));
    EXPECT_EQ(current, last);
  }
  CADRE_CUDA_CHECK(cudaGetDevice(&current));
  EXPECT_EQ(current, 0);
}

TEST(CudaRuntime, AnEventWaitsForWhatCameBeforeIt) {
  CADRE_REQUIRE_GPU();
  DeviceRuntime& runtime = Gpu::runtime();
  const auto stream = runtime.make_stream(0, nullptr);
  constexpr size_t kBytes = size_t{64} << 20;
  const Tensor a(DType::kU8, {static_cast<int64_t>(kBytes)}, {DeviceType::kCuda, 0});
  const auto host = runtime.allocate_pinned(2 * kBytes);
  auto* first = static_cast<uint8_t*>(host.get());
  const auto event = runtime.make_event(0);
  for (int round = 1; round <= 3; ++round) {
    runtime.fill(a->mutable_data(), static_cast<uint8_t>(round), kBytes, stream->get());
    runtime.copy(first, a->data(), kBytes, stream->get());
    event->record(stream->get());
    runtime.copy(first + kBytes, a->data(), kBytes, stream->get());
    event->wait();
    EXPECT_EQ(first[kBytes - 1], round);
    runtime.synchronize(stream->get());
  }
}

TEST(CudaRuntime, EveryDeviceServes) {
  CADRE_REQUIRE_GPU();
  for (int i = 0; i < Gpu::runtime().device_count(); ++i) {
    const Device device{DeviceType::kCuda, i};
    const auto stream = Gpu::runtime().make_stream(i, nullptr);
    const Tensor a(DType::kU8, {16}, device);
    const Tensor host(DType::kU8, {16});
    Gpu::runtime().fill(a->mutable_data(), static_cast<uint8_t>(40 + i), 16, stream->get());
    copy_tensor(a, host, stream->get());
    synchronize(stream->get());
    EXPECT_EQ(host->as<uint8_t>()[15], 40 + i);
  }
}

TEST(Check, AFaultNamesCallPlaceDeviceAndReason) {
  CADRE_REQUIRE_GPU();
  const std::string why = device_error([] { CADRE_CUDA_CHECK(cudaSetDevice(1000)); });
  for (const char* part :
       {"cuda:0", "cudaSetDevice(1000)", "device_runtime_test.cc:", "cudaErrorInvalidDevice"}) {
    EXPECT_NE(why.find(part), why.npos) << why;
  }
  EXPECT_NO_THROW(CADRE_CUDA_CHECK(cudaGetLastError()));  // reported once
}

}  // namespace
}  // namespace cadre::cuda
