// cadre bench generate: prefill and decode of a whole model on each backend, beside the time that
// reading its weights takes.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "bench_options.h"
#include "cadre/generation.h"
#include "cadre/thread_pool.h"
#include "commands.h"
#include "core/device_runtime.h"
#include "exit_codes.h"
#include "interrupt.h"
#include "machine.h"
#include "output.h"
#include "paged_memory.h"
#include "progress.h"
#include "session.h"
#include "shapes.h"
#include "synthetic_model.h"
#include "table.h"

namespace cadre::cli {

namespace {

struct CommandOptions {
  BenchOptions bench{3, 1024};
  std::vector<int64_t> prompt_lengths = {16, 128, 512};
  int64_t new_tokens = 32;
  int64_t sequences = 1;
  std::vector<std::string> experts = {"grouped_mm"};
  std::optional<SyntheticModel> synthetic;
};

/// Ctrl-C came while the synthetic model was written.
struct Stopped {};

/// What a decode step has to read at least.
struct DecodeBytes {
  double weights = 0;             // once each, without experts
  double experts = 0;             // those that its tokens are sent to, as a rule
  double cache_per_position = 0;  // keys and values, of all sequences
};

struct GenerateRow {
  std::string experts;
  int64_t prompt_tokens = 0;
  int64_t sequences = 1;
  bool packed = false;  // experts in packed form
  size_t pages = 0;     // bytes of the pages that weights lie on
  size_t expert_pages = 0;
  std::vector<double> prefill_seconds;
  std::vector<TimedCall> decode;  // seconds of one step, on average
};

/// Experts that a step of `tokens` hits when all are equally likely.
double expected_experts(const ExpertsConfig& config, int64_t tokens) {
  const auto experts = static_cast<double>(config.num_experts);
  const double missed = 1 - static_cast<double>(config.top_k) / experts;
  return experts * (1 - std::pow(missed, static_cast<double>(tokens)));
}

DecodeBytes decode_bytes(Model& model, const ModelReport& report, int64_t sequences) {
  DecodeBytes bytes;
  const auto part = [&](const char* name) {
    const auto found = report.bytes_per_part.find(name);
    return found == report.bytes_per_part.end() ? 0.0 : static_cast<double>(found->second);
  };
  for (const auto& [name, size] : report.bytes_per_part) {
    if (name != "embedding" && name != "experts" && name != "unused") {
      bytes.weights += static_cast<double>(size);
    }
  }
  // A tied embedding is read as the output head; else decoding reads one row of it.
  if (part("lm_head") == 0) bytes.weights += part("embedding");
  if (!report.experts.empty()) {
    const ExpertsConfig& c = report.experts.front().second.config;
    bytes.experts =
        part("experts") * expected_experts(c, sequences) / static_cast<double>(c.num_experts);
  }
  const int64_t positions = std::min<int64_t>(64, model.info().max_position_embeddings);
  bytes.cache_per_position = static_cast<double>(model.new_cache(sequences, positions)->bytes()) /
                             static_cast<double>(positions);
  return bytes;
}

std::vector<std::string> backends_for(const ModelReport& report,
                                      const std::vector<std::string>& names) {
  if (!names.empty()) return names;  // switching says why one cannot run
  std::vector<std::string> runnable;
  for (const std::string& name : backend_names()) {
    const bool all =
        std::all_of(report.experts.begin(), report.experts.end(),
                    [&](const auto& part) { return supports(name, part.second).ok(); });
    if (all) runnable.push_back(name);
  }
  return runnable;
}

class GenerateBench {
 public:
  GenerateBench(const CommandOptions& options, const CommonOptions& common, Model& model,
                ThreadPool& pool)
      : options_(options),
        model_(model),
        packed_(common.load.prepack == Prepack::kOn),
        random_(common.seed),
        report_(inspect_model(model.info().path, load_options(common))),
        bytes_(decode_bytes(model, report_, options.sequences)),
        stream_(model.info().device, pool),
        meter_(model.info().compute_dtype, options.bench.memory_bytes(), small_page_bytes(),
               stream_.get()) {
    if (packed_ && huge_page_bytes() > 0) {
      packed_meter_.emplace(model.info().compute_dtype, options.bench.memory_bytes(),
                            huge_page_bytes(), stream_.get());
    }
  }

  const ModelReport& report() const { return report_; }

  GenerateRow measure(const std::string& name, int64_t prompt_tokens, Progress& progress) {
    model_.set_experts_implementation(name);
    GenerateRow row;
    row.experts = name;
    row.prompt_tokens = prompt_tokens;
    row.sequences = options_.sequences;
    row.packed = packed_;
    run_once(prompt_tokens, 2);  // maps pages, makes workspaces
    const DecodePages pages = pages_at(mean_positions(prompt_tokens));
    row.pages = meter_.page_bytes();
    row.expert_pages = packed_meter_ ? packed_meter_->page_bytes() : row.pages;
    CeilingSample before = sample(pages);
    for (int64_t i = 0; i < options_.bench.repeats && interrupt_signal() == 0; ++i) {
      progress.update(str_cat(name, ", ", prompt_tokens, " tokens"), i, options_.bench.repeats);
      const GenerationResult result = run_once(prompt_tokens, options_.new_tokens);
      row.prefill_seconds.push_back(result.prefill_seconds);
      TimedCall timed;
      timed.seconds = result.decode_seconds * static_cast<double>(options_.sequences) /
                      static_cast<double>(result.decode_tokens);
      timed.work.bytes = pages.mapped + pages.packed;
      timed.before = before;
      timed.after = before = sample(pages);
      row.decode.push_back(timed);
    }
    return row;
  }

 private:
  double mean_positions(int64_t prompt_tokens) const {
    return static_cast<double>(prompt_tokens) + static_cast<double>(options_.new_tokens) / 2;
  }

  /// Bytes of one token by the pages they lie on: packed experts on huge ones, all else on the
  /// small ones of a mapped file or of usual memory.
  struct DecodePages {
    double mapped = 0;
    double packed = 0;
  };

  DecodePages pages_at(double positions) const {
    const double rest = bytes_.weights + bytes_.cache_per_position * positions;
    if (!packed_meter_) return {rest + bytes_.experts, 0};
    return {rest, bytes_.experts};
  }

  /// The ceiling of bytes that lie partly on these and partly on those pages.
  CeilingSample sample(const DecodePages& pages) {
    CeilingSample mixed = meter_.sample();
    if (!packed_meter_) return mixed;
    const double seconds = pages.mapped / mixed.bytes_per_second +
                           pages.packed / packed_meter_->sample().bytes_per_second;
    mixed.bytes_per_second = (pages.mapped + pages.packed) / seconds;
    return mixed;
  }

  GenerationResult run_once(int64_t prompt_tokens, int64_t new_tokens) {
    std::vector<std::vector<TokenId>> prompts(static_cast<size_t>(options_.sequences));
    for (std::vector<TokenId>& prompt : prompts) {
      prompt.resize(static_cast<size_t>(prompt_tokens));
      for (TokenId& id : prompt) {
        id = static_cast<TokenId>(random_() % static_cast<uint64_t>(model_.info().vocab_size));
      }
    }
    GenerationOptions generation;
    generation.max_new_tokens = new_tokens;
    generation.ignore_eos = true;
    // Ctrl-C ends the run at its next token; the row is not used then.
    return generate(model_, prompts, generation,
                    [](int64_t, TokenId) { return interrupt_signal() == 0; });
  }

  const CommandOptions& options_;
  Model& model_;
  bool packed_;
  std::mt19937_64 random_;
  ModelReport report_;
  DecodeBytes bytes_;
  OwnedStream stream_;
  CeilingMeter meter_;
  std::optional<CeilingMeter> packed_meter_;
};

Json to_json(const GenerateRow& row, const ModelInfo& info, const Machine& machine) {
  const CallStatistics decode = summarize(row.decode);
  const double prefill = median(row.prefill_seconds);
  Json json = {
      {"bench", "generate"},
      {"model", info.path},
      {"architecture", info.architecture},
      {"dtype", name_of(info.compute_dtype)},
      {"experts", row.experts},
      {"packed", row.packed},
      {"pages", row.pages},
      {"expert_pages", row.expert_pages},
      {"prompt_tokens", row.prompt_tokens},
      {"sequences", row.sequences},
      {"prefill_tokens_per_second",
       static_cast<double>(row.prompt_tokens * row.sequences) / prefill},
      {"prefill_seconds", prefill},
      {"prefill_seconds_mad", median_deviation(row.prefill_seconds)},
      {"decode_tokens_per_second", static_cast<double>(row.sequences) / decode.median_seconds},
      {"decode_us_median", decode.median_seconds * 1e6},
      {"decode_us_mad", decode.deviation_seconds * 1e6},
      {"decode_bytes", row.decode.front().work.bytes},
      {"gbs", decode.bytes_per_second / 1e9},
      {"percent_of_limit", decode.percent_of_limit ? Json(*decode.percent_of_limit) : Json()},
      {"calls", decode.num_calls},
      {"calls_dropped", decode.num_dropped},
      {"ceiling_gbs", decode.ceilings.bytes_per_second / 1e9}};
  add_machine(json, machine);
  return json;
}

std::string to_text(const std::vector<GenerateRow>& rows) {
  Table table({"experts", "prompt", "prefill tokens/s", "decode tokens/s", "ms/step", "+-",
               "MiB/step", "% of limit", "dropped", "read GB/s"});
  for (size_t column = 1; column < 10; ++column) table.right_align(column);
  for (const GenerateRow& row : rows) {
    const CallStatistics decode = summarize(row.decode);
    table.add_row(
        {row.experts, str_cat(row.prompt_tokens),
         format_number("%.1f", static_cast<double>(row.prompt_tokens * row.sequences) /
                                   median(row.prefill_seconds)),
         format_number("%.2f", static_cast<double>(row.sequences) / decode.median_seconds),
         format_number("%.3f", decode.median_seconds * 1e3),
         format_number("%.3f", decode.deviation_seconds * 1e3),
         format_number("%.1f", row.decode.front().work.bytes / (1 << 20)),
         format_number("%.1f", decode.percent_of_limit),
         str_cat(decode.num_dropped, "/", decode.num_calls),
         format_number("%.1f", decode.ceilings.bytes_per_second / 1e9)});
  }
  return table.to_string();
}

/// `synthetic`: where the model lies, if nowhere else. It goes as soon as its files are mapped, so
/// that nothing is left however the run ends.
int measure_all(const CommandOptions& options, const CommonOptions& common,
                std::optional<TemporaryFolder>& synthetic) {
  const std::unique_ptr<Model> model = load_model(common);
  for (const int64_t length : options.prompt_lengths) {
    require_context(model->info(), "--prompt-lengths and --new-tokens",
                    length + options.new_tokens);
  }
  ThreadPool pool(common.load.num_threads);
  GenerateBench bench(options, common, *model, pool);
  synthetic.reset();
  const Machine machine = describe_machine(model->info().device.type, pool.num_threads());
  Progress progress(ProgressTerminal::standard_error(common.quiet), "runs");
  std::vector<GenerateRow> rows;
  const InterruptGuard guard;
  for (const std::string& name : backends_for(bench.report(), options.experts)) {
    for (const int64_t length : options.prompt_lengths) {
      if (interrupt_signal() != 0) break;
      GenerateRow row = bench.measure(name, length, progress);
      if (interrupt_signal() != 0) break;
      if (common.json && !write_json(to_json(row, model->info(), machine))) return kExitDone;
      rows.push_back(std::move(row));
    }
  }
  progress.clear();
  if (!common.json) write_stdout(str_cat(to_string(machine), "\n\n", to_text(rows)));
  return interrupt_signal() != 0 ? kExitSignal + interrupt_signal() : kExitDone;
}

int run_command(const CommandOptions& options, CommonOptions common) {
  std::optional<TemporaryFolder> folder;
  if (!options.synthetic) return measure_all(options, common, folder);
  if (!common.model.empty()) {
    throw InvalidArgument(str_cat("expected one model, got --synthetic and --model ", common.model,
                                  "; leave out one"));
  }
  folder.emplace();
  const InterruptGuard guard;  // so that the folder is removed
  require_space(*options.synthetic, folder->path());
  note(str_cat("cadre bench generate: writing ",
               format_bytes(static_cast<size_t>(weight_bytes(*options.synthetic))), " to ",
               folder->path().string(), " (removed once it is mapped)"),
       common.quiet);
  try {
    Progress progress(ProgressTerminal::standard_error(common.quiet), "files");
    write_synthetic_model(*options.synthetic, folder->path(),
                          [&](std::string_view what, int64_t done, int64_t total) {
                            progress.update(what, done, total);
                            if (interrupt_signal() != 0) throw Stopped();
                          });
  } catch (const Stopped&) {
    return kExitSignal + interrupt_signal();
  }
  common.model = folder->path().string();
  return measure_all(options, common, folder);
}

SyntheticModel parse_synthetic(const std::string& text) {
  const size_t comma = text.find(',');
  if (comma == text.npos) {
    throw InvalidArgument(
        str_cat("--synthetic: expected LAYERS,SHAPE like 2,qwen3-30b-a3b, got \"", text, "\""));
  }
  SyntheticModel model;
  model.num_layers = parse_number<int64_t>("--synthetic", text.substr(0, comma), 1, 1000);
  model.experts = parse_shape("--synthetic", text.substr(comma + 1)).config;
  return model;
}

}  // namespace

void add_bench_generate(CLI::App& bench, CommonOptions& common, Runner& run) {
  auto options = std::make_shared<CommandOptions>();
  CLI::App* command =
      bench.add_subcommand("generate", "Time prefill and decode of a model on each backend");
  command->footer(
      "Random prompts. % of limit: what a decode step has to read (weights once, the experts that "
      "its "
      "tokens are sent to, and the KV cache; of several sequences the experts that are hit on "
      "average "
      "when all are equally likely) at the read ceiling measured before and after, over the step's "
      "time; the median of the runs. Runs whose two ceilings differ by more than 5 % are dropped "
      "and "
      "counted. --json prints one object a row.\n"
      "Example: cadre bench generate --synthetic 2,qwen3-30b-a3b --prompt-lengths 16,512");
  add_numbers(*command, "--prompt-lengths", options->prompt_lengths, 1, int64_t{1} << 30,
              "Tokens of the prompt");
  add_number(*command, "--new-tokens", options->new_tokens, int64_t{2}, int64_t{1} << 30,
             "Tokens to decode");
  add_number(*command, "--sequences", options->sequences, int64_t{1}, int64_t{1} << 20,
             "Sequences that are decoded together");
  add_backends_option(*command, options->experts);
  command
      ->add_option_function<std::string>(
          "--synthetic",
          [options](const std::string& text) { options->synthetic = parse_synthetic(text); },
          "In place of --model: random bfloat16 weights of a Qwen3-MoE model with this many layers "
          "and experts of this shape, written to $TMPDIR for the time of the run")
      ->type_name("LAYERS,SHAPE");
  add_bench_options(*command, options->bench);
  add_common_options(*command, common, ExpertsOption::kOwn);

  command->callback([&run, &common, options] {
    run = [&common, options] { return run_command(*options, common); };
  });
}

}  // namespace cadre::cli
