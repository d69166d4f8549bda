// cadre quantize: a checkpoint with quantised weights from one with plain weights.
#include <nlohmann/json.hpp>

#include "cadre/quantize_checkpoint.h"
#include "commands.h"
#include "exit_codes.h"
#include "interrupt.h"
#include "output.h"
#include "progress.h"
#include "table.h"

namespace cadre::cli {

namespace {

struct CommandOptions {
  std::string model;
  std::string out;
  std::string format = "fp8";
  std::vector<std::string> modules_to_not_convert;
  int64_t shard_mib = 5 << 10;
};

struct Stopped {};

CheckpointFormat parse_format(const std::string& text) {
  if (text == "fp8") return CheckpointFormat::kFp8;
  return text == "fp8-ue8m0" ? CheckpointFormat::kFp8Ue8m0 : CheckpointFormat::kFp4;
}

Json to_json(const QuantizeReport& report, const CommandOptions& options) {
  return {{"model", options.model},
          {"out", options.out},
          {"format", options.format},
          {"block_size", report.block_size > 0 ? Json(report.block_size) : Json()},
          {"num_quantized", report.num_quantized},
          {"num_kept", report.num_kept},
          {"bytes_before", report.bytes_before},
          {"bytes_after", report.bytes_after},
          {"bytes_per_dtype", report.bytes_per_dtype},
          {"not_converted", report.not_converted},
          {"files", report.files}};
}

std::string to_text(const QuantizeReport& report, const CommandOptions& options) {
  Table facts({});
  facts.add_row({"folder", options.out});
  facts.add_row({"format", report.block_size > 0
                               ? str_cat(options.format, ", blocks of ", report.block_size, " x ",
                                         report.block_size)
                               : options.format});
  facts.add_row({"weights", str_cat(report.num_quantized, " quantised, ", report.num_kept,
                                    " other tensors copied")});
  facts.add_row(
      {"bytes", str_cat(format_bytes(report.bytes_before), " before, ",
                        format_bytes(report.bytes_after), " now (",
                        format_number("%.1f", 100.0 * static_cast<double>(report.bytes_after) /
                                                  static_cast<double>(report.bytes_before)),
                        " %)")});
  std::vector<std::string> dtypes;
  for (const auto& [dtype, bytes] : report.bytes_per_dtype) {
    dtypes.push_back(str_cat(dtype, " ", format_bytes(bytes)));
  }
  facts.add_row({"of these", join(dtypes)});
  return facts.to_string();
}

int run_command(const CommandOptions& options, const CommonOptions& given) {
  const CommonOptions common = with_model(given, options.model);
  QuantizeOptions quantize;
  quantize.format = parse_format(options.format);
  quantize.modules_to_not_convert = options.modules_to_not_convert;
  quantize.shard_bytes = static_cast<size_t>(options.shard_mib) << 20;
  quantize.num_threads = common.load.num_threads;
  quantize.revision = common.load.revision;
  Progress progress(ProgressTerminal::standard_error(common.quiet), "tensors");
  quantize.progress = [&](std::string_view what, int64_t done, int64_t total) {
    progress.update(what, done, total);
    if (interrupt_signal() != 0) throw Stopped();
  };
  const InterruptGuard guard;  // so that the unfinished folder is removed
  QuantizeReport report;
  try {
    report = quantize_checkpoint(model_path(common), options.out, quantize);
  } catch (const Stopped&) {
    return kExitSignal + interrupt_signal();
  }
  progress.clear();
  if (common.json) {
    write_json(to_json(report, options));
  } else {
    write_stdout(to_text(report, options));
  }
  return kExitDone;
}

}  // namespace

void add_quantize(CLI::App& app, CommonOptions& common, Runner& run) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* command = app.add_subcommand("quantize", "Write a checkpoint with quantised weights");
  command->footer(
      "Writes a new folder in the hub's layout that Transformers loads too. fp8: experts and dense "
      "linears as e4m3 with a float32 scale per block of 128 x 128; fp8-ue8m0: with power-of-two "
      "scales; fp4: experts as e2m1 with a power-of-two scale per 32 values (MXFP4). Embeddings, "
      "lm_head, norms, routers and vision towers stay as they are. OUT appears when it is "
      "complete.\n"
      "Example: cadre quantize Qwen/Qwen1.5-MoE-A2.7B qwen-fp8 --format fp8");
  add_text(*command, "MODEL", options->model, "MODEL",
           "A folder in the hub's layout or a hub id, with float32, bfloat16 or float16 weights")
      ->required();
  add_text(*command, "OUT", options->out, "FOLDER", "The folder to make; it must not exist")
      ->required();
  add_choice(
      *command, "--format", {"fp8", "fp8-ue8m0", "fp4"},
      [options](const std::string& text) { options->format = text; }, "How weights are stored");
  add_texts(
      *command, "--modules-to-not-convert", options->modules_to_not_convert, "NAME",
      "A module that stays as it is: its name, or a part of it from either end, such as o_proj "
      "or model.layers.0.self_attn. May be given several times");
  add_number(*command, "--shard-size", options->shard_mib, int64_t{1}, int64_t{1} << 24,
             "MiB of weights in one file");
  add_common_options(*command, common);
  hide_options(*command, {"--model", "--device", "--dtype", "--experts", "--prepack",
                          "--dequantize", "--seed", "--decode-experts", "--no-graph"});
  command->callback([&run, &common, options] {
    run = [&common, options] { return run_command(*options, common); };
  });
}

}  // namespace cadre::cli
