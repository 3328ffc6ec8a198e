"""Named runs: a recipe is a function that returns the fields it sets.

`quickstart` is what `mb-train` does when told nothing: a dropless Mixture-of-Experts GPT that
learns the sample corpus on two CPU cores in about a minute. The others are the models of the
MegaBlocks paper (Gale et al., arXiv 2211.15841) as its launch scripts train them: GPT-2 tokens,
sequences of 1024, 512 of them per step, cosine decay; `dmoe-` and `moe-` have 64 top-1 experts in
every layer, shared out over the data-parallel ranks, dropless or with capacity 1. Where a script
says fp16, or Adafactor, the recipe says bf16 and Adam. `17m` is a size below theirs, for frontiers
of a few minutes (`runs/frontier.sh`).

`olmoe-1b-7b`, `deepseek-v2-lite` and `qwen3-30b-a3b` have the shapes of the published models
(Muennighoff et al., arXiv 2409.02060; DeepSeek-AI, arXiv 2405.04434; Yang et al., arXiv
2505.09388), all but the last their rates as well; Qwen's are not published. `--num-layers 2` makes
each fit on one GPU. `qwen3-next-80b-a3b` has Qwen3-Next's shape and the same rates.

`bert-`, `t5-` and `ict-` are Megatron-LM's other models with the settings of its example scripts.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

Recipe = dict[str, Any]


def quickstart() -> Recipe:
    """A dMoE GPT for two CPU cores. Two thirds of its time go into the 50,304-way softmax."""
    return {
        "num_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "ffn_hidden_size": 192,
        "activation": "swiglu", "moe_num_experts": 8, "moe_top_k": 2, "moe_loss_weight": 0.1,
        "seq_length": 64, "micro_batch_size": 8,
        "train_iters": 120, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "lr": 5e-3, "min_lr": 5e-4, "lr_decay_style": "cosine",
        "lr_warmup_fraction": 1 / 12, "adam_beta2": 0.95, "weight_decay": 0.1,
        "split": "90,10,0", "eval_interval": 40, "eval_iters": 8, "log_interval": 10,
        "save": "runs/quickstart", "save_interval": 60,
    }  # fmt: skip


def bert_quickstart() -> Recipe:
    """A BERT with experts that restores words of Python's docstrings."""
    return _sentences("bert") | {
        "seq_length": 64, "micro_batch_size": 32, "bert_binary_head": False, "mask_prob": 0.3,
        "train_iters": 750, "optimizer": "muon", "lr": 0.02, "min_lr": 1e-3,
    }  # fmt: skip


def t5_quickstart() -> Recipe:
    """A dense T5 that writes words which were taken out of Python's docstrings, one or a few."""
    return _sentences("t5") | {
        "moe_num_experts": None, "activation": "gelu", "scale_head": True, "init_method_std": 0.1,
        "seq_length": 48, "decoder_seq_length": 24, "vocab_extra_ids": 12, "mask_prob": 0.2,
        "mean_noise_span_length": 1.25, "micro_batch_size": 32, "train_iters": 900,
        "optimizer": "muon", "lr": 6e-3, "min_lr": 3e-4,
    }  # fmt: skip


def ict_quickstart() -> Recipe:
    """A retriever with one tower that finds the docstring which a sentence was taken from.

    One layer that begins with the mean of a text's words, for want of positions, and so large an
    init that the mean is heard: what a short training can learn is which words count.
    """
    return _sentences("ict") | {
        "num_layers": 1, "hidden_size": 192, "position_embedding_type": "none",
        "init_method_std": 0.1, "seq_length": 96, "micro_batch_size": 64, "train_iters": 350,
        "lr": 1e-3, "min_lr": 1e-4, "moe_num_experts": 4, "moe_top_k": 1, "eval_iters": 5,
        "biencoder_shared_query_context_model": True, "retriever_score_scaling": True,
    }  # fmt: skip


def _sentences(model: str) -> Recipe:
    return quickstart() | {
        "model": model, "activation": "gelu", "position_embedding_type": "relative",
        "tokenizer": "bert-base-uncased:8192", "micro_batch_size": 16, "eval_iters": 8,
        "eval_interval": 100, "save_interval": 200, "log_interval": 20,
        "save": f"runs/{model}-quickstart",
    }  # fmt: skip


@dataclass(frozen=True)
class _Size:
    """A model of the paper, and (micro-batch, peak rate) of each of its launch scripts."""

    layers: int
    hidden: int
    heads: int
    dense: tuple[int, float]
    dense_1gpu: tuple[int, float]
    dmoe: tuple[int, float] | None = None
    moe: tuple[int, float] | None = None


_SIZES = {
    # Ours: half the width of the least, heads of the same size, and its rates.
    "17m": _Size(4, 256, 4, (64, 6e-4), (64, 1.5e-4), dmoe=(64, 6e-4), moe=(64, 1.5e-4)),
    "46m": _Size(6, 512, 8, (64, 6e-4), (64, 1.5e-4), dmoe=(64, 6e-4), moe=(64, 1.5e-4)),
    "125m": _Size(12, 768, 12, (64, 6e-4), (32, 1.5e-4), dmoe=(32, 6e-4), moe=(32, 1.5e-4)),
    "356m": _Size(24, 1024, 16, (32, 6e-4), (16, 1.5e-4), dmoe=(16, 6e-4), moe=(8, 1.5e-4)),
    "760m": _Size(24, 1536, 16, (32, 4e-4), (16, 1.5e-4), dmoe=(8, 4e-4)),
    "1315m": _Size(24, 2048, 16, (16, 4e-4), (8, 1.5e-4)),
}


def _paper(size: str, batch: tuple[int, float], name: str) -> Recipe:
    model, (micro_batch, lr) = _SIZES[size], batch
    return {
        "num_layers": model.layers, "hidden_size": model.hidden,
        "num_attention_heads": model.heads, "seq_length": 1024, "max_position_embeddings": 1024,
        "make_vocab_size_divisible_by": 1024,
        "micro_batch_size": micro_batch, "global_batch_size": 512, "train_iters": 100_000,
        "lr": lr, "min_lr": 1e-5 if lr == 1.5e-4 else lr / 10, "lr_decay_style": "cosine",
        "lr_warmup_fraction": 0.01, "clip_grad": 1.0,
        "init_method_std": 0.02 if size == "1315m" else 0.01, "bf16": True, "compile": True,
        "split": "969,30,1", "log_interval": 100, "eval_interval": 1000, "eval_iters": 100,
        "save_interval": 2000, "save": f"runs/{name}",
    }  # fmt: skip


def _experts(size: str, batch: tuple[int, float], name: str, capacity: float) -> Recipe:
    return _paper(size, batch, name) | {
        "moe_num_experts": 64, "moe_top_k": 1, "moe_loss_weight": 0.1,
        "moe_capacity_factor": capacity, "moe_expert_model_parallelism": True,
        "train_iters": 20_000,
    }  # fmt: skip


def olmoe() -> Recipe:
    """OLMoE-1B-7B: 6.9 B parameters, 1.3 B of them for a token."""
    return _modern("olmoe-1b-7b") | {
        "num_layers": 16, "num_attention_heads": 16, "ffn_hidden_size": 1024,
        "qk_layernorm_over": "width", "layernorm_epsilon": 1e-5, "rotary_base": 1e4,
        "padded_vocab_size": 50_304,
        "moe_num_experts": 64, "moe_top_k": 8, "moe_loss_weight": 0.01, "moe_z_loss_weight": 0.001,
        "micro_batch_size": 4, "global_batch_size": 1024, "train_iters": 1_200_000,
        "lr": 4e-4, "min_lr": 4e-5, "lr_warmup_fraction": 1 / 480,
    }  # fmt: skip


def deepseek_v2_lite() -> Recipe:
    """DeepSeek-V2-Lite: 15.7 B parameters, 2.7 B of them for a token, latent attention.

    Its rate falls as a cosine to where DeepSeek's two steps of 0.316 end.
    """
    return _modern("deepseek-v2-lite") | {
        "num_layers": 27, "num_attention_heads": 16, "ffn_hidden_size": 10_944,
        "multi_latent_attention": True, "kv_lora_rank": 512, "layernorm_epsilon": 1e-6,
        "padded_vocab_size": 102_400,
        "moe_num_experts": 64, "moe_top_k": 6, "moe_ffn_hidden_size": 1408, "moe_first_k_dense": 1,
        "moe_shared_expert_intermediate_size": 2816,
        # 0.001 in each layer; ours is a mean over the 26 with experts.
        "moe_loss_weight": 0.026, "moe_balance_over": "sequence",
        "micro_batch_size": 2, "global_batch_size": 4608, "train_iters": 302_000,
        "lr": 4.2e-4, "min_lr": 4.2e-5, "lr_warmup_fraction": 1 / 151, "init_method_std": 0.006,
    }  # fmt: skip


def gpt_oss() -> Recipe:
    """gpt-oss-20b: 20.9 B parameters, 4.2 B of them for a token, windows and sinks.

    How it was trained is not published: rates and batch are those of the other models here.
    """
    return _modern("gpt-oss-20b") | {
        "num_layers": 24, "hidden_size": 2880, "num_attention_heads": 64, "kv_channels": 64,
        "group_query_attention": True, "num_query_groups": 8, "ffn_hidden_size": 2880,
        "swiglu": False, "activation": "swigluoai", "add_bias_linear": True,
        "qk_layernorm": False, "layernorm_epsilon": 1e-5, "softmax_type": "learnable",
        "window_size": 127, "window_attn_skip_freq": 2, "rotary_base": 1.5e5,
        "rope_type": "yarn", "rotary_scaling_factor": 32.0, "yarn_truncate": False,
        "max_position_embeddings": 131_072,
        "padded_vocab_size": 201_088,
        "moe_num_experts": 32, "moe_top_k": 4, "moe_renormalize": True, "moe_router_bias": True,
        "moe_mlp_bias": True, "moe_loss_weight": 0.001,
        "micro_batch_size": 1, "global_batch_size": 1024, "train_iters": 100_000,
        "lr": 3e-4, "min_lr": 3e-5, "lr_warmup_fraction": 0.02,
    }  # fmt: skip


def qwen3() -> Recipe:
    """Qwen3-30B-A3B: 30.5 B parameters, 3.3 B of them for a token."""
    return _modern("qwen3-30b-a3b") | {
        "num_layers": 48, "num_attention_heads": 32, "kv_channels": 128,
        "group_query_attention": True, "num_query_groups": 4, "ffn_hidden_size": 768,
        "qk_layernorm_over": "head", "layernorm_epsilon": 1e-6, "rotary_base": 1e6,
        "padded_vocab_size": 151_936,
        "moe_num_experts": 128, "moe_top_k": 8, "moe_renormalize": True, "moe_loss_weight": 0.001,
        "micro_batch_size": 1, "global_batch_size": 1024, "train_iters": 100_000,
        "lr": 3e-4, "min_lr": 3e-5, "lr_warmup_fraction": 0.02,
    }  # fmt: skip


def qwen3_next() -> Recipe:
    """Qwen3-Next-80B-A3B: 79.7 B parameters, 3.9 B of them for a token; three of four layers have a
    state. Its module for further tokens, which --mtp-num-layers 1 adds, is left out."""
    return _modern("qwen3-next-80b-a3b") | {
        "num_layers": 48, "num_attention_heads": 16, "kv_channels": 256,
        "group_query_attention": True, "num_query_groups": 2, "ffn_hidden_size": 512,
        "qk_layernorm_over": "head", "layernorm_epsilon": 1e-6, "rotary_base": 1e7,
        "rotary_percent": 0.25, "attention_output_gate": True,
        # Sizes of the states are the fields' own.
        "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4,
        "padded_vocab_size": 151_936,
        "moe_num_experts": 512, "moe_top_k": 10, "moe_renormalize": True, "moe_loss_weight": 0.001,
        "moe_shared_expert_intermediate_size": 512, "moe_shared_expert_gate": True,
        "micro_batch_size": 1, "global_batch_size": 1024, "train_iters": 100_000,
        "lr": 3e-4, "min_lr": 3e-5, "lr_warmup_fraction": 0.02,
    }  # fmt: skip


def nemotron_3_nano() -> Recipe:
    """Nemotron-3-Nano-30B-A3B: 31.6 B parameters, 3.6 B of them for a token; of 52 halves of blocks
    23 are Mamba-2, 23 experts and 6 attention.

    As in NVIDIA's script for Megatron Core, but for a cosine in place of a fall at the end.
    """
    return _modern("nemotron-3-nano-30b-a3b") | {
        "num_layers": 52, "hidden_size": 2688, "num_attention_heads": 32, "kv_channels": 128,
        "group_query_attention": True, "num_query_groups": 2, "ffn_hidden_size": 1856,
        "position_embedding_type": "none", "qk_layernorm": False, "swiglu": False,
        "squared_relu": True, "init_method_std": 0.0173, "seq_length": 8192,
        "hybrid_layer_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "mamba_num_heads": 64,  # of groups and widths the fields' own
        "padded_vocab_size": 131_072,
        "moe_num_experts": 128, "moe_top_k": 6, "moe_shared_expert_intermediate_size": 3712,
        "moe_router_score_function": "sigmoid", "moe_renormalize": True,
        "moe_router_topk_scaling_factor": 2.5, "moe_router_enable_expert_bias": True,
        # 0.0001 in each layer; ours is a mean over the 23 with experts.
        "moe_loss_weight": 0.0023, "moe_balance_over": "sequence", "moe_balance_by": "scores",
        "moe_router_fp32": True,
        "micro_batch_size": 1, "global_batch_size": 768, "train_iters": 158_946,
        "lr": 1.2e-3, "min_lr": 1.2e-5, "lr_warmup_fraction": 1 / 119,
    }  # fmt: skip


def bert(name: str, layers: int, hidden: int, heads: int) -> Recipe:
    """A BERT as Megatron-LM's examples train it: sentence order, sequences of 512.

    Its rate falls until the end, not until 990,000 steps of a million.
    """
    return _encoder(name, layers, hidden, heads) | {
        "model": "bert", "micro_batch_size": 4, "global_batch_size": 32, "train_iters": 1_000_000,
    }  # fmt: skip


def t5_220m() -> Recipe:
    """T5-base as Megatron-LM's example trains it: learned positions, 100 sentinels."""
    return _encoder("t5-220m", 12, 768, 12) | {
        "model": "t5", "decoder_seq_length": 128, "vocab_extra_ids": 100, "ffn_hidden_size": 3072,
        "kv_channels": 64, "micro_batch_size": 16, "global_batch_size": 128,
        "train_iters": 1_000_000,
    }  # fmt: skip


def ict_bert() -> Recipe:
    """A retriever of two towers of BERT-base as Megatron-LM's example; give it `--bert-load`."""
    return _encoder("ict-bert", 12, 768, 12) | {
        "model": "ict", "biencoder_projection_dim": 128, "query_in_block_prob": 0.1,
        "retriever_score_scaling": True, "seq_length": 256, "max_position_embeddings": 512,
        "micro_batch_size": 32, "train_iters": 100_000,
        "retriever_report_topk_accuracies": [1, 5, 20],
    }  # fmt: skip


def _encoder(name: str, layers: int, hidden: int, heads: int) -> Recipe:
    return {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "seq_length": 512, "max_position_embeddings": 512, "lr": 1e-4, "min_lr": 1e-5,
        "lr_decay_style": "linear", "lr_warmup_fraction": 0.01, "weight_decay": 0.01,
        "clip_grad": 1.0, "bf16": True, "compile": True, "split": "949,50,1", "log_interval": 100,
        "eval_interval": 1000, "eval_iters": 10, "save_interval": 10_000, "save": f"runs/{name}",
    }  # fmt: skip


def _modern(name: str) -> Recipe:
    return {
        "hidden_size": 2048, "seq_length": 4096, "position_embedding_type": "rope",
        "normalization": "RMSNorm", "swiglu": True, "qk_layernorm": True, "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "lr_decay_style": "cosine", "adam_beta2": 0.95, "weight_decay": 0.1,
        "clip_grad": 1.0, "bf16": True, "compile": True, "log_interval": 10, "eval_interval": 1000,
        "eval_iters": 20, "save_interval": 1000, "save": f"runs/{name}",
    }  # fmt: skip


def _registry() -> dict[str, Callable[[], Recipe]]:
    named: dict[str, Callable[[], Recipe]] = {
        "quickstart": quickstart,
        "bert-quickstart": bert_quickstart,
        "t5-quickstart": t5_quickstart,
        "ict-quickstart": ict_quickstart,
    }
    for size, model in _SIZES.items():
        for kind, batch in (("", model.dense), ("-1gpu", model.dense_1gpu)):
            name = f"dense-{size}{kind}"
            named[name] = partial(_paper, size, batch, name)
        for kind, batch, capacity in (("dmoe", model.dmoe, 0.0), ("moe", model.moe, 1.0)):
            if batch is not None:
                name = f"{kind}-{size}"
                named[name] = partial(_experts, size, batch, name, capacity)
    named |= {
        "bert-110m": partial(bert, "bert-110m", 12, 768, 12),
        "bert-345m": partial(bert, "bert-345m", 24, 1024, 16),
        "t5-220m": t5_220m,
        "ict-bert": ict_bert,
    }
    return named | {
        "olmoe-1b-7b": olmoe, "deepseek-v2-lite": deepseek_v2_lite, "gpt-oss-20b": gpt_oss,
        "qwen3-30b-a3b": qwen3, "qwen3-next-80b-a3b": qwen3_next,
        "nemotron-3-nano-30b-a3b": nemotron_3_nano,
    }  # fmt: skip


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
