#include <gtest/gtest.h>

#include <thread>

#include "cadre/error.h"
#include "cadre/experts.h"

namespace cadre {
namespace {

class Nothing : public ExpertsBackend {
 public:
  Support supports(const ExpertsQuery&) const override { return {{"it does nothing"}}; }
  std::unique_ptr<PreparedExperts> prepare(const ExpertsQuery&,
                                           std::shared_ptr<const ExpertsWeights>) override {
    return nullptr;
  }
  size_t workspace_bytes(const ExpertsQuery&, int64_t, int) const override { return 0; }

 protected:
  void run(const PreparedExperts&, const RoutedTokens&, Workspace&, const Stream&) override {}
};

template <typename E, typename F>
std::string message_of(F f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "no error";
}

TEST(Registry, ListsTheSpecificationsNamesInOrderForBothDevices) {
  const auto names = backend_names();
  const std::vector<std::string> first(names.begin(), names.begin() + 6);
  EXPECT_EQ(first, (std::vector<std::string>{"eager", "batched_mm", "grouped_mm", "deepgemm",
                                             "deepgemm_megamoe", "sonicmoe"}));
  int cpu = 0, cuda = 0;
  for (const BackendEntry& entry : list_backends()) {
    (entry.device == DeviceType::kCpu ? cpu : cuda) += 1;
    EXPECT_EQ(entry.backend == nullptr, !entry.not_built_reason.empty()) << entry.name;
  }
  EXPECT_GE(cpu, 6);
  EXPECT_GE(cuda, 6);
}

TEST(Registry, FindsTheCpuBackends) {
  for (const char* name : {"eager", "batched_mm", "grouped_mm"}) {
    EXPECT_NO_THROW(find_backend(name, DeviceType::kCpu));
  }
}

TEST(Registry, AnUnknownNameListsTheValidOnes) {
  const std::string text =
      message_of<InvalidArgument>([] { find_backend("eagre", DeviceType::kCpu); });
  EXPECT_NE(text.find("eager, batched_mm, grouped_mm"), std::string::npos) << text;
  EXPECT_NE(text.find("\"eagre\""), std::string::npos) << text;
  EXPECT_THROW(supports("eagre", {}), InvalidArgument);
}

TEST(Registry, ABackendThatIsNotBuiltSaysWhyAndWhatThereIs) {
  const std::string text =
      message_of<Unsupported>([] { find_backend("sonicmoe", DeviceType::kCpu); });
  EXPECT_NE(text.find("\"sonicmoe\" on cpu: runs on NVIDIA GPUs only"), std::string::npos) << text;
  EXPECT_NE(text.find("available on cpu: eager, batched_mm, grouped_mm"), std::string::npos)
      << text;
  ExpertsQuery query;
  EXPECT_EQ(to_string(supports("sonicmoe", query)), "runs on NVIDIA GPUs only");
}

TEST(Registry, TakesABackendAtRunTime) {
  register_backend("nothing", [] { return std::make_unique<Nothing>(); });
  EXPECT_NO_THROW(find_backend("nothing", DeviceType::kCpu));
  EXPECT_EQ(backend_names().back(), "nothing");
  ExpertsQuery query;
  EXPECT_EQ(to_string(supports("nothing", query)), "it does nothing");
  query.device.type = DeviceType::kCuda;
  EXPECT_EQ(to_string(supports("nothing", query)), "it is not registered for cuda");
  EXPECT_THROW(find_backend("nothing", DeviceType::kCuda), Unsupported);
}

TEST(Registry, RefusesEmptyAndTakenNamesAndFactoriesThatMakeNothing) {
  const auto make = [] { return std::make_unique<Nothing>(); };
  EXPECT_THROW(register_backend("", make), InvalidArgument);
  const std::string text = message_of<InvalidArgument>([&] { register_backend("eager", make); });
  EXPECT_NE(text.find("\"eager\", which is taken on cpu"), std::string::npos) << text;
  EXPECT_THROW(register_backend("null", [] { return std::unique_ptr<ExpertsBackend>(); }),
               InvalidArgument);
  EXPECT_THROW(register_backend("empty", BackendFactory()), InvalidArgument);
}

TEST(Registry, IsSafeFromManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 20; ++i) {
        const std::string name = "thread" + std::to_string(t) + "_" + std::to_string(i);
        register_backend(name, [] { return std::make_unique<Nothing>(); });
        find_backend(name, DeviceType::kCpu);
        list_backends();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(backend_names().size(), 160u);
}

}  // namespace
}  // namespace cadre
