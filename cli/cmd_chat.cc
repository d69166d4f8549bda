// cadre chat: a conversation, at a terminal or from a pipe.
#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>

#include "commands.h"
#include "conversation.h"
#include "exit_codes.h"
#include "generation_report.h"
#include "interrupt.h"
#include "line_reader.h"
#include "output.h"
#include "progress.h"
#include "sampling_options.h"
#include "session.h"
#include "suggest.h"

namespace cadre::cli {

namespace {

constexpr const char* kCommands =
    "/reset         begin a new conversation\n"
    "/system TEXT   change the system message, without TEXT remove it; what was said stays\n"
    "/stats         tokens, rates and memory so far\n"
    "/help          this list\n"
    "/exit          leave, as Ctrl-D does\n"
    "A line that ends with \\ goes on in the next one. Ctrl-C stops an answer. A message that "
    "begins "
    "with / is written with two.";

struct ChatCommandOptions {
  std::string system;
  bool stats = false;
  GenerationOptions generation{.max_new_tokens = 1024};
};

/// One run of the command, from the first line to the last.
class ChatCommand {
 public:
  ChatCommand(Model& model, Conversation conversation, const ChatCommandOptions& options,
              const CommonOptions& common)
      : model_(model),
        conversation_(std::move(conversation)),
        options_(options),
        common_(common),
        is_terminal_(isatty(STDIN_FILENO) == 1) {
    const bool is_shown = is_terminal_ && isatty(STDERR_FILENO) == 1;
    const ProgressTerminal terminal = ProgressTerminal::standard_error(/*quiet=*/false);
    const bool coloured = terminal.enabled && terminal.colour;  // not on a dumb one
    if (is_shown) prompt_ = coloured ? "\x1b[1;36m>\x1b[0m " : "> ";
    if (is_shown) next_prompt_ = coloured ? "\x1b[1;36m...\x1b[0m " : "... ";
  }

  int run() {
    const InterruptGuard guard(InterruptGuard::Again::kIsNoted);
    if (is_terminal_) {
      note(str_cat(model_.info().model_type, " on ", to_string(model_.info().device),
                   ", a context of ", model_.info().max_position_embeddings,
                   " tokens; /help tells the commands, Ctrl-D leaves"),
           common_.quiet);
    }
    std::string line;
    while (!exit_status_) {
      switch (reader_.read(prompt_, next_prompt_, line)) {
        case LineReader::Event::kLine:
          was_interrupted_ = false;
          take(line);
          break;
        case LineReader::Event::kInterrupted:
          interrupted_at_prompt();
          break;
        case LineReader::Event::kEnd:
          if (!prompt_.empty()) show("\n");  // the shell's prompt begins a line
          exit_status_ = kExitDone;
          break;
      }
    }
    return *exit_status_;
  }

 private:
  void leave_by_signal() { exit_status_ = kExitSignal + interrupt_signal(); }

  // A second Ctrl-C in a row leaves; so does any other signal, and all of them without a terminal.
  void interrupted_at_prompt() {
    if (!is_terminal_ || interrupt_signal() != SIGINT || was_interrupted_) return leave_by_signal();
    forget_interrupt();
    was_interrupted_ = true;
    show("\n");
    note("Ctrl-C again leaves; /help tells the commands", common_.quiet);
  }

  void take(const std::string& line) {
    if (line.empty()) return;
    if (!line.starts_with('/')) return say(line);
    if (line.starts_with("//")) return say(line.substr(1));
    const size_t end = std::min(line.find(' '), line.size());
    obey(line.substr(0, end), line.substr(std::min(end + 1, line.size())));
  }

  void obey(const std::string& command, const std::string& text) {
    static const std::vector<std::string> kNames = {"/reset", "/system", "/stats", "/help",
                                                    "/exit"};
    if (command == "/exit") {
      exit_status_ = kExitDone;
    } else if (command == "/reset") {
      conversation_.reset();
      note("a new conversation", common_.quiet);
    } else if (command == "/system") {
      conversation_.set_system(text);
      note(text.empty() ? "no system message" : "the system message is changed", common_.quiet);
    } else if (command == "/stats") {
      give_stats();
    } else if (command == "/help") {
      note(kCommands, false);
    } else {
      note(str_cat("unknown command ", quote(command), ", expected one of ", join(kNames),
                   did_you_mean(command, kNames),
                   "; a message that begins with / is written with "
                   "two"),
           false);
    }
  }

  void say(const std::string& text) {
    try {
      answer(text);
    } catch (const InvalidArgument& error) {
      if (!is_terminal_) throw;
      note(error.what(), false);
    }
  }

  void answer(const std::string& text) {
    const Conversation::Answer answer =
        conversation_.ask(text, options_.generation, [&](std::string_view piece) {
          if (!common_.json && !reader_gone_) reader_gone_ = !write_stdout(piece);
          return !reader_gone_ && interrupt_signal() == 0;
        });
    if (!common_.json && !reader_gone_) reader_gone_ = !write_stdout("\n");
    last_ = answer.result;
    decode_tokens_ += answer.result.decode_tokens;
    if (common_.json && !reader_gone_) reader_gone_ = !write_json(answer_json(answer));
    tell_end(answer);
    if (reader_gone_) exit_status_ = kExitDone;
  }

  std::string_view end_of_last() const {
    return end_of(*last_, 0, options_.generation.max_new_tokens);
  }

  RunMemory used() const { return {model_.memory(), model_.info().device}; }

  Json answer_json(const Conversation::Answer& answer) const {
    Json json = {{"text", answer.text},
                 {"output_ids", answer.result.token_ids[0]},
                 {"finish_reason", end_of_last()}};
    if (options_.stats) json["stats"] = stats_json(answer.result, used());
    return json;
  }

  // What people should know of how the answer ended.
  void tell_end(const Conversation::Answer& answer) {
    const std::string_view end = end_of_last();
    const size_t count = answer.result.token_ids[0].size();
    if (end == "context") {
      note(str_cat("the context of ", model_.info().max_position_embeddings,
                   " tokens is full: the answer ends after ", count,
                   " tokens; /reset begins a new conversation"),
           common_.quiet);
    } else if (end == "length" && is_terminal_) {
      note(str_cat("the answer ends after ", count, " tokens (--max-new-tokens)"), common_.quiet);
    } else if (end == "stopped" && interrupt_signal() != 0) {
      if (!is_terminal_ || interrupt_signal() != SIGINT) return leave_by_signal();
      forget_interrupt();
      note("stopped", common_.quiet);
    }
    if (options_.stats && !common_.json) note(stats_text(answer.result, used()), false);
  }

  void give_stats() {
    const int64_t context = model_.info().max_position_embeddings;
    if (common_.json) {
      Json json = {{"turns", conversation_.num_turns()},
                   {"context_tokens", conversation_.num_tokens()},
                   {"max_context_tokens", context},
                   {"decode_tokens", decode_tokens_}};
      if (last_) json["last_answer"] = stats_json(*last_, used());
      if (!write_json({{"stats", json}})) exit_status_ = kExitDone;  // the reader has gone
      return;
    }
    note(str_cat("turns:   ", conversation_.num_turns(), ", ", conversation_.num_tokens(), " of ",
                 context, " tokens of the context"),
         false);
    if (!last_) return;
    note(str_cat("answer:  ", last_->reused_tokens, " of ", last_->prompt_tokens,
                 " prompt tokens were in the cache\n", stats_text(*last_, used())),
         false);
  }

  Model& model_;
  Conversation conversation_;
  const ChatCommandOptions& options_;
  const CommonOptions& common_;
  bool is_terminal_;
  std::string prompt_;
  std::string next_prompt_;
  LineReader reader_;
  bool was_interrupted_ = false;  // by the last event at the prompt
  bool reader_gone_ = false;
  std::optional<GenerationResult> last_;
  int64_t decode_tokens_ = 0;
  std::optional<int> exit_status_;
};

int run_chat(ChatCommandOptions& options, const CommonOptions& common) {
  options.generation.sampling.seed = common.seed;
  validate(options.generation.sampling);
  note_idle_cuts("cadre chat", options.generation.sampling, common.quiet);
  ChatTemplate chat_template = load_chat_template(common, "chat");
  const std::unique_ptr<Model> model = load_model(common);
  options.generation.eos_token_ids = model->info().eos_token_ids;
  Conversation conversation(*model, load_tokenizer(*model), std::move(chat_template),
                            options.system);
  return ChatCommand(*model, std::move(conversation), options, common).run();
}

}  // namespace

void add_chat(CLI::App& app, CommonOptions& common, Runner& run) {
  auto options = std::make_shared<ChatCommandOptions>();
  CLI::App* command = app.add_subcommand("chat", "Talk with a model that has a chat template");
  command->footer(
      "Each line is a message; the answer comes as it is produced. What was said stays in the "
      "model's "
      "cache, so a turn costs its own tokens alone. At a terminal, /help tells the commands, "
      "Ctrl-C "
      "stops an answer, Ctrl-D leaves. From a pipe, --json gives one object for each answer.\n"
      "Examples:\n  cadre chat --model path/to/model --system \"Answer in one sentence.\"\n"
      "  printf 'Hello\\nAnd you?\\n' | cadre chat --model path/to/model --json");
  add_text(*command, "--system", options->system, "TEXT", "A system message before all others");
  add_number(*command, "--max-new-tokens", options->generation.max_new_tokens, int64_t{1},
             int64_t{1} << 40, "Stop an answer after this many tokens");
  add_sampling_options(*command, options->generation.sampling);
  command->add_flag("--stats", options->stats,
                    "Tokens/s, backends and memory after each answer, on standard error (with "
                    "--json: in the object)");
  add_common_options(*command, common);
  command->callback([&run, &common, options] {
    run = [&common, options] { return run_chat(*options, common); };
  });
}

}  // namespace cadre::cli
