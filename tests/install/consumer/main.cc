// A program outside the project: loads the installed model and generates four tokens on it.
#include <cadre/cadre.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string path = argv[1];
  const auto model = cadre::AutoModelForCausalLM::from_pretrained(path);
  const auto tokenizer = cadre::Tokenizer::from_file(path + "/tokenizer.json");
  const std::vector<std::vector<cadre::TokenId>> prompts = {tokenizer.encode("The sea")};
  const auto result = cadre::generate(*model, prompts, {.max_new_tokens = 4});
  std::cout << cadre::version() << ": " << tokenizer.decode(result.token_ids[0]) << "\n";
  return result.token_ids[0].size() == 4 ? 0 : 1;
}
