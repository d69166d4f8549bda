#include "synthetic_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "cadre/model.h"
#include "shapes.h"

namespace cadre::cli {
namespace {

namespace fs = std::filesystem;

SyntheticModel small_model() {
  SyntheticModel model;
  model.experts = parse_shape("", "4,2,32,16").config;
  model.num_layers = 2;
  model.vocab_size = 100;
  model.num_heads = 4;
  model.num_kv_heads = 2;
  model.head_dim = 8;
  return model;
}

TEST(SyntheticModel, IsACompleteCheckpointOfItsShape) {
  const TemporaryFolder folder;
  const SyntheticModel model = small_model();
  write_synthetic_model(model, folder.path());
  const ModelReport report = inspect_model(folder.path().string());
  EXPECT_TRUE(report.missing.empty());
  EXPECT_TRUE(report.left_over.empty());
  EXPECT_EQ(report.info.num_moe_layers, 2);
  EXPECT_EQ(report.experts.at(0).second.config.num_experts, 4);
  double bytes = 0;
  for (const auto& [part, size] : report.bytes_per_part) bytes += static_cast<double>(size);
  EXPECT_EQ(bytes, weight_bytes(model));
}

TEST(SyntheticModel, DataIsAlignedAsInRealFiles) {
  const TemporaryFolder folder;
  write_synthetic_model(small_model(), folder.path());
  for (int i = 0; i <= 2; ++i) {
    std::ifstream file(folder.path() / ("model-" + std::to_string(i) + ".safetensors"));
    uint64_t header_bytes = 1;
    file.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes);
    EXPECT_EQ(header_bytes % 8, 0u);
  }
}

TEST(SyntheticModel, Runs) {
  const TemporaryFolder folder;
  write_synthetic_model(small_model(), folder.path());
  const auto model = Model::from_pretrained(folder.path().string());
  const std::vector<TokenId> ids = {1, 2, 3};
  const std::vector<int64_t> counts = {3};
  const Tensor logits(DType::kF32, {1, 100});
  model->forward({ids, counts}, *model->new_cache(1, 8), logits);
  for (int64_t i = 0; i < 100; ++i) EXPECT_TRUE(std::isfinite(logits->as<float>()[i]));
}

TEST(SyntheticModel, ThatFitsOnNoDiskIsRefusedBeforeItIsWritten) {
  const TemporaryFolder folder;
  EXPECT_NO_THROW(require_space(small_model(), folder.path()));
  for (const char* shape : {"100000,8,16384,16384", "1000,8,16777216,16777216"}) {
    SyntheticModel model = small_model();
    model.experts = parse_shape("", shape).config;
    model.num_layers = 1000;
    try {
      require_space(model, folder.path());
      ADD_FAILURE() << shape;
    } catch (const Error& e) {
      for (const char* part : {"GiB", "free", "TMPDIR"}) {
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
      }
    }
  }
}

TEST(SyntheticModel, OfTheShapeOfQwen3HasItsBytes) {
  SyntheticModel model;
  model.experts = parse_shape("", "qwen3-30b-a3b").config;
  model.num_layers = 2;
  // Experts 2 * 128 * 3 * 2048 * 768, embeddings 2 * 151936 * 2048 and a little, 2 bytes each.
  EXPECT_NEAR(weight_bytes(model), 3.82e9, 0.1e9);
}

TEST(TemporaryFolder, IsGoneAtTheEnd) {
  fs::path path;
  {
    const TemporaryFolder folder;
    path = folder.path();
    EXPECT_TRUE(fs::is_directory(path));
  }
  EXPECT_FALSE(fs::exists(path));
}

}  // namespace
}  // namespace cadre::cli
