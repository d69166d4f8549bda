// DeepSeek-V4's caches: long sequences past the window and over many compressed entries, cutting a
// sequence back, memory by token, forwards that fail half-way. And what its checkpoints may hold.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "cadre/model.h"
#include "golden/model_runs.h"
#include "models/damaged_checkpoint.h"
#include "support/compare.h"

namespace cadre::test {
namespace {

// 204 tokens; window 9; entries of 5 tokens, of which 6 are picked, and of 12.
constexpr const char* kLong = "deepseek_v4_hub";

class DeepseekV4 : public testing::Test {
 protected:
  DeepseekV4() : expected_(read_expected(fixture(kLong) / "expected.safetensors")) {}

  static std::unique_ptr<Model> load(DType dtype = DType::kF32) {
    return Model::from_pretrained(fixture(kLong).string(), {.dtype = dtype, .num_threads = 2});
  }

  // Runs tokens [begin, end) of the text and returns their logits.
  std::vector<float> run(Model& model, KvCache& cache, int64_t begin, int64_t end,
                         const MoeHooks* hooks = nullptr) const {
    const auto vocab = model.info().vocab_size;
    std::vector<float> logits(static_cast<size_t>((end - begin) * vocab));
    const std::vector<int64_t> counts = {end - begin};
    model.forward({ids().subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
                   counts, LogitsRows::kAll},
                  cache, {logits.data(), DType::kF32, {end - begin, vocab}}, hooks);
    return logits;
  }
  std::span<const TokenId> ids() const { return expected_.row(0); }
  int64_t length() const { return expected_.length; }

  static std::vector<float> rows(const std::vector<float>& logits, const Model& model,
                                 int64_t begin, int64_t end) {
    const auto vocab = static_cast<std::ptrdiff_t>(model.info().vocab_size);
    return {logits.begin() + begin * vocab, logits.begin() + end * vocab};
  }

  Expected expected_;
};

TEST_F(DeepseekV4, TokenByTokenEqualsForwardAtEveryPosition) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto model = load(dtype);
    const auto whole_cache = model->new_cache(1, length());
    const std::vector<float> whole = run(*model, *whole_cache, 0, length());
    const auto cache = model->new_cache(1, length());
    for (int64_t t = 0; t < length(); ++t) {
      ASSERT_EQ(run(*model, *cache, t, t + 1), rows(whole, *model, t, t + 1)) << t;
    }
  }
}

TEST_F(DeepseekV4, PiecesAcrossAllBoundariesEqualForward) {
  const auto model = load();
  const auto whole_cache = model->new_cache(1, length());
  const std::vector<float> whole = run(*model, *whole_cache, 0, length());
  for (const int64_t piece : {2, 5, 7, 12, 13, 60, 61}) {
    const auto cache = model->new_cache(1, length());
    for (int64_t begin = 0; begin < length(); begin += piece) {
      const int64_t end = std::min(length(), begin + piece);
      ASSERT_EQ(run(*model, *cache, begin, end), rows(whole, *model, begin, end))
          << "from " << begin << " in pieces of " << piece;
    }
  }
}

TEST_F(DeepseekV4, SequencesOfUnequalLengthsDecodeTogetherAsAlone) {
  const auto model = load();
  const auto vocab = static_cast<size_t>(model->info().vocab_size);
  const auto whole_cache = model->new_cache(1, length());
  const std::vector<float> whole = run(*model, *whole_cache, 0, length());
  std::vector<int64_t> past = {100, 0, 37};  // the same text, at other places
  const auto cache = model->new_cache(3, length());
  std::vector<TokenId> tokens(ids().begin(), ids().begin() + 100);
  tokens.insert(tokens.end(), ids().begin(), ids().begin() + 37);
  std::vector<float> logits(3 * vocab);
  const MutableTensorView view(logits.data(), DType::kF32, {3, static_cast<int64_t>(vocab)});
  model->forward({tokens, past}, *cache, view);
  for (int step = 0; step < 40; ++step) {
    std::vector<TokenId> next;
    for (const int64_t p : past) next.push_back(ids()[static_cast<size_t>(p)]);
    model->forward({next, std::vector<int64_t>{1, 1, 1}}, *cache, view);
    for (size_t s = 0; s < 3; ++s) {
      const std::vector<float> row(logits.begin() + static_cast<std::ptrdiff_t>(s * vocab),
                                   logits.begin() + static_cast<std::ptrdiff_t>((s + 1) * vocab));
      ASSERT_EQ(row, rows(whole, *model, past[s], past[s] + 1)) << s << " at " << past[s];
      ++past[s];
    }
  }
}

TEST_F(DeepseekV4, ATruncatedSequenceGoesOnRightlyOrIsRefused) {
  const auto model = load();
  const auto whole_cache = model->new_cache(1, length());
  const std::vector<float> whole = run(*model, *whole_cache, 0, length());
  int64_t refused = 0;
  for (const int64_t filled : {8, 12, 60, 61, 119}) {
    for (int64_t kept = 0; kept <= filled; ++kept) {
      const auto cache = model->new_cache(1, length());
      run(*model, *cache, 0, filled);
      try {
        cache->truncate(0, kept);
      } catch (const Unsupported& error) {
        ++refused;
        EXPECT_LT(kept, filled - 1) << "one token can always be cut";
        EXPECT_GT(kept, 0) << "all can always be cut";
        EXPECT_EQ(cache->length(0), filled);
        EXPECT_EQ(run(*model, *cache, filled, filled + 1), rows(whole, *model, filled, filled + 1))
            << "a refused cut changed something";
        continue;
      }
      // Other tokens first, so that what was cut is overwritten by something else.
      const std::vector<float> rest = run(*model, *cache, kept, kept + 30);
      EXPECT_EQ(rest, rows(whole, *model, kept, kept + 30)) << filled << " cut to " << kept;
    }
  }
  EXPECT_GT(refused, 100);
}

TEST_F(DeepseekV4, CutsAddUp) {
  const auto model = load();
  const auto cache = model->new_cache(1, length());
  run(*model, *cache, 0, 50);
  cache->truncate(0, 49);
  EXPECT_THROW(cache->truncate(0, 48), Unsupported);  // row 40 of the window was replaced by 49
  const auto whole_cache = model->new_cache(1, length());
  const std::vector<float> whole = run(*model, *whole_cache, 0, 70);
  EXPECT_EQ(run(*model, *cache, 49, 70), rows(whole, *model, 49, 70));
  cache->truncate(0, 0);
  EXPECT_EQ(run(*model, *cache, 0, 70), whole);
}

TEST_F(DeepseekV4, AForwardThatFailsHalfWayIsNotGoneOnFrom) {
  const auto model = load();
  model->reserve(16);
  const auto cache = model->new_cache(1, length());
  run(*model, *cache, 0, 40);
  int calls = 0;
  MoeHooks hooks;
  hooks.on_output = [&](const MoeLayerRecord&) {
    if (++calls == 5) throw std::runtime_error("stop");  // in the second piece of three layers
  };
  EXPECT_THROW(run(*model, *cache, 40, 100, &hooks), std::runtime_error);
  EXPECT_EQ(cache->length(0), 40);
  try {
    run(*model, *cache, 40, 41);
    FAIL() << "expected InvalidArgument";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("truncate it to 0"), std::string::npos);
  }
  cache->truncate(0, 0);
  const std::vector<float> again = run(*model, *cache, 0, 41);
  const auto fresh = model->new_cache(1, length());
  EXPECT_EQ(again, run(*model, *fresh, 0, 41));
}

TEST_F(DeepseekV4, SixteenBitsWithNothingLeftOut) {
  DamagedCheckpoint checkpoint(kLong);
  checkpoint.config["index_topk"] = 64;  // of 40 entries
  const std::string folder = checkpoint.write();
  const auto logits_in = [&](DType dtype, const MoeHooks& hooks) {
    const auto model = Model::from_pretrained(folder, {.dtype = dtype});
    return all_logits(*model, ids(), 1, &hooks);
  };
  std::map<int64_t, MoeCapture> routing;
  const std::vector<float> expected = logits_in(DType::kF32, capture_into(routing));
  EXPECT_LE(relative_error(logits_in(DType::kBF16, replay_of(routing)), expected), 1.5e-2);
  EXPECT_LE(relative_error(logits_in(DType::kF16, replay_of(routing)), expected), 2e-3);
}

TEST_F(DeepseekV4, AFirstForwardThatFailsMayBeRunAgain) {
  const auto model = load();
  model->reserve(16);
  const auto cache = model->new_cache(1, length());
  MoeHooks hooks;
  hooks.on_output = [calls = 0](const MoeLayerRecord&) mutable {
    if (++calls == 8) throw std::runtime_error("stop");
  };
  EXPECT_THROW(run(*model, *cache, 0, 100, &hooks), std::runtime_error);
  const auto fresh = model->new_cache(1, length());
  EXPECT_EQ(run(*model, *cache, 0, 10), run(*model, *fresh, 0, 10));
  EXPECT_EQ(run(*model, *cache, 10, 30), run(*model, *fresh, 10, 30));
}

// Two sparse layers with an entry of 16 and a key of 12 elements for 5 tokens, a heavy one with 16
// for 12 tokens; float32.
TEST_F(DeepseekV4, ATokenTakesAFractionOfARow) {
  const auto model = load();
  const size_t per_60 = 2 * (12 * (16 + 12)) * 4 + 5 * 16 * 4;
  const auto bytes = [&](int64_t tokens) { return model->new_cache(1, tokens)->bytes(); };
  EXPECT_NEAR(static_cast<double>(bytes(480) - bytes(60)), 7.0 * per_60, 8 * 256);  // padding
  EXPECT_NEAR(static_cast<double>(bytes(480) - bytes(240)), 4.0 * per_60, 8 * 256);
  // Whatever the length: windows of 9 rows; of each compressor two rings of its rows' projections.
  const size_t fixed = 4 * (3 * 9 * 16 + 2 * 2 * (10 * 32 + 10 * 24) + 2 * 12 * 16);
  EXPECT_NEAR(static_cast<double>(bytes(60)), static_cast<double>(fixed + per_60), 20 * 256);
}

class DeepseekV4Files : public testing::Test {
 protected:
  static std::string fault(const DamagedCheckpoint& checkpoint) {
    try {
      Model::from_pretrained(checkpoint.write());
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }
};

TEST_F(DeepseekV4Files, TensorsOfMultiTokenPredictionAreNotNeeded) {
  const ModelReport report = inspect_model(fixture(kLong).string());
  ASSERT_EQ(report.ignored.size(), 1u);
  EXPECT_EQ(report.ignored[0].name, "mtp.0.e_proj.weight");
  EXPECT_TRUE(report.left_over.empty());
  EXPECT_TRUE(report.missing.empty());
}

TEST_F(DeepseekV4Files, ARenamedTensorIsNamedTwice) {
  for (const auto& [folder, name] : std::vector<std::pair<const char*, std::string>>{
           {"deepseek_v4", "model.layers.2.attn.indexer.weights_proj.weight"},
           {"deepseek_v4_hub", "layers.0.hc_ffn_base"},
           {"deepseek_v4_hub", "layers.1.ffn.gate.tid2eid"},
           {"deepseek_v4_own_names", "model.layers.1.self_attn.compressor.position_bias"},
           {"deepseek_v4_own_names", "model.hc_head.hc_scale"}}) {
    DamagedCheckpoint checkpoint(folder);
    ASSERT_TRUE(checkpoint.tensors.count(name)) << name;
    checkpoint.tensors[name + "x"] = checkpoint.tensors[name];
    checkpoint.tensors.erase(name);
    const std::string what = fault(checkpoint);
    EXPECT_NE(what.find("1 missing"), std::string::npos) << what;
    EXPECT_NE(what.find(name + " "), std::string::npos) << what;
    EXPECT_NE(what.find(name + "x"), std::string::npos) << what;
  }
}

TEST_F(DeepseekV4Files, ATableThatNamesNoExpertIsRefused) {
  DamagedCheckpoint checkpoint("deepseek_v4");
  const std::string name = "model.layers.0.ffn.gate.tid2eid";
  std::vector<int64_t> table(256 * 3, 7);
  table[10 * 3 + 1] = 8;  // of 8 experts
  checkpoint.tensors[name] = TensorView(table.data(), DType::kI64, {256, 3});
  const std::string what = fault(checkpoint);
  EXPECT_NE(what.find(name), std::string::npos) << what;
  EXPECT_NE(what.find("[0, 8), found 8 for token id 10"), std::string::npos) << what;
  table[10 * 3 + 1] = -1;
  EXPECT_NE(fault(checkpoint).find("found -1"), std::string::npos);
  checkpoint.put(name, DType::kF32, {256, 3});
  EXPECT_NE(fault(checkpoint).find("expected int32 or int64"), std::string::npos);
}

TEST_F(DeepseekV4Files, ConfigValuesThatCannotBe) {
  struct Fault {
    const char* key;
    Json value;
    const char* part;
  };
  for (const Fault& wrong : std::vector<Fault>{
           {"layer_types", {"sliding_attention"}, "expected 4 entries, got 1"},
           {"layer_types", {"a", "b", "c", "d"}, "compressed_sparse_attention"},
           {"mlp_layer_types", {"moe", "moe", "moe", "dense"}, "hash_moe or moe"},
           {"num_key_value_heads", 2, "num_key_value_heads: expected 1"},
           {"o_groups", 3, "o_groups (3) must divide"},
           {"hc_mult", 17, "hc_mult"},
           {"hc_sinkhorn_iters", 0, "hc_sinkhorn_iters"},
           {"swiglu_limit", 0, "swiglu_limit: expected > 0"},
           {"scoring_func", "softmax", "supported: sqrtsoftplus, sigmoid"},
           {"sliding_window", 0, "sliding_window"},
           {"index_topk", 0, "index_topk"},
           {"index_head_dim", 4, "index_head_dim (4)"},
           {"rope_parameters",
            {{"main", {{"rope_theta", 10000}}},
             {"compress", {{"rope_type", "dynamic"}, {"rope_theta", 10000}, {"factor", 2}}}},
            "\"dynamic\" is not supported by this family"},
           {"compress_rates", {{"heavily_compressed_attention", 0}}, "compress_rates."}}) {
    DamagedCheckpoint checkpoint("deepseek_v4");
    checkpoint.config[wrong.key] = wrong.value;
    const std::string what = fault(checkpoint);
    EXPECT_NE(what.find(wrong.part), std::string::npos) << wrong.key << ": " << what;
  }
  DamagedCheckpoint checkpoint("deepseek_v4_hub");
  checkpoint.config["compress_ratios"] = {4, 128, 5};
  EXPECT_NE(fault(checkpoint).find("compress_ratios: expected 0, 4 or 128, got 5"),
            std::string::npos);
}

}  // namespace
}  // namespace cadre::test
