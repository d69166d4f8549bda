// cadre chat and generate --chat: what the model sees, what comes out where, commands, signals.
#include <csignal>
#include <sstream>

#include "cadre/tokenizer.h"
#include "end_to_end/fixtures.h"

namespace cadre::test {
namespace {

const std::string kTemplate =
    "{% for message in messages %}{{ message.role | title }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}";

/// The bundled model with a chat template, in a folder of the test's own.
std::filesystem::path chat_model(const TempDir& folder, const std::string& text = kTemplate) {
  const auto model = folder / "model";
  std::filesystem::copy(CADRE_ASSETS "/tiny-moe", model);
  write_file(model / "chat_template.jinja", text);
  return model;
}

std::vector<std::string> with(std::vector<std::string> arguments,
                              const std::vector<std::string>& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// `cadre chat` on eight tokens an answer in float32, where ids are comparable.
std::vector<std::string> chat_call(const std::filesystem::path& model,
                                   const std::vector<std::string>& more = {}) {
  return with({"chat", "--model", model, "--dtype", "float32", "--max-new-tokens", "8"}, more);
}

std::vector<nlohmann::json> json_lines(const std::string& text) {
  std::vector<nlohmann::json> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

/// What `generate` makes of a text as it stands.
nlohmann::json continued(const std::filesystem::path& model, const std::string& text) {
  const Result result = run_cadre({"generate", text, "--model", model, "--dtype", "float32",
                                   "--max-new-tokens", "8", "--json"});
  expect_success(result);
  return json_of(result);
}

TEST(GenerateChat, PutsThePromptIntoTheTemplate) {
  const TempDir folder;
  const auto model = chat_model(folder);
  const std::vector<std::string> call = {
      "generate", "Hello there", "--model",          model, "--dtype", "float32",
      "--chat",   "--json",      "--max-new-tokens", "8"};
  const nlohmann::json plain = json_of(run_cadre(call));
  EXPECT_EQ(plain, continued(model, "User: Hello there\nAssistant:"));
  const nlohmann::json with_system = json_of(run_cadre(with(call, {"--system", "Be kind."})));
  EXPECT_EQ(with_system, continued(model, "System: Be kind.\nUser: Hello there\nAssistant:"));
  EXPECT_NE(plain["text"], with_system["text"]);
}

TEST(GenerateChat, StopsAtAnyEndOfTheGenerationConfigAndPrintsNoSpecialToken) {
  const TempDir folder;
  const auto model = chat_model(folder);
  const std::vector<std::string> call = {"generate", "Hello",   "--model", model,
                                         "--chat",   "--dtype", "float32", "--max-new-tokens",
                                         "8",        "--json"};
  const nlohmann::json whole = json_of(run_cadre(call));
  ASSERT_EQ(whole["output_ids"][0].size(), 8u);
  // The fourth token becomes a second end; a special one, so that it must not be printed.
  const auto end = whole["output_ids"][0][3].get<TokenId>();
  write_file(model / "generation_config.json", nlohmann::json{{"eos_token_id", {0, end}}}.dump());
  nlohmann::json tokenizer = nlohmann::json::parse(read_file(model / "tokenizer.json"));
  const auto loaded = Tokenizer::from_file(model / "tokenizer.json");
  tokenizer["added_tokens"].push_back({{"id", end},
                                       {"content", *loaded.id_to_token(end)},
                                       {"single_word", false},
                                       {"lstrip", false},
                                       {"rstrip", false},
                                       {"normalized", false},
                                       {"special", true}});
  write_file(model / "tokenizer.json", tokenizer.dump());
  const nlohmann::json stopped = json_of(run_cadre(call));
  const std::vector<TokenId> ids = stopped["output_ids"][0];
  EXPECT_EQ(ids.back(), end);
  EXPECT_EQ(stopped["finish_reasons"][0], "eos");
  EXPECT_EQ(stopped["text"], loaded.decode(std::span(ids).first(ids.size() - 1)));
}

TEST(GenerateChat, ATemplateMayRefuseAndMayBeDamaged) {
  const TempDir folder;
  const auto model = chat_model(
      folder,
      "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x");
  const std::vector<std::string> call = {"generate", "Hi", "--model", model, "--chat"};
  expect_success(run_cadre(with(call, {"--max-new-tokens", "1"})));
  expect_failure(run_cadre(with(call, {"--system", "S"})), 2, {"no system", "chat_template.jinja"});
  write_file(model / "chat_template.jinja", "{{ messages[0].content + 1 }}");
  expect_failure(run_cadre(call), 3, {"chat_template.jinja, line 1, column 4"});
  write_file(model / "chat_template.jinja", "{{ messages | nosuch }}");
  expect_failure(run_cadre(call), 4, {"chat_template.jinja, line 1", "nosuch"});
}

TEST(GenerateChat, OptionsThatDoNotGoTogetherAreRefused) {
  const std::string file = expected_file("olmoe");
  expect_failure(run_cadre({"generate", "--input-ids", file, "--chat"}), 2, {"--chat"});
  expect_failure(run_cadre({"generate", "x", "--system", "S"}), 2, {"--system", "--chat"});
}

TEST(Chat, EachLineIsATurnOfOneConversation) {
  const TempDir folder;
  const auto model = chat_model(folder);
  const Result result = run_cadre(chat_call(model, {"--json", "--system", "Be kind."}),
                                  {.input = "Hello\n\nAnd you?\n"});
  expect_success(result);
  const auto lines = json_lines(result.out);
  ASSERT_EQ(lines.size(), 2u);  // an empty line is no turn
  const std::string first = "System: Be kind.\nUser: Hello\nAssistant:";
  const auto expect_as = [&](const nlohmann::json& line, const std::string& prompt) {
    const nlohmann::json expected = continued(model, prompt);
    EXPECT_EQ(line["output_ids"], expected["output_ids"][0]);
    EXPECT_EQ(line["text"], expected["text"]);
    EXPECT_EQ(line["finish_reason"], expected["finish_reasons"][0]);
  };
  expect_as(lines[0], first);
  expect_as(lines[1], first + lines[0]["text"].get<std::string>() + "\nUser: And you?\nAssistant:");

  // The same as text, each answer a line of its own here.
  const Result text =
      run_cadre(chat_call(model, {"--system", "Be kind."}), {.input = "Hello\nAnd you?"});
  expect_success(text);
  EXPECT_EQ(text.out, lines[0]["text"].get<std::string>() + "\n" +
                          lines[1]["text"].get<std::string>() + "\n");
}

TEST(Chat, WhatWasSaidIsNotRunAgain) {
  const TempDir folder;
  const auto model = chat_model(folder);
  const Result result = run_cadre(chat_call(model, {"--json", "--stats"}),
                                  {.input = "Tell me of the sea\nAnd more\n/stats\n"});
  expect_success(result);
  const auto lines = json_lines(result.out);
  ASSERT_EQ(lines.size(), 3u);
  const nlohmann::json& first = lines[0]["stats"];
  const nlohmann::json& second = lines[1]["stats"];
  EXPECT_EQ(first["reused_tokens"], 0);
  EXPECT_GE(second["reused_tokens"], first["prompt_tokens"]);
  EXPECT_LT(second["reused_tokens"], second["prompt_tokens"]);
  EXPECT_GT(first["decode_tokens_per_second"], 0);
  EXPECT_GT(first["kv_cache_bytes"], 0);
  const nlohmann::json& stats = lines[2]["stats"];
  EXPECT_EQ(stats["turns"], 2);
  EXPECT_EQ(stats["last_answer"], second);
  EXPECT_EQ(stats["max_context_tokens"], 2048);
  EXPECT_EQ(stats["context_tokens"], second["prompt_tokens"].get<int>() + 7);
  EXPECT_EQ(stats["decode_tokens"], 14);
}

TEST(Chat, CommandsBeginANewConversationAndChangeTheSystemMessage) {
  const TempDir folder;
  const auto model = chat_model(folder);
  const Result result =
      run_cadre(chat_call(model, {"--json", "--quiet"}),
                {.input = "Hello\nHello\n/reset\nHello\n/system Be kind.\n/reset\nHello\n/system\n"
                          "/reset\nHello\n//path\n/exit\nnever said\n"});
  expect_success(result);
  const auto lines = json_lines(result.out);
  ASSERT_EQ(lines.size(), 6u);
  EXPECT_NE(lines[1]["output_ids"], lines[0]["output_ids"]);
  EXPECT_EQ(lines[2], lines[0]);
  EXPECT_EQ(lines[3]["output_ids"],
            continued(model, "System: Be kind.\nUser: Hello\nAssistant:")["output_ids"][0]);
  EXPECT_EQ(lines[4], lines[0]);
  EXPECT_EQ(lines[5]["output_ids"],
            continued(model, "User: Hello\nAssistant:" + lines[4]["text"].get<std::string>() +
                                 "\nUser: /path\nAssistant:")["output_ids"][0]);
}

TEST(Chat, CommandsAnswerOnStandardError) {
  const TempDir folder;
  const auto model = chat_model(folder);
  const Result result =
      run_cadre(chat_call(model), {.input = "/help\n/stats\n/rest\n/system S\n/system\n/reset\n"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "");
  for (const char* part :
       {"/system TEXT", "Ctrl-C", "turns:   0, 0 of 2048", "did you mean /reset?",
        "the system message is changed", "no system message", "a new conversation"}) {
    EXPECT_NE(result.err.find(part), std::string::npos) << part << " in " << result.err;
  }
}

TEST(Chat, ABackslashContinuesALine) {
  const TempDir folder;
  const auto model = chat_model(folder);
  const Result result = run_cadre(chat_call(model, {"--json"}), {.input = "One\\\ntwo\\\n\n"});
  expect_success(result);
  EXPECT_EQ(json_of(result)["output_ids"],
            continued(model, "User: One\ntwo\n\nAssistant:")["output_ids"][0]);
}

TEST(Chat, DrawsAreSetByTheSeedAndDifferFromTurnToTurn) {
  const TempDir folder;
  const auto model = chat_model(folder, "{{ messages[-1].content }}");
  const auto answers = [&](const char* seed) {
    const Result result = run_cadre(
        chat_call(model, {"--json", "--temperature", "1.5", "--top-k", "200", "--seed", seed}),
        {.input = "Once\nOnce\n"});
    expect_success(result);
    return result.out;
  };
  EXPECT_EQ(answers("7"), answers("7"));
  EXPECT_NE(answers("7"), answers("8"));
  const auto lines = json_lines(answers("7"));
  EXPECT_NE(lines[0], lines[1]);
}

TEST(Chat, EveryOptionOfGenerationIsTaken) {
  const TempDir folder;
  const auto model = chat_model(folder);
  const auto answer = [&](const std::vector<std::string>& more) {
    const Result result = run_cadre(chat_call(model, with({"--quiet"}, more)), {.input = "Hello"});
    expect_success(result);
    return result.out;
  };
  const std::string text = answer({});
  for (const std::vector<std::string>& more :
       std::vector<std::vector<std::string>>{{"--experts", "eager"},
                                             {"--threads", "1"},
                                             {"--device", "cpu"},
                                             {"--prepack", "on"},
                                             {"--dequantize"},
                                             {"--decode-experts", "off"},
                                             {"--no-graph"},
                                             {"--temperature", "0.7", "--top-k", "1"},
                                             {"--temperature", "0.7", "--top-p", "0.0001"},
                                             {"--temperature", "0.7", "--min-p", "1"}}) {
    EXPECT_EQ(answer(more), text) << more.front();
  }
  EXPECT_NE(answer({"--repetition-penalty", "1.8"}), text);
  const Result idle = run_cadre(chat_call(model, {"--top-k", "3"}), {.input = ""});
  EXPECT_NE(idle.err.find("cadre chat: --top-k"), std::string::npos);
  const Result stats = run_cadre(chat_call(model, {"--stats"}), {.input = "Hello"});
  EXPECT_NE(stats.err.find("tokens/s"), std::string::npos);
  EXPECT_EQ(stats.out, text);
}

TEST(Chat, ModelsWithoutATemplateAreRefusedBeforeTheyLoad) {
  expect_failure(run_cadre({"chat"}), 4, {"tiny-moe", "chat template", "chat_template.jinja"});
  expect_failure(run_cadre({"chat", "--model", "/nowhere"}), 3, {"/nowhere"});
  expect_failure(run_cadre({"chat", "--top-p", "7"}), 2, {"--top-p"});
  expect_failure(run_cadre({"chat", "Hello"}), 2, {"Hello"});
}

TEST(Chat, AFullContextSaysSoAndWhatToDo) {
  const TempDir folder;
  const auto model = chat_model(folder);
  set_config(model, "max_position_embeddings", 40);
  const std::string length = "100";
  const std::vector<std::string> call = {"chat", "--model", model, "--max-new-tokens", length};
  const Result cut = run_cadre(with(call, {"--json"}), {.input = "Hello\n"});
  EXPECT_EQ(cut.exit_code, 0);
  EXPECT_EQ(json_of(cut)["finish_reason"], "context");
  EXPECT_NE(cut.err.find("context of 40 tokens is full"), std::string::npos) << cut.err;
  EXPECT_NE(cut.err.find("/reset"), std::string::npos);
  const Result full = run_cadre(call, {.input = "Hello\nAgain\n"});
  EXPECT_EQ(full.exit_code, 2);
  EXPECT_NE(full.err.find("the conversation is full"), std::string::npos) << full.err;
  const Result anew = run_cadre(with(call, {"--quiet"}), {.input = "Hello\n/reset\nHello\n"});
  expect_success(anew);
}

/// A conversation at a terminal, as its user sees it.
class Typed {
 public:
  explicit Typed(const std::vector<std::string>& call,
                 const std::map<std::string, std::string>& environment = {{"NO_COLOR", "1"}})
      : process_(call, {.environment = environment, .interactive = true}) {}
  void type(const std::string& keys) { process_.send(keys); }
  void see(const std::string& text) { process_.wait_for_text(text); }
  Result end() { return process_.wait(); }

 private:
  Process process_;
};

TEST(ChatAtATerminal, AnswersAndLeavesByCtrlD) {
  const TempDir folder;
  const auto model = chat_model(folder);
  const std::string answer = continued(model, "User: Hello\nAssistant:")["text"].get<std::string>();
  Typed chat(chat_call(model));
  chat.see("qwen3_moe on cpu, a context of 2048 tokens");
  chat.see("> ");
  chat.type("Hello\n");
  chat.see(answer + "\r\n");
  chat.see("(--max-new-tokens)");
  chat.see("> ");
  chat.type("One\\\n");
  chat.see("... ");
  chat.type("two\n");
  chat.see("> ");
  chat.type("\x04");
  const Result result = chat.end();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(result.out.ends_with("\r\n"));
  EXPECT_EQ(result.out.find('\x1b'), std::string::npos);
}

TEST(ChatAtATerminal, ThePromptIsColouredUnlessThatIsUnwanted) {
  const TempDir folder;
  const auto model = chat_model(folder);
  Typed coloured(chat_call(model, {"--quiet"}), {});
  coloured.see("\x1b[1;36m>\x1b[0m ");
  coloured.type("/exit\n");
  const Result result = coloured.end();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out.find("context"), std::string::npos);  // --quiet
  Typed dumb(chat_call(model), {{"TERM", "dumb"}});
  dumb.see("> ");
  dumb.type("\x04");
  EXPECT_EQ(dumb.end().out.find('\x1b'), std::string::npos);
}

TEST(ChatAtATerminal, CtrlCStopsTheAnswerAndNotTheCommand) {
  const TempDir folder;
  const auto model = chat_model(folder);
  Typed chat({"chat", "--model", model, "--max-new-tokens", "2000", "--temperature", "2"});
  chat.see("> ");
  chat.type("Tell me a long story\n");
  chat.see("\r\n");
  chat.see(" ");  // the answer has begun
  chat.type("\x03");
  chat.see("stopped\r\n> ");
  chat.type("/stats\n");  // what was said counts
  chat.see("turns:   1");
  chat.see("> ");
  chat.type("\x04");
  EXPECT_EQ(chat.end().exit_code, 0);
}

TEST(ChatAtATerminal, CtrlCAtThePromptLeavesTheSecondTime) {
  const TempDir folder;
  const auto model = chat_model(folder);
  Typed chat(chat_call(model));
  chat.see("> ");
  chat.type("half a line\x03");
  chat.see("Ctrl-C again leaves");
  chat.see("> ");
  chat.type("/reset\n");  // in between, so the next one is a first one again
  chat.see("a new conversation");
  chat.see("> ");
  chat.type("\x03");
  chat.see("Ctrl-C again leaves");
  chat.see("> ");
  chat.type("\x03");
  const Result result = chat.end();
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_EQ(result.out.find("turns"), std::string::npos);
}

TEST(ChatAtATerminal, ErrorsOfAMessageAreToldAndTheChatGoesOn) {
  const TempDir folder;
  const auto model = chat_model(folder,
                                "{{ raise_exception('not that') if messages[-1].content == 'bad' "
                                "}}{{ messages[-1].content }}");
  Typed chat(chat_call(model));
  chat.see("> ");
  chat.type("bad\n");
  chat.see("not that");
  chat.see("> ");
  chat.type("/stats\n");
  chat.see("turns:   0");
  chat.type("\x04");
  EXPECT_EQ(chat.end().exit_code, 0);
}

TEST(Chat, WithoutATerminalCtrlCEndsTheCommandAfterTheAnswerAtHand) {
  const TempDir folder;
  const auto model = chat_model(folder);
  Process process({"chat", "--model", model, "--max-new-tokens", "2000", "--temperature", "2"},
                  {.input = "Tell me a story\nAnd another\n"});
  process.wait_for_output(1);
  process.send_signal(SIGINT);
  const Result result = process.wait();
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_TRUE(result.out.ends_with("\n"));
}

TEST(Chat, AReaderThatGoesAwayIsNoFailure) {
  const TempDir folder;
  const auto model = chat_model(folder);
  Process process({"chat", "--model", model, "--max-new-tokens", "2000", "--temperature", "2"},
                  {.input = "Tell me a story\nAnd another\n"});
  process.wait_for_output(1);
  process.close_output();
  EXPECT_EQ(process.wait().exit_code, 0);
}

}  // namespace
}  // namespace cadre::test
