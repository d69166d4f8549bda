#include "plot.h"

#include <gtest/gtest.h>

#include <cmath>
#include <regex>
#include <string>
#include <vector>

namespace cadre::cli {
namespace {

/// Centres of all dots, in order.
std::vector<std::pair<double, double>> dots(const std::string& svg) {
  const std::regex dot("<circle cx=\"([^\"]+)\" cy=\"([^\"]+)\"");
  std::vector<std::pair<double, double>> found;
  for (std::sregex_iterator i(svg.begin(), svg.end(), dot), end; i != end; ++i) {
    found.emplace_back(std::stod((*i)[1]), std::stod((*i)[2]));
  }
  return found;
}

TEST(Plot, EqualFactorsAreEqualDistancesOnLogarithmicAxes) {
  const auto at =
      dots(to_svg({"x", "ms", Scale::kLog, 0, {{"a", {{1, 1}, {10, 10}, {100, 100}}}}}));
  ASSERT_EQ(at.size(), 3u);
  EXPECT_NEAR(at[1].first - at[0].first, at[2].first - at[1].first, 0.2);
  EXPECT_NEAR(at[0].second - at[1].second, at[1].second - at[2].second, 0.2);
  EXPECT_GT(at[0].second, at[2].second);  // up is more
}

TEST(Plot, ALinearAxisReachesToItsTopAndBeyondForLargerValues) {
  const auto half =
      dots(to_svg({"x", "%", Scale::kLinear, 100, {{"a", {{1, 0}, {2, 50}, {4, 100}}}}}));
  EXPECT_NEAR(half[0].second - half[1].second, half[1].second - half[2].second, 0.2);
  for (const auto& [x, y] : dots(to_svg({"x", "%", Scale::kLinear, 100, {{"a", {{1, 250}}}}}))) {
    EXPECT_GE(y, 0);
  }
}

TEST(Plot, NothingAndOnePointAreFinite) {
  for (const Plot& plot :
       {Plot{"x", "u", Scale::kLog, 0, {}}, Plot{"x", "u", Scale::kLinear, 100, {{"a", {}}}},
        Plot{"x", "u", Scale::kLog, 0, {{"a", {{4, 2}}}}}}) {
    const std::string svg = to_svg(plot);
    EXPECT_EQ(svg.find("nan"), std::string::npos);
    EXPECT_EQ(svg.find("inf"), std::string::npos);
    EXPECT_TRUE(svg.ends_with("</svg>\n"));
  }
}

TEST(Plot, NamesAreEscapedAndDoNotOverlap) {
  const std::string svg =
      to_svg({"x", "u", Scale::kLog, 0, {{"a<b", {{1, 5}}}, {"second", {{1, 5}}}}});
  EXPECT_NE(svg.find("a&lt;b"), std::string::npos);
  const std::regex label("class=\"label\" x=\"[^\"]+\" y=\"([^\"]+)\"");
  std::vector<double> heights;
  for (std::sregex_iterator i(svg.begin(), svg.end(), label), end; i != end; ++i) {
    heights.push_back(std::stod((*i)[1]));
  }
  ASSERT_EQ(heights.size(), 2u);
  EXPECT_GE(std::abs(heights[1] - heights[0]), 12);
}

}  // namespace
}  // namespace cadre::cli
