"""Checks with Transformers that every spelling in tests/data/models/rope_spellings.json gives the logits of qwen3_moe_yarn.

Run: /opt/oracle/bin/python tests/data/make/check_rope_spellings.py   (Transformers 5.17)
"""
import json
import pathlib
import shutil
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

DATA = pathlib.Path(__file__).parent.parent / "models"
SOURCE = DATA / "qwen3_moe_yarn"

expected = load_file(SOURCE / "expected.safetensors")
for what, patch in json.loads((DATA / "rope_spellings.json").read_text())["equal"].items():
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(SOURCE, folder, dirs_exist_ok=True)
        config = json.loads((SOURCE / "config.json").read_text())
        del config["rope_parameters"]
        config.update(patch)
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                     experts_implementation="eager").eval()
        with torch.no_grad():
            logits = model(expected["input_ids"], use_cache=False).logits
    error = (logits - expected["logits"]).norm() / expected["logits"].norm()
    print(f"{what}: relative difference {error:.3g}")
    assert error < 1e-6, what
