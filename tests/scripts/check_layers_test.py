"""scripts/check_layers.py finds planted includes of each forbidden kind and passes the allowed ones."""
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_layers.py"

# A small tree with one header in each place; every test adds one file that includes one of them.
HEADERS = dict.fromkeys([
    "include/cadre/cadre.h", "include/cadre/tensor.h", "include/cadre/experts.h", "include/cadre/model.h",
    "src/core/check.h", "src/quant/codec.h", "src/experts/plan.h", "src/dense/dense_ops.h",
    "src/io/json.h", "src/layers/rope.h", "src/models/config.h", "src/generation/sampler.h",
    "src/backends/cpu/kernels/matmul.h", "src/backends/cpu/eager/eager.h",
    "src/backends/cpu/grouped_mm/tiles.h", "src/backends/cuda/kernels/mma.h", "cli/options.h",
    "tests/support/temp.h",
], "")
HEADERS["src/io/harness.h"] = "#include <gtest/gtest.h>\n"


def run(root):
    return subprocess.run([sys.executable, "-B", SCRIPT, root], capture_output=True, text=True)


class CheckLayersTest(unittest.TestCase):
    def answer(self, source, include):
        """Runs the script on the small tree plus `source`, which includes `include`."""
        with tempfile.TemporaryDirectory() as folder:
            for name in HEADERS:
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("#pragma once\n" + HEADERS[name])
            path = Path(folder, source)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f'#include <vector>\n#include "{include}"\n')
            return run(folder)

    def assert_refused(self, source, include, reason):
        result = self.answer(source, include)
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn(f'{source}:2: #include "{include}"', result.stdout)
        self.assertIn(reason, result.stdout)

    def assert_passes(self, source, include):
        result = self.answer(source, include)
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertIn("1 includes, 0 wrong", result.stdout)

    def test_upward_includes_are_refused(self):
        for source, include in [
            ("src/core/a.cc", "quant/codec.h"),
            ("src/core/a.cc", "models/config.h"),
            ("src/experts/a.cc", "layers/rope.h"),
            ("src/layers/a.cc", "models/config.h"),
            ("src/models/a.cc", "generation/sampler.h"),
            ("src/generation/a.cc", "cli/options.h"),
            ("src/core/a.cc", "cadre/experts.h"),
            ("src/experts/a.cc", "cadre/model.h"),
        ]:
            with self.subTest(source=source, include=include):
                self.assert_refused(source, include, "may not see")

    def test_siblings_are_refused(self):
        self.assert_refused("src/experts/a.cc", "dense/dense_ops.h", "experts may not see dense")
        self.assert_refused("src/dense/a.cc", "cadre/experts.h", "dense may not see experts")
        self.assert_refused("src/layers/a.cc", "io/json.h", "layers may not see io")

    def test_backends_see_their_own_device_kernels_and_no_sibling(self):
        eager = "src/backends/cpu/eager/a.cc"
        self.assert_passes(eager, "eager.h")
        self.assert_passes(eager, "backends/cpu/kernels/matmul.h")
        self.assert_passes(eager, "experts/plan.h")
        self.assert_passes(eager, "dense/dense_ops.h")
        self.assert_refused(eager, "backends/cpu/grouped_mm/tiles.h", "never a sibling")
        self.assert_refused(eager, "../grouped_mm/tiles.h", "never a sibling")
        self.assert_refused(eager, "backends/cuda/kernels/mma.h", "never a sibling")
        self.assert_refused(eager, "io/json.h", "backends may not see io")

    def test_nobody_includes_a_backend(self):
        for source in ("src/models/a.cc", "src/experts/a.cc", "cli/a.cc"):
            self.assert_refused(source, "backends/cpu/eager/eager.h", "nobody includes a backend")

    def test_public_headers_and_examples_see_public_headers_only(self):
        self.assert_refused("include/cadre/experts.h", "core/check.h", "public headers only")
        self.assert_refused("examples/hello/main.cc", "core/check.h", "public headers only")
        self.assert_passes("examples/hello/main.cc", "cadre/cadre.h")

    def test_allowed_includes_pass(self):
        for source, include in [
            ("src/layers/a.cc", "experts/plan.h"),
            ("src/models/a.cc", "io/json.h"),
            ("src/models/a.cc", "core/check.h"),
            ("cli/a.cc", "cadre/cadre.h"),
            ("cli/a.cc", "options.h"),
            ("src/experts/plan_test.cc", "support/temp.h"),
            ("src/experts/plan_test.cc", "io/json.h"),
            ("tests/conformance/a.cc", "experts/plan.h"),
        ]:
            with self.subTest(source=source, include=include):
                self.assert_passes(source, include)

    def test_a_test_header_is_for_tests(self):
        self.assert_passes("src/io/broken.h", "support/temp.h")
        self.assert_passes("src/io/json_test.cc", "support/temp.h")
        self.assert_refused("src/io/a.cc", "support/temp.h", "only tests include")
        self.assert_refused("src/io/a.cc", "io/harness.h", "only tests include")

    def test_a_header_or_folder_outside_the_table_is_refused(self):
        self.assert_refused("include/cadre/novel.h", "cadre/tensor.h", "belongs to no layer")
        self.assert_refused("src/novel/a.cc", "core/check.h", "belongs to no layer")

    def test_a_missing_file_is_refused(self):
        self.assert_refused("src/core/a.cc", "core/nowhere.h", "no such file")

    def test_an_empty_folder_is_no_success(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(run(folder).returncode, 1)

    def test_this_tree_is_clean(self):
        result = run(ROOT)
        self.assertEqual(result.returncode, 0, result.stdout)


if __name__ == "__main__":
    unittest.main()
