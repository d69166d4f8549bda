// Where memory lives and work runs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace cadre {

enum class DeviceType : uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;  // the GPU's number; 0 for the CPU

  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu" or "cuda".
std::string_view name_of(DeviceType type);

/// "cpu", "cuda:0", ...
std::string to_string(Device device);

/// Reads "cpu", "cuda" (= "cuda:0") or "cuda:N". Throws InvalidArgument on anything else.
Device parse_device(std::string_view text);

}  // namespace cadre
