// Finding cuBLASLt. What is found is kept for the process, so ctest runs this program once more for
// each value of CADRE_CUBLASLT that matters (CMakeLists.txt).
#include "backends/cuda/device/cublas_lt.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "backends/cuda/device/device_runtime.h"
#include "cadre/error.h"
#include "support/expect_error.h"

namespace cadre::cuda {
namespace {

std::string variable() {
  const char* value = std::getenv("CADRE_CUBLASLT");
  return value == nullptr ? "" : value;
}

TEST(CublasLt, IsFoundOrItIsSaidWhyNot) {
  if (!variable().empty()) GTEST_SKIP() << "CADRE_CUBLASLT is set";
  const CublasLt* lib = find_cublas_lt();
  EXPECT_EQ(lib == nullptr, !why_no_cublas_lt().empty());
  if (lib == nullptr) {
    EXPECT_NE(why_no_cublas_lt().find("libcublasLt.so.13"), std::string::npos);
    EXPECT_NE(why_no_cublas_lt().find("LD_LIBRARY_PATH"), std::string::npos);
  } else {
    EXPECT_NE(lib->file.find("cublasLt"), std::string::npos) << lib->file;
    EXPECT_GE(std::stoi(lib->version), 12) << lib->version;
    EXPECT_NE(device_runtime().products().find(lib->version), std::string::npos);
  }
}

TEST(CublasLt, CanBeTurnedOff) {
  if (variable() != "off") GTEST_SKIP() << "CADRE_CUBLASLT is not off";
  EXPECT_EQ(find_cublas_lt(), nullptr);
  EXPECT_EQ(why_no_cublas_lt(), "CADRE_CUBLASLT is off");
  EXPECT_EQ(device_runtime().products(), "own kernels (CADRE_CUBLASLT is off)");
}

TEST(CublasLt, AFileThatIsNoneIsRefusedEveryTime) {
  if (variable().find('/') == std::string::npos) GTEST_SKIP() << "CADRE_CUBLASLT names no file";
  for (int i = 0; i < 2; ++i) {
    test::expect_error<InvalidArgument>([] { find_cublas_lt(); },
                                        {"CADRE_CUBLASLT", variable(), "libcublasLt.so.13", "off"});
  }
}

}  // namespace
}  // namespace cadre::cuda
