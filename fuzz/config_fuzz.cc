// config.json: the typed reader and what the models read from it.
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "cadre/error.h"
#include "io/json.h"
#include "models/quantization_config.h"
#include "models/registry.h"
#include "models/text_config.h"

namespace {

// One part must not keep the next from being tried.
template <typename Call>
void attempt(Call call) {
  try {
    call();
  } catch (const cadre::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cadre;  // NOLINT(google-build-using-namespace)
  attempt([&] {
    const ConfigReader config(
        parse_json_object({reinterpret_cast<const char*>(data), size}, "config.json"),
        "config.json");
    for (const auto& item : config.json().items()) {
      attempt([&] { config.integers(item.key()); });
      attempt([&] { config.texts(item.key()); });
      attempt([&] { config.number(item.key()); });
      attempt([&] { config.object(item.key()); });
    }
    attempt([&] { find_architecture(config); });
    attempt([&] { read_text_config(config, {}); });
    attempt([&] { read_top_k(config, read_num_experts(config)); });
    attempt([&] { read_dtype(config); });
    attempt([&] { read_eos_token_ids(config); });
    attempt([&] {
      const CheckpointQuantization quantization = read_quantization(config, {});
      is_excluded(quantization.fp8, "model.layers.10.mlp.experts.7.down_proj");
      if (quantization.has_fp8) scale_shape(scale_layout_of(quantization.fp8), 160, 96);
    });
  });
  return 0;
}
