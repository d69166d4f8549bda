#!/usr/bin/env python3
"""Writes the model folders under tests/data/models whose config keys the bundled fixtures do not cover: tiny random
checkpoints in the hub's layout and what Transformers 5.17 makes of them (float32 on the stored bfloat16 weights, attention
and experts eager), laid out like the bundled expected.safetensors. Also tests/data/models/rope.json: inverse frequencies.

    /opt/oracle/bin/python tests/data/make/make_models.py [NAME...]
"""
import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, DeepseekV4Config, DynamicCache, Glm4MoeConfig,
                          GptOssConfig, GraniteMoeConfig, MiniMaxM2Config, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig)

DATA = pathlib.Path(__file__).resolve().parents[1] / "models"
COMMON = dict(vocab_size=160, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
              num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype="bfloat16")
QWEN = dict(COMMON, intermediate_size=48, moe_intermediate_size=24, num_experts=6)
QWEN2 = dict(QWEN, shared_expert_intermediate_size=40)
MIXTRAL = dict(COMMON, intermediate_size=24, num_local_experts=6)
OLMOE = dict(COMMON, intermediate_size=24, num_experts=6)
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
DEEPSEEK_V4 = dict(COMMON, vocab_size=64, num_key_value_heads=1, max_position_embeddings=512, head_dim=16, q_lora_rank=16, o_groups=2,
                   o_lora_rank=8, moe_intermediate_size=16, n_routed_experts=6, index_n_heads=6, index_head_dim=12)
GLM = dict(COMMON, intermediate_size=40, moe_intermediate_size=16, n_routed_experts=8, head_dim=16)
GRANITE = dict(COMMON, intermediate_size=24, num_local_experts=6, embedding_multiplier=3.0, residual_multiplier=0.4,
               attention_multiplier=0.5, logits_scaling=2.5)
MINIMAX = dict(COMMON, intermediate_size=24, num_local_experts=6, head_dim=16)
GPT_OSS = dict(COMMON, intermediate_size=24, num_local_experts=6, head_dim=16)

# Odd widths everywhere; sequences of more than 200 tokens stretch over YaRN's original context.
MLA = dict(COMMON, num_key_value_heads=4, max_position_embeddings=512, intermediate_size=40, moe_intermediate_size=20, n_routed_experts=8,
           num_experts_per_tok=3, num_hidden_layers=2, first_k_dense_replace=1, kv_lora_rank=26, qk_nope_head_dim=12, qk_rope_head_dim=6,
           v_head_dim=10, vocab_size=64)
MLA_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}


def older(config):
    """The spellings of Transformers 4: torch_dtype, rope_theta with rope_scaling, num_experts."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else dict(rope, type=kind)
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"].startswith("qwen") and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    if config["model_type"] != "gpt_oss":
        config.pop("layer_types", None)
    config["transformers_version"] = "4.41.0"


def without(*keys):
    def edit(config):
        for key in keys:
            del config[key]
    return edit


def renamed(*pairs):
    def edit(tensors):
        for old, new in pairs:
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        return tensors
    return edit


def hub_deepseek(config):
    """The keys of the released configs: older spellings, no head_dim, topk_method and moe_layer_freq in V3's too."""
    older(config)
    for key in ("head_dim", "qk_head_dim", "rope_interleave", "num_local_experts"):
        config.pop(key, None)
    config["moe_layer_freq"] = 1
    config.setdefault("topk_method", "noaux_tc")
    config["scoring_func"] = "sigmoid" if config["model_type"] == "deepseek_v3" else "softmax"


def with_mtp_layer(tensors):
    """A layer for multi-token prediction behind the last one, as in DeepSeek-V3's checkpoint."""
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    extra = {name.replace(f"layers.{last}.", f"layers.{last + 1}."): tensor.clone() for name, tensor in tensors.items() if f"layers.{last}." in name}
    prefix = f"model.layers.{last + 1}."
    hidden = tensors["model.norm.weight"].shape[0]
    extra[prefix + "eh_proj.weight"] = torch.randn(hidden, 2 * hidden, dtype=torch.bfloat16)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        extra[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for name, source in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        if source + ".weight" in tensors:
            extra[f"{prefix}{name}.weight"] = tensors[source + ".weight"].clone()
    return {**tensors, **extra}


def packed(tensors, prefix_from=None, prefix_to=None):
    """Per-expert tensors -> Transformers 5's packed ones."""
    names = {"gate_proj": 0, "up_proj": 1, "down_proj": 2, "w1": 0, "w3": 1, "w2": 2}
    parts, rest = {}, {}
    for name, tensor in tensors.items():
        if prefix_from:
            name = name.replace(prefix_from, prefix_to)
        head, found, tail = name.partition(".experts.")
        if not found:
            rest[name] = tensor
            continue
        expert, projection, _ = tail.split(".")
        parts.setdefault(head, {}).setdefault(int(expert), {})[names[projection]] = tensor
    for head, experts in parts.items():
        ordered = [experts[e] for e in sorted(experts)]
        rest[head + ".experts.gate_up_proj"] = torch.stack([torch.cat([e[0], e[1]]) for e in ordered])
        rest[head + ".experts.down_proj"] = torch.stack([e[2] for e in ordered])
    return rest


def v4_hub(tensors):
    """The names of DeepSeek's own files: no "model." in front, embed, hc_head_fn, kv_norm; a layer for multi-token prediction."""
    def name_of(name):
        name = name.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
        return name.replace(".attn.norm.", ".attn.kv_norm.")
    return {**{name_of(k): v for k, v in tensors.items()}, "mtp.0.e_proj.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}


def v4_older(config):
    """The spellings of DeepSeek's own config."""
    compress = config.pop("rope_parameters")["compress"]
    config["rope_scaling"] = {"type": compress["rope_type"], **{k: compress[k] for k in ("factor", "original_max_position_embeddings",
                                                                                         "beta_fast", "beta_slow")}}
    assert compress["attention_factor"] == 1.0 and config["rope_theta"] == 10000.0
    config["qk_rope_head_dim"] = int(config["head_dim"] * config.pop("partial_rotary_factor"))
    ratios = {SLIDING: 0, SPARSE: 4, HEAVY: 128}
    config["compress_ratios"] = [ratios[kind] for kind in config.pop("layer_types")] + [0]
    rates = config.pop("compress_rates")
    config["compress_rate_csa"], config["compress_rate_hca"] = rates[SPARSE], rates[HEAVY]
    config["num_hash_layers"] = config.pop("mlp_layer_types").count("hash_moe")
    config["torch_dtype"] = config.pop("dtype")


OWN_NAMES = "the names of Transformers' own modules, which save_pretrained() turns into the hub's"


# name: (config, edit of the written config.json or None, edit of the tensors or None, length of the prompt or (batch, length))
CASES = {
    "qwen2_moe_dense_layers": (Qwen2MoeConfig(**QWEN2, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3],
                                              norm_topk_prob=True, qkv_bias=False), None, None, 13),
    "qwen2_moe_sliding_window": (Qwen2MoeConfig(**QWEN2, num_hidden_layers=4, use_sliding_window=True, sliding_window=5,
                                                max_window_layers=3), None, None, 24),
    "qwen2_moe_older_config": (Qwen2MoeConfig(**QWEN2, num_hidden_layers=2, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
                               older, None, 13),
    "qwen2_moe_packed": (Qwen2MoeConfig(**QWEN2, num_hidden_layers=2, head_dim=12), None, packed, 13),
    "qwen3_moe_dense_layers": (Qwen3MoeConfig(**QWEN, num_hidden_layers=3, mlp_only_layers=[0], head_dim=16, attention_bias=True,
                                              norm_topk_prob=False), None, None, 13),
    "qwen3_moe_sliding_window": (Qwen3MoeConfig(**QWEN, num_hidden_layers=2, head_dim=16, use_sliding_window=True, sliding_window=4),
                                 None, None, 24),
    "qwen3_moe_older_config": (Qwen3MoeConfig(**QWEN, num_hidden_layers=2, head_dim=16, tie_word_embeddings=True, norm_topk_prob=True,
                                              rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}),
                               older, None, 13),
    "qwen3_moe_packed": (Qwen3MoeConfig(**QWEN, num_hidden_layers=2, head_dim=10, tie_word_embeddings=True), None, packed, 13),
    "qwen3_moe_yarn": (Qwen3MoeConfig(**QWEN, num_hidden_layers=2, head_dim=16, hidden_act="gelu_pytorch_tanh", rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}), None, None, 40),
    "mixtral_sliding_window": (MixtralConfig(**MIXTRAL, num_hidden_layers=2, sliding_window=6), None, None, 24),
    "mixtral_older_config": (MixtralConfig(**MIXTRAL, num_hidden_layers=2, head_dim=12,
                                           rope_parameters={"rope_type": "default", "rope_theta": 20000.0}), older, None, 13),
    "mixtral_packed": (MixtralConfig(**MIXTRAL, num_hidden_layers=2), None,
                       lambda t: packed(t, "block_sparse_moe", "mlp"), 13),
    "olmoe_clip_qkv": (OlmoeConfig(**OLMOE, num_hidden_layers=2, clip_qkv=0.4, attention_bias=True, norm_topk_prob=True),
                       None, None, 13),
    "olmoe_older_config": (OlmoeConfig(**dict(OLMOE, num_key_value_heads=None), num_hidden_layers=2, rope_parameters={
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}), older, packed, 70),
    # Compressed queries, groups by their best expert, biases, YaRN with unequal mscales; norm_topk_prob does nothing here.
    "deepseek_v2_groups_yarn": (DeepseekV2Config(**MLA, q_lora_rank=14, topk_method="group_limited_greedy", n_group=4, topk_group=2,
                                                 n_shared_experts=2, routed_scaling_factor=1.7, norm_topk_prob=True, attention_bias=True,
                                                 rope_parameters=dict(MLA_YARN, mscale=1.0, mscale_all_dim=0.707)), None, None, 210),
    "deepseek_v2_older_config": (DeepseekV2Config(**MLA, q_lora_rank=None, n_group=3, rope_parameters=dict(
        MLA_YARN, mscale=0.707, mscale_all_dim=0.707)), hub_deepseek, packed, 210),
    "deepseek_v3_older_config": (DeepseekV3Config(**MLA, q_lora_rank=14, n_group=4, topk_group=2, rope_parameters=dict(
        MLA_YARN, mscale=1.0, mscale_all_dim=1.0)), hub_deepseek, with_mtp_layer, 210),
    "deepseek_v3_plain_q": (DeepseekV3Config(**dict(MLA, first_k_dense_replace=0), q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False,
                                             rope_interleave=False, attention_bias=True, num_mtp_layers=0), None, packed, 13),
    # Past the window and many entries, of which the indexer picks few.
    "deepseek_v4_hub": (DeepseekV4Config(**DEEPSEEK_V4, num_hidden_layers=3, layer_types=[SPARSE, HEAVY, SPARSE], hc_mult=4, hc_sinkhorn_iters=20,
                                         compress_rates={SPARSE: 5, HEAVY: 12}, index_topk=6, sliding_window=9, num_hash_layers=2,
                                         partial_rotary_factor=0.25, swiglu_limit=1.0, rope_parameters={
                                             "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0,
                                             "beta_slow": 1.0}), v4_older, v4_hub, (1, 204)),
    "deepseek_v4_own_names": (DeepseekV4Config(**DEEPSEEK_V4, num_hidden_layers=3, layer_types=[SLIDING, SPARSE, HEAVY], hc_mult=3, hc_sinkhorn_iters=2,
                                               hc_eps=0.01, compress_rates={SPARSE: 3, HEAVY: 7}, index_topk=64, sliding_window=30,
                                               mlp_layer_types=["moe", "hash_moe", "moe"], partial_rotary_factor=0.5,
                                               scoring_func="sigmoid", routed_scaling_factor=2.5, mlp_bias=True), None, OWN_NAMES, 26),
    "glm4_moe_groups": (Glm4MoeConfig(**dict(GLM, num_experts_per_tok=3), num_hidden_layers=2, first_k_dense_replace=0, n_group=4,
                                      topk_group=2, use_qk_norm=True, norm_topk_prob=False, routed_scaling_factor=2.5,
                                      n_shared_experts=2, rope_parameters={
                                          "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "partial_rotary_factor": 0.25,
                                          "original_max_position_embeddings": 32}), None, None, 40),
    "glm4_moe_older_config": (Glm4MoeConfig(**GLM, num_hidden_layers=2, tie_word_embeddings=True, attention_bias=True,
                                            rope_parameters={"rope_type": "default", "rope_theta": 3000.0}),
                              older, lambda t: with_mtp_layer(packed(t)), 13),
    "granitemoe_packed": (GraniteMoeConfig(**GRANITE, num_hidden_layers=2, tie_word_embeddings=True, attention_bias=True), None,
                          renamed(("input_linear.weight", "experts.gate_up_proj"), ("output_linear.weight", "experts.down_proj"),
                                  ("router.layer", "router")), 13),
    "granitemoe_older_config": (GraniteMoeConfig(**GRANITE, num_hidden_layers=2, rope_parameters={
        "rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}), older, None, 13),
    "minimax_m2_packed": (MiniMaxM2Config(**MINIMAX, num_hidden_layers=2, rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}), None,
        lambda t: renamed(("block_sparse_moe", "mlp"))(packed(t)), 13),
    "minimax_m2_older_config": (MiniMaxM2Config(**MINIMAX, num_hidden_layers=2, tie_word_embeddings=True), older, None, 13),
    "gpt_oss_defaults": (GptOssConfig(**GPT_OSS, num_hidden_layers=3, attention_bias=False, tie_word_embeddings=True),
                         without("rope_parameters", "layer_types", "sliding_window"), None, 13),
    "gpt_oss_long": (GptOssConfig(**dict(GPT_OSS, vocab_size=32, max_position_embeddings=512), num_hidden_layers=2, sliding_window=20,
                                  layer_types=["full_attention", "sliding_attention"]), older, None, 210),
    "qwen3_moe_proportional": (Qwen3MoeConfig(**QWEN, num_hidden_layers=1, head_dim=16, rope_parameters={
        "rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "factor": 2.0}), None, None, 24),
    # A cached decode from the first token on, past the 16 positions that the model knows.
    "qwen3_moe_dynamic": (Qwen3MoeConfig(**dict(QWEN, max_position_embeddings=16), num_hidden_layers=1, head_dim=16, rope_parameters={
        "rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}), None, None, 40),
}
STEPWISE = {"qwen3_moe_dynamic"}


def randomize(model):
    """Values of order one everywhere: biases, norms and logits must matter."""
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(buffer.shape[0], model.config.n_routed_experts).argsort(-1)[:, :buffer.shape[1]])
        elif name.endswith("e_score_correction_bias") and model.config.model_type == "deepseek_v4":
            buffer.copy_(0.2 * torch.randn_like(buffer))
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.5 * torch.randn_like(parameter))
            else:
                parameter.copy_(1.2 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn_like(buffer))


def capture(model, layers):
    """Hooks on the experts of each MoE layer."""
    seen = {}

    def hook(layer):
        def run(module, inputs, output):
            hidden, index, weights = inputs
            seen[f"moe{layer}.hidden_states"] = hidden.reshape(-1, hidden.shape[-1]).clone()
            seen[f"moe{layer}.top_k_index"] = index.to(torch.int64).clone()
            seen[f"moe{layer}.top_k_weights"] = weights.to(torch.float32).clone()
            seen[f"moe{layer}.output"] = output.reshape(-1, output.shape[-1]).clone()
        return run

    blocks = [getattr(layer, "mlp", None) or layer.block_sparse_moe for layer in layers]
    handles = [block.experts.register_forward_hook(hook(i)) for i, block in enumerate(blocks) if hasattr(block, "experts")]
    return seen, handles


def stepwise(model, ids, seen):
    """Logits of all tokens given one by one, and what the experts saw of them, row by row of the batch."""
    cache = DynamicCache(config=model.config)
    logits, steps = [], []
    for t in range(ids.shape[1]):
        logits.append(model(ids[:, t:t + 1], past_key_values=cache, use_cache=True).logits)
        steps.append(dict(seen))
    for name in seen:
        seen[name] = torch.stack([step[name] for step in steps], 1).flatten(0, 1)
    return torch.cat(logits, 1)


def reference(folder, size, one_by_one):
    batch, length = size if isinstance(size, tuple) else (2, size)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
    model.eval()
    ids = torch.randint(3, model.config.vocab_size, (batch, length))
    seen, handles = capture(model, model.model.layers)
    def run(ids):
        return stepwise(model, ids, seen) if one_by_one else model(ids, use_cache=False).logits

    with torch.no_grad():
        logits = run(ids).float()
    expected = dict(seen)
    seen.clear()
    for handle in handles:
        handle.remove()
    greedy = ids
    with torch.no_grad():
        for _ in range(10):
            step = run(greedy)[:, -1]
            top = step.topk(2).values
            assert ((top[:, 0] - top[:, 1]) > 1e-3).all(), "a near-tie: take another seed"
            greedy = torch.cat([greedy, step.argmax(-1, keepdim=True)], 1)
    return dict(expected, input_ids=ids, logits=logits, greedy_ids=greedy[:, length:])


def make(name, seed):
    config, edit_config, edit_tensors, length = CASES[name]
    torch.manual_seed(seed)
    folder = DATA / name
    shutil.rmtree(folder, ignore_errors=True)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    expected = reference(folder, length, name in STEPWISE)
    if edit_config:
        text = json.loads((folder / "config.json").read_text())
        edit_config(text)
        (folder / "config.json").write_text(json.dumps(text, indent=1) + "\n")
    if edit_tensors == OWN_NAMES:
        state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    elif edit_tensors:
        tensors = edit_tensors(load_file(folder / "model.safetensors"))
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({k: v.contiguous() for k, v in expected.items()}, folder / "expected.safetensors")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name}: {size / 1024:.0f} KiB")
    assert size < 400 * 1024


def make_rope():
    """Inverse frequencies and scale of cos and sin for each rope type."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    rows = []
    for parameters in [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
         "beta_slow": 1.0, "truncate": False},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
         "mscale_all_dim": 0.707},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 4096, "attention_factor": 0.75},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 4096,
         "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0, "partial_rotary_factor": 0.25},
        {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.5},
        {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.3, "factor": 2.0},
        {"rope_type": "proportional", "rope_theta": 10000.0},
    ]:
        config = Qwen3MoeConfig(hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=131072, rope_parameters=dict(parameters))
        inverse, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
        rows.append(dict(parameters, head_dim=64, inverse_frequencies=inverse.tolist(), scale=scale))
    (DATA / "rope.json").write_text(json.dumps({"cases": rows}, indent=1) + "\n")


SEEDS = {}
if __name__ == "__main__":
    names = sys.argv[1:] or [*CASES, "rope"]
    for case in names:
        make_rope() if case == "rope" else make(case, SEEDS.get(case, 20))
