#include "report.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace cadre::cli {
namespace {

ExpertsRow row(const std::string& shape, int64_t tokens, const std::string& experts, double us,
               std::optional<double> percent) {
  ExpertsRow row;
  row.shape = shape;
  row.config.num_experts = 60;
  row.tokens = tokens;
  row.experts = experts;
  row.routing = "uniform";
  row.calls.median_seconds = us * 1e-6;
  row.calls.percent_of_limit = percent;
  row.calls.num_calls = 20;
  row.calls.num_dropped = 3;
  return row;
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(Report, HasATableAndTwoPlotsForEachShape) {
  const std::string page = report_page(
      {"abc123", "A <CPU> & more", "avx2", 2},
      {row("first", 1, "grouped_mm", 1234.5, 81.25), row("first", 256, "grouped_mm", 9e4, 40),
       row("first", 1, "eager", 2345.6, std::nullopt), row("second", 1, "eager", 10, 5)});
  EXPECT_EQ(count(page, "<table>"), 2);
  EXPECT_EQ(count(page, "<svg"), 4);
  // A line a backend and plot: 2 * 2 of the first shape, 2 of the second.
  EXPECT_EQ(count(page, "<polyline"), 6);
  // 3 + 1 points of time, 2 + 1 of shares: a row without a share has none.
  EXPECT_EQ(count(page, "<circle"), 7);
  for (const char* part :
       {"abc123", "A &lt;CPU&gt; &amp; more", "1234.5", "81.2", "<td>-</td>", "<td>256</td>",
        "prefers-color-scheme: dark", "grouped_mm, 256: 90 ms"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
}

TEST(Report, PackedExpertsHavePlotsOfTheirOwn) {
  std::vector<ExpertsRow> rows = {row("s", 1, "eager", 2, 1), row("s", 1, "eager", 1, 2)};
  rows[1].packed = true;
  const std::string page = report_page({"c", "p", "i", 1}, rows);
  EXPECT_EQ(count(page, "<table>"), 2);
  EXPECT_EQ(count(page, ", packed, computing in"), 1);
}

TEST(Report, SaysWhichPagesTheLimitIsOf) {
  std::vector<ExpertsRow> rows = {row("s", 1, "eager", 2, 1), row("s", 1, "eager", 1, 2)};
  rows[0].pages = 4096;
  rows[1].pages = 2 << 20;
  const std::string page = report_page({"c", "p", "i", 1}, rows);
  EXPECT_EQ(count(page, "<table>"), 2);
  EXPECT_EQ(count(page, ", on pages of 4 KiB, computing in"), 1);
  EXPECT_EQ(count(page, ", on pages of 2 MiB, computing in"), 1);
  EXPECT_EQ(count(report_page({"c", "p", "i", 1}, {row("s", 1, "eager", 2, 1)}), ", on pages of"),
            0);
}

TEST(Report, NeedsNothingFromElsewhere) {
  const std::string page = report_page({"c", "p", "i", 1}, {row("s", 1, "eager", 1, 1)});
  for (const char* part : {"http:", "https:", "<script", "src=", "@import", "url("}) {
    EXPECT_EQ(page.find(part), std::string::npos) << part;
  }
  for (const char* tag : {"html", "head", "body", "table", "svg", "figure", "div"}) {
    EXPECT_EQ(count(page, std::string("<") + tag + ">") + count(page, std::string("<") + tag + " "),
              count(page, std::string("</") + tag + ">"))
        << tag;
  }
}

TEST(Report, WithoutRowsIsStillAPage) {
  EXPECT_TRUE(report_page({"c", "p", "i", 1}, {}).ends_with("</html>\n"));
}

TEST(Report, EscapesWhatHtmlTakesForItsOwn) {
  EXPECT_EQ(escape_html("a<b>&\"c\""), "a&lt;b&gt;&amp;&quot;c&quot;");
}

}  // namespace
}  // namespace cadre::cli
