// The small parts of core: errors, checks, messages, arithmetic, version.
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <locale>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cadre/cadre.h"
#include "cadre/function_ref.h"
#include "core/check.h"
#include "core/checked_math.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

template <typename Family>
void expect_family() {
  static_assert(std::is_base_of_v<Error, Family>);
  try {
    throw Family("what happened");
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "what happened");
    EXPECT_NE(dynamic_cast<const Family*>(&error), nullptr);
  }
}

TEST(Error, EveryFamilyIsCaughtAsErrorAndAsItself) {
  static_assert(std::is_base_of_v<std::runtime_error, Error>);
  expect_family<InvalidArgument>();
  expect_family<CheckpointError>();
  expect_family<Unsupported>();
  expect_family<DeviceError>();
  expect_family<CommunicationError>();
  static_assert(!std::is_base_of_v<InvalidArgument, CheckpointError>);
}

TEST(Check, AFailedAssertionNamesExpressionAndPlace) {
  EXPECT_NO_THROW(CADRE_ASSERT(1 + 1 == 2));
  try {
    CADRE_ASSERT(1 + 1 == 3);
    FAIL();
  } catch (const std::logic_error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("1 + 1 == 3"), message.npos) << message;
    EXPECT_NE(message.find("core_test.cc"), message.npos) << message;
    EXPECT_NE(message.find("please report"), message.npos) << message;
  }
}

TEST(CheckedMath, EmptyOnOverflowOnly) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  EXPECT_EQ(checked_multiply(3, -4), -12);
  EXPECT_EQ(checked_multiply(kMax, 1), kMax);
  EXPECT_EQ(checked_multiply(kMax, 2), std::nullopt);
  EXPECT_EQ(checked_multiply(kMin, -1), std::nullopt);
  EXPECT_EQ(checked_add(kMax, 0), kMax);
  EXPECT_EQ(checked_add(kMax, 1), std::nullopt);
  EXPECT_EQ(checked_add(kMin, -1), std::nullopt);
}

TEST(StrCat, PrintsNumbersTextsAndOurTypes) {
  EXPECT_EQ(str_cat("a", std::string("b"), 1, ' ', -2, " ", 0.5), "ab1 -2 0.5");
  EXPECT_EQ(str_cat(DType::kBF16, " ", Dims{2, 3}, " ", Device{DeviceType::kCuda, 1}),
            "bfloat16 [2, 3] cuda:1");
  EXPECT_EQ(str_cat(), "");
}

TEST(StrCat, JoinsWithASeparator) {
  EXPECT_EQ(join(std::array<int, 3>{1, 2, 3}), "1, 2, 3");
  EXPECT_EQ(join(std::array<std::string, 2>{"x", "y"}, "/"), "x/y");
  EXPECT_EQ(join(std::vector<int>{}), "");
}

// Files hold numbers made by str_cat: a program's locale must not put separators into them.
TEST(StrCat, IgnoresTheProgramsLocale) {
  struct Grouping : std::numpunct<char> {
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale(), new Grouping));
  EXPECT_EQ(str_cat(1234567), "1234567");
  EXPECT_EQ(join(std::vector<int>{1234567}), "1234567");
  std::locale::global(before);
}

TEST(Quote, EscapesControlCharactersAndCutsLongTexts) {
  EXPECT_EQ(quote("abc"), "\"abc\"");
  EXPECT_EQ(quote("a\x1b[31m\n"), "\"a\\x1b[31m\\x0a\"");
  EXPECT_EQ(quote("\xc3\xa4"), "\"\xc3\xa4\"");
  EXPECT_EQ(quote(std::string(1000, 'x')), '"' + std::string(200, 'x') + "...\"");
}

TEST(FormatBytes, PicksTheUnit) {
  EXPECT_EQ(format_bytes(0), "0 bytes");
  EXPECT_EQ(format_bytes(1023), "1023 bytes");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(1536u << 20), "1.50 GiB");
  EXPECT_EQ(format_bytes(SIZE_MAX), "16384.00 PiB");
}

TEST(FunctionRef, CallsWhatItRefersTo) {
  int calls = 0;
  auto count = [&calls](int by) { return calls += by; };
  const FunctionRef<int(int)> ref = count;
  EXPECT_EQ(ref(2), 2);
  EXPECT_EQ(ref(3), 5);
  const FunctionRef<int(int)> copy = ref;
  EXPECT_EQ(copy(1), 6);
}

TEST(Version, HasThreeNumbers) {
  int major = -1;
  int minor = -1;
  int patch = -1;
  EXPECT_EQ(std::sscanf(version(), "%d.%d.%d", &major, &minor, &patch), 3);
}

}  // namespace
}  // namespace cadre
