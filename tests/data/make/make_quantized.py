#!/usr/bin/env python3
"""Makes tests/data/quantized/transformers.safetensors: weights that Transformers' own operations (Fp8Quantize,
Fp8Dequantize) quantised and dequantised, so that ours are held to bits that we did not compute.

    make_quantized.py OUT        needs torch 2.11 and transformers 5.17
"""
import sys
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

ROWS, COLS, BLOCK = 64, 128, 32


def quantizer(scale_fmt):
    config = SimpleNamespace(weight_block_size=(BLOCK, BLOCK), scale_fmt=scale_fmt)
    return SimpleNamespace(quantization_config=config)


def main():
    torch.manual_seed(6)
    weight = (torch.randn(ROWS, COLS) * 0.05).to(torch.bfloat16)
    weight[:BLOCK, :BLOCK] = 0  # a block of zeros
    weight[40, 100] = 7  # one huge value
    tensors = {"weight": weight}
    for scale_fmt in ("float", "ue8m0"):
        made = Fp8Quantize(quantizer(scale_fmt)).convert({"w.weight": weight})
        values, scales = made["w.weight"], made["w.weight_scale_inv"]
        out = Fp8Dequantize(quantizer(scale_fmt))._dequantize_one(values, scales, torch.bfloat16)
        tensors |= {f"{scale_fmt}.values": values, f"{scale_fmt}.scales": scales, f"{scale_fmt}.dequantized": out}
    packed = torch.randint(-128, 128, (ROWS, COLS // 2), dtype=torch.int8)
    exponents = torch.randint(120, 134, (ROWS, COLS // 32), dtype=torch.uint8)
    out = Fp8Dequantize(quantizer("ue8m0"))._dequantize_one(packed, exponents, torch.bfloat16)
    tensors |= {"fp4.values": packed, "fp4.scales": exponents, "fp4.dequantized": out}
    save_file({name: t.contiguous() for name, t in tensors.items()}, sys.argv[1])


if __name__ == "__main__":
    main()
