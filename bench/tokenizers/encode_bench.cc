// Times Tokenizer::encode on texts, for tokenizers.py: what comes first from a fresh tokenizer
// (cold), then again (warm).
//
//     encode_bench TOKENIZER.json TEXTS.json ROUNDS
//
// TEXTS.json is an array of strings. Prints one line of JSON: seconds of loading, of the first
// round and of each later one, and the number and a checksum of all ids.
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "cadre/tokenizer.h"

namespace {

struct Round {
  double seconds = 0;
  size_t num_ids = 0;
  uint64_t checksum = 0;  // as in tokenizers.py
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Round encode_all(const cadre::Tokenizer& tokenizer, const std::vector<std::string>& texts) {
  Round round;
  std::vector<std::vector<cadre::TokenId>> all;
  const auto start = std::chrono::steady_clock::now();
  for (const std::string& text : texts) all.push_back(tokenizer.encode(text));
  round.seconds = seconds_since(start);
  for (const auto& ids : all) {
    round.num_ids += ids.size();
    for (const cadre::TokenId id : ids) {
      round.checksum = (round.checksum * 31 + static_cast<uint64_t>(id)) % 1000000007;
    }
  }
  return round;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) {
    std::cerr << "usage: encode_bench TOKENIZER.json TEXTS.json ROUNDS\n";
    return 2;
  }
  const auto texts = nlohmann::json::parse(std::ifstream(argv[2])).get<std::vector<std::string>>();
  const auto start = std::chrono::steady_clock::now();
  const auto tokenizer = cadre::Tokenizer::from_file(argv[1]);
  nlohmann::json row = {{"load", seconds_since(start)}, {"warm", nlohmann::json::array()}};
  const Round cold = encode_all(tokenizer, texts);
  row["cold"] = cold.seconds;
  row["ids"] = cold.num_ids;
  row["checksum"] = cold.checksum;
  for (int i = std::atoi(argv[3]); i > 0; --i) {
    row["warm"].push_back(encode_all(tokenizer, texts).seconds);
  }
  std::cout << row << "\n";
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
