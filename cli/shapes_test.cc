#include "shapes.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "cadre/error.h"

namespace cadre::cli {
namespace {

std::vector<int64_t> sizes(const ExpertsConfig& c) {
  return {c.num_experts, c.top_k, c.hidden_size, c.intermediate_size};
}

std::string refusal(const std::string& text) {
  try {
    parse_shape("--shape", text);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

TEST(Shapes, TheNamedOnesAreThoseOfTheModels) {
  const std::map<std::string, std::vector<int64_t>> expected = {
      {"qwen1.5-moe-a2.7b", {60, 4, 2048, 1408}},  {"qwen3-30b-a3b", {128, 8, 2048, 768}},
      {"mixtral-8x7b", {8, 2, 4096, 14336}},       {"deepseek-v3", {256, 8, 7168, 2048}},
      {"deepseek-v4-flash", {256, 6, 4096, 2048}}, {"gpt-oss-20b", {32, 4, 2880, 2880}},
      {"olmoe-1b-7b", {64, 8, 2048, 1024}}};
  std::map<std::string, std::vector<int64_t>> found;
  for (const NamedShape& shape : named_shapes()) {
    found[shape.name] = sizes(shape.config);
    EXPECT_EQ(sizes(parse_shape("--shape", shape.name).config), sizes(shape.config));
  }
  EXPECT_EQ(found, expected);
}

TEST(Shapes, FourNumbersAreAShape) {
  const NamedShape shape = parse_shape("--shape", "6,2,24,40");
  EXPECT_EQ(sizes(shape.config), (std::vector<int64_t>{6, 2, 24, 40}));
  EXPECT_EQ(shape.name, "6,2,24,40");
}

TEST(Shapes, WhatIsNoShapeIsRefusedWithWhatThereIs) {
  EXPECT_NE(refusal("qwen3-30b-a3").find("did you mean qwen3-30b-a3b?"), std::string::npos);
  EXPECT_NE(refusal("1,2,3").find("E,k,H,I"), std::string::npos);
  EXPECT_NE(refusal("").find("mixtral-8x7b"), std::string::npos);
  EXPECT_NE(refusal("6,2,0,40").find("--shape: expected a whole number, from 1"),
            std::string::npos);
  EXPECT_NE(refusal("6,2,x,40").find("\"x\""), std::string::npos);
  EXPECT_NE(refusal("2,6,8,8").find("top_k"), std::string::npos);
}

}  // namespace
}  // namespace cadre::cli
