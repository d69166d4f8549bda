// What whole models do not show of latent attention: the memory of DeepSeek-V3's shape, and steps
// whose heads go in groups.
#include "layers/mla_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "cadre/thread_pool.h"

namespace cadre {
namespace {

MlaConfig deepseek_v3() {
  MlaConfig config;
  config.hidden_size = 7168;
  config.num_heads = 128;
  config.q_rank = 1536;
  config.rank = 512;
  config.nope_dim = 128;
  config.rope_dim = 64;
  config.value_dim = 128;
  return config;
}

// arXiv 2405.04434: kv_lora_rank + qk_rope_head_dim elements a token and layer, instead of
// 2 * 128 * 128 and more.
TEST(MlaAttention, KeepsOnlyTheCompressedRowOfAToken) {
  const MlaAttention attention(deepseek_v3(), {});
  const CacheLayout layout = attention.cache_layout(DType::kBF16);
  ASSERT_EQ(layout.size(), 1u);
  EXPECT_EQ(layout[0].num_heads * layout[0].width, 512 + 64);
  const KvShape shape{1, 4096, std::vector<CacheLayout>(61, layout)};
  EXPECT_EQ(kv_bytes(shape), size_t{4096} * 70272);
}

// Queries and results of all heads in the latent space would take 4 GiB at 16384 tokens.
TEST(MlaAttention, TheLatentSpacesWorkspaceIsBounded) {
  const MlaAttention attention(deepseek_v3(), {});
  const DenseOps& ops = dense_ops(DeviceType::kCpu);
  for (const int64_t tokens : {1, 1024, 2048, 16384}) {
    const size_t got = attention.workspace_bytes({ops, tokens, DType::kBF16, 2});
    const int64_t of_a_token = 128 * (192 + 128) * 2 + 576 * 4;  // queries, outputs and fresh row
    const size_t latent = size_t{256} << 20;
    const size_t output = ops.linear_add_workspace_bytes(tokens, 7168, 128 * 128, DType::kBF16, 2);
    EXPECT_LE(got, static_cast<size_t>(tokens * of_a_token) + std::max(latent, output) + (8 << 20))
        << tokens;
  }
}

class SmallMla : public testing::Test {
 protected:
  static constexpr int64_t kTokens = 1100;  // times 120 heads: more than go at a time
  static constexpr int64_t kHidden = 6;

  SmallMla() : threads_(2), stream_(Stream::cpu(threads_)), x_(random({kTokens, kHidden})) {
    config_.hidden_size = kHidden;
    config_.num_heads = 120;
    config_.rank = 8;
    config_.nope_dim = 3;
    config_.rope_dim = 2;
    config_.value_dim = 3;
    config_.scale = 0.4f;
    q_ = random({120 * 5, kHidden});
    kv_a_ = random({10, kHidden});
    kv_norm_ = random({8});
    kv_b_ = random({120 * 6, 8});
    o_ = random({kHidden, 120 * 3});
    angles_ = random({2, kTokens, 1});
  }

  Tensor random(const Dims& shape) {
    Tensor tensor(DType::kF32, shape);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < tensor->numel(); ++i) tensor->as<float>()[i] = normal(random_);
    return tensor;
  }

  /// All tokens, in steps of so many; each has exactly the workspace that it asks for.
  std::vector<float> run(int64_t step) {
    const MlaAttention attention(config_, {{},
                                           {},
                                           {q_.view(), {}},
                                           {kv_a_.view(), {}},
                                           kv_norm_.view(),
                                           kv_b_.view(),
                                           {o_.view(), {}}});
    DenseOps& ops = dense_ops(DeviceType::kCpu);
    KvStore cache({1, kTokens, {attention.cache_layout(DType::kF32)}}, {});
    const Tensor residual(DType::kF32, {kTokens, kHidden});
    std::fill_n(residual->as<float>(), residual->numel(), 0.0f);
    for (int64_t begin = 0; begin < kTokens; begin += step) {
      const int64_t end = std::min(begin + step, kTokens);
      Workspace workspace(
          {}, attention.workspace_bytes({ops, end - begin, DType::kF32, threads_.num_threads()}));
      const RopeAngles rope{angles_->operator[](0).slice(begin, end),
                            angles_->operator[](1).slice(begin, end)};
      const SequenceSpan span{0, 0, end - begin, begin};
      const ForwardContext context{ops,          workspace,  stream_, DType::kF32,
                                   {{&span, 1}}, {&rope, 1}, cache,   nullptr};
      attention.forward(x_.view().slice(begin, end), residual->slice(begin, end), 0, context);
    }
    return {residual->as<float>(), residual->as<float>() + residual->numel()};
  }

  std::mt19937 random_{3};
  ThreadPool threads_;
  Stream stream_;
  MlaConfig config_;
  Tensor x_, q_, kv_a_, kv_norm_, kv_b_, o_, angles_;
};

TEST_F(SmallMla, HeadsInGroupsGiveTheBitsOfHeadsTogether) { EXPECT_EQ(run(kTokens), run(550)); }

}  // namespace
}  // namespace cadre
