// Interactive behaviour: progress bars, Ctrl-C, readers that go away.
#include <sys/stat.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "end_to_end/fixtures.h"

namespace cadre::test {
namespace {

/// An evaluation that takes well over a second on this machine: the held-out text as often as that
/// needs. Runs it without a terminal, where no bar may show.
std::vector<std::string> long_evaluation(const TempDir& folder) {
  const std::string once = read_file(CADRE_TEST_DATA "/tiny-moe/heldout.txt");
  std::string text = once;
  for (;;) {
    const std::vector<std::string> call = {
        "eval", "--threads", "1", "--dtype", "float32", "--text", folder.write("long.txt", text)};
    const auto start = std::chrono::steady_clock::now();
    const Result result = run_cadre(call);
    expect_success(result);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (elapsed.count() > 2.5 || testing::Test::HasFailure()) return call;
    text += text;
  }
}

std::vector<std::string> endless_generation() {
  return {"generate", "In the beginning", "--max-new-tokens", "2000", "--ignore-eos"};
}

TEST(Terminal, ALongStepShowsABarUnlessItIsUnwanted) {
  const TempDir folder;
  const std::vector<std::string> call = long_evaluation(folder);
  const Result coloured = run_cadre(call, {.terminal = true});
  EXPECT_EQ(coloured.exit_code, 0);
  for (const char* part : {"evaluating [", "#", "%", "tokens/s", "ETA", "\x1b[36m"}) {
    EXPECT_NE(coloured.err.find(part), std::string::npos) << part;
  }
  EXPECT_TRUE(coloured.err.ends_with("\r\x1b[K"));  // wiped at the end
  EXPECT_EQ(coloured.out.find('\x1b'), std::string::npos);

  const Result plain = run_cadre(call, {.environment = {{"NO_COLOR", "1"}}, .terminal = true});
  EXPECT_NE(plain.err.find("evaluating [#"), std::string::npos);
  EXPECT_EQ(plain.err.find("\x1b[36m"), std::string::npos);

  EXPECT_EQ(run_cadre(call, {.environment = {{"TERM", "dumb"}}, .terminal = true}).err, "");
  std::vector<std::string> quiet = call;
  quiet.push_back("--quiet");
  EXPECT_EQ(run_cadre(quiet, {.terminal = true}).err, "");
}

TEST(Terminal, StepsUnderASecondShowNothing) {
  EXPECT_EQ(run_cadre({"inspect"}, {.terminal = true}).err, "");
}

TEST(Terminal, CtrlCStopsAfterTheNextTokenWithACompleteLine) {
  for (const int signal : {SIGINT, SIGTERM}) {
    Process process(endless_generation());
    process.wait_for_output(1);
    process.send_signal(signal);
    const Result result = process.wait();
    EXPECT_EQ(result.exit_code, 128 + signal);
    EXPECT_EQ(result.signal, 0);
    EXPECT_EQ(result.err, "");
    EXPECT_TRUE(result.out.ends_with("\n"));
  }
}

TEST(Terminal, CtrlCKeepsStatsJsonAndOut) {
  std::vector<std::string> call = endless_generation();
  call.push_back("--stats");
  Process text(call);
  text.wait_for_output(1);
  text.send_signal(SIGINT);
  const Result stopped = text.wait();
  EXPECT_EQ(stopped.exit_code, 130);
  EXPECT_NE(stopped.err.find("tokens/s"), std::string::npos) << stopped.err;

  // With --json nothing comes out before the end, so the time of the first token is guessed: the
  // signal is sent again until it comes after it. Before it, the process just ends.
  const TempDir folder;
  const auto out = folder / "out.safetensors";
  const auto ids = write_input_ids(folder / "ids.safetensors", {2, 3}, {1, 2, 3});
  Result result;
  for (int wait_ms = 50; result.exit_code != 130 && wait_ms < 4000; wait_ms *= 2) {
    Process process({"generate", "--input-ids", ids, "--max-new-tokens", "2000", "--ignore-eos",
                     "--json", "--stats", "--out", out});
    std::this_thread::sleep_for(std::chrono::milliseconds(wait_ms));
    process.send_signal(SIGINT);
    result = process.wait();
    if (result.exit_code == 0) break;
  }
  ASSERT_EQ(result.exit_code, 130) << result.err;
  const nlohmann::json json = json_of(result);
  EXPECT_EQ(json["finish_reasons"], nlohmann::json::array({"stopped", "stopped"}));
  const size_t count = std::min(json["output_ids"][0].size(), json["output_ids"][1].size());
  EXPECT_GT(json["stats"]["prefill_seconds"], 0);
  EXPECT_EQ(read_shape(out, "output_ids"), (Dims{2, static_cast<int64_t>(count)}));
  EXPECT_LT(count, 2000u);
}

TEST(Terminal, CtrlCBeforeTheFirstTokenEndsTheProcess) {
  // The text is a FIFO that nobody writes to: the evaluation has not begun.
  const TempDir folder;
  const auto fifo = folder / "fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  Process process({"eval", "--text", fifo});
  process.send_signal(SIGINT);
  const Result result = process.wait();
  EXPECT_EQ(result.signal, SIGINT);
  EXPECT_EQ(result.out, "");
}

TEST(Terminal, AReaderThatGoesAwayIsNoFailure) {
  Process process(endless_generation());
  process.wait_for_output(1);
  process.close_output();
  const Result result = process.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.signal, 0);
  EXPECT_EQ(result.err, "");
}

TEST(Terminal, TextIsGivenOutAsItIsProduced) {
  Process process(endless_generation());
  process.wait_for_output(1);
  process.send_signal(SIGKILL);
  const Result result = process.wait();
  EXPECT_EQ(result.signal, SIGKILL);  // it was still at work when the first text came
  EXPECT_NE(result.out, "");
}

}  // namespace
}  // namespace cadre::test
