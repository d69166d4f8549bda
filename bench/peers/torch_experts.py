"""Transformers' own experts modules on PyTorch's CPU kernels, timed as `cadre bench experts` times Cadre: bfloat16,
layers of random weights that take turns, another uniform routing and other memory read before each call.
"""
import time

import torch
import transformers
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

PATTERN_VALUES = 1048573  # random values are drawn once and repeated; a prime, so that no two experts are equal
READ_BYTES = 128 << 20  # before each call
MAX_ERROR = 0.02  # of a token against float32; rounding of bfloat16 gives 0.003 to 0.006
DTYPE = torch.bfloat16


def versions():
    onednn = torch.__config__.show().split("MKL-DNN v")[-1].split()[0]
    return {"torch": torch.__version__, "transformers": transformers.__version__, "torch_onednn": onednn}


def fill(tensor, deviation, first, generator):
    """Normal values; another `first` gives other ones."""
    pattern = (torch.randn(PATTERN_VALUES, generator=generator) * deviation).to(tensor.dtype).roll(first)
    flat = tensor.view(-1)
    whole = flat.numel() // PATTERN_VALUES * PATTERN_VALUES
    flat[:whole].view(-1, PATTERN_VALUES).copy_(pattern)
    flat[whole:].copy_(pattern[: flat.numel() - whole])


class TorchExperts:
    """The layers of one shape."""

    def __init__(self, shape, threads, memory_bytes, seed):
        torch.set_num_threads(threads)
        self.shape = shape
        self.generator = torch.Generator().manual_seed(seed)
        config_class, self.experts_class = Qwen3MoeConfig, Qwen3MoeExperts
        if shape.name.startswith("qwen1.5"):
            config_class, self.experts_class = Qwen2MoeConfig, Qwen2MoeExperts
        self.config = config_class(
            num_experts=shape.num_experts, num_experts_per_tok=shape.top_k, hidden_size=shape.hidden_size,
            moe_intermediate_size=shape.intermediate_size, hidden_act="silu")
        layer_bytes = shape.num_experts * shape.expert_bytes
        self.layers = [self.new_layer(i) for i in range(max(2, -(-memory_bytes // layer_bytes)))]
        self.memory = torch.ones(max(memory_bytes, READ_BYTES) // 4, dtype=torch.float32)
        self.next = 0  # element of `memory` to read from

    def new_layer(self, index):
        torch.set_default_dtype(DTYPE)
        layer = self.experts_class(self.config).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        fill(layer.gate_up_proj.data, self.shape.hidden_size ** -0.5, 4096 * index, self.generator)
        fill(layer.down_proj.data, self.shape.intermediate_size ** -0.5, 4096 * index, self.generator)
        return layer

    def new_call(self, tokens):
        """hidden_states, top_k_index, top_k_weights; the weights in bfloat16, as Transformers' routers give them."""
        keys = torch.rand(tokens, self.shape.num_experts, generator=self.generator)
        weights = (torch.rand(tokens, self.shape.top_k, generator=self.generator) + 0.5) / self.shape.top_k
        hidden = torch.randn(tokens, self.shape.hidden_size, generator=self.generator)
        return hidden.to(DTYPE), keys.topk(self.shape.top_k).indices, weights.to(DTYPE)

    def read_other_memory(self):
        count = READ_BYTES // 4
        if self.next + count > self.memory.numel():
            self.next = 0
        self.memory[self.next:self.next + count].sum()
        self.next += count

    def check(self, layer, call, output):
        """Raises ValueError unless `output` is finite and its last token is right."""
        hidden, ids, weights = (tensor[-1].float() if tensor.is_floating_point() else tensor[-1] for tensor in call)
        truth = torch.zeros(self.shape.hidden_size)
        for expert, weight in zip(ids.tolist(), weights.tolist()):
            gate, up = (layer.gate_up_proj[expert].float() @ hidden).chunk(2)
            truth += weight * (layer.down_proj[expert].float() @ (torch.nn.functional.silu(gate) * up))
        error = ((output[-1].float() - truth).norm() / truth.norm()).item()
        if not bool(output.isfinite().all()) or not error <= MAX_ERROR:
            raise ValueError(f"torch {self.config._experts_implementation}: expected finite numbers and a relative "
                             f"error of at most {MAX_ERROR}, got {error}; it is not timed")

    @torch.inference_mode()
    def measure(self, backend, tokens, repeats):
        """Microseconds of each of `repeats` calls."""
        self.config._experts_implementation = backend
        calls = [self.new_call(tokens) for _ in range(repeats)]
        for i, call in enumerate(calls):  # another layer than below; oneDNN makes the products for these row counts
            layer = self.layers[(i + 1) % len(self.layers)]
            output = layer(*call)
            if i == 0:
                self.check(layer, call, output)
        times = []
        for i, call in enumerate(calls):
            layer = self.layers[i % len(self.layers)]
            self.read_other_memory()
            start = time.perf_counter()
            layer(*call)
            times.append((time.perf_counter() - start) * 1e6)
        return times
