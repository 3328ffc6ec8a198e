"""Named runs: a recipe is a function that returns the fields it sets.

`quickstart` is what `mb-train` does when told nothing: a dropless Mixture-of-Experts GPT that
learns the sample corpus on two CPU cores in about a minute. The others are the models of the
MegaBlocks paper (Gale et al., arXiv 2211.15841) as its launch scripts train them: GPT-2 tokens,
sequences of 1024, 512 of them per step, cosine decay, every layer an MoE of 64 top-1 experts.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

Recipe = dict[str, Any]


def quickstart() -> Recipe:
    """A dMoE GPT for two CPU cores. Two thirds of its time go into the 50,304-way softmax."""
    return {
        "num_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "ffn_hidden_size": 192,
        "activation": "swiglu", "moe_num_experts": 8, "moe_top_k": 2, "moe_loss_weight": 0.1,
        "seq_length": 64, "micro_batch_size": 8, "global_batch_size": 8,
        "train_iters": 120, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "lr": 5e-3, "min_lr": 5e-4, "lr_decay_style": "cosine", "lr_decay_iters": 120,
        "lr_warmup_iters": 10, "adam_beta2": 0.95, "weight_decay": 0.1,
        "split": "90,10,0", "eval_interval": 40, "eval_iters": 8, "log_interval": 10,
        "save": "runs/quickstart", "save_interval": 60,
    }  # fmt: skip


# name: layers, hidden, heads, micro batch and peak rate of the 8-GPU dense and dMoE scripts.
_SIZES: dict[str, tuple[int, int, int, tuple[int, float], tuple[int, float] | None]] = {
    "46m": (6, 512, 8, (64, 6e-4), (64, 6e-4)),
    "125m": (12, 768, 12, (64, 6e-4), (32, 6e-4)),
    "356m": (24, 1024, 16, (32, 6e-4), (16, 6e-4)),
    "760m": (24, 1536, 16, (32, 4e-4), (8, 4e-4)),
    "1315m": (24, 2048, 16, (16, 4e-4), None),
}


def _paper(size: str, micro_batch: int, lr: float) -> Recipe:
    layers, hidden, heads, *_ = _SIZES[size]
    return {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "seq_length": 1024, "max_position_embeddings": 1024, "make_vocab_size_divisible_by": 1024,
        "micro_batch_size": micro_batch, "global_batch_size": 512,
        "lr": lr, "min_lr": lr / 10, "lr_decay_style": "cosine", "lr_warmup_fraction": 0.01,
        "clip_grad": 1.0, "init_method_std": 0.02 if size == "1315m" else 0.01, "bf16": True,
        "split": "969,30,1", "log_interval": 100, "eval_interval": 1000, "eval_iters": 100,
        "save_interval": 2000,
    }  # fmt: skip


def dense(size: str) -> Recipe:
    """A dense GPT of the paper, 100,000 steps."""
    return _paper(size, *_SIZES[size][3]) | {"train_iters": 100_000, "save": f"runs/dense-{size}"}


def dmoe(size: str) -> Recipe:
    """A dropless MoE GPT of the paper: 64 experts, top-1, 20,000 steps (10 B tokens)."""
    batch = _SIZES[size][4]
    assert batch is not None
    return _paper(size, *batch) | {
        "moe_num_experts": 64, "moe_top_k": 1, "moe_loss_weight": 0.1,
        "train_iters": 20_000, "save": f"runs/dmoe-{size}",
    }  # fmt: skip


def moe(size: str) -> Recipe:
    """The same with expert capacity 1: tokens beyond an expert's even share are dropped."""
    return dmoe(size) | {"moe_capacity_factor": 1.0, "save": f"runs/moe-{size}"}


def _registry() -> dict[str, Callable[[], Recipe]]:
    named: dict[str, Callable[[], Recipe]] = {"quickstart": quickstart}
    for size, (*_, with_experts) in _SIZES.items():
        named[f"dense-{size}"] = lambda size=size: dense(size)
        if with_experts is not None:
            named[f"dmoe-{size}"] = lambda size=size: dmoe(size)
            named[f"moe-{size}"] = lambda size=size: moe(size)
    return named


RECIPES: dict[str, Callable[[], Recipe]] = _registry()


def recipe(name: str) -> Recipe:
    """The fields that the recipe `name` sets.

    Raises:
        ValueError: unknown name; lists all and names the nearest.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"Expected --recipe to be one of {', '.join(RECIPES)}, got {name!r}.{hint}"
        )
    return RECIPES[name]()
