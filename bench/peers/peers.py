#!/usr/bin/env python3
"""Runs `cadre bench experts` and what it is compared with in turns, and prints their ratios. README.md says more.

    peers.py --cadre build/release/cli/cadre --shape qwen1.5-moe-a2.7b --tokens 1,8,256 --threads 2
"""
import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

# As in cli/shapes.cc: experts, experts per token, hidden size, intermediate size.
SHAPES = {
    "qwen1.5-moe-a2.7b": (60, 4, 2048, 1408),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "deepseek-v3": (256, 8, 7168, 2048),
    "deepseek-v4-flash": (256, 6, 4096, 2048),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "olmoe-1b-7b": (64, 8, 2048, 1024),
}

# Each peer and the backend of Cadre that it is compared with.
PEERS = {
    "torch_grouped_mm": "grouped_mm",
    "torch_batched_mm": "batched_mm",
    "torch_eager": "eager",
    "onednn_plain": "grouped_mm",
    "onednn_packed": "grouped_mm",
}

# A round in which other programs had a larger share of the machine is dropped: neighbours cost OpenMP's threads, which
# wait for each other at every product, far more than their share, and Cadre's less.
MAX_SHARE_OF_OTHERS = 0.02  # 0.001 when nothing else runs

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Shape:
    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @property
    def expert_bytes(self):
        return 3 * self.hidden_size * self.intermediate_size * 2

    def gathered_bytes(self, tokens):
        """What PyTorch's batched_mm copies in a call: an expert for each token and slot."""
        return tokens * self.top_k * self.expert_bytes


class PeerError(Exception):
    """A message for the user."""


def positive(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return int(text)


def numbers(text):
    return [positive(item) for item in text.split(",")]


def parse_shape(text):
    sizes = SHAPES.get(text) or text.split(",")
    try:
        return Shape(text, *map(positive, map(str, sizes)))
    except (argparse.ArgumentTypeError, TypeError):
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(SHAPES)} or E,k,H,I, got {text!r}") from None


def peer_list(text):
    names = text.split(",")
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(PEERS)}, got {name!r}")
    return names


def has(names, library):
    return any(name.startswith(library) for name in names)


def parse_options(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cadre", type=Path, default=ROOT / "build/release/cli/cadre",
                        help="the command (%(default)s)")
    parser.add_argument("--cadre-options", default="", metavar="TEXT", help="more options for it, separated by spaces")
    parser.add_argument("--onednn", type=Path, default=ROOT / "build/release/bench/peers/onednn_experts",
                        help="onednn_experts (%(default)s)")
    parser.add_argument("--peers", type=peer_list, default=",".join(PEERS), metavar="LIST", help="%(default)s")
    parser.add_argument("--shape", type=parse_shape, action="append", metavar="NAME|E,k,H,I",
                        help="may be given several times (default: qwen1.5-moe-a2.7b and qwen3-30b-a3b)")
    parser.add_argument("--tokens", type=numbers, default="1,4,8,32,256,1024", metavar="LIST", help="%(default)s")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="%(default)s")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each cell (%(default)s)")
    parser.add_argument("--repeats", type=positive, default=4, help="calls of a program in a turn (%(default)s)")
    parser.add_argument("--memory", type=positive, default=1024, metavar="MIB",
                        help="MiB of layers that take turns, two layers at least (%(default)s)")
    parser.add_argument("--gather", type=positive, default=4096, metavar="MIB",
                        help="torch_batched_mm is left out where it copies more MiB of weights a call (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    parser.add_argument("--out", type=argparse.FileType("w"), metavar="FILE", help="gets each row as a line of JSON")
    options = parser.parse_args(arguments)
    options.shape = options.shape or [parse_shape("qwen1.5-moe-a2.7b"), parse_shape("qwen3-30b-a3b")]
    programs = [options.cadre]
    if has(options.peers, "onednn"):
        programs.append(options.onednn)
    for program in programs:
        if not os.access(program, os.X_OK):
            parser.error(f"{program} is no program: build it (README.md), name it (--cadre, --onednn) or leave its "
                         "peers out (--peers)")
    return options


def run_json(command):
    """The objects that a program printed, one a line."""
    command = [str(word) for word in command]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise PeerError(f"{' '.join(command)}: exit status {result.returncode}: {result.stderr.strip()}")
    return [json.loads(line) for line in result.stdout.splitlines()]


def cpu_seconds():
    """CPU time that the machine spent so far, and what this program and those that it waited for had of it."""
    ticks = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]))
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


class OthersMeter:
    """share(): how much of the machine's CPU time other programs have had since this was made, from 0 to 1."""

    def __init__(self):
        self.busy, self.own = cpu_seconds()
        self.start = time.monotonic()

    def share(self):
        busy, own = cpu_seconds()
        return max(0.0, busy - self.busy - (own - self.own)) / ((time.monotonic() - self.start) * os.cpu_count())


class Cell:
    """A shape and a number of tokens: programs take turns, and each turn gives a time per backend or peer."""

    def __init__(self, options, shape, tokens, torch_experts):
        self.options, self.shape, self.tokens, self.torch = options, shape, tokens, torch_experts
        self.left_out = {}
        gathered = shape.gathered_bytes(tokens) / 2**20
        if "torch_batched_mm" in options.peers and gathered > options.gather:
            self.left_out["torch_batched_mm"] = f"not run: copies {gathered / 1024:.1f} GiB of weights a call"
        self.peers = [name for name in options.peers if name not in self.left_out]

    def common_options(self, turn):
        o = self.options
        return ["--shape", self.shape.name, "--tokens", self.tokens, "--threads", o.threads, "--repeats", o.repeats,
                "--memory", o.memory, "--seed", o.seed + turn, "--json"]

    def run_cadre(self, turn):
        backends = sorted({PEERS[name] for name in self.peers})
        rows = run_json([self.options.cadre, "bench", "experts", *self.common_options(turn), "--quiet", "--experts",
                         ",".join(backends), *self.options.cadre_options.split()])
        return {row["experts"]: row for row in rows}

    def run_onednn(self, turn):
        forms = [name.split("_")[1] for name in self.peers if name.startswith("onednn")]
        form = forms[0] if len(forms) == 1 else "both"
        rows = run_json([self.options.onednn, *self.common_options(turn), "--form", form])
        return {row["peer"]: row for row in rows}

    def run_torch(self, _turn):
        return {name: {"us_median": median(self.torch.measure(PEERS[name], self.tokens, self.options.repeats))}
                for name in self.peers if name.startswith("torch")}

    def rows(self):
        """One per peer, in the order of --peers."""
        programs = [self.run_cadre]
        if has(self.peers, "torch"):
            programs.append(self.run_torch)
        if has(self.peers, "onednn"):
            programs.append(self.run_onednn)
        turns = []
        for turn in range(self.options.rounds if self.peers else 0):
            found = {}
            meter = OthersMeter()
            for program in programs if turn % 2 == 0 else reversed(programs):  # what drifts cancels
                found.update(program(turn))
            found["others"] = meter.share()
            turns.append(found)
        return [self.row(name, turns) for name in self.options.peers]

    def row(self, peer, turns):
        row = {"bench": "peers", "shape": self.shape.name, "tokens": self.tokens, "peer": peer, "experts": PEERS[peer],
               "threads": self.options.threads, "cadre_options": self.options.cadre_options}
        if peer in self.left_out:
            return {**row, "note": self.left_out[peer]}
        kept = [turn for turn in turns if turn["others"] <= MAX_SHARE_OF_OTHERS]
        row.update(rounds=len(turns), rounds_dropped=len(turns) - len(kept),
                   share_of_others=max(turn["others"] for turn in turns))
        turns = kept or turns
        ours, theirs = [turn[PEERS[peer]] for turn in turns], [turn[peer] for turn in turns]
        ratios = [their["us_median"] / our["us_median"] for our, their in zip(ours, theirs)]
        row.update(peer_us=median(their["us_median"] for their in theirs),
                   cadre_us=median(our["us_median"] for our in ours), ratio=median(ratios),
                   ratio_min=min(ratios), ratio_max=max(ratios), calls=len(turns) * self.options.repeats,
                   cadre_calls_dropped=sum(our["calls_dropped"] for our in ours))
        for key in ("commit", "cpu", "isa"):
            row[key] = ours[0].get(key)
        for key in ("ceiling_gbs", "ceiling_tflops"):
            row[key] = median(our[key] for our in ours)
        row.update({f"peer_{key}": theirs[0][key] for key in ("version", "implementation") if key in theirs[0]})
        return row


def to_text(rows):
    header = ["shape", "tokens", "peer", "ms", "cadre", "ms", "ratio", "from - to", "dropped", "read GB/s"]
    table = [header]
    for row in rows:
        cells = [row["shape"], str(row["tokens"]), row["peer"]]
        if "note" in row:
            table.append([*cells, row["note"]])
            continue
        table.append([*cells, f"{row['peer_us'] / 1000:.3f}", row["experts"], f"{row['cadre_us'] / 1000:.3f}",
                      f"{row['ratio']:.2f}", f"{row['ratio_min']:.2f} - {row['ratio_max']:.2f}",
                      f"{row['rounds_dropped']}/{row['rounds']}", f"{row['ceiling_gbs']:.1f}"])
    # A note is wider than any column and stands last.
    widths = [max(len(line[i]) for line in table if i < 3 or len(line) == len(header)) for i in range(len(header))]
    right = {1, 3, 5, 6, 7, 8, 9}

    def aligned(line, i):
        is_right = i in right and (i < 3 or len(line) == len(header))
        return line[i].rjust(widths[i]) if is_right else line[i].ljust(widths[i])

    return "\n".join("  ".join(aligned(line, i) for i in range(len(line))).rstrip() for line in table)


def run_all(options, rows):
    """Appends to `rows`; what is there counts when the user stops the run."""
    uses_torch = has(options.peers, "torch")
    about = {}
    if uses_torch:
        import torch_experts  # only now: other peers need no PyTorch
        about = torch_experts.versions()
    about["environment"] = {name: value for name, value in sorted(os.environ.items())
                            if name.startswith(("OMP_", "GOMP_", "MKL_", "ONEDNN_", "DNNL_", "THP_", "CADRE_"))}
    for shape in options.shape:
        layers = None
        if uses_torch:
            layers = torch_experts.TorchExperts(shape, options.threads, options.memory << 20, options.seed)
        for tokens in options.tokens:
            for row in Cell(options, shape, tokens, layers).rows():
                rows.append(row)
                if options.out:
                    print(json.dumps({**row, **about}), file=options.out, flush=True)


def main(arguments=None):
    options = parse_options(arguments)
    rows, status = [], 0
    try:
        run_all(options, rows)
    except KeyboardInterrupt:
        status = 130
    except (PeerError, ImportError, ValueError, RuntimeError) as error:
        print(f"peers.py: {error}", file=sys.stderr)
        status = 1
    if rows:
        print(to_text(rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
