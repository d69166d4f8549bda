#include "conformance/device_under_test.h"

namespace cadre::test {

Device device_under_test() { return {}; }

}  // namespace cadre::test
