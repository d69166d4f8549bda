#!/usr/bin/env python3
"""Writes tests/data/sampler_cases.json: logits, history and options, and the probabilities that Transformers' logits processors
(5.17, in the order of its generate()) leave. Token ids that were cut are absent."""
import json
import pathlib

import torch
from transformers.generation.logits_process import (MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper,
                                                    TopKLogitsWarper, TopPLogitsWarper)

OUT = pathlib.Path(__file__).resolve().parents[1] / "sampler_cases.json"


def expected(case):
    scores = torch.tensor([case["logits"]], dtype=torch.float32)
    ids = torch.tensor([case["history"]], dtype=torch.int64)
    chain = []
    if case["repetition_penalty"] != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
    if case["temperature"] != 1.0:
        chain.append(TemperatureLogitsWarper(case["temperature"]))
    if case["top_k"]:
        chain.append(TopKLogitsWarper(case["top_k"]))
    if case["top_p"] < 1.0:
        chain.append(TopPLogitsWarper(case["top_p"]))
    if case["min_p"] > 0.0:
        chain.append(MinPLogitsWarper(case["min_p"]))
    for processor in chain:
        scores = processor(ids, scores)
    kept = torch.isfinite(scores[0])
    probabilities = torch.softmax(scores.double(), -1)[0]
    return [[i, probabilities[i].item()] for i in range(len(kept)) if kept[i]]


def main():
    generator = torch.Generator().manual_seed(1)
    cases = []

    def add(logits, history=(0,), **options):
        case = {"logits": [round(float(x), 4) for x in logits], "history": list(history), "temperature": 1.0, "top_k": 0, "top_p": 1.0,
                "min_p": 0.0, "repetition_penalty": 1.0}
        case.update(options)
        case["expected"] = expected(case)
        cases.append(case)

    normal = lambda n: (torch.randn(n, generator=generator) * 3).tolist()
    for temperature in (0.3, 1.0, 2.5):
        for options in ({}, {"top_k": 1}, {"top_k": 5}, {"top_k": 1000}, {"top_p": 0.0}, {"top_p": 0.1}, {"top_p": 0.9}, {"min_p": 0.05},
                        {"min_p": 1.0}, {"repetition_penalty": 1.7}, {"repetition_penalty": 0.6},
                        {"top_k": 8, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.3}):
            add(normal(40), (3, 3, 7, 39, 3, 0), temperature=temperature, **options)
    ties = [2.0, 1.0, 2.0, 1.0, 1.0, 0.0, 2.0, 1.0]
    for options in ({"top_k": 2}, {"top_k": 4}, {"top_p": 0.2}, {"top_p": 0.5}, {"top_p": 0.85}, {"min_p": 0.5}, {"top_k": 4, "top_p": 0.9}):
        add(ties, **options)
    add([5.0, -5.0, 0.0, -1.0], (0, 1, 1, 2), repetition_penalty=2.0)
    add([0.0] * 6, (0,), top_p=0.4)
    add([-1e30, 3.0, 1e30, 2.0], (0,), temperature=1.0)
    OUT.write_text("[\n" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "\n]\n")


if __name__ == "__main__":
    main()
