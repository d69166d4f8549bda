// cadre bench: times beside the machine's ceilings.
#include "commands.h"

namespace cadre::cli {

void add_bench(CLI::App& app, CommonOptions& common, Runner& run) {
  CLI::App* command =
      app.add_subcommand("bench", "Time experts and models beside the machine's ceilings");
  command->footer(
      "Ceilings are measured between the calls, because they move on a shared machine.\n"
      "Example: cadre bench experts --shape qwen3-30b-a3b --tokens 1,256");
  command->require_subcommand(1);
  add_bench_experts(*command, common, run);
  add_bench_generate(*command, common, run);
  add_bench_ceilings(*command, common, run);
}

}  // namespace cadre::cli
