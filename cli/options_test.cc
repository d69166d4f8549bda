#include "options.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "core/device_runtime.h"

namespace cadre::cli {
namespace {

/// Parses `arguments` as the common options of a command.
CommonOptions parse(std::vector<std::string> arguments) {
  CommonOptions common;
  CLI::App app;
  add_common_options(app, common);
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes a stack
  app.parse(arguments);
  return common;
}

template <typename E>
std::string message_of(const std::vector<std::string>& arguments) {
  try {
    parse(arguments);
  } catch (const E& error) {
    return error.what();
  }
  return "no error";
}

TEST(Options, DefaultsAreTheLibrarys) {
  const CommonOptions common = parse({});
  EXPECT_EQ(common.model, "");
  EXPECT_TRUE(common.experts.empty());
  EXPECT_EQ(common.load.device, Device{});
  EXPECT_FALSE(common.load.dtype.has_value());
  EXPECT_EQ(common.load.num_threads, 0);
  EXPECT_EQ(common.load.prepack, Prepack::kAuto);
  EXPECT_FALSE(common.load.quantization_config.has_value());
  EXPECT_EQ(common.seed, 0u);
  EXPECT_FALSE(common.quiet);
  EXPECT_FALSE(common.json);
}

TEST(Options, EachReachesItsPlace) {
  const CommonOptions common = parse({"--model",
                                      "m",
                                      "--revision",
                                      "r",
                                      "--device",
                                      "cuda:2",
                                      "--dtype",
                                      "float16",
                                      "--experts",
                                      "eager",
                                      "--threads",
                                      "3",
                                      "--prepack",
                                      "off",
                                      "--dequantize",
                                      "--seed",
                                      "18446744073709551615",
                                      "--quiet",
                                      "--json",
                                      "--decode-experts",
                                      "16",
                                      "--no-graph"});
  EXPECT_EQ(common.model, "m");
  EXPECT_EQ(common.load.revision, "r");
  EXPECT_EQ(common.load.device, (Device{DeviceType::kCuda, 2}));
  EXPECT_EQ(common.load.dtype, DType::kF16);
  EXPECT_EQ(common.experts, (ExpertsImplementation{{"", "eager"}}));
  EXPECT_EQ(common.load.num_threads, 3);
  EXPECT_EQ(common.load.prepack, Prepack::kOff);
  ASSERT_TRUE(common.load.quantization_config.has_value());
  EXPECT_TRUE(common.load.quantization_config->dequantize);
  EXPECT_EQ(common.seed, 18446744073709551615u);
  EXPECT_TRUE(common.quiet);
  EXPECT_TRUE(common.json);
  EXPECT_TRUE(common.no_graph);
}

TEST(Options, AMapOfSubConfigsIsReadFromJson) {
  const CommonOptions common =
      parse({"--experts", R"({"text_config":"grouped_mm","vision_config":"eager"})"});
  EXPECT_EQ(common.experts,
            (ExpertsImplementation{{"text_config", "grouped_mm"}, {"vision_config", "eager"}}));
}

TEST(Options, BadValuesNameTheOptionWhatItTakesAndWhatCame) {
  const auto holds = [](const std::string& text, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
    }
  };
  using E = InvalidArgument;
  holds(message_of<E>({"--threads", "-1"}), {"--threads", "from 0 to 1024", "\"-1\""});
  holds(message_of<E>({"--threads", "4x"}), {"--threads", "\"4x\""});
  holds(message_of<E>({"--seed", "18446744073709551616"}), {"--seed", "18446744073709551616"});
  holds(message_of<E>({"--prepack", "yes"}), {"--prepack", "auto, on, off", "\"yes\""});
  holds(message_of<E>({"--dtype", "half-ish"}), {"--dtype", "bfloat16", "\"half-ish\""});
  holds(message_of<E>({"--device", "tpu"}), {"cpu", "cuda:N", "\"tpu\""});
  holds(message_of<E>({"--decode-experts", "0"}), {"--decode-experts", "\"0\""});
  holds(message_of<E>({"--experts", "groupedmm"}),
        {"--experts", "eager", "did you mean grouped_mm?"});
  holds(message_of<E>({"--experts", "{\"a\":"}), {"--experts"});
  holds(message_of<E>({"--experts", "{\"a\":1}"}), {"--experts", "{\"a\":1}"});
  holds(message_of<E>({"--experts", "{\"a\":\"nope\"}"}), {"--experts", "\"nope\""});
  holds(message_of<Unsupported>({"--dtype", "float64"}), {"--dtype", "float64", "bfloat16"});
}

TEST(Options, TheVariableChoosesTheExpertsUnlessTheOptionDoes) {
  setenv("CADRE_EXPERTS_IMPLEMENTATION", "batched_mm", 1);
  EXPECT_EQ(chosen_experts(parse({})), (ExpertsImplementation{{"", "batched_mm"}}));
  EXPECT_EQ(load_options(parse({"--experts", "eager"})).experts_implementation,
            (ExpertsImplementation{{"", "eager"}}));
  setenv("CADRE_EXPERTS_IMPLEMENTATION", "nope", 1);
  try {
    chosen_experts(parse({}));
    ADD_FAILURE() << "an unknown name was taken";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("CADRE_EXPERTS_IMPLEMENTATION"), std::string::npos);
  }
  setenv("CADRE_EXPERTS_IMPLEMENTATION", "", 1);
  EXPECT_TRUE(chosen_experts(parse({})).empty());
  unsetenv("CADRE_EXPERTS_IMPLEMENTATION");
}

// Without the variable the answer is the machine's: checked only for being one of the two.
TEST(Options, TheVariableChoosesTheDeviceUnlessTheOptionDoes) {
  setenv("CADRE_DEVICE", "cuda:7", 1);
  EXPECT_EQ(default_device(), (Device{DeviceType::kCuda, 7}));
  EXPECT_FALSE(parse({}).device_given);
  EXPECT_TRUE(parse({"--device", "cpu"}).device_given);
  setenv("CADRE_DEVICE", "tpu", 1);
  try {
    default_device();
    ADD_FAILURE() << "an unknown device was taken";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("CADRE_DEVICE"), std::string::npos) << text;
    EXPECT_NE(text.find("\"tpu\""), std::string::npos) << text;
  }
  setenv("CADRE_DEVICE", "", 1);
  DeviceRuntime* runtime = find_device_runtime(DeviceType::kCuda);
  const Device device = default_device();
  const bool has_gpu = runtime != nullptr && runtime->device_count() > 0;
  EXPECT_TRUE(device == Device{} || has_gpu);
  EXPECT_EQ(device.index, 0);
  unsetenv("CADRE_DEVICE");
}

TEST(Options, AnEmptyTextIsRefusedWithItsOptionsName) {
  for (const char* name : {"--model", "--revision", "--experts", "--device", "--dtype"}) {
    const std::string text = message_of<InvalidArgument>({name, ""});
    EXPECT_NE(text.find("expected"), std::string::npos) << name << ": " << text;
  }
  EXPECT_NE(message_of<InvalidArgument>({"--model", ""}).find("--model"), std::string::npos);
}

TEST(Options, AHiddenOptionIsTakenButNotShown) {
  CommonOptions common;
  CLI::App app;
  add_common_options(app, common);
  hide_options(app, {"--seed"});
  EXPECT_EQ(app.help().find("--seed"), std::string::npos);
  EXPECT_NE(app.help().find("--threads"), std::string::npos);
  app.parse(std::vector<std::string>{"7", "--seed"});
  EXPECT_EQ(common.seed, 7u);
}

TEST(Options, TheModelMayBeAnArgumentOrAnOptionButNotBoth) {
  CommonOptions common;
  EXPECT_EQ(with_model(common, "a").model, "a");
  common.model = "b";
  EXPECT_EQ(with_model(common, "").model, "b");
  EXPECT_THROW(with_model(common, "a"), InvalidArgument);
}

TEST(Options, ARevisionBelongsToAHubIdAndNotToAFolder) {
  CommonOptions common;
  common.model = CADRE_ASSETS "/tiny-moe";
  EXPECT_EQ(model_path(common), common.model);
  common.load.revision = "v2";
  EXPECT_THROW(model_path(common), InvalidArgument);
  common.model = "nobody/nothing";
  EXPECT_EQ(model_path(common), common.model);
}

TEST(Options, NumbersAreReadWholeAndInRange) {
  EXPECT_EQ(parse_number<int>("--n", "12", 0, 20), 12);
  EXPECT_FLOAT_EQ(parse_number<float>("--n", "0.25", 0.0f, 1.0f), 0.25f);
  for (const char* text : {"", " 1", "1 ", "0x1", "1.5", "21", "-1"}) {
    EXPECT_THROW(parse_number<int>("--n", text, 0, 20), InvalidArgument) << text;
  }
  for (const char* text : {"nan", "inf", "-0.1", "1e", "1.1"}) {
    EXPECT_THROW(parse_number<float>("--n", text, 0.0f, 1.0f), InvalidArgument) << text;
  }
}

/// What `arguments` leave of a list of numbers and a list of backends.
std::pair<std::vector<int64_t>, std::vector<std::string>> parse_lists(
    std::vector<std::string> arguments) {
  std::vector<int64_t> numbers = {7};
  std::vector<std::string> backends = {"grouped_mm"};
  CLI::App app;
  add_numbers(app, "--tokens", numbers, 1, 100, "help");
  add_backends_option(app, backends);
  std::reverse(arguments.begin(), arguments.end());
  app.parse(arguments);
  return {numbers, backends};
}

TEST(Options, ListsReplaceTheirDefaults) {
  using Lists = std::pair<std::vector<int64_t>, std::vector<std::string>>;
  EXPECT_EQ(parse_lists({}), (Lists{{7}, {"grouped_mm"}}));
  EXPECT_EQ(parse_lists({"--tokens", "1,100,5", "--experts", "eager,batched_mm"}),
            (Lists{{1, 100, 5}, {"eager", "batched_mm"}}));
  EXPECT_EQ(parse_lists({"--experts", "all"}), (Lists{{7}, {}}));  // all: no name at all
}

TEST(Options, EveryItemOfAListIsChecked) {
  for (const char* text : {"0", "101", "1,", ",1", "1,,2", "1 2", "", "x"}) {
    EXPECT_THROW(parse_lists({"--tokens", text}), InvalidArgument) << text;
  }
  for (const char* text : {"nope", "eager,nope", "eager,", ""}) {
    EXPECT_THROW(parse_lists({"--experts", text}), InvalidArgument) << text;
  }
}

TEST(Options, ABenchmarkBringsItsOwnExperts) {
  CommonOptions common;
  CLI::App app;
  add_common_options(app, common, ExpertsOption::kOwn);
  EXPECT_EQ(app.get_option_no_throw("--experts"), nullptr);
  EXPECT_NE(app.get_option_no_throw("--seed"), nullptr);
}

}  // namespace
}  // namespace cadre::cli
