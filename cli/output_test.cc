#include "output.h"

#include <gtest/gtest.h>

#include "bundled_model.h"
#include "cadre/error.h"
#include "interrupt.h"
#include "support/temp_dir.h"

namespace cadre::cli {
namespace {

std::string error_of(const std::filesystem::path& path) {
  try {
    require_writable(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Output, RequireWritablePassesWhereAFileCanBeMade) {
  const test::TempDir folder;
  EXPECT_EQ(error_of(""), "");
  EXPECT_EQ(error_of(folder / "new.safetensors"), "");
  EXPECT_EQ(error_of(folder.write("old.safetensors", "x")), "");
  EXPECT_EQ(error_of("/dev/full"), "");
}

TEST(Output, RequireWritableNamesTheFolderThatIsMissing) {
  const test::TempDir folder;
  const std::string message = error_of(folder / "missing" / "a.safetensors");
  EXPECT_NE(message.find((folder / "missing").string()), std::string::npos) << message;
  EXPECT_NE(message.find("No such file"), std::string::npos) << message;
  EXPECT_NE(error_of(folder.path()).find("got a folder"), std::string::npos);
}

TEST(Output, RequireDistinctKnowsAFileByWhateverName) {
  const test::TempDir folder;
  const std::string file = folder.write("a.safetensors", "x");
  std::filesystem::create_symlink(file, folder / "link");
  std::filesystem::create_hard_link(file, folder / "hard");
  for (const char* name : {"a.safetensors", "link", "hard"}) {
    EXPECT_THROW(require_distinct(folder / name, file), InvalidArgument) << name;
  }
  require_distinct(folder / "new.safetensors", file);
  require_distinct(folder.write("b.safetensors", "x"), file);
  require_distinct("", file);
}

TEST(BundledModel, IsFoundInTheSourceTreeAndOnlyInCadreAssetsWhenThatIsSet) {
  EXPECT_EQ(bundled_model_path(), CADRE_ASSETS "/tiny-moe");
  const test::TempDir folder;
  setenv("CADRE_ASSETS", folder.path().c_str(), 1);
  try {
    bundled_model_path();
    ADD_FAILURE() << "an empty folder was taken";
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find((folder / "tiny-moe").string()), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("--model"), std::string::npos);
  }
  folder.write("tiny-moe/config.json", "{}");
  EXPECT_EQ(bundled_model_path(), (folder / "tiny-moe").string());
  unsetenv("CADRE_ASSETS");
}

TEST(Interrupt, IsNotedUnderAGuardAndTheOldHandlerComesBack) {
  std::signal(SIGINT, SIG_IGN);
  {
    const InterruptGuard guard;
    raise(SIGINT);  // ignored before: stays ignored, as for a job in the background
    EXPECT_EQ(interrupt_signal(), 0);
    raise(SIGTERM);
    EXPECT_EQ(interrupt_signal(), SIGTERM);
  }
  struct sigaction action {};
  sigaction(SIGTERM, nullptr, &action);
  EXPECT_EQ(action.sa_handler, SIG_DFL);
}

TEST(Output, APlaceThatCannotBeWrittenNamesItsOption) {
  try {
    require_writable("/no/such/folder/page.html", "--report");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("--report /no/such/folder/page.html"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace cadre::cli
