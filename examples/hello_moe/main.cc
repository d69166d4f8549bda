// Loads a model, lists the experts backends with their reasons, generates, switches, generates
// again.
#include <cadre/cadre.h>

#include <iostream>

std::string continue_text(cadre::Model& model, const cadre::Tokenizer& tokenizer,
                          std::string_view prompt) {
  const std::vector<std::vector<cadre::TokenId>> prompts = {tokenizer.encode(prompt)};
  const auto result = cadre::generate(model, prompts, {.max_new_tokens = 32});
  return tokenizer.decode(result.token_ids[0]);
}

int main(int argc, char** argv) try {
  const std::string path = argc > 1 ? argv[1] : "assets/tiny-moe";
  const auto model =
      cadre::AutoModelForCausalLM::from_pretrained(path, {.dtype = cadre::DType::kF32});
  const auto tokenizer = cadre::Tokenizer::from_file(model->info().path + "/tokenizer.json");

  // What can run here, and why not the rest: known before any weight is touched.
  for (const std::string& name : cadre::backend_names()) {
    std::cout << name << ": " << to_string(cadre::supports(name, model->experts_query())) << "\n";
  }

  const std::string prompt = "The old captain looked at the sea and";
  model->set_experts_implementation("grouped_mm");
  const std::string grouped = continue_text(*model, tokenizer, prompt);
  model->set_experts_implementation("eager");  // at run time, nothing is reloaded
  const std::string eager = continue_text(*model, tokenizer, prompt);

  std::cout << "\n" << prompt << grouped << "\n";
  std::cout << "eager says " << (eager == grouped ? "the same" : "something else") << "\n";
  return eager == grouped ? 0 : 1;
} catch (const cadre::Error& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
