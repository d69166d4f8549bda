#!/usr/bin/env python3
"""Transformers' experts on a GPU beside `cadre bench experts`, in one run: a table of microseconds and ratios.

    gpu.py --cadre build/portable/cli/cadre --shape qwen3-30b-a3b --tokens 1,8,64 [--compile] [--out rows.jsonl]

Cadre replays a graph of eight calls with routings of their own over layers that take turns (`--graph`). Transformers' module
runs the same way where it can be recorded into a CUDA graph, else launched from Python; each call is timed by events over
eight calls, medians of `--repeats`. grouped_mm, batched_mm and eager, uncompiled, and with --compile also
torch.compile(mode="max-autotune-no-cudagraphs") of the module.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from peers import PeerError, numbers, parse_shape, run_json  # noqa: E402
from torch_experts import MAX_ERROR, PATTERN_VALUES, versions  # noqa: E402

CALLS = 8  # that are timed together, as in cadre bench experts
DEVICE = "cuda"
MAX_GATHER = 64 << 30  # batched_mm copies an expert for every token and slot
MAX_DECODE = 64  # tokens up to which our batched_mm is timed: it is made for few


def experts_module(shape, backend):
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(num_experts=shape.num_experts, num_experts_per_tok=shape.top_k,
                            hidden_size=shape.hidden_size, moe_intermediate_size=shape.intermediate_size,
                            hidden_act="silu")
    config._experts_implementation = backend
    with torch.device("meta"):
        return config, Qwen3MoeExperts(config)


def fill(tensor, deviation):
    pattern = (torch.randn(PATTERN_VALUES, device=DEVICE) * deviation).to(tensor.dtype)
    flat = tensor.view(-1)
    for begin in range(0, flat.numel(), PATTERN_VALUES):
        end = min(begin + PATTERN_VALUES, flat.numel())
        flat[begin:end].copy_(pattern[: end - begin])


class Layers:
    """Experts of one shape in GPU memory; backends share them."""

    def __init__(self, shape, memory_bytes):
        self.shape = shape
        layer_bytes = shape.num_experts * shape.expert_bytes
        count = max(2, -(-memory_bytes // layer_bytes))
        self.weights = []
        for _ in range(count):
            up = torch.empty(shape.num_experts, 2 * shape.intermediate_size, shape.hidden_size, dtype=torch.bfloat16,
                             device=DEVICE)
            down = torch.empty(shape.num_experts, shape.hidden_size, shape.intermediate_size, dtype=torch.bfloat16,
                               device=DEVICE)
            fill(up, shape.hidden_size ** -0.5)
            fill(down, shape.intermediate_size ** -0.5)
            self.weights.append((up, down))

    def modules(self, backend):
        result = []
        for up, down in self.weights:
            _, module = experts_module(self.shape, backend)
            module.gate_up_proj = torch.nn.Parameter(up, requires_grad=False)
            module.down_proj = torch.nn.Parameter(down, requires_grad=False)
            result.append(module.eval())
        return result


def new_call(shape, tokens):
    keys = torch.rand(tokens, shape.num_experts, device=DEVICE)
    weights = (torch.rand(tokens, shape.top_k, device=DEVICE) + 0.5) / shape.top_k
    hidden = torch.randn(tokens, shape.hidden_size, device=DEVICE)
    return hidden.bfloat16(), keys.topk(shape.top_k).indices, weights.bfloat16()


def check(shape, module, call, output):
    hidden, ids, weights = (tensor[-1].float() if tensor.is_floating_point() else tensor[-1] for tensor in call)
    truth = torch.zeros(shape.hidden_size, device=DEVICE)
    for expert, weight in zip(ids.tolist(), weights.tolist()):
        gate, up = (module.gate_up_proj[expert].float() @ hidden).chunk(2)
        truth += weight * (module.down_proj[expert].float() @ (torch.nn.functional.silu(gate) * up))
    error = ((output[-1].float() - truth).norm() / truth.norm()).item()
    if not bool(output.isfinite().all()) or not error <= MAX_ERROR:
        raise PeerError(f"relative error {error}, expected at most {MAX_ERROR}; it is not timed")


def time_events(run, repeats):
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return times


@torch.inference_mode()
def measure(layers, backend, tokens, repeats, compiled):
    """Microseconds a call, and whether a CUDA graph was replayed."""
    shape = layers.shape
    modules = layers.modules(backend)
    forwards = [torch.compile(m, mode="max-autotune-no-cudagraphs") if compiled else m for m in modules]
    calls = [new_call(shape, tokens) for _ in range(CALLS)]
    for i in range(3):
        output = forwards[i % len(forwards)](*calls[i])
        if i == 0:
            check(shape, modules[0], calls[0], output)

    def run_all():
        for i, call in enumerate(calls):
            forwards[i % len(forwards)](*call)

    run_all()
    torch.cuda.synchronize()
    graph = None
    if backend != "eager":
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run_all()
            graph.replay()
            torch.cuda.synchronize()
        except Exception:  # it reads routing on the host
            graph = None
            torch.cuda.synchronize()
    if graph is not None:
        return median(time_events(graph.replay, repeats)), True
    run_all()
    return median(time_events(run_all, max(3, repeats // 4) if backend == "eager" else repeats)), False


def measure_torch(shape, options, report):
    layers = Layers(shape, options.memory << 20)
    for tokens in options.tokens:
        for backend in options.backends.split(","):
            if backend == "batched_mm" and tokens * shape.top_k * shape.expert_bytes > MAX_GATHER:
                continue
            for compiled in ([False, True] if options.compile and tokens <= 1024 else [False]):
                name = f"torch {backend}" + (" compiled" if compiled else "")
                try:
                    us, graph = measure(layers, backend, tokens, options.repeats, compiled)
                except (PeerError, RuntimeError) as error:
                    print(f"{shape.name:20} {tokens:6} {name:24} {str(error).splitlines()[0][:60]}")
                    continue
                report({"shape": shape.name, "tokens": tokens, "peer": name, "us": us, "graph": graph},
                       "yes" if graph else "no")


def measure_cadre(shape, options, report):
    for backend, tokens in [("grouped_mm", options.tokens), ("batched_mm", [t for t in options.tokens if t <= MAX_DECODE])]:
        if not tokens:
            continue
        rows = run_json([options.cadre, "bench", "experts", "--device", "cuda", "--graph", "--json", "--shape", shape.name,
                         "--tokens", ",".join(map(str, tokens)), "--experts", backend, "--repeats", options.repeats,
                         "--memory", options.memory])
        for row in rows:
            report({"peer": f"cadre {backend}", "us": row["us_median"], "graph": True, **row},
                   f"yes  {row['percent_of_limit']:5.1f} % of limit, {row['tflops']:.0f} TFLOP/s, "
                   f"{row['active_experts']} active")


def print_ratios(rows):
    """Our fastest backend beside PyTorch's fastest that is not compiled."""
    for shape, tokens in dict.fromkeys((row["shape"], row["tokens"]) for row in rows):
        cell = [row for row in rows if (row["shape"], row["tokens"]) == (shape, tokens)]
        ours = min((row["us"] for row in cell if row["peer"].startswith("cadre")), default=None)
        torch_us = min((row["us"] for row in cell if row["peer"] in ("torch grouped_mm", "torch batched_mm")), default=None)
        if ours and torch_us:
            print(f"{shape:20} {tokens:6} ratio {torch_us / ours:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cadre", type=Path, help="left out: PyTorch alone")
    parser.add_argument("--shape", type=parse_shape, action="append", required=True)
    parser.add_argument("--tokens", type=numbers, default="1,8,64,1024,4096,16384")
    parser.add_argument("--backends", default="grouped_mm,batched_mm")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--memory", type=int, default=1024, help="MiB")
    parser.add_argument("--out", type=argparse.FileType("w"))
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {versions()}")
    print(f"{'shape':20} {'T':>6} {'peer':24} {'us':>9} {'graph':>5}")
    rows = []

    def report(row, remark):
        rows.append(row)
        print(f"{row['shape']:20} {row['tokens']:6} {row['peer']:24} {row['us']:9.1f}   {remark}", flush=True)
        if options.out:
            options.out.write(json.dumps(row) + "\n")

    for shape in options.shape:
        measure_torch(shape, options, report)
        torch.cuda.empty_cache()
        if options.cadre:
            measure_cadre(shape, options, report)
    print_ratios(rows)


if __name__ == "__main__":
    try:
        main()
    except (PeerError, subprocess.SubprocessError) as error:
        sys.exit(str(error))
