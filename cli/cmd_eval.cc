// cadre eval: how well a model predicts a text: negative log-likelihood per token and perplexity.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>

#include "commands.h"
#include "exit_codes.h"
#include "interrupt.h"
#include "io/safetensors.h"
#include "output.h"
#include "progress.h"
#include "session.h"

namespace cadre::cli {

namespace {

struct EvalOptions {
  std::string text;
  std::string out;
  int64_t window = 512;
};

/// -log softmax(logits)[target], in double.
double negative_log_likelihood(std::span<const float> logits, TokenId target) {
  const double max = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - max);
  return max + std::log(sum) - static_cast<double>(logits[static_cast<size_t>(target)]);
}

std::vector<TokenId> tokens_of(const Model& model, const EvalOptions& options) {
  // The text's own tokens: no BOS and the like, so that every window is treated alike.
  std::vector<TokenId> ids = encode_text(load_tokenizer(model), model, read_text(options.text),
                                         /*add_special_tokens=*/false);
  const auto count = static_cast<int64_t>(ids.size());
  if (count < options.window) {
    throw InvalidArgument(str_cat("--window ", options.window, ": expected a text of ",
                                  options.window, " tokens or more, ", options.text, " has ", count,
                                  "; use a smaller --window or a longer text"));
  }
  return ids;
}

/// Predicts every token of every window but its first: [windows, window - 1] of nats. Stops early,
/// at a window's end, when Ctrl-C was pressed.
Tensor evaluate(Model& model, std::span<const TokenId> ids, const EvalOptions& options,
                const CommonOptions& common) {
  const int64_t window = options.window;
  const int64_t num_windows = static_cast<int64_t>(ids.size()) / window;
  const int64_t vocab_size = model.info().vocab_size;
  const Tensor nll(DType::kF32, {num_windows, window - 1});
  const Tensor logits(DType::kF32, {window, vocab_size});
  const std::unique_ptr<KvCache> cache = model.new_cache(1, window);
  Progress progress(ProgressTerminal::standard_error(common.quiet), "tokens");
  const InterruptGuard guard;
  for (int64_t w = 0; w < num_windows && interrupt_signal() == 0; ++w) {
    const auto tokens = ids.subspan(static_cast<size_t>(w * window), static_cast<size_t>(window));
    cache->truncate(0, 0);
    model.forward({tokens, {&window, 1}, LogitsRows::kAll}, *cache, logits);
    for (int64_t i = 0; i + 1 < window; ++i) {
      const std::span<const float> row(logits.view()[i].as<float>(),
                                       static_cast<size_t>(vocab_size));
      nll.view()[w].as<float>()[i] =
          static_cast<float>(negative_log_likelihood(row, tokens[static_cast<size_t>(i) + 1]));
    }
    progress.update("evaluating", (w + 1) * window, num_windows * window);
  }
  return nll;
}

/// NaN, infinite or a perplexity beyond double: what damaged weights make of a text.
void require_finite(const Tensor& nll, const ModelInfo& info) {
  double sum = 0;
  for (int64_t i = 0; i < nll->numel(); ++i) sum += static_cast<double>(nll->as<float>()[i]);
  const double perplexity = std::exp(sum / static_cast<double>(nll->numel()));
  if (std::isfinite(perplexity)) return;
  throw CheckpointError(str_cat(
      "eval: expected a finite perplexity, got ", std::isnan(perplexity) ? "NaN" : "infinity",
      ": the weights or config.json of ", info.path, " are at fault (or ", info.compute_dtype,
      " overflows: try --dtype float32); fetch the model again"));
}

int run_command(const EvalOptions& options, const CommonOptions& common) {
  require_writable(options.out);
  require_distinct(options.out, options.text);
  const std::unique_ptr<Model> model = load_model(common);
  require_outside_model(options.out, model->info());
  require_context(model->info(), "--window", options.window);
  const std::vector<TokenId> ids = tokens_of(*model, options);
  const Tensor nll = evaluate(*model, ids, options, common);
  if (interrupt_signal() != 0) return kExitSignal + interrupt_signal();
  require_finite(nll, model->info());
  if (!options.out.empty()) {
    const NamedTensor tensor{"window_nll", nll};
    write_safetensors(options.out, {&tensor, 1});
  }
  const int64_t count = nll->numel();
  const int64_t left_out = static_cast<int64_t>(ids.size()) - nll->dim(0) * options.window;
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(nll->as<float>()[i]);
  const double mean = sum / static_cast<double>(count);
  if (common.json) {
    write_json(Json{{"perplexity", std::exp(mean)},
                    {"mean_nll", mean},
                    {"num_tokens", count},
                    {"num_windows", nll->dim(0)},
                    {"window", options.window},
                    {"left_out_tokens", left_out},
                    {"experts", model->get_experts_implementation()}});
  } else {
    char text[160];
    std::snprintf(text, sizeof text,
                  "perplexity %.3f, mean negative log-likelihood %.5f over %lld tokens",
                  std::exp(mean), mean, static_cast<long long>(count));
    write_stdout(str_cat(
        text,
        left_out == 0 ? ""
                      : str_cat("; the text's last ", left_out, " left out, too few for a window"),
        "\n"));
  }
  return kExitDone;
}

}  // namespace

void add_eval(CLI::App& app, CommonOptions& common, Runner& run) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* command = app.add_subcommand("eval", "Perplexity of a text");
  command->footer(
      "The text is cut into windows that do not overlap; every token of a window but its first is "
      "predicted; a last shorter window is left out.\n"
      "Example: cadre eval --text heldout.txt --window 512 --dtype float32 --json");
  add_text(*command, "--text", options->text, "FILE", "The text; - reads standard input")
      ->required();
  add_number(*command, "--window", options->window, int64_t{2}, int64_t{1} << 40,
             "Tokens of a window");
  add_text(*command, "--out", options->out, "FILE",
           "Write window_nll (windows, N-1) f32 to this safetensors file");
  add_common_options(*command, common);
  hide_options(*command, {"--seed", "--decode-experts", "--no-graph"});
  command->callback([&run, &common, options] {
    run = [&common, options] { return run_command(*options, common); };
  });
}

}  // namespace cadre::cli
