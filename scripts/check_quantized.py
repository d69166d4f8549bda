#!/usr/bin/env python3
"""Does Transformers read what `cadre quantize` writes, and as the same numbers?

    scripts/check_quantized.py --cadre build/ci/cli/cadre MODEL... [--formats fp8,fp8-ue8m0,fp4]

Each model is quantised, then its logits are computed three times from the same tokens: by cadre (--dequantize, float32), by
Transformers with dequantize=True, and by Transformers' own modules for quantised weights (FP8Linear, FP8Experts). The last ones
need a GPU and a kernel from the hub; without --gpu plain products of the weights, taken block by block as the config says, stand
in for that kernel, so that what is checked is how weights and scales are loaded. Prints |difference| / |cadre's| of each.
Needs torch, transformers, accelerate (5.17 was used).
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, FineGrainedFP8Config, Mxfp4Config

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def run(*words):
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


def weights_of(values, scales, block):
    """[.., N, K] float32; block n // block[0], k // block[1] decides the scale."""
    if values.dtype == torch.int8:
        bytes_ = values.view(torch.uint8).long()
        values = torch.stack([E2M1[bytes_ & 15], E2M1[bytes_ >> 4]], -1).flatten(-2)
        block = (1, 32)
    values, scales = values.float(), scales.float()
    rows = torch.arange(values.shape[-2]) // block[0]
    cols = torch.arange(values.shape[-1]) // block[1]
    return values * scales[..., rows, :][..., cols]


class StandIn:
    """The kernel's three products with activations as they are."""

    @staticmethod
    def matmul(x, weight, scales, block, dtype, activation_scale=None):
        return (x.float() @ weights_of(weight, scales, block).T).to(dtype)

    @staticmethod
    def batched_matmul(x, weight, scales, block_size=None, expert_ids=None):
        w = weights_of(weight, scales, block_size)
        return torch.stack([x[i].float() @ w[e].T for i, e in enumerate(expert_ids)]).to(x.dtype)

    @staticmethod
    def grouped_matmul(x, weight, scales, offsets=None, tokens_per_expert=None, block_size=None):
        w = weights_of(weight, scales, block_size)
        out = x.new_zeros(x.shape[0], w.shape[1])
        begin = 0
        for e, end in enumerate(offsets.tolist()):
            out[begin:end] = (x[begin:end].float() @ w[e].T).to(x.dtype)
            begin = end
        return out


def model_class(config):
    return getattr(transformers, config.architectures[0])


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits.float().cpu()


def load(folder, dtype, **options):
    config = AutoConfig.from_pretrained(folder)
    model, info = model_class(config).from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    if dtype == torch.float32:  # some families keep parts in the checkpoint's dtype
        for value in [*model.parameters(), *model.buffers()]:
            if value.dtype == torch.bfloat16:
                value.data = value.data.float()
    faults = {k: sorted(v)[:2] for k, v in info.items() if v}
    return model.eval(), faults


def dequantized(folder, dtype, method):
    config = Mxfp4Config(dequantize=True) if method == "mxfp4" else FineGrainedFP8Config(dequantize=True)
    return load(folder, dtype, quantization_config=config)


def quantized_on_cpu(folder, dtype):
    from transformers.integrations import finegrained_fp8 as fp8

    with mock.patch("torch.cuda.is_available", return_value=True), mock.patch(
        "torch.cuda.get_device_capability", return_value=(9, 0)
    ):
        model, faults = load(folder, dtype, device_map="cpu", experts_implementation="eager")
    mock.patch.object(fp8, "load_finegrained_fp8_kernel", return_value=StandIn).start()
    mock.patch.object(fp8, "is_deepgemm_loadable", return_value=False).start()
    return model, faults


def difference(a, b):
    return ((a - b).norm() / b.norm()).item()


def check(cadre, source, format_, folder, gpu):
    out = folder / "quantized"
    report = json.loads(run(cadre, "quantize", source, out, "--format", format_, "--json", "--quiet"))
    config = json.loads((out / "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    ids = torch.randint(0, vocabulary, (2, 33), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, folder / "ids.safetensors")
    method = config["quantization_config"]["quant_method"]
    row = {"model": Path(source).name, "format": format_, "block": report["block_size"],
           "bytes": round(report["bytes_after"] / report["bytes_before"], 3)}
    try:
        run(cadre, "forward", "--model", out, "--inputs", folder / "ids.safetensors", "--out", folder / "ours.safetensors",
            "--dequantize", "--dtype", "float32", "--device", "cpu", "--quiet")
        truth = load_file(folder / "ours.safetensors")["logits"]
    except RuntimeError as error:
        row["cadre"] = str(error)[-100:]
        truth = None
    plain = logits(load(source, torch.float32)[0], ids)

    def measure(name, make):
        nonlocal truth
        try:
            model, faults = make()
            found = logits(model, ids)
            row[name] = "" if truth is None else f"{difference(found, truth):.1e}"
            row[name] += f" (from the plain model {difference(found, plain):.1e})" + (f" {faults}" if faults else "")
            if truth is None:
                truth = found
        except Exception as error:  # what a user would see is the result
            row[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
        finally:
            mock.patch.stopall()

    measure("dequantize", lambda: dequantized(out, torch.float32, method))
    if method != "mxfp4":
        measure("modules", lambda: quantized_on_cpu(out, torch.float32))
    if gpu:
        ids = ids.cuda()
        measure("gpu", lambda: load(out, torch.bfloat16, device_map="cuda"))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--cadre", required=True)
    parser.add_argument("--formats", default="fp8,fp8-ue8m0,fp4")
    parser.add_argument("--gpu", action="store_true", help="also in Transformers' own FP8 compute on a GPU")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for source in arguments.models:
        for format_ in arguments.formats.split(","):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    row = check(arguments.cadre, source, format_, Path(folder), arguments.gpu)
                except RuntimeError as error:
                    row = {"model": Path(source).name, "format": format_, "refused": str(error)[-300:]}
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
