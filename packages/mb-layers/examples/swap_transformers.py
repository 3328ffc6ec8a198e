"""A transformers MoE model on this library, in two ways.

Needs `pip install mb-layers[transformers]`.

1. `set_experts_implementation("mb")`: their model, router and losses, our expert kernels.
2. `swap_blocks`: their attention and embeddings, our whole layer with its losses and metrics.

    python examples/swap_transformers.py
"""

import copy

import mb_layers.transformers as mb
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig


def main() -> tuple[float, float]:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(128, (2, 24))
    expected = model(input_ids=ids).logits

    model.set_experts_implementation("mb")
    kernels = (model(input_ids=ids).logits - expected).abs().max().item()
    print(f'largest difference with set_experts_implementation("mb"): {kernels:.1e}')

    swapped = copy.deepcopy(model)
    layers = mb.swap_blocks(swapped, load_balancing_loss_weight=0.01)
    layer = (swapped(input_ids=ids).logits - expected).abs().max().item()
    print(f"largest difference with {len(layers)} swapped blocks: {layer:.1e}")

    loads = {}
    for name, moe in layers.items():
        moe.register_forward_hook(lambda _, __, out, name=name: loads.update({name: out.metrics}))
    optimizer = torch.optim.AdamW(swapped.parameters(), lr=1e-3)
    for step in range(3):
        loss = swapped(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()  # the balancing losses ride along
        optimizer.step()
        imbalance = max(m["load_imbalance"].item() for m in loads.values())
        print(f"step {step}  loss {loss.item():.3f}  fullest expert {imbalance:.2f} x the mean")
    return kernels, layer


if __name__ == "__main__":
    main()
