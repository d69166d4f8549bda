"""bench/peers/peers.py: options, turns and ratios, with made-up programs in place of cadre and onednn_experts. What
needs PyTorch is only compiled."""
import contextlib
import io
import json
import re
import stat
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "peers"
sys.path.insert(0, str(FOLDER))
import peers  # noqa: E402

# Appends its kind to the log and prints the times of the turn, which it knows by its seed.
PROGRAM = """#!{python}
import json, sys
turn = int(sys.argv[sys.argv.index("--seed") + 1])
with open("{log}", "a") as log:
    log.write("{kind} " + " ".join(sys.argv[1:]) + "\\n")
if turn >= {fails_at}:
    sys.exit("made to fail")
for row in {rows}:
    print(json.dumps({{**row, "us_median": {times}[turn], "ceiling_gbs": 30 + turn, "ceiling_tflops": 5,
                      "calls_dropped": 2}}))
"""


class PeersTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.log = self.folder / "log"
        self.make_program("cadre", [{"experts": "grouped_mm", "commit": "abc"}], [1000, 2000, 4000])
        self.make_program("onednn", [{"peer": "onednn_plain", "version": "2.6.3"}], [3000, 8000, 4000])
        self.set_shares_of_others(0, 0, 0)

    def make_program(self, kind, rows, times, fails_at=99):
        path = self.folder / kind
        path.write_text(PROGRAM.format(python=sys.executable, kind=kind, log=self.log, rows=rows, times=times,
                                       fails_at=fails_at))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def set_shares_of_others(self, *shares):
        patch = mock.patch.object(peers.OthersMeter, "share", side_effect=shares)
        patch.start()
        self.addCleanup(patch.stop)

    def run_peers(self, *more):
        """Exit status, standard output and standard error."""
        out, errors = io.StringIO(), io.StringIO()
        arguments = ["--cadre", str(self.folder / "cadre"), "--onednn", str(self.folder / "onednn"), "--peers",
                     "onednn_plain", "--shape", "8,2,64,32", "--tokens", "3", "--rounds", "3", *more]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                status = peers.main(arguments)
            except SystemExit as stop:
                status = stop.code
        return status, out.getvalue(), errors.getvalue()

    def test_shapes_are_those_of_the_command(self):
        text = (ROOT / "cli" / "shapes.cc").read_text(encoding="utf-8")
        found = re.findall(r'shape\("([^"]+)", (\d+), (\d+), (\d+), (\d+)\)', text)
        self.assertTrue(found)
        self.assertEqual({name: tuple(map(int, sizes)) for name, *sizes in found}, peers.SHAPES)

    def test_wrong_options_are_refused(self):
        for option, value, message in [
            ("--shape", "qwen", "expected one of qwen1.5-moe-a2.7b"),
            ("--shape", "8,2,64", "got '8,2,64'"),
            ("--shape", "8,2,64,0", "got '8,2,64,0'"),
            ("--tokens", "1,0", "expected a whole number, 1 or more, got '0'"),
            ("--peers", "onednn", "expected some of torch_grouped_mm"),
            ("--rounds", "-1", "1 or more, got '-1'"),
            ("--cadre", "/nowhere/cadre", "/nowhere/cadre is no program: build it"),
        ]:
            with self.subTest(option=option, value=value):
                status, _, errors = self.run_peers(f"{option}={value}")
                self.assertEqual(status, 2)
                self.assertIn(message, errors)

    def test_programs_take_turns_with_the_same_arguments(self):
        status, _, errors = self.run_peers("--cadre-options", "--routing one")
        self.assertEqual((status, errors), (0, ""))
        lines = self.log.read_text().splitlines()
        self.assertEqual([line.split()[0] for line in lines],
                         ["cadre", "onednn", "onednn", "cadre", "cadre", "onednn"])
        same = "--shape 8,2,64,32 --tokens 3 --threads 7 --repeats 4 --memory 1024 --seed 0 --json"
        same = re.sub("--threads 7", f"--threads {len(peers.os.sched_getaffinity(0))}", same)
        self.assertEqual(lines[0], f"cadre bench experts {same} --quiet --experts grouped_mm --routing one")
        self.assertEqual(lines[1], f"onednn {same} --form plain")

    def test_the_ratio_is_the_median_of_the_turns_ratios(self):
        rows_file = self.folder / "rows"
        status, out, _ = self.run_peers("--out", str(rows_file))
        self.assertEqual(status, 0)
        row = json.loads(rows_file.read_text())
        self.assertEqual((row["ratio"], row["ratio_min"], row["ratio_max"]), (3, 1, 4))
        self.assertEqual((row["peer_us"], row["cadre_us"], row["ceiling_gbs"]), (4000, 2000, 31))
        self.assertEqual((row["rounds"], row["rounds_dropped"]), (3, 0))
        self.assertEqual((row["calls"], row["cadre_calls_dropped"]), (12, 6))
        self.assertEqual((row["commit"], row["peer_version"]), ("abc", "2.6.3"))
        self.assertEqual(out.splitlines()[1].split(), ["8,2,64,32", "3", "onednn_plain", "4.000", "grouped_mm", "2.000",
                                                       "3.00", "1.00", "-", "4.00", "0/3", "31.0"])

    def test_rounds_that_others_disturbed_are_dropped_and_counted(self):
        for shares, ratio, dropped in [((0.06, 0.01, 0.02), 2.5, "1/3"), ((0.5, 0.5, 0.5), 3, "3/3")]:
            with self.subTest(shares=shares):
                self.set_shares_of_others(*shares)
                _, out, _ = self.run_peers()
                self.assertEqual(out.splitlines()[1].split()[6], f"{ratio:.2f}")
                self.assertIn(f" {dropped} ", out)

    def test_the_share_of_others_counts_their_time_and_not_ours(self):
        mock.patch.stopall()
        with mock.patch.object(peers, "cpu_seconds", side_effect=[(100, 7), (106, 9)]):
            with mock.patch.object(peers.time, "monotonic", side_effect=[50, 60]):
                with mock.patch.object(peers.os, "cpu_count", return_value=2):
                    self.assertAlmostEqual(peers.OthersMeter().share(), 4 / 20)
        before, end = peers.cpu_seconds(), time.process_time() + 0.3
        while time.process_time() < end:
            pass
        after = peers.cpu_seconds()
        self.assertGreater(after[1] - before[1], 0.25)
        self.assertGreater(after[0] - before[0], 0.15)  # of ticks, on a machine that may be busy

    def test_a_failing_program_ends_the_run_with_its_message(self):
        self.make_program("onednn", [], [], fails_at=1)
        status, out, errors = self.run_peers()
        self.assertEqual((status, out), (1, ""))
        self.assertIn("/onednn --shape 8,2,64,32", errors)
        self.assertIn("exit status 1: made to fail", errors)

    def test_copies_beyond_the_limit_are_left_out_with_the_reason(self):
        options = peers.parse_options(["--cadre", str(self.folder / "cadre"), "--peers", "torch_batched_mm"])
        shape = peers.parse_shape("qwen1.5-moe-a2.7b")
        self.assertEqual(shape.gathered_bytes(256), 17716740096)  # 256 x 4 experts of 3 x 2048 x 1408 x 2 bytes
        rows = peers.Cell(options, shape, 256, None).rows()
        self.assertEqual([row["note"] for row in rows], ["not run: copies 16.5 GiB of weights a call"])
        self.assertIn("not run: copies 16.5 GiB", peers.to_text(rows))
        self.assertEqual(peers.Cell(options, shape, 32, None).left_out, {})

    def test_what_needs_pytorch_compiles(self):
        path = FOLDER / "torch_experts.py"
        compile(path.read_text(encoding="utf-8"), str(path), "exec")


if __name__ == "__main__":
    unittest.main()
