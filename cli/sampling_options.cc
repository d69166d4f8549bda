#include "sampling_options.h"

#include <limits>

#include "options.h"
#include "output.h"

namespace cadre::cli {

std::vector<CLI::Option*> add_sampling_options(CLI::App& command, SamplingOptions& sampling) {
  constexpr float kMax = std::numeric_limits<float>::max();
  return {add_number(command, "--temperature", sampling.temperature, 0.0f, kMax,
                     "Of the random draw; 0 takes the likeliest token (greedy)"),
          add_number(command, "--top-k", sampling.top_k, 0, std::numeric_limits<int32_t>::max(),
                     "Draw from the K likeliest tokens; 0: off"),
          add_number(command, "--top-p", sampling.top_p, 0.0f, 1.0f,
                     "Draw from the likeliest tokens that hold this probability together; 1: off"),
          add_number(command, "--min-p", sampling.min_p, 0.0f, 1.0f,
                     "Drop tokens below this share of the likeliest one's probability; 0: off"),
          add_number(command, "--repetition-penalty", sampling.repetition_penalty, 0.0f, kMax,
                     "Divides the score of tokens that occurred; 1: off")};
}

void note_idle_cuts(std::string_view command, const SamplingOptions& sampling, bool quiet) {
  const bool cuts = sampling.top_k != 0 || sampling.top_p != 1 || sampling.min_p != 0;
  if (sampling.temperature != 0 || !cuts) return;
  note(
      str_cat(command, ": --top-k, --top-p and --min-p do nothing at temperature 0 (greedy); give ",
              "--temperature too"),
      quiet);
}

}  // namespace cadre::cli
