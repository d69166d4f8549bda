// What the tests of a program run on. The same sources make conformance_test (the CPU) and
// conformance_gpu_test (the first GPU).
#pragma once

#include <gtest/gtest.h>

#include "cadre/stream.h"
#include "conformance/experts_case.h"

namespace cadre::test {

/// Given by cpu_under_test.cc or gpu_under_test.cc.
Device device_under_test();

inline bool is_gpu_under_test() { return device_under_test().type != DeviceType::kCpu; }

/// A stream of the device under test; on the CPU over a pool of so many threads. They live until
/// the program ends.
const Stream& test_stream(int num_threads = 2);

/// Tests that run on the device under test, or are skipped with the reason where there is none or
/// no backend for it.
class DeviceTest : public testing::Test {
 protected:
  void SetUp() override;
};

/// GPU backends take plain weights in the compute dtype alone, and all at addresses of whole
/// elements: a case is asked for with those. Unchanged on the CPU.
CaseParams for_device_under_test(CaseParams params);

}  // namespace cadre::test
