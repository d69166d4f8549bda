#include "cadre/device.h"

#include <charconv>
#include <limits>

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre {

std::string_view name_of(DeviceType type) { return type == DeviceType::kCpu ? "cpu" : "cuda"; }

std::string to_string(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : str_cat("cuda:", device.index);
}

Device parse_device(std::string_view text) {
  if (text == "cpu") return {};
  if (text == "cuda") return {DeviceType::kCuda, 0};
  constexpr std::string_view kPrefix = "cuda:";
  if (text.starts_with(kPrefix)) {
    const std::string_view digits = text.substr(kPrefix.size());
    unsigned index = 0;  // unsigned: no "-0"
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    if (error == std::errc() && end == digits.data() + digits.size() &&
        index <= static_cast<unsigned>(std::numeric_limits<int>::max()))
      return {DeviceType::kCuda, static_cast<int>(index)};
  }
  throw InvalidArgument(
      str_cat("device: expected cpu, cuda or cuda:N (N = 0, 1, ...), got ", quote(text)));
}

}  // namespace cadre
