// cadre forward: logits of whole sequences, and what every MoE layer saw and gave.
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "convert.h"
#include "exit_codes.h"
#include "image_input.h"
#include "interrupt.h"
#include "io/safetensors.h"
#include "output.h"
#include "session.h"

namespace cadre::cli {

namespace {

struct ForwardOptions {
  std::string inputs;
  std::string out;
  bool capture_experts = false;
  bool from_image = false;
};

/// Rows of one MoE layer, gathered over the pieces that a long forward is cut into.
struct LayerCapture {
  int64_t hidden_size = 0;
  int64_t top_k = 0;
  std::vector<float> hidden_states;
  std::vector<int64_t> top_k_index;
  std::vector<float> top_k_weights;
  std::vector<float> output;

  void add(const MoeLayerRecord& record) {
    hidden_size = record.hidden_states.dim(1);
    top_k = record.top_k_index.dim(1);
    append_floats(record.hidden_states, hidden_states);
    append_integers(record.top_k_index, top_k_index);
    append_floats(record.top_k_weights, top_k_weights);
    append_floats(record.output, output);
  }

  void name_tensors(const std::string& prefix, std::vector<NamedTensor>& tensors) const {
    const int64_t rows = static_cast<int64_t>(hidden_states.size()) / hidden_size;
    const auto add = [&](const char* name, const void* data, DType dtype, int64_t columns) {
      tensors.push_back({prefix + name, TensorView(data, dtype, {rows, columns})});
    };
    add("hidden_states", hidden_states.data(), DType::kF32, hidden_size);
    add("top_k_index", top_k_index.data(), DType::kI64, top_k);
    add("top_k_weights", top_k_weights.data(), DType::kF32, top_k);
    add("output", output.data(), DType::kF32, hidden_size);
  }
};

using Captures = std::map<int64_t, LayerCapture>;

Tensor run_forward(Model& model, const TokenBatch& batch, const PixelValues& images,
                   Captures* captures) {
  const Tensor logits(DType::kF32,
                      {batch.num_sequences, batch.num_tokens, model.info().vocab_size});
  const std::unique_ptr<KvCache> cache = model.new_cache(batch.num_sequences, batch.num_tokens);
  const std::vector<int64_t> num_tokens(static_cast<size_t>(batch.num_sequences), batch.num_tokens);
  MoeHooks hooks;
  hooks.on_output = [&](const MoeLayerRecord& record) { (*captures)[record.layer].add(record); };
  model.forward({batch.token_ids, num_tokens, LogitsRows::kAll, images.values, images.grids},
                *cache, logits->reshape({batch.num_sequences * batch.num_tokens, logits->dim(2)}),
                captures != nullptr ? &hooks : nullptr);
  return logits;
}

int run_command(const ForwardOptions& options, const CommonOptions& common) {
  require_writable(options.out);
  require_distinct(options.out, options.inputs);
  const std::unique_ptr<Model> model = load_model(common);
  require_outside_model(options.out, model->info());
  const TokenBatch batch = read_input_ids(options.inputs, model->info().vocab_size);
  require_context(model->info(), options.inputs, batch.num_tokens);
  Captures captures;
  const PixelValues images =
      read_image_tensors(options.inputs, options.from_image, batch, model->info());
  const Tensor logits =
      run_forward(*model, batch, images, options.capture_experts ? &captures : nullptr);
  std::vector<NamedTensor> tensors{{"logits", logits}};
  for (const auto& [layer, capture] : captures) {
    capture.name_tensors(str_cat("moe", layer, "."), tensors);
  }
  {
    const InterruptGuard guard;
    write_safetensors(options.out, tensors);
  }
  if (common.json) {
    write_json(Json{{"out", options.out},
                    {"logits", {batch.num_sequences, batch.num_tokens, logits->dim(2)}},
                    {"moe_layers", captures.size()},
                    {"experts", model->get_experts_implementation()}});
  }
  return interrupt_signal() != 0 ? kExitSignal + interrupt_signal() : kExitDone;
}

}  // namespace

void add_forward(CLI::App& app, CommonOptions& common, Runner& run) {
  auto options = std::make_shared<ForwardOptions>();
  CLI::App* command = app.add_subcommand("forward", "Compute the logits of token sequences");
  command->footer("Example: cadre forward --inputs ids.safetensors --out logits.safetensors");
  add_text(*command, "--inputs", options->inputs, "FILE",
           "A safetensors file with input_ids (B, T) i64 or i32 and, for a vision model, "
           "pixel_values with image_grid_thw; other tensors are ignored")
      ->required();
  add_text(*command, "--out", options->out, "FILE",
           "Write logits (B, T, V) f32 to this safetensors file")
      ->required();
  command->add_flag(
      "--capture-experts", options->capture_experts,
      "Also write moe<l>.hidden_states, .top_k_index, .top_k_weights and .output (the "
      "routed experts alone), rows sequence after sequence");
  command->add_flag("--from-image", options->from_image,
                    "Take image_u8 (H, W, 3) in place of pixel_values and pre-process it");
  add_common_options(*command, common);
  hide_options(*command, {"--seed", "--decode-experts", "--no-graph"});
  command->callback([&run, &common, options] {
    run = [&common, options] { return run_command(*options, common); };
  });
}

}  // namespace cadre::cli
