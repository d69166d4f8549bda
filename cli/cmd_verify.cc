// cadre verify: does every backend that runs here keep its bound on this model's own experts?
#include <algorithm>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "exit_codes.h"
#include "interrupt.h"
#include "models/verify.h"
#include "output.h"
#include "progress.h"
#include "session.h"
#include "table.h"

namespace cadre::cli {

namespace {

struct CommandOptions {
  std::string model;
  VerifyOptions verify;
};

Json to_json(const ExpertsCheck& check) {
  Json row = {{"layer", check.layer},
              {"backend", check.backend},
              {"dtype", name_of(check.compute_dtype)},
              {"format", name_of(check.format)},
              {"relative_error", check.relative_error},  // a NaN becomes null
              {"bound", check.bound},
              {"ok", check.ok()},
              {"us", check.seconds * 1e6}};
  if (!check.sub_config.empty()) row["sub_config"] = check.sub_config;
  return row;
}

std::string to_text(const std::vector<ExpertsCheck>& checks) {
  Table table({"layer", "backend", "dtype", "format", "relative error", "bound", "time", ""});
  for (const size_t column : {0, 4, 5, 6}) table.right_align(column);
  for (const ExpertsCheck& check : checks) {
    table.add_row(
        {str_cat(check.layer), check.backend, str_cat(check.compute_dtype), str_cat(check.format),
         format_number("%.2e", check.relative_error), format_number("%.0e", check.bound),
         format_number("%.3f ms", check.seconds * 1e3), check.ok() ? "ok" : "OUT OF BOUND"});
  }
  return table.to_string();
}

std::string verdict(const VerifySummary& summary) {
  if (summary.num_failed == 0) {
    return str_cat(summary.num_checks, " checks, all within their bounds\n");
  }
  return str_cat(summary.num_failed, " of ", summary.num_checks, " checks out of bound\n");
}

int run_command(const CommandOptions& options, const CommonOptions& given) {
  const CommonOptions common = with_model(given, options.model);
  const std::unique_ptr<Model> model = load_model(common);
  Progress progress(ProgressTerminal::standard_error(common.quiet), "layers");
  VerifyOptions verify = options.verify;
  verify.seed = common.seed;
  verify.num_threads = common.load.num_threads;
  verify.progress = progress.callback();
  std::vector<ExpertsCheck> checks;
  const InterruptGuard guard;
  const VerifySummary summary = verify_experts(*model, verify, [&](const ExpertsCheck& check) {
    checks.push_back(check);
    return (!common.json || write_json(to_json(check))) && interrupt_signal() == 0;
  });
  progress.clear();
  if (!common.json) write_stdout(to_text(checks) + "\n" + verdict(summary));
  if (interrupt_signal() != 0) return kExitSignal + interrupt_signal();
  return summary.num_failed == 0 ? kExitDone : kExitOther;
}

}  // namespace

void add_verify(CLI::App& app, CommonOptions& common, Runner& run) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* command =
      app.add_subcommand("verify", "Compare every backend with the reference on a model's experts");
  command->footer(
      "Runs random tokens through the model, then what each MoE layer saw through every backend "
      "that runs here and through a float64 reference. Exit 1 when one is out of its stated "
      "bound. --json prints one object per layer and backend. The last token's last expert is "
      "replaced by \"no expert\".\n"
      "Example: cadre verify Qwen/Qwen1.5-MoE-A2.7B --layers 2");
  add_model_argument(*command, options->model);
  add_number(*command, "--layers", options->verify.num_layers, int64_t{0}, int64_t{1} << 20,
             "Check the first N layers that have experts; 0: all");
  add_number(*command, "--tokens", options->verify.num_tokens, int64_t{1}, int64_t{1} << 20,
             "Tokens that each layer sees");
  add_common_options(*command, common);
  hide_options(*command, {"--decode-experts", "--no-graph"});
  command->callback([&run, &common, options] {
    run = [&common, options] { return run_command(*options, common); };
  });
}

}  // namespace cadre::cli
