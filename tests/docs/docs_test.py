"""The documents say what is true: links and paths exist, the README's example is the compiled one, its table of
backends is the build's, the commands and options shown are the command's, and the counted promises of
docs/adding_a_*.md hold.

    docs_test.py COMMAND     path of the built `cadre`
"""
import re
import subprocess
import sys
import unittest
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ""
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TOP = {path.name for path in ROOT.iterdir() if not path.name.startswith("build")}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def prose(text):
    """The text without fenced blocks."""
    return FENCE.sub("", text)


@lru_cache(maxsize=None)
def help_of(*words):
    """The text of `cadre WORDS --help`."""
    result = subprocess.run([COMMAND, *words, "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, f"cadre {' '.join(words)} --help: exit {result.returncode}"
    return result.stdout


def options_in(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))


def shown_commands():
    """(document, words, options) of each `cadre ...` line in the documents' blocks and code spans."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        lines = [line for _, block in FENCE.findall(text) for line in block.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", prose(text))
        lines += [line for line in prose(text).splitlines() if line.startswith("    ")]
        for line in lines:
            match = re.match(r"\s*(?:\S*/)?cadre (bench [a-z]+|[a-z]+)\b(.*)", line.split("  #")[0])
            if match:
                yield path.relative_to(ROOT), match[1], options_in(match[2])


class LinksTest(unittest.TestCase):
    def test_relative_links_lead_somewhere(self):
        count = 0
        for path in DOCUMENTS:
            for target in re.findall(r"\]\(([^)#\s]+)", prose(path.read_text(encoding="utf-8"))):
                if "://" in target:
                    continue
                count += 1
                self.assertTrue((path.parent / target).exists(), f"{path.name}: no such file: {target}")
        self.assertGreater(count, 10)

    def test_paths_in_code_spans_exist(self):
        count = 0
        for path in DOCUMENTS:
            for span in re.findall(r"`([A-Za-z.][\w./-]*/[\w./-]*)`", prose(path.read_text(encoding="utf-8"))):
                if span.split("/")[0] not in TOP or span.startswith("cadre/"):
                    continue
                count += 1
                self.assertTrue((ROOT / span).exists(), f"{path.name}: no such path: {span}")
        self.assertGreater(count, 10)


class ReadmeTest(unittest.TestCase):
    def test_the_example_is_the_compiled_one(self):
        blocks = [block for kind, block in FENCE.findall(read("README.md")) if kind == "cpp"]
        self.assertEqual(blocks, [read("examples/hello_moe/main.cc")])

    def test_the_two_commands_come_first(self):
        head = read("README.md").splitlines()[1:5]
        self.assertIn("scripts/quickstart.sh", head[1])
        self.assertIn("scripts/test.sh", head[2])

    def test_the_table_of_backends_is_the_build(self):
        """"yes" stands exactly where src/backends/CMakeLists.txt builds the backend, for a GPU where it finds nvcc."""
        built = {}
        for device, name, rest in re.findall(
            r"^ *cadre_backend\((\w+) (\w+)(.*)\)$", read("src/backends/CMakeLists.txt"), re.MULTILINE
        ):
            built[name, device] = "NOT_BUILT" not in rest
        rows = re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\| ([^|]+) \| ([^|]+) \|$", read("README.md"), re.MULTILINE)
        said = {}
        for name, cpu, cuda in rows:
            said[name, "cpu"] = cpu.split(";")[0].strip() == "yes"  # "yes; with a remark"
            said[name, "cuda"] = cuda.split(";")[0].strip() == "yes"
        self.assertEqual(said, built)


def mentions(pattern):
    """Lines of the library's and the command's own files that match, as {file: count}; tests, benches and // comments do not count."""
    found = {}
    for top in ("src", "include", "cli"):
        for path in (ROOT / top).rglob("*"):
            if not path.is_file() or re.search(r"_(test|fixture|bench)\.", path.name):
                continue
            text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
            count = len(re.findall(pattern, text))
            if count:
                found[str(path.relative_to(ROOT))] = count
    return found


class PromiseTest(unittest.TestCase):
    """docs/adding_a_*.md say how much a newcomer touches; those that are here touch no more."""

    def test_a_backend_is_one_folder_and_one_line(self):
        self.assertRegex(read("docs/adding_a_backend.md"), r"one (new )?folder and one line")
        table = "src/backends/CMakeLists.txt"
        built = re.findall(r"^ *cadre_backend\((\w+) (\w+)\)$", read(table), re.MULTILINE)
        self.assertGreater(len(built), 0)
        for device, name in built:
            folder = f"src/backends/{device}/{name}"
            self.assertTrue((ROOT / folder / "CMakeLists.txt").exists(), folder)
            lines = mentions(
                rf"backends/{device}/{name}\b|\bmake_{name}\b|\bcadre_{device}_{name}\b|cadre_backend\({device} {name}\b"
            )
            # The backend of that name on another device has a make_<name> of its own, in its own namespace.
            of_name = re.compile(rf"src/backends/\w+/{name}/")
            elsewhere = {file: count for file, count in lines.items() if not of_name.match(file)}
            self.assertEqual(elsewhere, {table: 1}, name)

    def test_a_model_is_one_file_and_one_line(self):
        self.assertRegex(read("docs/adding_a_model.md"), r"one (new )?file and one line")
        table = "src/models/CMakeLists.txt"
        built = re.findall(r"^cadre_model\((\w+) (\w+)\)$", read(table), re.MULTILINE)
        self.assertGreater(len(built), 0)
        for architecture, name in built:
            file = f"src/models/{name}.cc"
            lines = mentions(rf'\bbuild_{name}\b|\b{architecture}\b|"{name}"')
            lines.pop(file)
            lines.pop("cli/synthetic_model.cc", None)  # writes checkpoints of a family that is there
            self.assertEqual(lines, {table: 1}, name)
            self.assertIn(f"`{name}`", read("README.md"))


class CommandTest(unittest.TestCase):
    def test_shown_commands_and_options_exist(self):
        shown = list(shown_commands())
        self.assertGreater(len(shown), 5)
        for document, word, options in shown:
            known = options_in(help_of(*word.split()))
            self.assertLessEqual(options, known, f"{document}: cadre {word} has no {options - known}")

    def test_options_in_code_spans_exist(self):
        calls = [[word] for word in self.commands()] + [["bench", word] for word in self.commands("bench")]
        known = set().union(*(options_in(help_of(*words)) for words in calls))
        for path in DOCUMENTS:
            for span in re.findall(r"`(--[^`\n]+)`", prose(path.read_text(encoding="utf-8"))):
                self.assertLessEqual(options_in(span), known, path.name)

    @staticmethod
    def commands(*words):
        return re.findall(r"^  ([a-z]+)\s{2,}\S", help_of(*words), re.MULTILINE)

    def test_the_readme_shows_every_command(self):
        words = {word.split()[0] for document, word, _ in shown_commands() if str(document) == "README.md"}
        self.assertGreater(len(self.commands()), 0)
        self.assertLessEqual(set(self.commands()), words)

    def test_presets_that_the_documents_name_exist(self):
        presets = set(re.findall(r'"name": "([\w-]+)"', read("CMakePresets.json")))
        for path in DOCUMENTS:
            for name in re.findall(r"--preset ([\w-]+)", path.read_text(encoding="utf-8")):
                self.assertIn(name, presets, path.name)


if __name__ == "__main__":
    COMMAND = sys.argv.pop(1)
    unittest.main()
