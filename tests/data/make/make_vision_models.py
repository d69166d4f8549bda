#!/usr/bin/env python3
"""Writes tests/data/models/qwen3_vl_moe_images: what the bundled qwen3_vl_moe fixture does not cover. Two sequences with two
images each (one of two frames), before, between and after text; a dense layer and attention biases; the hub's layout of
experts (transposed) with hidden_size = 2 * moe_intermediate_size, where gate_up_proj alone does not tell the layouts apart;
the older spelling of RoPE parameters. Values by Transformers 5.17 as in make_models.py.

    /opt/oracle/bin/python tests/data/make/make_vision_models.py
"""
import json
import shutil

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from make_models import DATA, capture

NAME = "qwen3_vl_moe_images"
IMAGE = 90
TEXT = dict(vocab_size=96, hidden_size=32, intermediate_size=40, moe_intermediate_size=16, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2, mlp_only_layers=[1], attention_bias=True,
            max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "mrope_interleaved": True, "mrope_section": [4, 2, 2]})
VISION = dict(hidden_size=32, num_heads=2, intermediate_size=40, depth=3, deepstack_visual_indexes=[0, 2], patch_size=4,
              temporal_patch_size=1, spatial_merge_size=2, num_position_embeddings=25, out_hidden_size=32)
GRIDS = torch.tensor([[1, 4, 4], [1, 2, 6], [1, 6, 2], [2, 2, 4]])
TOKENS = (GRIDS.prod(-1) // 4).tolist()


def randomize(model):
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            noise = torch.randn_like(parameter)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif any(part in name for part in ("embed_tokens", "lm_head", "pos_embed")):
                parameter.copy_(0.5 * noise)
            elif "experts" in name:
                parameter.copy_(1.2 * noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(1.2 * noise / (parameter.numel() / parameter.shape[0]) ** 0.5)


def prompt():
    text = lambda count: torch.randint(3, IMAGE, (count,))
    image = lambda i: torch.full((TOKENS[i],), IMAGE)
    rows = [[text(3), image(0), text(2), image(1), text(8)], [image(2), text(6), image(3), text(7)]]
    return torch.stack([torch.cat(row) for row in rows])


def reference(folder):
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                               experts_implementation="eager").eval()
    ids = prompt()
    pixels = torch.rand(int(GRIDS.prod(-1).sum()), 3 * VISION["patch_size"] ** 2) * 2 - 1
    run = lambda ids: model(ids, pixel_values=pixels, image_grid_thw=GRIDS, mm_token_type_ids=(ids == IMAGE).int(),
                            use_cache=False).logits.float()
    seen, handles = capture(model, model.model.language_model.layers)
    with torch.no_grad():
        logits = run(ids)
    for handle in handles:
        handle.remove()
    greedy = ids
    with torch.no_grad():
        for _ in range(10):
            step = run(greedy)[:, -1]
            top = step.topk(2)
            assert ((top.values[:, 0] - top.values[:, 1]) > 1e-3).all() and (top.indices[:, 0] != IMAGE).all(), "take another seed"
            greedy = torch.cat([greedy, step.argmax(-1, keepdim=True)], 1)
    return dict(seen, input_ids=ids, pixel_values=pixels, image_grid_thw=GRIDS, logits=logits, greedy_ids=greedy[:, ids.shape[1]:])


def hub_layout(folder):
    """The spellings and the layout of the checkpoints on the hub."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = rope
    if "num_local_experts" in text:
        text["num_experts"] = text.pop("num_local_experts")
    config["vision_config"].pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if ".experts." in name:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    torch.manual_seed(20)
    folder = DATA / NAME
    shutil.rmtree(folder, ignore_errors=True)
    config = Qwen3VLMoeConfig(text_config=TEXT, vision_config=VISION, image_token_id=IMAGE, video_token_id=91, vision_start_token_id=92,
                              vision_end_token_id=93, dtype="bfloat16")
    model = Qwen3VLMoeForConditionalGeneration(config)
    randomize(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    expected = reference(folder)
    hub_layout(folder)
    save_file({k: v.contiguous() for k, v in expected.items()}, folder / "expected.safetensors")
    print(f"{NAME}: {sum(f.stat().st_size for f in folder.iterdir()) / 1024:.0f} KiB")
