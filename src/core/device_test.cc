#include "cadre/device.h"

#include <gtest/gtest.h>

#include "cadre/error.h"

namespace cadre {
namespace {

TEST(Device, NamesRoundTrip) {
  EXPECT_EQ(parse_device("cpu"), Device());
  EXPECT_EQ(parse_device("cuda"), (Device{DeviceType::kCuda, 0}));
  EXPECT_EQ(parse_device("cuda:0"), (Device{DeviceType::kCuda, 0}));
  EXPECT_EQ(parse_device("cuda:13"), (Device{DeviceType::kCuda, 13}));
  EXPECT_EQ(to_string(Device()), "cpu");
  EXPECT_EQ(to_string(Device{DeviceType::kCuda, 3}), "cuda:3");
  EXPECT_EQ(name_of(DeviceType::kCpu), "cpu");
  EXPECT_EQ(name_of(DeviceType::kCuda), "cuda");
}

TEST(Device, EverythingElseIsRefusedWithTheValidForms) {
  for (const char* text : {"", "CPU", "cpu:0", "gpu", "cuda:", "cuda:-1", "cuda:-0", "cuda:+1",
                           "cuda:1x", "cuda: 1", "cuda:2147483648", "cuda:99999999999999999999"}) {
    try {
      parse_device(text);
      ADD_FAILURE() << text << " was accepted";
    } catch (const InvalidArgument& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("cuda:N"), message.npos) << message;
      EXPECT_NE(message.find('"' + std::string(text) + '"'), message.npos) << message;
    }
  }
}

}  // namespace
}  // namespace cadre
