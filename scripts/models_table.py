#!/usr/bin/env python3
"""The table of docs/models.md, from a run of the golden tests: a family has a "yes" where every test of every fixture of it
passed on that backend, in float32 (logits, greedy tokens, experts), bfloat16 and float16.

    build/ci/tests/golden/golden_test --gtest_filter='Models/Golden.*:Models/Quantized.*' --gtest_output=json:cpu.json
    scripts/models_table.py cpu.json             writes the table
    scripts/models_table.py cpu.json --check     fails when the page says something else
    scripts/models_table.py cpu.json --gpu gpu.json --gpu-run "H200, 2026-11-30, commit 0123456"

The second table is of the quantised fixtures: "yes" where the backend ran the experts in their own precision in every dtype
and all tests of the fixture passed, "refused" where it said before loading that it does not run them.

A GPU is not everywhere: what golden_gpu_test gave in a recorded run is kept in docs/models_gpu.json and taken from there.
"""
import argparse
import json
import re
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/models.md"
GPU_RUN = ROOT / "docs/models_gpu.json"
BACKENDS = ("eager", "batched_mm", "grouped_mm")
QUANTIZED_BACKENDS = (*BACKENDS, "deepgemm")
BEGIN, END = "<!-- table: scripts/models_table.py -->\n", "<!-- end of the table -->\n"


def families():
    """(architecture, model_type) in the order of the build's table."""
    return re.findall(r"^cadre_model\((\w+) (\w+)\)$", (ROOT / "src/models/CMakeLists.txt").read_text(), re.MULTILINE)


def fixtures():
    """{fixture: (model_type, layout of the experts)}"""
    found = {}
    for folder in sorted((ROOT / "tests/data/models").iterdir()):
        if not (folder / "expected.safetensors").exists():
            continue
        config = json.loads((folder / "config.json").read_text())
        if "quantization_config" in config:
            continue
        kind = config["model_type"]
        names = []
        for file in folder.glob("model*.safetensors"):
            with open(file, "rb") as data:
                names += json.loads(data.read(struct.unpack("<Q", data.read(8))[0]))
        one_each = any(re.search(r"\.experts\.\d+\.", name) for name in names)
        found[folder.name] = (kind, "one tensor each" if one_each else "packed")
    return found


def quantized_fixtures():
    """{fixture: what its config says of formats}"""
    found = {}
    for folder in sorted((ROOT / "tests/data/models").iterdir()):
        config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
        quantization = config.get("quantization_config")
        if quantization is None or not (folder / "expected.safetensors").exists():
            continue
        parts = [f"`quant_method: {quantization['quant_method']}`"]
        if "weight_block_size" in quantization:
            parts.append("blocks of " + " x ".join(map(str, quantization["weight_block_size"])))
        if "scale_fmt" in quantization:
            parts.append(f"`scale_fmt: {quantization['scale_fmt']}`")
        if "expert_dtype" in config:
            parts.append(f"`expert_dtype: {config['expert_dtype']}`")
        found[folder.name] = (config["model_type"], ", ".join(parts))
    return found


def quantized_results(file):
    """{"fixture": all its tests passed, "fixture backend": it ran there}"""
    found = {}
    for suite in json.loads(Path(file).read_text())["testsuites"]:
        if suite["name"] != "Models/Quantized":
            continue
        for case in suite["testsuite"]:
            if case["result"] == "SKIPPED":
                continue
            name = case["name"].split("/")[1]
            found[name] = found.get(name, True) and not case.get("failures")
            for backend in QUANTIZED_BACKENDS:
                if f"{backend}_float32" in case:
                    found[f"{name} {backend}"] = True
    return found


def quantized_answer(name, backend, found):
    if name not in found:
        return "not run"
    if not found[name]:
        return "no"
    return "yes" if backend is None or f"{name} {backend}" in found else "refused"


def quantized_table(cpu, gpu, gpu_run):
    heads = ["`--dequantize`"] + [f"`{b}`" for b in QUANTIZED_BACKENDS]
    lines = ["| family | as its config says | " + " | ".join(f"CPU {h}" for h in heads) + " | " +
             " | ".join(f"GPU {h}" for h in heads) + " |", "|---|---|" + "---|" * (2 * len(heads))]
    for name, (kind, formats) in quantized_fixtures().items():
        cells = [quantized_answer(name, b, found) for found in (cpu, gpu) for b in (None, *QUANTIZED_BACKENDS)]
        lines.append(f"| `{kind}` | {formats} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\nGPU: {gpu_run}.\n"


def results(file):
    """{"fixture backend": passed} of a run; cases that were skipped are left out."""
    passed = {}
    for suite in json.loads(Path(file).read_text())["testsuites"]:
        if suite["name"] != "Models/Golden":
            continue
        for case in suite["testsuite"]:
            name = case["name"].split("/")[1]
            backend = next(b for b in BACKENDS if name.endswith("_" + b))
            key = f"{name.removesuffix('_' + backend)} {backend}"
            if case["result"] != "SKIPPED":
                passed[key] = passed.get(key, True) and not case.get("failures")
    return passed


def answer(names, backend, passed):
    known = [passed.get(f"{name} {backend}") for name in names]
    if None in known:
        return "not run"
    return "yes" if all(known) else "no"


def table(cpu, gpu):
    lines = ["| family (`model_type`) | experts in the file | " + " | ".join(f"CPU `{b}`" for b in BACKENDS) + " | " +
             " | ".join(f"GPU `{b}`" for b in BACKENDS) + " |",
             "|---|---|" + "---|" * (2 * len(BACKENDS))]
    known = fixtures()
    for architecture, kind in families():
        names = [name for name, (model_type, _) in known.items() if model_type == kind]
        layouts = ", ".join(sorted({known[name][1] for name in names}))
        cells = [answer(names, b, cpu) for b in BACKENDS] + [answer(names, b, gpu["passed"]) for b in BACKENDS]
        lines.append(f"| {architecture} (`{kind}`) | {layouts} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\nGPU: {gpu['run']}.\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cpu")
    parser.add_argument("--gpu")
    parser.add_argument("--gpu-run")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.gpu:
        record = {"run": args.gpu_run, "passed": results(args.gpu),
                  "quantized_run": args.gpu_run, "quantized": quantized_results(args.gpu)}
        GPU_RUN.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    gpu = json.loads(GPU_RUN.read_text())
    made = (head + BEGIN + "\n" + table(results(args.cpu), gpu) + "\n" +
            quantized_table(quantized_results(args.cpu), gpu.get("quantized", {}), gpu.get("quantized_run", "not run")) +
            "\n" + END + rest.split(END)[1])
    if not args.check:
        PAGE.write_text(made)
    elif made != page:
        sys.exit("docs/models.md: the table is not what this run gave; run scripts/models_table.py (see its head)")


if __name__ == "__main__":
    main()
