// The device that a test program runs on: some are built twice, for the CPU and, with
// CADRE_TEST_DEVICE="cuda", for a GPU.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "cadre/device.h"
#include "core/device_runtime.h"

#ifndef CADRE_TEST_DEVICE
#define CADRE_TEST_DEVICE "cpu"
#endif

namespace cadre::test {

/// Of several GPUs, the environment variable CADRE_TEST_GPU names one by number.
inline Device test_device() {
  Device device = parse_device(CADRE_TEST_DEVICE);
  const char* gpu = std::getenv("CADRE_TEST_GPU");
  if (device.type == DeviceType::kCuda && gpu != nullptr) device.index = std::atoi(gpu);
  return device;
}
inline bool on_gpu() { return test_device().type == DeviceType::kCuda; }

/// Why tests of a GPU cannot run here; empty when they can.
inline std::string why_no_gpu() {
  DeviceRuntime* runtime = find_device_runtime(DeviceType::kCuda);
  if (runtime == nullptr) return "this build has no CUDA backends";
  return runtime->device_count() > 0 ? "" : runtime->why_none();
}

}  // namespace cadre::test

/// First line of a SetUp() or a test that needs the test device.
#define CADRE_SKIP_WITHOUT_DEVICE()                                        \
  do {                                                                     \
    if (::cadre::test::on_gpu() && !::cadre::test::why_no_gpu().empty()) { \
      GTEST_SKIP() << "needs a GPU: " << ::cadre::test::why_no_gpu();      \
    }                                                                      \
  } while (false)
