// Registers PlainLoops, compares it with the reference on a small random problem, then lets the
// bundled model generate with it.
#include <cadre/cadre.h>
#include <cadre/thread_pool.h>

#include <cmath>
#include <iostream>
#include <random>

#include "plain_loops.h"

using cadre::DType;
using cadre::Tensor;

namespace {

Tensor random_tensor(std::mt19937& random, const cadre::Dims& shape, float scale) {
  Tensor tensor(DType::kF32, shape);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < tensor->numel(); ++i) tensor->as<float>()[i] = scale * normal(random);
  return tensor;
}

/// |out - ref| / |ref| of PlainLoops on 5 tokens, 8 experts, top 2.
double error_on_random_experts() {
  const cadre::ExpertsConfig config = {
      .num_experts = 8, .hidden_size = 64, .intermediate_size = 48, .top_k = 2};
  const int64_t num_tokens = 5;
  std::mt19937 random(1);
  const Tensor gate_up = random_tensor(random, {8, 2 * 48, 64}, 1.0f / 8);
  const Tensor down = random_tensor(random, {8, 64, 48}, 1.0f / 7);
  const Tensor x = random_tensor(random, {num_tokens, 64}, 1.0f);
  const Tensor weights = random_tensor(random, {num_tokens, 2}, 1.0f);
  Tensor ids(DType::kI32, {num_tokens, 2});
  for (int i = 0; i < 10; ++i) ids->as<int32_t>()[i] = i % 9;  // 8 means "no expert"
  const Tensor output(DType::kF32, {num_tokens, 64});

  const auto experts = std::make_shared<const cadre::ExpertsWeights>(cadre::make_experts_weights(
      config, {.gate_up_proj = gate_up.view(), .down_proj = down.view()}));
  cadre::ExpertsQuery query;
  query.config = config;
  query.compute_dtype = DType::kF32;
  query.format = experts->format;

  cadre::ExpertsBackend& backend = cadre::find_backend("plain_loops", cadre::DeviceType::kCpu);
  cadre::ThreadPool threads;
  cadre::Workspace workspace({}, backend.workspace_bytes(query, num_tokens, threads.num_threads()));
  const cadre::RoutedTokens tokens = {x.view(), ids.view(), weights.view(), output.view()};
  backend.forward(*backend.prepare(query, experts), tokens, workspace, cadre::Stream::cpu(threads));

  std::vector<double> reference(static_cast<size_t>(output->numel()));
  cadre::reference_forward(config, *experts, tokens, reference.data());
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    error += std::pow(static_cast<double>(output->as<float>()[i]) - reference[i], 2);
    norm += std::pow(reference[i], 2);
  }
  return std::sqrt(error / norm);
}

std::vector<cadre::TokenId> generate_with(cadre::Model& model, std::string_view backend,
                                          const std::vector<cadre::TokenId>& prompt) {
  model.set_experts_implementation(backend);
  const std::vector<std::vector<cadre::TokenId>> prompts = {prompt};
  return cadre::generate(model, prompts, {.max_new_tokens = 24}).token_ids[0];
}

}  // namespace

int main(int argc, char** argv) try {
  cadre::register_backend("plain_loops", [] { return std::make_unique<PlainLoops>(); });

  const double error = error_on_random_experts();
  std::cout << "relative error against the reference: " << error << "\n";
  if (!(error < 1e-5)) return 1;

  const std::string path = argc > 1 ? argv[1] : "assets/tiny-moe";
  const auto model = cadre::Model::from_pretrained(path, {.dtype = DType::kF32});
  const auto tokenizer = cadre::Tokenizer::from_file(model->info().path + "/tokenizer.json");
  const auto prompt = tokenizer.encode("The old captain looked at the sea and");
  const auto expected = generate_with(*model, "grouped_mm", prompt);
  const auto ours = generate_with(*model, "plain_loops", prompt);
  std::cout << "plain_loops: " << tokenizer.decode(ours) << "\n";
  std::cout << (ours == expected ? "the same tokens as grouped_mm\n" : "other tokens!\n");
  return ours == expected ? 0 : 1;
} catch (const cadre::Error& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
