#!/usr/bin/env python3
"""Cadre's encoding beside that of the PyPI package `tokenizers`, in turns, one thread each.

    cmake --build build/release --target encode_bench
    python bench/tokenizers/tokenizers_bench.py --bench build/release/bench/tokenizers/encode_bench \
        --tokenizer qwen3.json --tokenizer mixtral.json prose.txt code.txt cjk.txt

README.md beside it says what is timed.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

# The peer in a process of its own, so that each round starts with empty caches. `encode_batch_fast` leaves out the
# offsets, which Cadre does not make either.
PEER = """
import json, sys, time
import tokenizers
texts = json.load(open(sys.argv[2]))
start = time.perf_counter()
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
row = {"load": time.perf_counter() - start, "version": tokenizers.__version__, "warm": []}
calls = {"batch": lambda: tokenizer.encode_batch_fast(texts), "single": lambda: [tokenizer.encode(t) for t in texts]}
for i in range(int(sys.argv[3]) + 1):
    start = time.perf_counter()
    encodings = calls[sys.argv[4]]()
    seconds = time.perf_counter() - start
    if i:
        row["warm"].append(seconds)
        continue
    checksum = 0
    row.update(cold=seconds, ids=sum(len(e.ids) for e in encodings))
    for encoding in encodings:
        for token_id in encoding.ids:
            checksum = (checksum * 31 + token_id) % 1000000007
    row["checksum"] = checksum
print(json.dumps(row))
"""
ONE_THREAD = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def documents(path, size):
    """The file in pieces of about `size` bytes that end with a line, as many documents have."""
    parts, part, length = [], [], 0
    for line in path.read_text().splitlines(keepends=True):
        part.append(line)
        length += len(line.encode())
        if length >= size:
            parts.append("".join(part))
            part, length = [], 0
    return parts + (["".join(part)] if part else [])


def run(command):
    done = subprocess.run(command, env=ONE_THREAD, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def compare(options, tokenizer, texts, folder):
    """Medians over the rounds of Cadre and of the faster way to call the peer."""
    stored = Path(folder) / "texts.json"
    stored.write_text(json.dumps(texts))
    rows = {"cadre": [], "batch": [], "single": []}
    arguments = [str(tokenizer), str(stored), str(options.repeats)]
    for _ in range(options.rounds):
        rows["cadre"].append(run([str(options.bench.resolve()), *arguments]))
        for call in ("batch", "single"):
            rows[call].append(run([sys.executable, "-c", PEER, *arguments, call]))
    first = rows["cadre"][0]
    for row in rows["batch"] + rows["single"]:
        if (row["ids"], row["checksum"]) != (first["ids"], first["checksum"]):
            sys.exit("%s: Cadre's ids are not those of the package" % tokenizer)
    times = {}
    for kind in ("cold", "warm"):
        mine, batch, single = (median(median([row["cold"]] if kind == "cold" else row["warm"]) for row in rows[call])
                               for call in ("cadre", "batch", "single"))
        times[kind] = (mine, min(batch, single))
    return times, first["ids"], rows["batch"][0]["version"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", type=Path, required=True, help="the built encode_bench")
    parser.add_argument("--tokenizer", type=Path, action="append", required=True, help="a tokenizer.json; may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--repeats", type=int, default=3, help="warm passes in each process")
    parser.add_argument("--document", type=int, default=8192, help="bytes of a document")
    parser.add_argument("texts", type=Path, nargs="+")
    options = parser.parse_args()
    print("| tokenizer | text | MB | tokens | cold MB/s | `tokenizers` | ratio | warm MB/s | `tokenizers` | ratio |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for tokenizer in options.tokenizer:
            for path in options.texts:
                texts = documents(path, options.document)
                megabytes = sum(len(text.encode()) for text in texts) / 1e6
                times, ids, version = compare(options, tokenizer, texts, folder)
                cells = ["%.1f | %.1f | %.1f" % (megabytes / mine, megabytes / peer, peer / mine)
                         for mine, peer in (times["cold"], times["warm"])]
                print("| %s | %s | %.2f | %d | %s |" % (tokenizer.stem, path.stem, megabytes, ids, " | ".join(cells)), flush=True)
    print("tokenizers %s" % version)


if __name__ == "__main__":
    main()
