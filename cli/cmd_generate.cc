// cadre generate: continues a prompt, or the sequences of a file.
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "cadre/chat.h"
#include "cadre/generation.h"
#include "commands.h"
#include "exit_codes.h"
#include "generation_report.h"
#include "image_input.h"
#include "interrupt.h"
#include "io/checkpoint.h"
#include "io/safetensors.h"
#include "output.h"
#include "progress.h"
#include "sampling_options.h"
#include "session.h"

namespace cadre::cli {

namespace {

struct GenerateOptions {
  std::string prompt;
  std::string input_ids;
  std::string out;
  std::vector<std::string> images;
  bool from_image = false;
  std::string system;
  bool chat = false;
  std::optional<ChatTemplate> chat_template;  // with `chat`
  bool stats = false;
  GenerationOptions generation;
};

/// Everything that came of a run: what the library returned and the memory that it held meanwhile.
struct Outcome {
  GenerationResult result;
  RunMemory used;
  std::string text;  // of a text prompt
  bool reader_gone = false;
};

void note_context_end(const Outcome& outcome, const ModelInfo& info, int64_t max_new_tokens,
                      bool quiet) {
  for (size_t i = 0; i < outcome.result.token_ids.size(); ++i) {
    if (end_of(outcome.result, i, max_new_tokens) != "context") continue;
    note(str_cat("cadre generate: the context of ", info.max_position_embeddings,
                 " tokens is full: stopped after ", outcome.result.token_ids[i].size(), " of ",
                 max_new_tokens, " new tokens"),
         quiet);
    return;
  }
}

void check_options(const GenerateOptions& options, const CommonOptions& common, bool has_prompt) {
  if (!has_prompt && options.input_ids.empty()) {
    throw InvalidArgument(
        "expected a PROMPT (\"-\" reads standard input) or --input-ids FILE, got neither");
  }
  validate(options.generation.sampling);
  require_writable(options.out);
  require_distinct(options.out, options.input_ids);
  if (!options.images.empty()) {
    const ModelInfo info = inspect_model(model_path(common), load_options(common)).info;
    require_vision(str_cat("--image ", options.images.front()), info);
  }
  note_idle_cuts("cadre generate", options.generation.sampling, common.quiet);
}

/// Runs the model; `on_token` is called for every token and returns false to stop.
Outcome run_model(Model& model, const std::vector<std::vector<TokenId>>& prompts,
                  const GenerationOptions& generation, const TokenCallback& on_token) {
  Outcome outcome;
  // Before the first token Ctrl-C simply ends the process: nothing has been given out yet.
  std::optional<InterruptGuard> guard;
  outcome.result = generate(model, prompts, generation, [&](int64_t sequence, TokenId id) {
    if (!guard) {
      guard.emplace();
      outcome.used = {model.memory(), model.info().device};
    }
    return on_token(sequence, id) && interrupt_signal() == 0;
  });
  return outcome;
}

/// A text prompt with its images, whose values the ids have room for.
struct Prompt {
  std::vector<TokenId> ids;
  PixelValues images;
};

/// The conversation of one turn, the images before the text, as the model was trained on it.
std::string chat_prompt(const std::string& text, const GenerateOptions& options) {
  std::vector<ChatMessage> messages;
  if (!options.system.empty()) messages.push_back({.role = "system", .content = options.system});
  ChatMessage message{.role = "user", .content = text};
  message.parts.assign(options.images.size(), {.type = ChatPart::Type::kImage});
  if (!message.parts.empty()) message.parts.push_back({.text = text});
  messages.push_back(std::move(message));
  return options.chat_template->render(messages);
}

Prompt encode_prompt(const Tokenizer& tokenizer, const Model& model, const std::string& text,
                     const GenerateOptions& options) {
  const ModelInfo& info = model.info();
  const std::vector<std::string>& image_files = options.images;
  // A chat template writes special tokens itself, those of images too.
  const std::string prompt_text = with_image_places(
      options.chat ? chat_prompt(text, options) : text, image_files.size(), tokenizer, info);
  Prompt prompt{encode_text(tokenizer, model, prompt_text, !options.chat), {}};
  if (!info.vision) return prompt;
  prompt.images = read_images(image_files, info);
  prompt.ids = ImageProcessor::from_pretrained(info.path).expand(prompt.ids, prompt.images.grids,
                                                                 info.vision->image);
  return prompt;
}

/// `images` must outlive the result.
GenerationOptions with_images(GenerationOptions options, const PixelValues& images) {
  options.pixel_values = images.values;
  options.image_grids = images.grids;
  return options;
}

Outcome generate_text(Model& model, const GenerateOptions& options, const CommonOptions& common) {
  const Tokenizer tokenizer = load_tokenizer(model);
  const std::string text = options.prompt == "-" ? read_text("-") : options.prompt;
  TextStream stream(tokenizer);
  bool reader_gone = false;
  const Prompt ids = encode_prompt(tokenizer, model, text, options);
  std::string answer;
  const auto give = [&](const std::string& piece) {
    answer += piece;
    if (!common.json && !reader_gone) reader_gone = !write_stdout(piece);
  };
  const bool bar = common.json || isatty(STDOUT_FILENO) == 0;
  Progress progress(ProgressTerminal::standard_error(common.quiet || !bar), "tokens");
  int64_t count = 0;
  Outcome outcome = run_model(
      model, {ids.ids}, with_images(options.generation, ids.images), [&](int64_t, TokenId id) {
        give(stream.push(id));
        progress.update("generating", ++count, options.generation.max_new_tokens);
        return !reader_gone;
      });
  progress.clear();
  give(stream.finish());
  outcome.text = answer;
  if (!common.json && !reader_gone) reader_gone = !write_stdout("\n");
  outcome.reader_gone = reader_gone;
  return outcome;
}

Outcome generate_ids(Model& model, const GenerateOptions& options, const CommonOptions& common) {
  const TokenBatch batch = read_input_ids(options.input_ids, model.info().vocab_size);
  std::vector<std::vector<TokenId>> prompts;
  for (int64_t i = 0; i < batch.num_sequences; ++i) {
    const auto begin = batch.token_ids.begin() + i * batch.num_tokens;
    prompts.emplace_back(begin, begin + batch.num_tokens);
  }
  Progress progress(ProgressTerminal::standard_error(common.quiet), "tokens");
  const int64_t total = batch.num_sequences * options.generation.max_new_tokens;
  int64_t count = 0;
  const PixelValues images =
      read_image_tensors(options.input_ids, options.from_image, batch, model.info());
  return run_model(model, prompts, with_images(options.generation, images), [&](int64_t, TokenId) {
    progress.update("generating", ++count, total);
    return true;
  });
}

/// The continuations as (B, N) i64. N is the number of tokens asked for, less only where the
/// context ended or Ctrl-C stopped (then what all running sequences have); a sequence that met an
/// end-of-sequence id repeats that id up to N.
void write_output_ids(const std::string& path, const GenerationResult& result,
                      int64_t max_new_tokens) {
  int64_t columns = max_new_tokens;
  for (size_t i = 0; i < result.token_ids.size(); ++i) {
    if (result.finish_reasons[i] == FinishReason::kEos) continue;
    columns = std::min(columns, static_cast<int64_t>(result.token_ids[i].size()));
  }
  const auto rows = static_cast<int64_t>(result.token_ids.size());
  const Tensor ids(DType::kI64, {rows, columns});
  auto* out = ids->as<int64_t>();
  for (const std::vector<TokenId>& row : result.token_ids) {
    const auto length = std::min(columns, static_cast<int64_t>(row.size()));
    int64_t* end = std::copy(row.begin(), row.begin() + length, out);
    out += columns;
    std::fill(end, out, row.empty() ? 0 : row.back());
  }
  const NamedTensor tensor{"output_ids", ids};
  write_safetensors(path, {&tensor, 1});
}

Json outcome_json(const Outcome& outcome, const GenerateOptions& options) {
  Json json = Json::object();
  json["output_ids"] = outcome.result.token_ids;
  json["finish_reasons"] = Json::array();
  for (size_t i = 0; i < outcome.result.finish_reasons.size(); ++i) {
    json["finish_reasons"].push_back(end_of(outcome.result, i, options.generation.max_new_tokens));
  }
  if (options.input_ids.empty()) json["text"] = outcome.text;
  if (options.stats) json["stats"] = stats_json(outcome.result, outcome.used);
  return json;
}

std::string ids_text(const GenerationResult& result) {
  std::string text;
  for (const std::vector<TokenId>& row : result.token_ids) text += join(row, " ") + "\n";
  return text;
}

/// Everything that a run gives beyond the text, which came out as it was produced.
void give_outcome(const Outcome& outcome, const GenerateOptions& options, bool json,
                  bool has_prompt) {
  if (!options.out.empty()) {
    const InterruptGuard guard;
    write_output_ids(options.out, outcome.result, options.generation.max_new_tokens);
  }
  if (json) {
    write_json(outcome_json(outcome, options));
  } else if (!has_prompt && options.out.empty()) {
    write_stdout(ids_text(outcome.result));
  }
  if (options.stats && !json) note(stats_text(outcome.result, outcome.used), false);
}

int run_generate(GenerateOptions& options, const CommonOptions& common, bool has_prompt) {
  options.generation.sampling.seed = common.seed;
  check_options(options, common, has_prompt);
  if (options.chat) options.chat_template = load_chat_template(common, "--chat");
  const std::unique_ptr<Model> model = load_model(common);
  require_outside_model(options.out, model->info());
  options.generation.eos_token_ids = model->info().eos_token_ids;
  const Outcome outcome =
      has_prompt ? generate_text(*model, options, common) : generate_ids(*model, options, common);
  if (outcome.reader_gone) return kExitDone;
  note_context_end(outcome, model->info(), options.generation.max_new_tokens, common.quiet);
  give_outcome(outcome, options, common.json, has_prompt);
  return interrupt_signal() != 0 ? kExitSignal + interrupt_signal() : kExitDone;
}

}  // namespace

void add_generate(CLI::App& app, CommonOptions& common, Runner& run) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App* command = app.add_subcommand("generate", "Continue a prompt");
  command->footer(
      "Prints the continuation alone, as it is produced. Ctrl-C stops after the next token; --out, "
      "--json and --stats then give what was done, exit 130.\nExamples:\n  cadre generate \"Call "
      "me\" --max-new-tokens 40\n"
      "  cadre generate --input-ids prompts.safetensors --out continued.safetensors");
  CLI::Option* prompt =
      command->add_option("PROMPT", options->prompt, "The text to continue; - reads standard input")
          ->type_name("TEXT");
  CLI::Option* input_ids =
      add_text(
          *command, "--input-ids", options->input_ids, "FILE",
          "Continue input_ids (B, T) of a safetensors file, greedily, in place of a PROMPT; for "
          "a vision model with pixel_values and image_grid_thw beside them")
          ->excludes(prompt);
  add_text(*command, "--out", options->out, "FILE",
           "Write output_ids (B, N) i64, the continuations; a sequence that ended early repeats "
           "its end-of-sequence id")
      ->needs(input_ids);
  add_number(*command, "--max-new-tokens", options->generation.max_new_tokens, int64_t{1},
             int64_t{1} << 40, "Stop after this many tokens");
  for (CLI::Option* option : add_sampling_options(*command, options->generation.sampling)) {
    option->excludes(input_ids);
  }
  command->add_flag("--ignore-eos", options->generation.ignore_eos,
                    "Go on after an end-of-sequence token");
  CLI::Option* chat =
      command
          ->add_flag("--chat", options->chat,
                     "Answer the prompt as a user's message, by the model's chat template")
          ->excludes(input_ids);
  add_text(*command, "--system", options->system, "TEXT", "A system message before the prompt")
      ->needs(chat);
  add_texts(*command, "--image", options->images, "FILE",
            "Show the model this JPEG, PNG or WebP image (vision models); may be repeated. Images "
            "stand where the PROMPT has the model's image token, else before it")
      ->excludes(input_ids);
  command
      ->add_flag("--from-image", options->from_image,
                 "With --input-ids: take image_u8 (H, W, 3) in place of pixel_values and "
                 "pre-process it")
      ->needs(input_ids);
  command->add_flag(
      "--stats", options->stats,
      "Tokens/s of prefill and decode, the backend of each, the CPU's instruction set "
      "and memory, on standard error (with --json: in the object)");
  add_common_options(*command, common);
  command->callback([&run, &common, options, prompt] {
    run = [&common, options, prompt] {
      return run_generate(*options, common, prompt->count() > 0);
    };
  });
}

}  // namespace cadre::cli
