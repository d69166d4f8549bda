// Choosing and switching experts backends: by name, by map, at load and at run time.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "cadre/model.h"
#include "core/str_cat.h"
#include "models/damaged_checkpoint.h"
#include "models/registry.h"
#include "support/allocation_counter.h"

namespace cadre::test {
namespace {

const std::vector<std::string> kBackends = {"eager", "batched_mm", "grouped_mm"};

std::string folder_of(const std::string& name) {
  return std::string(CADRE_TEST_DATA) + "/models/" + name;
}

std::vector<float> logits_of(Model& model) {
  const std::vector<TokenId> ids = {3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62};
  const std::vector<int64_t> counts = {static_cast<int64_t>(ids.size())};
  const auto cache = model.new_cache(1, 32);
  std::vector<float> logits(ids.size() * static_cast<size_t>(model.info().vocab_size));
  model.forward({ids, counts, LogitsRows::kAll}, *cache,
                {logits.data(), DType::kF32, {counts[0], model.info().vocab_size}});
  return logits;
}

TEST(Switching, EveryOrderedPairEqualsAFreshModel) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::string& from : kBackends) {
      for (const std::string& to : kBackends) {
        const auto switched = Model::from_pretrained(
            folder_of("qwen2_moe"), {.experts_implementation = {{"", from}}, .dtype = dtype});
        logits_of(*switched);
        switched->set_experts_implementation(to);
        const auto fresh = Model::from_pretrained(
            folder_of("qwen2_moe"), {.experts_implementation = {{"", to}}, .dtype = dtype});
        EXPECT_EQ(logits_of(*switched), logits_of(*fresh)) << from << " to " << to;
      }
    }
  }
}

TEST(Switching, AllocatesNothing) {
  const auto model = Model::from_pretrained(folder_of("qwen2_moe"));
  model->reserve(64);
  const size_t workspace = model->memory().workspace_bytes;
  std::vector<ExpertsImplementation> maps;
  for (const std::string& name : kBackends) maps.push_back({{"", name}});
  const AllocationCounter counter;
  for (const std::string& from : kBackends) {
    for (const std::string& to : kBackends) {
      model->set_experts_implementation(from);
      model->set_experts_implementation(to);
    }
  }
  for (const ExpertsImplementation& map : maps) model->set_experts_implementation(map);
  const int64_t allocations = counter.count();
  EXPECT_EQ(allocations, 0);
  EXPECT_EQ(model->memory().workspace_bytes, workspace);
  EXPECT_EQ(model->memory().added_bytes, 0u);
}

TEST(Switching, DefaultIsGroupedMm) {
  const auto model = Model::from_pretrained(folder_of("mixtral"));
  EXPECT_EQ(model->get_experts_implementation(), (ExpertsImplementation{{"", "grouped_mm"}}));
}

TEST(Switching, GetGivesWhatSetTakes) {
  const auto model = Model::from_pretrained(folder_of("mixtral"));
  model->set_experts_implementation("eager");
  const ExpertsImplementation map = model->get_experts_implementation();
  EXPECT_EQ(map, (ExpertsImplementation{{"", "eager"}}));
  model->set_experts_implementation("batched_mm");
  model->set_experts_implementation(map);
  EXPECT_EQ(model->get_experts_implementation(), map);
}

void expect_parts(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "\"" << part << "\" is not in:\n"
                                                     << message;
  }
}

TEST(Switching, UnknownNameListsTheNamesAndChangesNothing) {
  const auto model = Model::from_pretrained(folder_of("mixtral"));
  const std::vector<std::function<void()>> attempts = {
      [&] { model->set_experts_implementation("groupd_mm"); },
      [&] {
        model->set_experts_implementation({{"", "groupd_mm"}});
      },
      [&] {
        Model::from_pretrained(folder_of("mixtral"),
                               {.experts_implementation = {{"", "groupd_mm"}}});
      }};
  for (const auto& attempt : attempts) {
    expect_parts(message_of<InvalidArgument>(attempt),
                 {"eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe"});
  }
  EXPECT_EQ(model->get_experts_implementation().at(""), "grouped_mm");
}

TEST(Switching, UnknownKeyListsTheKeysAndChangesNothing) {
  const auto model = Model::from_pretrained(folder_of("mixtral"));
  const ExpertsImplementation map = {{"", "eager"}, {"text_confg", "eager"}};
  expect_parts(message_of<InvalidArgument>([&] { model->set_experts_implementation(map); }),
               {"text_confg", "\"\""});
  expect_parts(message_of<InvalidArgument>([&] {
                 Model::from_pretrained(folder_of("mixtral"), {.experts_implementation = map});
               }),
               {"text_confg"});
  EXPECT_EQ(model->get_experts_implementation().at(""), "grouped_mm");
}

TEST(Switching, ABackendThatCannotRunIsRefusedWithEveryBackendsAnswer) {
  const auto model = Model::from_pretrained(folder_of("mixtral"));
  const std::vector<std::function<void()>> attempts = {
      [&] { model->set_experts_implementation("sonicmoe"); },
      [&] {
        Model::from_pretrained(folder_of("mixtral"),
                               {.experts_implementation = {{"", "sonicmoe"}}});
      }};
  for (const auto& attempt : attempts) {
    const std::string message = message_of<Unsupported>(attempt);
    expect_parts(message, {"\"sonicmoe\"", "NVIDIA", "eager: can run", "grouped_mm: can run",
                           "batched_mm: can run", "deepgemm:", "deepgemm_megamoe:"});
  }
  EXPECT_EQ(model->get_experts_implementation().at(""), "grouped_mm");
}

TEST(Switching, QueryDescribesTheExperts) {
  const auto model = Model::from_pretrained(folder_of("qwen2_moe"), {.dtype = DType::kF16});
  const ExpertsQuery query = model->experts_query();
  EXPECT_EQ(query.config.num_experts, 8);
  EXPECT_EQ(query.config.hidden_size, 64);
  EXPECT_EQ(query.config.intermediate_size, 24);
  EXPECT_EQ(query.config.top_k, 2);
  EXPECT_EQ(query.compute_dtype, DType::kF16);
  EXPECT_EQ(query.format, StorageFormat::kBF16);
  expect_parts(message_of<InvalidArgument>([&] { model->experts_query("text_config"); }),
               {"text_config"});
}

// Wraps grouped_mm; with `added` pretends to hold memory of its own.
class Wrapper : public ExpertsBackend {
 public:
  Wrapper(size_t added, size_t extra_workspace) : added_(added), extra_(extra_workspace) {}
  Support supports(const ExpertsQuery& query) const override { return inner().supports(query); }
  std::unique_ptr<PreparedExperts> prepare(const ExpertsQuery& query,
                                           std::shared_ptr<const ExpertsWeights> weights) override {
    auto prepared = inner().prepare(query, std::move(weights));
    prepared->added_bytes = added_;
    return prepared;
  }
  size_t workspace_bytes(const ExpertsQuery& query, int64_t max_tokens,
                         int num_threads) const override {
    return inner().workspace_bytes(query, max_tokens, num_threads) + extra_;
  }

 protected:
  void run(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace& workspace,
           const Stream& stream) override {
    if (extra_ > 0) {
      const Workspace::Scope scope(workspace);
      std::memset(workspace.allocate(extra_), 0xff, extra_);
    }
    inner().forward(experts, tokens, workspace, stream);
  }

 private:
  static ExpertsBackend& inner() { return find_backend("grouped_mm", DeviceType::kCpu); }
  size_t added_;
  size_t extra_;
};

TEST(Switching, BackendsRegisteredLaterReachLoadedModels) {
  const auto model = Model::from_pretrained(folder_of("qwen2_moe"));
  const std::vector<float> expected = logits_of(*model);
  model->reserve(32);
  register_backend("later", [] { return std::make_unique<Wrapper>(0, size_t{8} << 20); });
  model->set_experts_implementation("later");
  EXPECT_EQ(model->get_experts_implementation().at(""), "later");
  EXPECT_EQ(logits_of(*model), expected);
  const auto fresh =
      Model::from_pretrained(folder_of("qwen2_moe"), {.experts_implementation = {{"", "later"}}});
  EXPECT_EQ(logits_of(*fresh), expected);
}

TEST(Switching, MemoryOfABackendIsReportedAndFreedWithTheSwitch) {
  register_backend("hoarder", [] { return std::make_unique<Wrapper>(1000, 0); });
  const auto model = Model::from_pretrained(folder_of("qwen2_moe"));
  EXPECT_EQ(model->memory().added_bytes, 0u) << "prepared without being asked for";
  model->set_experts_implementation("hoarder");
  EXPECT_EQ(model->memory().added_bytes, 3000u);  // three layers
  const std::vector<float> logits = logits_of(*model);
  model->set_experts_implementation("grouped_mm");
  EXPECT_EQ(model->memory().added_bytes, 0u);
  EXPECT_EQ(logits_of(*model), logits);
}

// Cannot be given its workspace, and shows itself only to the test that wants it.
class Glutton : public Wrapper {
 public:
  Glutton() : Wrapper(0, 0) {}
  Support supports(const ExpertsQuery& query) const override {
    if (!visible) return {{"hidden"}};
    return Wrapper::supports(query);
  }
  size_t workspace_bytes(const ExpertsQuery&, int64_t, int) const override {
    throw DeviceError("no memory");
  }
  static inline bool visible = false;
};

TEST(Switching, WithoutMemoryForTheWorkspaceNothingChanges) {
  register_backend("glutton", [] { return std::make_unique<Glutton>(); });
  const auto model = Model::from_pretrained(folder_of("qwen2_moe"));
  model->reserve(32);
  const std::vector<float> expected = logits_of(*model);
  const size_t workspace = model->memory().workspace_bytes;
  Glutton::visible = true;
  EXPECT_THROW(model->set_experts_implementation("glutton"), DeviceError);
  EXPECT_EQ(model->get_experts_implementation().at(""), "grouped_mm");
  EXPECT_EQ(model->memory().workspace_bytes, workspace);
  EXPECT_EQ(logits_of(*model), expected);
  Glutton::visible = false;
}

// A model with experts in two sub-configs: the first layer's belong to the vision part.
BuiltModel build_composite(ModelBuilder& builder) {
  const ConfigReader text_config = builder.config().object("text_config");
  builder.begin(read_text_config(text_config, {}));
  const TextConfig& text = builder.text();
  AttentionConfig attention = builder.attention_config();
  attention.qk_norm = QkNorm::kPerHead;
  for (int64_t l = 0; l < text.num_layers; ++l) {
    const std::string layer = str_cat("model.layers.", l, ".");
    const ConfigReader part = builder.config().object(l == 0 ? "vision_config" : "text_config");
    MoeOptions moe;
    moe.experts.num_experts = read_num_experts(part);
    moe.experts.top_k = read_top_k(part, moe.experts.num_experts);
    moe.experts.intermediate_size = part.integer("moe_intermediate_size");
    moe.router.normalize = true;
    builder.add_layer(
        {builder.norm(layer + "input_layernorm.weight", text.hidden_size),
         builder.attention(layer + "self_attn.", attention, false, false),
         builder.norm(layer + "post_attention_layernorm.weight", text.hidden_size),
         builder.moe(layer + "mlp.", moe, {}, l == 0 ? "vision_config" : "text_config")});
  }
  return builder.finish();
}

class Composite : public testing::Test {
 protected:
  Composite() : checkpoint_("qwen3_moe") {
    [[maybe_unused]] static const bool added = [] {
      add_architecture_for_testing({"CompositeForTesting", "composite", build_composite});
      return true;
    }();
    const Json part = checkpoint_.config;
    checkpoint_.config = {
        {"architectures", {"CompositeForTesting"}}, {"text_config", part}, {"vision_config", part}};
    folder_ = checkpoint_.write();
  }
  std::unique_ptr<Model> load(const ExpertsImplementation& map = {}) const {
    return Model::from_pretrained(folder_, {.experts_implementation = map, .dtype = DType::kF32});
  }

  DamagedCheckpoint checkpoint_;
  std::string folder_;
};

ExpertsImplementation all(const std::string& whole, const std::string& text,
                          const std::string& vision) {
  return {{"", whole}, {"text_config", text}, {"vision_config", vision}};
}

TEST_F(Composite, HasAnEntryForEachSubConfig) {
  const auto model = load();
  EXPECT_EQ(model->info().sub_configs, (std::vector<std::string>{"vision_config", "text_config"}));
  EXPECT_EQ(model->get_experts_implementation(), all("grouped_mm", "grouped_mm", "grouped_mm"));
  EXPECT_EQ(model->experts_query("text_config").config.num_experts, 8);
  EXPECT_EQ(model->experts_query("vision_config").config.num_experts, 8);
  expect_parts(message_of<InvalidArgument>([&] { model->experts_query(); }),
               {"\"vision_config\"", "\"text_config\""});
}

TEST_F(Composite, OneKeyLeavesTheOthers) {
  const auto model = load();
  model->set_experts_implementation({{"text_config", "eager"}});
  EXPECT_EQ(model->get_experts_implementation(), all("grouped_mm", "eager", "grouped_mm"));
}

TEST_F(Composite, TheEmptyKeySetsTheWholeAndNamedKeysPrevail) {
  const auto model = load();
  model->set_experts_implementation({{"", "eager"}});
  EXPECT_EQ(model->get_experts_implementation(), all("eager", "eager", "eager"));
  model->set_experts_implementation({{"", "batched_mm"}, {"vision_config", "eager"}});
  EXPECT_EQ(model->get_experts_implementation(), all("batched_mm", "batched_mm", "eager"));
  model->set_experts_implementation("grouped_mm");
  EXPECT_EQ(model->get_experts_implementation(), all("grouped_mm", "grouped_mm", "grouped_mm"));
}

TEST_F(Composite, MapsWorkAtLoad) {
  EXPECT_EQ(load({{"vision_config", "eager"}})->get_experts_implementation(),
            all("grouped_mm", "grouped_mm", "eager"));
  EXPECT_EQ(load({{"", "eager"}, {"text_config", "batched_mm"}})->get_experts_implementation(),
            all("eager", "batched_mm", "eager"));
}

TEST_F(Composite, GetGivesWhatSetTakes) {
  const auto model = load();
  const ExpertsImplementation map = all("eager", "batched_mm", "grouped_mm");
  model->set_experts_implementation(map);
  EXPECT_EQ(model->get_experts_implementation(), map);
  model->set_experts_implementation(model->get_experts_implementation());
  EXPECT_EQ(model->get_experts_implementation(), map);
}

TEST_F(Composite, AFaultInOneEntryChangesNothing) {
  const auto model = load();
  const ExpertsImplementation before = model->get_experts_implementation();
  expect_parts(message_of<InvalidArgument>([&] {
                 model->set_experts_implementation({{"text_config", "eager"}, {"audio", "eager"}});
               }),
               {"audio", "text_config", "vision_config"});
  EXPECT_THROW(
      model->set_experts_implementation({{"vision_config", "eager"}, {"text_config", "sonicmoe"}}),
      Unsupported);
  // Overruled by the named keys, but still no name.
  EXPECT_THROW(model->set_experts_implementation(all("bogus", "eager", "eager")), InvalidArgument);
  EXPECT_EQ(model->get_experts_implementation(), before);
}

TEST_F(Composite, EachPartRunsItsOwnBackend) {
  const auto mixed = load({{"text_config", "eager"}, {"vision_config", "batched_mm"}});
  const auto plain = Model::from_pretrained(folder_of("qwen3_moe"), {.dtype = DType::kF32});
  const std::vector<float> a = logits_of(*mixed);
  const std::vector<float> b = logits_of(*plain);
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += static_cast<double>((a[i] - b[i]) * (a[i] - b[i]));
    norm += static_cast<double>(b[i] * b[i]);
  }
  EXPECT_LE(difference, 1e-10 * norm);
}

TEST_F(Composite, InspectSeesBothParts) {
  const ModelReport report = inspect_model(folder_);
  ASSERT_EQ(report.experts.size(), 2u);
  EXPECT_EQ(report.experts[0].first, "vision_config");
  EXPECT_EQ(report.experts[1].first, "text_config");
}

TEST_F(Composite, IsNotPartOfTheTable) {
  for (const std::string& name : known_architectures()) {
    EXPECT_EQ(name.find("CompositeForTesting"), std::string::npos);
  }
}

}  // namespace
}  // namespace cadre::test
