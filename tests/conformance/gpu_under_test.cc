#include "conformance/device_under_test.h"

namespace cadre::test {

Device device_under_test() { return {DeviceType::kCuda, 0}; }

}  // namespace cadre::test
