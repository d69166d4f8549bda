#include "golden/model_runs.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "dense/dense_ops.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "support/compare.h"
#include "support/test_device.h"

namespace cadre::test {
namespace {

template <typename T>
std::vector<T> to_integers(const TensorView& tensor) {
  std::vector<T> result;
  for (const double value : to_doubles(tensor)) result.push_back(static_cast<T>(value));
  return result;
}

Images read_images(const SafetensorsFile& data) {
  Images images;
  if (data.find("pixel_values") == nullptr) return images;
  for (const double value : to_doubles(data.tensor("pixel_values"))) {
    images.pixel_values.push_back(static_cast<float>(value));
  }
  const auto grids = to_integers<int64_t>(data.tensor("image_grid_thw"));
  for (size_t i = 0; i < grids.size(); i += 3) {
    images.grids.push_back({grids[i], grids[i + 1], grids[i + 2]});
  }
  return images;
}

TokenId argmax(std::span<const float> logits) {
  return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace

Expected read_expected(const std::filesystem::path& file) {
  const SafetensorsFile data = SafetensorsFile::open(file);
  Expected expected;
  const TensorView ids = data.tensor("input_ids");
  expected.batch = ids.dim(0);
  expected.length = ids.dim(1);
  expected.input_ids = to_integers<TokenId>(ids);
  expected.logits = to_doubles(data.tensor("logits"));
  const TensorView greedy = data.tensor("greedy_ids");
  expected.num_greedy = greedy.dim(1);
  expected.greedy_ids = to_integers<TokenId>(greedy);
  for (int64_t layer = 0; layer < 100; ++layer) {
    const std::string prefix = "moe" + std::to_string(layer) + ".";
    if (data.find(prefix + "output") == nullptr) continue;
    expected.moe[layer] = {to_doubles(data.tensor(prefix + "hidden_states")),
                           to_integers<int64_t>(data.tensor(prefix + "top_k_index")),
                           to_doubles(data.tensor(prefix + "top_k_weights")),
                           to_doubles(data.tensor(prefix + "output"))};
  }
  expected.images = read_images(data);
  return expected;
}

namespace {

std::vector<std::string> fixtures_that(bool are_quantized) {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(CADRE_TEST_DATA) / "models")) {
    if (!std::filesystem::exists(entry.path() / "expected.safetensors")) continue;
    const bool is_quantized =
        read_json_file(entry.path() / "config.json").contains("quantization_config");
    if (is_quantized == are_quantized) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

std::vector<std::string> fixture_names() { return fixtures_that(false); }
std::vector<std::string> quantized_fixture_names() { return fixtures_that(true); }

std::filesystem::path fixture(const std::string& name) {
  return std::filesystem::path(CADRE_TEST_DATA) / "models" / name;
}

bool lacks_compressed_ops(const std::string& name) {
  return name.rfind("deepseek_v4", 0) == 0 && !dense_ops(test_device().type).has_compressed_ops();
}

std::vector<float> all_logits(Model& model, std::span<const TokenId> ids, int64_t batch,
                              const MoeHooks* hooks, const Images& images) {
  const auto length = static_cast<int64_t>(ids.size()) / batch;
  const auto cache = model.new_cache(batch, length);
  const std::vector<int64_t> counts(static_cast<size_t>(batch), length);
  std::vector<float> logits(ids.size() * static_cast<size_t>(model.info().vocab_size));
  model.forward({ids, counts, LogitsRows::kAll, images.pixel_values, images.grids}, *cache,
                {logits.data(), DType::kF32, {batch * length, model.info().vocab_size}}, hooks);
  return logits;
}

std::vector<TokenId> greedy(Model& model, std::span<const TokenId> ids, int64_t batch,
                            int64_t num_new, const Images& images) {
  const auto length = static_cast<int64_t>(ids.size()) / batch;
  const auto cache = model.new_cache(batch, length + num_new);
  const auto vocab = static_cast<size_t>(model.info().vocab_size);
  std::vector<float> logits(static_cast<size_t>(batch) * vocab);
  std::vector<TokenId> next(ids.begin(), ids.end());
  std::vector<int64_t> counts(static_cast<size_t>(batch), length);
  std::vector<TokenId> result(static_cast<size_t>(batch * num_new));
  for (int64_t step = 0; step < num_new; ++step) {
    ForwardInput input{next, counts};
    if (step == 0) {
      input.pixel_values = images.pixel_values;
      input.image_grids = images.grids;
    }
    model.forward(input, *cache, {logits.data(), DType::kF32, {batch, model.info().vocab_size}});
    next.assign(static_cast<size_t>(batch), 0);
    counts.assign(static_cast<size_t>(batch), 1);
    for (int64_t b = 0; b < batch; ++b) {
      const auto row = static_cast<size_t>(b);
      next[row] = argmax(std::span(logits).subspan(row * vocab, vocab));
      result[static_cast<size_t>(b * num_new + step)] = next[row];
    }
  }
  return result;
}

int64_t top_k_of(const Model& model) {
  const auto& parts = model.info().sub_configs;
  return model.experts_query(parts.empty() ? "" : parts.front()).config.top_k;
}

MoeHooks capture_into(std::map<int64_t, MoeCapture>& captures) {
  MoeHooks hooks;
  hooks.on_output = [&captures](const MoeLayerRecord& record) {
    captures[record.layer] = {to_doubles(record.hidden_states),
                              to_integers<int64_t>(record.top_k_index),
                              to_doubles(record.top_k_weights), to_doubles(record.output)};
  };
  return hooks;
}

MoeHooks replay_of(const std::map<int64_t, MoeCapture>& stored) {
  MoeHooks hooks;
  hooks.on_routing = [&stored](int64_t layer, MutableTensorView index, MutableTensorView weights) {
    const MoeCapture& moe = stored.at(layer);
    std::transform(moe.top_k_index.begin(), moe.top_k_index.end(), index.as<int32_t>(),
                   [](int64_t id) { return static_cast<int32_t>(id); });
    std::transform(moe.top_k_weights.begin(), moe.top_k_weights.end(), weights.as<float>(),
                   [](double weight) { return static_cast<float>(weight); });
  };
  return hooks;
}

int64_t differing_rows(const MoeCapture& a, const MoeCapture& b, int64_t top_k) {
  int64_t count = 0;
  for (size_t row = 0; row < a.top_k_index.size(); row += static_cast<size_t>(top_k)) {
    const auto ids = [&](const MoeCapture& moe) {
      return std::set<int64_t>(moe.top_k_index.begin() + static_cast<std::ptrdiff_t>(row),
                               moe.top_k_index.begin() + static_cast<std::ptrdiff_t>(row) + top_k);
    };
    if (ids(a) != ids(b)) ++count;
  }
  return count;
}

}  // namespace cadre::test
