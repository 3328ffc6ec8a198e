"""A shallow Qwen3-MoE of real width, trained through transformers: `grouped_mm` beside `mb`.

    python packages/mb-layers/benchmarks/qwen3.py            # on a GPU
    python packages/mb-layers/benchmarks/qwen3.py --smoke    # tiny, on CPU

Same model and tokens, forward, backward and AdamW step; `set_experts_implementation` alone differs.
Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import mb_layers.transformers  # noqa: F401, registers "mb"
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

IMPLEMENTATIONS = ("grouped_mm", "mb")


def build(*, layers: int, smoke: bool) -> torch.nn.Module:
    """Qwen3-30B-A3B's width with fewer layers and a smaller vocabulary."""
    sizes = {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 32768,
    }
    if smoke:
        sizes |= {
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 128,
        }
    config = Qwen3MoeConfig(num_hidden_layers=layers, norm_topk_prob=True, **sizes)
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers' Qwen3-MoE: grouped_mm beside mb.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="tiny, two steps")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.smoke:
        arguments.layers, arguments.batch, arguments.length, arguments.steps = 1, 2, 16, 2
    elif device == "cpu":
        parser.error("expected a GPU; for a tiny run on CPU use --smoke")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = build(layers=arguments.layers, smoke=arguments.smoke).to(device, dtype)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shape = (arguments.steps + 2, arguments.batch, arguments.length)
    batches = torch.randint(model.config.vocab_size, shape, device=device)

    rows = []
    for name in IMPLEMENTATIONS:
        model.load_state_dict(initial)
        model.set_experts_implementation(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
        times, losses = [], []
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for ids in batches:
            start = time.perf_counter()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # waits for the GPU
            times.append(time.perf_counter() - start)
        del optimizer
        seconds = statistics.median(times[2:])
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        rows.append(
            {
                "implementation": name,
                "tokens_per_second": arguments.batch * arguments.length / seconds,
                "ms_per_step": 1e3 * seconds,
                "peak_bytes": peak,
                "losses": losses,
            }
        )
    chip = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{chip}, torch {torch.__version__}, {arguments.layers} layers, median of steps")
    print(f"{'experts':12} {'tokens/s':>10} {'ms/step':>9} {'peak GiB':>9} {'last loss':>10}")
    for row in rows:
        print(
            f"{row['implementation']:12} {row['tokens_per_second']:10.0f} "
            f"{row['ms_per_step']:9.1f} {row['peak_bytes'] / 2**30:9.2f} {row['losses'][-1]:10.4f}"
        )
    print(json.dumps({"benchmark": "qwen3-moe through transformers", "chip": chip, "rows": rows}))


if __name__ == "__main__":
    main()
