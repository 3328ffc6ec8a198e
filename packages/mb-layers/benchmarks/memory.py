"""What a layer keeps for the backward pass, by option, and what fewer bits do to gradients.

    python packages/mb-layers/benchmarks/memory.py              # on a GPU if there is one

Bytes per token are those of the tensors that autograd saves, each storage once, parameters apart.
Errors are relative to exact gradients, in fp32 on random weights and tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json

import torch
from mb_layers import FrozenWeight, MoE, MoEConfig, add_lora, dMoE, freeze_in_bits
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SHAPE = {"hidden_size": 512, "ffn_hidden_size": 192, "num_experts": 32, "top_k": 8}
OPTIONS: dict[str, dict] = {
    "dMoE": {},
    "recompute": {"recompute": True},
    "saved_activation_bits=8": {"saved_activation_bits": 8},
    "saved_activation_bits=4": {"saved_activation_bits": 4},
    "gelu": {"activation": "gelu"},
    "capacity 1.25": {"capacity_factor": 1.25},
    "mask": {},
    "shared expert": {"shared_expert_hidden_size": 192},
    "mlp_bias": {"mlp_bias": True},
    "mlp_bias, recompute": {"mlp_bias": True, "recompute": True},
    "mlp_bias, saved_activation_bits=4": {"mlp_bias": True, "saved_activation_bits": 4},
    "LoRA, rank 16": {},
    "LoRA, rank 16, recompute": {"recompute": True},
    "LoRA over 4 bits": {},
}
ACTIVATIONS = (  # but relu and reglu, which are refused
    *("swiglu", "geglu", "geglu_tanh", "swigluoai", "swiglu(limit=1)"),
    *("gelu", "gelu_tanh", "silu", "squared_relu"),
)


def saved_bytes(layer: nn.Module, *inputs: Tensor, **arguments: Tensor) -> int:
    """Bytes of the storages that one forward pass keeps, without the layer's own."""
    own = {
        part.untyped_storage().data_ptr()
        for t in layer.state_dict().values()
        for part in ((t.codes, t.scales) if isinstance(t, FrozenWeight) else (t,))
    }
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(*inputs, **arguments)
    del output
    return sum(kept.values())


def memory(tokens: int, device: str) -> list[dict]:
    """One row per option."""
    rows = []
    for name, overrides in OPTIONS.items():
        config = MoEConfig(**(SHAPE | overrides))
        cls = dMoE if config.capacity_factor is None else MoE
        layer = cls(config, device=device, dtype=torch.bfloat16)
        if "4 bits" in name:
            freeze_in_bits(layer.experts, 4)
        if "LoRA" in name:
            add_lora(layer.experts, rank=16, alpha=16.0)
        x = torch.randn(tokens, config.hidden_size, device=device, dtype=torch.bfloat16)
        arguments = {}
        if name == "mask":
            arguments = {"mask": torch.arange(tokens, device=device) % 4 > 0}
        per_token = saved_bytes(layer, x.requires_grad_(), **arguments) / tokens
        rows.append({"option": name, "bytes per token": round(per_token)})
    if importlib.util.find_spec("transformers"):
        rows.append({"option": "transformers' GPT-OSS", "bytes per token": gpt_oss(tokens, device)})
    return rows


def gpt_oss(tokens: int, device: str) -> int:
    """Bytes per token that GPT-OSS's experts keep on our kernels: clamped gates and biases."""
    from mb_layers.transformers.experts import IMPLEMENTATION, recognise_gate
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(
        hidden_size=SHAPE["hidden_size"],
        intermediate_size=SHAPE["ffn_hidden_size"],
        num_local_experts=SHAPE["num_experts"],
    )
    config._experts_implementation = IMPLEMENTATION
    options = {"device": device, "dtype": torch.bfloat16}
    experts = GptOssExperts(config).to(**options)
    recognise_gate(experts)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.02)
    x = torch.randn(tokens, SHAPE["hidden_size"], **options).requires_grad_()
    scores = torch.randn(tokens, SHAPE["num_experts"], **options).requires_grad_()
    weights, ids = scores.softmax(dim=-1).topk(SHAPE["top_k"])
    return round(saved_bytes(experts, x, ids, weights) / tokens)


def errors(tokens: int, device: str) -> list[dict]:
    """Relative error of dx and of the weights' gradients for each activation and number of bits."""
    rows = []
    for activation in ACTIVATIONS:
        torch.manual_seed(0)
        config = MoEConfig(**SHAPE, activation=activation, init_method_std=0.05)
        layer = dMoE(config, device=device)
        x = torch.randn(tokens, config.hidden_size, device=device).requires_grad_()
        grad_y = torch.randn(tokens, config.hidden_size, device=device)
        inputs = (x, layer.experts.w1, layer.experts.w2)
        exact = torch.autograd.grad((layer(x).y * grad_y).sum(), inputs)
        row: dict = {"activation": activation}
        for bits in (8, 4):
            layer.experts.config = dataclasses.replace(config, saved_activation_bits=bits)
            grads = torch.autograd.grad((layer(x).y * grad_y).sum(), inputs)
            for name, got, expected in zip(("dx", "dw1", "dw2"), grads, exact, strict=True):
                row[f"{name}, {bits} bits"] = ((got - expected).norm() / expected.norm()).item()
        rows.append(row)
    return rows


def table(rows: list[dict]) -> None:
    """Print rows as Markdown."""
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        cells = (f"{row[n]:.2%}" if isinstance(row[n], float) else f"{row[n]}" for n in names)
        print("| " + " | ".join(cells) + " |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few tokens, for the tests")
    smoke = parser.parse_args().smoke
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = ", ".join(f"{name} {size}" for name, size in SHAPE.items())
    print(f"{shape}; bf16 on {device}; x itself is {2 * SHAPE['hidden_size']} bytes per token\n")
    rows = memory(64 if smoke else 1024, device)
    table(rows)
    rounded = errors(64 if smoke else 512, device)
    table(rounded)
    print(json.dumps({"rows": rows, "errors": rounded}))


if __name__ == "__main__":
    main()
